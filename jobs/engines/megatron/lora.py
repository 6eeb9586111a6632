"""Low-rank adapters inside megatron-core's parallel linears: y = W x + alpha / rank * B A dropout(x).

Tensor-parallel ranks exchange activations of the LoRA rank's width only. The base weight keeps its name, so base
checkpoints load unchanged. Shape letters: S sequence, B batch, I input, O output, R rank.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.functional import dropout, linear

from bench.contract.modules import Part
from bench.contract.training import Lora
from jobs.profiles.ranges import named
from jobs.weights.drawn import drawn

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

ADAPTERS = ("lora_a", "lora_b")


class _Config(Protocol):
    """What is read of a `layer.LayerConfig` with adapters."""

    lora: Lora
    params_dtype: torch.dtype
    sequence_parallel: bool


class _Adapter:
    """The common part of both adapted linears: two weights beside the base's, and how they are saved."""

    config: _Config
    input_size: int
    training: bool
    tp_group: ProcessGroup
    state_dict: Callable[..., dict[str, Tensor]]
    base_tp_axis: dict[str, int]
    """Where the base's weights are split."""
    tp_axis: dict[str, int]
    """The axis along which TP splits each weight; a weight that is not named is complete on every rank."""

    def add_adapter(self, num_in: int, num_out: int, split_sequence: str) -> None:
        """Add A [R, I] and B [O, R] of this TP rank; `split_sequence` sees only a part of the sequence under SP."""
        like: dict[str, Any] = {"dtype": self.config.params_dtype, "device": torch.cuda.current_device()}
        self.lora_a = Parameter(torch.empty(self.config.lora.rank, num_in, **like))
        self.lora_b = Parameter(torch.zeros(num_out, self.config.lora.rank, **like))
        for name in ADAPTERS:
            weight = getattr(self, name)
            weight.tensor_model_parallel = name in self.tp_axis
            weight.partition_dim, weight.partition_stride = self.tp_axis.get(name, -1), 1
            weight.sequence_parallel = self.config.sequence_parallel and name == split_sequence

    def init_adapter(self, seed: int, name: str) -> None:
        """Draw A by seed and name, the same in every layout."""
        whole = drawn((self.config.lora.rank, self.input_size), "A", seed=seed, name=name)
        if "lora_a" in self.tp_axis:
            whole = whole.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]
        self.lora_a.data.copy_(whole)
        self.lora_b.data.zero_()

    def dropped(self, x: Tensor, *, is_split: bool) -> Tensor:
        """Return dropout(x); TP ranks that hold different parts of x use generators of their own."""
        p = self.config.lora.dropout
        if p == 0 or not self.training:
            return x
        if not is_split:
            return dropout(x, p)
        with get_cuda_rng_tracker().fork():
            return dropout(x, p)

    @property
    def scale(self) -> float:
        return self.config.lora.alpha / self.config.lora.rank

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return base and adapter tensors, each with the axis along which TP splits it."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self.base_tp_axis | self.tp_axis,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state


class LoraColumnParallelLinear(_Adapter, ColumnParallelLinear):
    """Output split over TP: A whole, B split like the base's rows."""

    base_tp_axis = {"weight": 0, "bias": 0}
    tp_axis = {"lora_b": 0}

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.add_adapter(input_size, self.output_size_per_partition, split_sequence="lora_a")

    def forward(self, x_SBI: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        y_SBO, bias = super().forward(x_SBI, *args, **kwargs)
        with named(Part.adapters):
            low_SBR = linear(self.dropped(x_SBI, is_split=self.sequence_parallel), self.lora_a)
            if self.sequence_parallel:
                low_SBR = gather_from_sequence_parallel_region(low_SBR, group=self.tp_group)
            else:
                low_SBR = copy_to_tensor_model_parallel_region(low_SBR, group=self.tp_group)
            return y_SBO + self.scale * linear(low_SBR, self.lora_b), bias


class LoraRowParallelLinear(_Adapter, RowParallelLinear):
    """Input split over TP: A split like the base's columns, B whole."""

    base_tp_axis = {"weight": 1}
    tp_axis = {"lora_a": 1}

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.add_adapter(self.input_size_per_partition, output_size, split_sequence="lora_b")

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, Tensor | None]:
        y_SBO, bias = super().forward(x_SBI)
        with named(Part.adapters):
            low_SBR = linear(self.dropped(x_SBI, is_split=self.tp_group.size() > 1), self.lora_a)
            if self.sequence_parallel:
                low_SBR = reduce_scatter_to_sequence_parallel_region(low_SBR, group=self.tp_group)
            else:
                low_SBR = reduce_from_tensor_model_parallel_region(low_SBR, group=self.tp_group)
            return y_SBO + self.scale * linear(low_SBR, self.lora_b), bias


def is_adapter(name: str) -> bool:
    """Return whether a parameter or checkpoint key belongs to an adapter."""
    return name.rsplit(".", 1)[-1] in ADAPTERS


def freeze_base(model: torch.nn.Module) -> None:
    """Train the adapters only."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = is_adapter(name)


def init_adapters(model: "GPTModel", seed: int) -> None:
    """Draw every adapter of this rank's layers; B is zero, so training starts from the base model."""
    for layer in model.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, _Adapter):
                module.init_adapter(seed, f"layer {layer.layer_number} {name}")
