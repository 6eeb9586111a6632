"""Low-rank adapters inside megatron-core's parallel linears: y = W x + alpha / rank * B A dropout(x).

For an adapter, tensor-parallel ranks exchange activations of the LoRA rank's width only. The base weight keeps its
name, so base checkpoints load unchanged. Shape letters: S sequence, B batch, I input, O output, R LoRA rank.
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
from jobs.profiles.ranges import profile_range
from jobs.weights.adapter_init import init_adapter

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

ADAPTERS = ("lora_a", "lora_b")


class _Config(Protocol):
    """The attributes of a `layer.LayerConfig` with adapters that are used here."""

    lora: Lora
    params_dtype: torch.dtype
    sequence_parallel: bool


class _Adapter:
    """The common part of both linears with adapters: the two adapter weights, and how they are saved."""

    config: _Config
    input_size: int
    training: bool
    tp_group: ProcessGroup
    state_dict: Callable[..., dict[str, Tensor]]
    base_tp_axis: dict[str, int]
    """The axis along which TP splits each weight of the base."""
    tp_axis: dict[str, int]
    """The axis along which TP splits each adapter weight; a weight without an entry is replicated."""

    def add_adapter(self, num_in: int, num_out: int, split_sequence: str) -> None:
        """Add A [R, I] and B [O, R] of this TP rank; under SP the weight `split_sequence` gets part of the sequence."""
        options: dict[str, Any] = {"dtype": self.config.params_dtype, "device": torch.cuda.current_device()}
        self.lora_a = Parameter(torch.empty(self.config.lora.rank, num_in, **options))
        self.lora_b = Parameter(torch.zeros(num_out, self.config.lora.rank, **options))
        for name in ADAPTERS:
            weight = getattr(self, name)
            weight.tensor_model_parallel = name in self.tp_axis
            weight.partition_dim, weight.partition_stride = self.tp_axis.get(name, -1), 1
            weight.sequence_parallel = self.config.sequence_parallel and name == split_sequence

    def reset_adapter(self, seed: int, name: str) -> None:
        """Initialise A by seed and name, the same in every layout, and B with zeros."""
        a = init_adapter((self.config.lora.rank, self.input_size), "A", seed=seed, name=name)
        if "lora_a" in self.tp_axis:
            a = a.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]
        self.lora_a.data.copy_(a)
        self.lora_b.data.zero_()

    def dropout(self, x: Tensor, *, is_split: bool) -> Tensor:
        """Return dropout(x); TP ranks that hold different parts of x use separate generators."""
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
    """A linear whose output is split over TP: A is replicated, B is split like the rows of the base."""

    base_tp_axis = {"weight": 0, "bias": 0}
    tp_axis = {"lora_b": 0}

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.add_adapter(input_size, self.output_size_per_partition, split_sequence="lora_a")

    def forward(self, x_SBI: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        y_SBO, bias = super().forward(x_SBI, *args, **kwargs)
        with profile_range(Part.adapters):
            low_SBR = linear(self.dropout(x_SBI, is_split=self.sequence_parallel), self.lora_a)
            if self.sequence_parallel:
                low_SBR = gather_from_sequence_parallel_region(low_SBR, group=self.tp_group)
            else:
                low_SBR = copy_to_tensor_model_parallel_region(low_SBR, group=self.tp_group)
            return y_SBO + self.scale * linear(low_SBR, self.lora_b), bias


class LoraRowParallelLinear(_Adapter, RowParallelLinear):
    """A linear whose input is split over TP: A is split like the columns of the base, B is replicated."""

    base_tp_axis = {"weight": 1}
    tp_axis = {"lora_a": 1}

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.add_adapter(self.input_size_per_partition, output_size, split_sequence="lora_b")

    def forward(self, x_SBI: Tensor) -> tuple[Tensor, Tensor | None]:
        y_SBO, bias = super().forward(x_SBI)
        with profile_range(Part.adapters):
            low_SBR = linear(self.dropout(x_SBI, is_split=self.tp_group.size() > 1), self.lora_a)
            if self.sequence_parallel:
                low_SBR = reduce_scatter_to_sequence_parallel_region(low_SBR, group=self.tp_group)
            else:
                low_SBR = reduce_from_tensor_model_parallel_region(low_SBR, group=self.tp_group)
            return y_SBO + self.scale * linear(low_SBR, self.lora_b), bias


def is_adapter(name: str) -> bool:
    """Return whether a parameter or checkpoint key belongs to an adapter."""
    return name.rsplit(".", 1)[-1] in ADAPTERS


def freeze_base(model: torch.nn.Module) -> None:
    """Freeze all parameters except the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad = is_adapter(name)


def init_adapters(model: "GPTModel", seed: int) -> None:
    """Initialise the adapters of this rank's layers; B is zero, so training starts from the base model."""
    for layer in model.decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, _Adapter):
                module.reset_adapter(seed, f"layer {layer.layer_number} {name}")
