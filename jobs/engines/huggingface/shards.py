"""What a rank holds of the weights that are trained: parts of named tensors, with master weights and moments."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from jobs.engines.huggingface import quantized
from jobs.engines.huggingface.sources import Source
from jobs.weights.boxes import Shape, flat_range

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
            shape = (module.out_features, module.in_features) if quantized.is_quantized(parameter) else whole(parameter)
            weight = source.read(name, shape)
            if quantized.is_quantized(parameter):
                quantized.quantize(module, weight.to(device), device)
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


def num_bytes(model: Module) -> int:
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
