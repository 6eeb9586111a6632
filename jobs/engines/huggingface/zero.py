"""Distribute the model with DeepSpeed's ZeRO, at the stage of the plan's DeepSpeed settings."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from bench.contract.engine import MOST_ZERO_STAGE, Bf16
from bench.contract.modules import Part
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Device
from bench.errors import ConfigError
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface import model as models
from jobs.engines.huggingface import optimizer as optimizers
from jobs.engines.huggingface.packages import settings
from jobs.engines.huggingface.training_state import Shard, fill
from jobs.engines.huggingface.weights import Source, canonical
from jobs.profiles.ranges import profile_range

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's replacement of gloo's all-reduce on CPUs. It is disabled: compiling it takes a minute."""


class ZeroPlacement:
    """A DeepSpeed engine, which reduces gradients, clips and shards by its own settings."""

    def __init__(self, plan: TrainingPlan, model: PreTrainedModel) -> None:
        self.model, self._plan = model, plan
        self._trained = adapters.trainable(model)
        optimizer = _optimizer(plan, list(self._trained.values()))
        self.module, self._wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(plan.deepspeed or {})
        )
        self._base = getattr(self._wrapped, "optimizer", self._wrapped)
        self.restart()

    @property
    def stage(self) -> int:
        return int(self.module.zero_optimization_stage())

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def pass_backward(self, loss: Tensor) -> None:
        """Run the backward pass. DeepSpeed divides by the number of micro-batches, and counts them itself."""
        self.module.backward(loss)
        if not self.module.is_gradient_accumulation_boundary():
            self.module.step()

    def update(self, lr: float) -> None:
        optimizers.set_rate(self._base, lr)
        with profile_range(Part.adamw):
            self.module.step()

    def restart(self, num_steps: int = 0) -> None:
        optimizers.restart(self._base, self._updated(), num_steps)

    def _updated(self) -> list[Tensor]:
        if self.stage == MOST_ZERO_STAGE:
            partitioned: list[Tensor] = self._wrapped.fp32_partitioned_groups_flat
            return partitioned
        if self.stage:
            return self._flat_groups()
        return [parameter for group in self._base.param_groups for parameter in group["params"]]

    def shards(self) -> list[Shard]:
        parts = {0: self._full_shard, 1: self._flat_group_shard, 2: self._flat_group_shard, 3: self._partition_shard}
        shards = (parts[self.stage](number, name, p) for number, (name, p) in enumerate(self._trained.items()))
        return [shard for shard in shards if shard is not None and shard.size]

    def _full_shard(self, number: int, name: str, parameter: Parameter) -> Shard:
        """Stage 0: every rank updates everything; in BF16 the master weights are copies."""
        master = parameter
        for low, high in zip(*self._master_groups(), strict=True):
            for p, copy in zip(low, high, strict=True):
                master = copy if p is parameter else master
        moments = {key: self._base.state[master][key] for key in optimizers.MOMENTS}
        is_saved = number % self._plan.world.num_ranks == torch.distributed.get_rank()
        flat = {key: tensor.detach().view(-1) for key, tensor in ({"master": master} | moments).items()}
        return Shard(canonical(name), tuple(parameter.shape), 0, flat, is_saved)

    def _master_groups(self) -> tuple[list[Any], list[Any]]:
        return getattr(self._wrapped, "fp16_groups", []), getattr(self._wrapped, "fp32_groups", [])

    def _flat_group_shard(self, number: int, name: str, parameter: Any) -> Shard | None:
        """Stages 1 and 2: a rank updates one contiguous part of all weights; it may begin and end inside a weight."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self._flat_groups()[mapping.param_group_index]
        at, own = mapping.hp_fragment_address, mapping.lp_fragment_address
        state = {"master": flat} | {key: self._base.state[flat][key] for key in optimizers.MOMENTS}
        parts = {key: tensor.detach().narrow(0, at.start, at.numel) for key, tensor in state.items()}
        return Shard(canonical(name), tuple(parameter.shape), own.start, parts, True)

    def _flat_groups(self) -> list[Tensor]:
        groups: list[Tensor] | None = getattr(self._wrapped, "single_partition_of_fp32_groups", None)
        if groups is None:
            groups = self._wrapped.fp32_groups_flat_partition
        return groups

    def _partition_shard(self, number: int, name: str, parameter: Any) -> Shard:
        """Stage 3: a rank updates an equal part of each weight; the end of a part may be padding."""
        group, offset, size = self._wrapped.grad_position[self._wrapped.get_param_id(parameter)]
        flat = self._wrapped.fp32_partitioned_groups_flat[group]
        begin = parameter.ds_tensor.numel() * torch.distributed.get_rank()
        real = max(0, min(size, parameter.ds_numel - begin))
        state = {"master": flat} | {key: self._base.state[flat][key] for key in optimizers.MOMENTS}
        parts = {key: tensor.detach().narrow(0, offset, real) for key, tensor in state.items()}
        return Shard(canonical(name), tuple(parameter.ds_shape), begin, parts, True)


def build(plan: TrainingPlan) -> PreTrainedModel:
    """Return the model; at stage 3 the weights of each module are sharded as soon as it is built.

    Raises:
        ConfigError: DeepSpeed rejects its settings.
    """
    if (
        plan.config.cluster.device is Device.cpu
    ):  # on GPUs this lookup would probe every operator that DeepSpeed can compile
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)  # uses the existing process group
    require(plan)
    if not settings(plan).is_sharded:
        return models.build(plan)
    return models.build(plan, around=lambda: deepspeed.zero.Init(config_dict_or_path=dict(plan.deepspeed or {})))


def place(plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device) -> ZeroPlacement:
    """Allocate and load the model; DeepSpeed then makes its own copies of the weights."""
    models.allocate(model, device)
    fill(model, source, device)
    return ZeroPlacement(plan, model)


def require(plan: TrainingPlan) -> None:
    """Check that DeepSpeed accepts its settings.

    Raises:
        ConfigError: it does not; the message contains DeepSpeed's own.
    """
    if plan.deepspeed is None:
        what, fix = "the plan has no settings for DeepSpeed", "start a new run with this version of runstop"
        raise ConfigError(what, where="plan.deepspeed", fix=fix)
    try:
        deepspeed.DeepSpeedConfig(dict(plan.deepspeed))
    except (ValueError, AssertionError, TypeError, deepspeed.runtime.config.DeepSpeedConfigError) as error:
        name = settings(plan).deepspeed_json
        raise ConfigError(
            f"DeepSpeed rejects these settings: {_reason(error)}",
            where=name or "engine.huggingface",
            fix="correct this file"
            if name
            else "choose another engine.huggingface.zero_stage or another setting of offload",
        ) from error


def _reason(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()[:3]) or repr(error)


def _optimizer(plan: TrainingPlan, trained: list[Parameter]) -> torch.optim.Optimizer:
    """Return AdamW: torch's, or DeepSpeed's if the optimizer runs on the CPU."""
    if not settings(plan).offload_optimizer:
        return optimizers.adamw(plan, trained)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    r = plan.config.training_recipe
    groups, betas = optimizers.parameter_groups(plan, trained), (r.adam_beta1, r.adam_beta2)
    is_pure = settings(plan).bf16_mode is Bf16.pure
    adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups, lr=r.lr, betas=betas, eps=r.adam_eps, adamw_mode=True, fp32_optimizer_states=not is_pure
    )
    return adam
