"""Lay the model on the ranks with DeepSpeed's ZeRO, of the stage that the plan's settings for DeepSpeed name."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from bench.contract.engine import MOST_ZERO_STAGE
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
from jobs.profiles.ranges import named

SHARED_MEMORY = "deepspeed_shm_comm"
"""What would replace gloo's sums on CPUs; it is compiled with its first use, for a minute."""


class ZeroPlacement:
    """A DeepSpeed engine, which sums, clips and shards as its settings say."""

    def __init__(self, plan: TrainingPlan, model: PreTrainedModel) -> None:
        self.model, self._plan = model, plan
        self._trained = adapters.trained(model)
        optimizer = _optimizer(plan, list(self._trained.values()))
        self.module, self._wrapped, _, _ = _initialized(plan, model, optimizer)
        self._base = getattr(self._wrapped, "optimizer", self._wrapped)
        self.restart()

    @property
    def stage(self) -> int:
        return int(self.module.zero_optimization_stage())

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def pass_backward(self, loss: Tensor) -> None:
        """DeepSpeed divides by the number of micro-batches, and counts them to know the last one."""
        self.module.backward(loss)
        if not self.module.is_gradient_accumulation_boundary():
            self.module.step()

    def update(self, lr: float) -> None:
        optimizers.set_rate(self._base, lr)
        with named(Part.adamw):
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
        parts = {0: self._replicated, 1: self._of_flat_groups, 2: self._of_flat_groups, 3: self._of_partitions}
        found = (parts[self.stage](number, name, p) for number, (name, p) in enumerate(self._trained.items()))
        return [shard for shard in found if shard is not None and shard.size]

    def _replicated(self, number: int, name: str, parameter: Parameter) -> Shard:
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

    def _of_flat_groups(self, number: int, name: str, parameter: Any) -> Shard | None:
        """Stages 1 and 2: a rank updates one part of all weights in a row, from somewhere in one to within another."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        flat = self._flat_groups()[mapping.param_group_index]
        at, own = mapping.hp_fragment_address, mapping.lp_fragment_address
        state = {"master": flat} | {key: self._base.state[flat][key] for key in optimizers.MOMENTS}
        parts = {key: tensor.detach().narrow(0, at.start, at.numel) for key, tensor in state.items()}
        return Shard(canonical(name), tuple(parameter.shape), own.start, parts, True)

    def _flat_groups(self) -> list[Tensor]:
        found: list[Tensor] | None = getattr(self._wrapped, "single_partition_of_fp32_groups", None)
        if found is None:
            found = self._wrapped.fp32_groups_flat_partition
        return found

    def _of_partitions(self, number: int, name: str, parameter: Any) -> Shard:
        """Stage 3: a rank updates an equal part of each weight, whose end may be padding."""
        group, offset, size = self._wrapped.grad_position[self._wrapped.get_param_id(parameter)]
        flat = self._wrapped.fp32_partitioned_groups_flat[group]
        begin = parameter.ds_tensor.numel() * torch.distributed.get_rank()
        real = max(0, min(size, parameter.ds_numel - begin))
        state = {"master": flat} | {key: self._base.state[flat][key] for key in optimizers.MOMENTS}
        parts = {key: tensor.detach().narrow(0, offset, real) for key, tensor in state.items()}
        return Shard(canonical(name), tuple(parameter.ds_shape), begin, parts, True)


def build(plan: TrainingPlan) -> PreTrainedModel:
    """Return the model; at stage 3 each module's weights are sharded as soon as it is made.

    Raises:
        ConfigError: DeepSpeed does not take its settings.
    """
    if plan.config.cluster.device is Device.cpu:  # elsewhere asking would try every operation that can be compiled
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    deepspeed.init_distributed(auto_mpi_discovery=False)  # takes the process group that is there
    require(plan)
    if not settings(plan).is_sharded:
        return models.build(plan)
    return models.build(plan, around=deepspeed.zero.Init(config_dict_or_path=dict(plan.deepspeed or {})))


def place(plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device) -> ZeroPlacement:
    """Give the model memory and weights; DeepSpeed makes its copies of them."""
    models.give_memory(model, device)
    fill(model, source, device)
    return ZeroPlacement(plan, model)


def require(plan: TrainingPlan) -> None:
    """Do nothing if DeepSpeed takes its settings.

    Raises:
        ConfigError: with what DeepSpeed says of them.
    """
    if plan.deepspeed is None:
        what, fix = "the plan has no settings for DeepSpeed", "make the plan again with this version of runstop"
        raise ConfigError(what, where="plan.deepspeed", fix=fix)
    try:
        deepspeed.DeepSpeedConfig(dict(plan.deepspeed))
    except (ValueError, AssertionError, TypeError, deepspeed.runtime.config.DeepSpeedConfigError) as error:
        name = settings(plan).deepspeed_json
        raise ConfigError(
            f"DeepSpeed does not take its settings: {_reason(error)}",
            where=name or "engine.huggingface",
            fix="correct the file" if name else "choose another engine.huggingface.zero_stage or offload",
        ) from error


def _reason(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines()[:3]) or repr(error)


def _initialized(plan: TrainingPlan, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Any:
    return deepspeed.initialize(model=model, optimizer=optimizer, config=dict(plan.deepspeed or {}))


def _optimizer(plan: TrainingPlan, trained: list[Parameter]) -> torch.optim.Optimizer:
    """Return AdamW: torch's, or DeepSpeed's own where the CPU updates."""
    if not settings(plan).offload_optimizer:
        return optimizers.adamw(plan, trained)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    r = plan.config.training_recipe
    groups, betas = optimizers.groups(plan, trained), (r.adam_beta1, r.adam_beta2)
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=r.lr, betas=betas, eps=r.adam_eps, adamw_mode=True)
    return made
