"""The software whose steps are predicted: what it computes in addition, what it sends, and what it hides.

Every constant names its source. A constant that a published row set names that row: it ran on one node.
"""

from dataclasses import dataclass, field

from bench.planning.estimates.memory_traffic import Traffic

SPREAD = 0.013
"""Standard deviation of the speed of GPUs at their power limit, relative to the mean.

Source: docs/results/2026-11-22-eight-gpus.md: the eight GPUs of one host differ by 3.7 %, and the range of eight normal
values is 2.85 standard deviations (Tippett, 1925).
"""
CALIBRATION_GPUS = 8
"""GPUs of the systems that set the factors below (GB200's has 4); their steps contain the wait for the slowest one."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that one published row set, so that the prediction of this row is exact."""

    value: float
    row: str
    """Round, submitter and system; empty: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training program."""

    name: str
    summary: str
    forward: Traffic
    backward: Traffic
    """Bytes per token of a layer's element-wise kernels."""
    gelu_fc1: tuple[float, float]
    """The same per element of fc1's output with GELU, forward and backward."""
    gathered_bytes: int
    """Per element of the hidden states that TP ranks gather; what they reduce has two."""
    gradient_bytes: int
    parameter_bytes: int
    """Per parameter that replicas reduce and gather in a step."""
    head_bytes: int = 6
    """Device memory traffic of the loss per logit: read for the loss, then read and overwritten by its gradient, all in
    BF16, as in one fused kernel."""
    update_bytes: int = 26
    """Device memory traffic of Adam per parameter of this rank: FP32 gradient read twice (8), FP32 weight (8) and two
    BF16 moments (8) read and written, BF16 weight written (2). Assumed: as runstop's with recipe.moments=bf16. The
    update takes at most 0.04 % of a published step."""
    shown_tensor_share: Constant
    """Of the seconds of TP's collectives alone: what they add to a layer. The GEMMs around them hide the rest."""
    adapter_factors: dict[str, Constant] = field(default_factory=dict)
    """By GPU: seconds of a layer's computation with LoRA, relative to the same layer without adapters and without
    weight gradients."""
    kernels: int = 0
    """Kernels of a layer, forward and backward, that the host launches without CUDA graphs."""

    def constants(self) -> dict[str, Constant]:
        """Return the constants that published rows set, by what they are."""
        of_gpus = {f"LoRA's factor on {gpu}": each for gpu, each in self.adapter_factors.items()}
        return {"share of TP's collectives that is not hidden": self.shown_tensor_share, **of_gpus}


REFERENCE = Stack(
    name="reference",
    summary="NVIDIA's code for MLPerf: NeMo, Megatron-core, Transformer Engine with FP8, TP communication inside GEMMs",
    # The traffic of runstop's own trained layer in FP8: both quantize the same tensors.
    forward=Traffic(residual=16, attention=3, qkv=4, fc1=3.9),
    backward=Traffic(residual=34, attention=5, qkv=5, fc1=8),
    gelu_fc1=(4.0, 9.0),
    gathered_bytes=1,  # FP8
    gradient_bytes=2,  # grad_reduce_in_fp32=False and grad_sync_dtype: bf16 in the submissions
    parameter_bytes=1,  # FP8_PARAM_GATHER
    shown_tensor_share=Constant(0.825, "v4.1 NVIDIA eos_ngc24.09_nemo"),
    adapter_factors={
        "h100": Constant(1.185, "v4.1 NVIDIA h200_ngc24.09_nemo"),
        "h200": Constant(1.185, "v4.1 NVIDIA h200_ngc24.09_nemo"),
        "b200": Constant(1.044, "v5.0 NVIDIA nyx_n1_ngc25.04_nemo"),
        "gb200": Constant(1.015, "v5.0 Oracle 1xBM.GPU.GB200.4"),
    },
    kernels=142,  # assumed: about as runstop's frozen layer with TP, SP and CP (bench/planning/estimates/step_time.py)
)

MEGATRON = Stack(
    name="megatron",
    summary="Megatron-LM and Megatron-DeepSpeed of 2022: BF16, no FlashAttention, collectives not hidden",
    # Kernels are not fused: their bytes were fitted together with the rates of an A100 (data/rates.yaml).
    forward=Traffic(residual=80, attention=0, qkv=10.7, fc1=16.1),
    backward=Traffic(residual=121, attention=0, qkv=16.1, fc1=26.8),
    gelu_fc1=(16.1, 26.8),
    gathered_bytes=2,
    gradient_bytes=2,
    parameter_bytes=2,
    # Kernels of the loss are not fused and in FP32: cast (6), maximum (4), difference (8), exponential (8), sum (4),
    # quotient (8); gradient times that of the loss (8), cast back (6). Counted in Megatron-LM,
    # core/tensor_parallel/cross_entropy.py.
    head_bytes=52,
    shown_tensor_share=Constant(1.0, ""),
    kernels=100,  # assumed; launch_us of an A100 was fitted with this number, and only their product matters
)
