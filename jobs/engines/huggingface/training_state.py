"""The training state of a rank in files: master weights, both moments, and the generators; not the data's order."""

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
from jobs.engines.huggingface import model as huggingface_model
from jobs.engines.huggingface.weights import Source
from jobs.weights.boxes import Shape, flat_range
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

NAMES = {"master": "", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
"""What stands before a weight's name in a checkpoint, by the tensors of a shard; the other engine's are the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of one weight, from `begin` on in row-major order, flat; `state` is keyed by NAMES."""

    name: str
    whole: Shape
    begin: int
    state: dict[str, Tensor]
    is_saved: bool
    """Whether this rank saves it; of several ranks that hold the same elements one does."""

    @property
    def size(self) -> int:
        return self.state["master"].numel()

    def boxes(self) -> Iterator[tuple[Shape, Shape, slice]]:
        """Yield offset and shape of boxes of the weight, and which elements of the shard they are."""
        at = 0
        for offset, shape in flat_range(self.whole, self.begin, self.begin + self.size):
            num = torch.Size(shape).numel()
            yield offset, shape, slice(at, at + num)
            at += num


def fill(model: Module, source: Source, device: torch.device, *, only_trained: bool = False) -> None:
    """Give each parameter its weights: of a sharded one, this rank's part."""
    done: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in done or only_trained and not parameter.requires_grad:
                continue
            name = f"{prefix}.{key}" if prefix else key
            shape = (
                (module.out_features, module.in_features)
                if huggingface_model.is_quantized(parameter)
                else whole(parameter)
            )
            weight = source.read(name, shape)
            if huggingface_model.is_quantized(parameter):
                huggingface_model.quantize(module, weight.to(device), device)
            else:
                _copy(parameter, weight)
            done.add(id(module._parameters[key]))


def whole(parameter: Parameter) -> Shape:
    """Return the shape of the whole weight, of which the rank may hold a part."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def _copy(parameter: Parameter, weight: Tensor) -> None:
    if isinstance(parameter, DTensor):
        begin, local = rows_of(parameter), parameter.to_local()
        local.copy_(weight[begin : begin + len(local)])
        return
    if hasattr(parameter, "ds_tensor"):
        part, begin = parameter.ds_tensor, parameter.ds_tensor.numel() * torch.distributed.get_rank()
        mine = weight.flatten()[begin : begin + part.numel()]
        part.data[: len(mine)].copy_(mine)
        if not parameter.numel():
            return
    parameter.data.copy_(weight)


def rows_of(parameter: DTensor) -> int:
    """Return the first row that this rank holds of a parameter that fully_shard has cut by rows."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def weight_bytes(model: Module) -> int:
    """Return the bytes of the weights that this rank holds while no layer is at work."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last layers stay whole from a forward pass to the backward pass
    held = 0
    for parameter in model.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own = getattr(parameter, "ds_tensor", own)
        held += own.numel() * own.element_size()
    return held


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank as it was, or as it is, where the host has no room for a copy."""

    shards: list[Shard]
    generators: dict[str, Tensor]
    is_copy: bool
    """Whether training may go on while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, and then the record that says so."""
        rank_state.write(folder, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        for shard in self.shards:
            for offset, shape, where in shard.boxes():
                for key, prefix in NAMES.items():
                    yield Piece(prefix + shard.name, shard.whole, offset, shard.state[key][where].view(shape).cpu())
        yield from rank_state.generator_pieces(self.generators)


def state_bytes(shards: list[Shard]) -> int:
    """Return how much a rank writes."""
    return sum(tensor.nbytes for shard in shards if shard.is_saved for tensor in shard.state.values())


def take(plan: Plan, shards: list[Shard]) -> Snapshot:
    """Return the state of this moment, copied into host memory where there is room for the ranks of a node."""
    saved = [shard for shard in shards if shard.is_saved]
    has_room = rank_state.has_room(plan, state_bytes(saved))
    if has_room:
        saved = [_copied(shard) for shard in saved]
    return Snapshot(saved, rank_state.generators(), has_room)


def _copied(shard: Shard) -> Shard:
    state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in shard.state.items()}
    return Shard(shard.name, shard.whole, shard.begin, state, shard.is_saved)


@torch.no_grad()
def load(reader: Reader, shards: list[Shard]) -> None:
    """Overwrite what this rank updates by a checkpoint of any layout."""
    reader.read(
        Wanted(prefix + shard.name, shard.whole, offset, shard.state[key][where].view(shape))
        for shard in shards
        for offset, shape, where in shard.boxes()
        for key, prefix in NAMES.items()
    )
