"""A rank's training state in a checkpoint: master weights, Adam moments and random generators, not the data order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from bench.contract.plan import Plan
from jobs.engines import rank_state
from jobs.engines.huggingface import quantized
from jobs.engines.huggingface.weights import Source
from jobs.weights.boxes import Shape, flat_range
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

NAMES = {"master": "", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
"""The prefix of a weight's name in a checkpoint, by tensor of a shard. engine=megatron uses the same prefixes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive elements of one weight in row-major order, starting at `begin`; `state` is keyed by NAMES."""

    name: str
    full_shape: Shape
    begin: int
    state: dict[str, Tensor]
    is_saved: bool
    """Whether this rank saves the shard: one of the ranks that hold the same elements does."""

    @property
    def size(self) -> int:
        return self.state["master"].numel()

    def boxes(self) -> Iterator[tuple[Shape, Shape, slice]]:
        """Yield offset and shape of rectangular blocks of the weight, and their elements in the shard."""
        at = 0
        for offset, shape in flat_range(self.full_shape, self.begin, self.begin + self.size):
            num = torch.Size(shape).numel()
            yield offset, shape, slice(at, at + num)
            at += num


def fill(model: Module, source: Source, device: torch.device, *, only_trained: bool = False) -> None:
    """Copy the weights into the parameters; of a sharded parameter, this rank's part."""
    done: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done or only_trained and not parameter.requires_grad:
                continue
            name = f"{prefix}.{key}" if prefix else key
            is_4bit = quantized.is_quantized(parameter)
            is_packed = isinstance(module, quantized.PackedLinear) and key == "weight"
            is_in_4_bits = is_4bit or is_packed
            shape = (module.out_features, module.in_features) if is_in_4_bits else full_shape(parameter)
            weight = source.read(name, shape)
            if is_4bit:
                quantized.quantize(module, weight.to(device), device)
            else:
                is_sharded = isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")
                scales_on = device if is_sharded else parameter.device
                _copy(parameter, module.pack(weight, scales_on) if is_packed else weight)
            done.add(id(module._parameters[key]))


def full_shape(parameter: Parameter) -> Shape:
    """Return the shape of the full weight, of which this rank may hold a part."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def _copy(parameter: Parameter, weight: Tensor) -> None:
    if isinstance(parameter, DTensor):
        begin, local = first_row(parameter), parameter.to_local()
        local.copy_(weight[begin : begin + len(local)])
        return
    if hasattr(parameter, "ds_tensor"):
        part, begin = parameter.ds_tensor, parameter.ds_tensor.numel() * torch.distributed.get_rank()
        mine = weight.flatten()[begin : begin + part.numel()]
        part.data[: len(mine)].copy_(mine)
        if not parameter.numel():
            return
    parameter.data.copy_(weight)


def first_row(parameter: DTensor) -> int:
    """Return the first row that this rank holds of a parameter that fully_shard has sharded by rows."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def weight_bytes(model: Module) -> int:
    """Return the bytes of the weights that this rank holds while no layer is gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last layers stay gathered between the forward and the backward pass
    held = 0
    for parameter in model.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own = getattr(parameter, "ds_tensor", own)
        held += own.numel() * own.element_size()
    return held


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank: a copy, or the live tensors if host memory has no room for a copy."""

    shards: list[Shard]
    generators: dict[str, Tensor]
    is_copy: bool
    """Whether training may continue while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, then the record that marks it as complete."""
        rank_state.write(folder, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        for shard in self.shards:
            for offset, shape, where in shard.boxes():
                for key, prefix in NAMES.items():
                    yield Piece(
                        prefix + shard.name, shard.full_shape, offset, shard.state[key][where].view(shape).cpu()
                    )
        yield from rank_state.generator_pieces(self.generators)


def state_bytes(shards: list[Shard]) -> int:
    """Return how many bytes this rank writes."""
    return sum(tensor.nbytes for shard in shards if shard.is_saved for tensor in shard.state.values())


def take_snapshot(plan: Plan, shards: list[Shard]) -> Snapshot:
    """Return the current state, copied into host memory if there is room for all ranks of a node."""
    saved = [shard for shard in shards if shard.is_saved]
    has_room = rank_state.has_room(plan, state_bytes(saved))
    if has_room:
        saved = [_copy_to_host(shard) for shard in saved]
    return Snapshot(saved, rank_state.generators(), has_room)


def _copy_to_host(shard: Shard) -> Shard:
    state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in shard.state.items()}
    return Shard(shard.name, shard.full_shape, shard.begin, state, shard.is_saved)


@torch.no_grad()
def load(reader: Reader, shards: list[Shard]) -> None:
    """Load the state that this rank updates from a checkpoint of any layout."""
    reader.read(
        Wanted(prefix + shard.name, shard.full_shape, offset, shard.state[key][where].view(shape))
        for shard in shards
        for offset, shape, where in shard.boxes()
        for key, prefix in NAMES.items()
    )
