"""Distribute the model with torch: replicas (DDP), shards (FSDP2), or layers over the GPUs of a node (balanced)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from bench.contract import plan as plans
from bench.contract.engine import Strategy
from bench.contract.modules import Part
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface import model as models
from jobs.engines.huggingface import optimizer as optimizers
from jobs.engines.huggingface.packages import settings
from jobs.engines.huggingface.training_state import Shard, fill, first_row
from jobs.engines.huggingface.weights import Source, canonical
from jobs.profiles.ranges import profile_range
from jobs.ranks import rank_times


def free_bytes(num_gpus: int) -> list[int]:
    """Return the free memory of the first `num_gpus` GPUs that are visible to this process.

    Raises:
        ConfigError: fewer GPUs are visible.
    """
    visible = torch.cuda.device_count()
    if visible < num_gpus:
        raise ConfigError(
            f"strategy=balanced puts the layers on {num_gpus} GPUs, but this process can use only {visible} GPUs",
            where="engine.huggingface.num_gpus, CUDA_VISIBLE_DEVICES",
            fix=f"set engine.huggingface.num_gpus={visible}, or set CUDA_VISIBLE_DEVICES to {num_gpus} GPUs",
            rule="HW-03",
        )
    return [torch.cuda.mem_get_info(index)[0] for index in range(num_gpus)]


def device_map(model: PreTrainedModel, free: list[int]) -> dict[str, int]:
    """Return the GPU of each module, with the layers in order; the model may be on the meta device.

    free: free bytes of each GPU. A layer is never split. Only weights are counted, as device_map="balanced" does.

    Raises:
        ConfigError: the weights do not fit. Accelerate would place the rest in host memory or on disk, untrained.
    """
    whole = list(model._no_split_modules)
    room = get_balanced_memory(model, max_memory=dict(enumerate(free)), no_split_module_classes=whole)
    devices: dict[str, Any] = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    if left := [name for name, device in devices.items() if not isinstance(device, int)]:
        raise ConfigError(
            f"the weights do not fit into {len(free)} GPUs: {left[0]} and {len(left) - 1} other modules have no space",
            where="engine.huggingface.num_gpus",
            fix="raise engine.huggingface.num_gpus, or choose a smaller model",
            rule="RUN-03",
        )
    return devices


class Placement(Protocol):
    """The model on this rank and its optimizer, for any strategy."""

    model: PreTrainedModel
    """The model of transformers; its parameters may be shards."""
    module: Module
    """The wrapped model, which is called."""

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch. Gradients are reduced over ranks after the last one of a step."""

    def pass_backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch, for the mean loss of its rows."""

    def update(self, lr: float) -> None:
        """Clip the gradients, update the weights, and clear the gradients."""

    def shards(self) -> list[Shard]:
        """Return the master weights and moments that this rank updates. Callers may overwrite them between steps."""

    def restart(self, num_steps: int = 0) -> None:
        """Continue as after `num_steps` steps; with 0, from zero moments."""


class TorchPlacement:
    """A model that torch's AdamW updates; its weights are the master weights."""

    def __init__(self, plan: TrainingPlan, model: PreTrainedModel, module: Module) -> None:
        self.model, self.module, self._plan = model, module, plan
        self._trained = adapters.trainable(model)
        self._optimizer = optimizers.adamw(plan, list(self._trained.values()))
        self.restart()
        if isinstance(module, DistributedDataParallel):  # its backward pass waits for other ranks at the end
            first = next(iter(self._trained.values()))
            first.register_post_accumulate_grad_hook(lambda _: rank_times.wait_from_here())

    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(is_last)
        no_sync = getattr(self.module, "no_sync", None)
        with no_sync() if no_sync and not is_last else nullcontext():
            yield

    def pass_backward(self, loss: Tensor) -> None:
        (loss / self._plan.batch.gradient_accumulation_steps).backward()

    def update(self, lr: float) -> None:
        with profile_range(Part.gradient_norm):
            clip_grad_norm_(self._trained.values(), self._plan.config.training_recipe.clip_grad)
        optimizers.set_rate(self._optimizer, lr)
        with profile_range(Part.adamw):
            self._optimizer.step()
        self._optimizer.zero_grad()

    def restart(self, num_steps: int = 0) -> None:
        optimizers.restart(self._optimizer, self._trained.values(), num_steps)

    def shards(self) -> list[Shard]:
        ranks, rank = self._plan.world.num_ranks, torch.distributed.get_rank()
        shards = []
        for number, (name, parameter) in enumerate(self._trained.items()):
            state = {"master": parameter} | {key: self._optimizer.state[parameter][key] for key in optimizers.MOMENTS}
            begin, is_saved = 0, number % ranks == rank
            if isinstance(parameter, DTensor):
                begin, is_saved = first_row(parameter) * parameter[:1].numel(), _is_first_copy(parameter)
            flat = {key: _local(tensor).view(-1) for key, tensor in state.items()}
            shards.append(Shard(canonical(name), tuple(parameter.shape), begin, flat, is_saved))
        return [shard for shard in shards if shard.size]


def place(plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device) -> TorchPlacement:
    """Allocate and load the model as its strategy distributes it."""
    return {
        Strategy.ddp: _place_replicated,
        Strategy.fsdp2: _place_sharded,
        Strategy.fsdp2_hybrid: _place_sharded,
        Strategy.balanced: _place_balanced,
    }[settings(plan).strategy](plan, model, source, device)


def _place_replicated(
    plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device
) -> TorchPlacement:
    models.allocate(model, device)
    fill(model, source, device)
    return TorchPlacement(plan, model, _prepare_model(plan, model, device))


def _prepare_model(plan: TrainingPlan, model: PreTrainedModel, device: torch.device) -> Module:
    """Return the model as Accelerate prepares it: under autocast, and in torch's DDP if there are several ranks."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import patch_environment

    AcceleratorState._reset_state(reset_partial_state=True)
    alone = {} if plan.world.num_ranks > 1 else {"LOCAL_RANK": "-1", "WORLD_SIZE": "1"}
    with patch_environment(**alone):
        precision = "bf16" if models.is_autocast(plan) else "no"
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
        prepared: Module = accelerator.prepare_model(model, device_placement=False)
        return prepared


def _place_balanced(plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device) -> TorchPlacement:
    """Distribute the layers evenly over the GPUs that the plan gives this process; on CPUs there is one device."""
    if device.type == "cpu":
        return _place_replicated(plan, model, source, device)
    distribute_layers(plan, model, source, device)
    return TorchPlacement(plan, model, _prepare_model(plan, model, device))


def distribute_layers(plan: Plan, model: PreTrainedModel, source: Source, device: torch.device) -> None:
    """Allocate and load the model, its layers distributed evenly over the GPUs that the plan gives this process."""
    from accelerate import dispatch_model

    devices = device_map(model, free_bytes(plans.gpus_per_rank(plan.config)))
    models.allocate(model, {name: torch.device("cuda", index) for name, index in devices.items()})
    fill(model, source, device)
    dispatch_model(model, devices, force_hooks=True)


def _place_sharded(plan: TrainingPlan, model: PreTrainedModel, source: Source, device: torch.device) -> TorchPlacement:
    """Shard the model on the meta device as Accelerate does for FSDP2; then each rank loads its shards.

    Accelerate's public API does not use FSDP2 on CPUs and makes plain replicas there. Therefore its internal sharding
    function is called here, on every device.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    chosen = settings(plan)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=_offload(plan, device),
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    if models.is_autocast(plan):
        plugin.set_mixed_precision("bf16")
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    fsdp2_prepare_model(_accelerator(plan, plugin, device), model)
    model.to_empty(device="cpu" if chosen.offload_parameters else device)
    models.tie(model, plan)
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = buffer
    fill(model, source, device)
    return TorchPlacement(plan, model, model)


def _offload(plan: TrainingPlan, device: torch.device) -> OffloadPolicy:
    if not settings(plan).offload_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def _accelerator(plan: TrainingPlan, plugin: Any, device: torch.device) -> Any:
    """Return an object with the attributes of an Accelerator that `fsdp2_prepare_model` reads."""
    mesh = _mesh(plan, device)
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        device=device,
        mixed_precision="bf16" if models.is_autocast(plan) else "no",
        is_main_process=torch.distributed.get_rank() == 0,
    )


def _mesh(plan: TrainingPlan, device: torch.device) -> DeviceMesh:
    """Return a 1D mesh of all ranks; for fsdp2_hybrid a 2D mesh that shards in a node and replicates across nodes."""
    world = plan.world
    if settings(plan).strategy is Strategy.fsdp2:
        return init_device_mesh(device.type, (world.num_ranks,), mesh_dim_names=("dp_shard",))
    shape = (world.num_ranks // world.ranks_per_node, world.ranks_per_node)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _is_first_copy(parameter: DTensor) -> bool:
    """Return whether this rank is the first one that holds this shard."""
    mesh, place = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert place is not None and mesh is not None
    return not any(at for at, kind in zip(place, parameter.placements, strict=True) if isinstance(kind, Replicate))
