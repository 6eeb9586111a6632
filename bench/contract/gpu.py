"""What is known of an accelerator: its data sheet, and the rates that were measured on one."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured rates of an accelerator, to estimate the step time. Sizes rise; rates between them are interpolated.

    A rate measured inside a step, with a hot GPU and cold caches, is better than that of a kernel alone; `source` says
    which one it is.
    """

    source: str
    layer_tflop: list[float]
    """TFLOP of all GEMMs of one layer in a forward pass; bf16_tflops and fp8_tflops are the rates at these sizes."""
    bf16_tflops: list[float]
    fp8_tflops: list[float]
    attention_forward_tflops: float
    attention_backward_tflops: float
    """Of causal attention in BF16 in rows of 8192 tokens; masked scores are not counted as work."""
    copy_gbs: float
    """Device memory, bytes read plus bytes written."""
    busbw_mib: list[float]
    busbw_gbs: list[float]
    """All-reduce bus bandwidth in one node, by size of the message."""
    launch_us: float
    """Host time per kernel of an FP8 layer, with all of Python; kernels may run faster than the host launches them."""
    host_gbs: float | None = None
    """Between host and device memory, one way; both ways go on at once. None: not measured."""
    fp8_weight_gradient_tflops: float | None = None
    """Of the GEMMs that add FP8 weight gradients to FP32 ones. None: not measured, and fp8_tflops is taken."""
    attention_forward_4096_tflops: float | None = None
    attention_backward_4096_tflops: float | None = None
    """In rows of 4096 tokens; shorter rows are extrapolated. None: not measured, and the rates at 8192 are taken."""
    elementwise_gbs: float | None = None
    """Device memory in the element-wise kernels of a step. None: not measured, and copy_gbs is taken."""


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One accelerator; dense peak rates, without sparsity."""

    name: str
    memory_gib: float
    peak_bf16_tflops: float
    peak_fp8_tflops: float | None = None
    """None: it does not multiply in FP8, and precision=fp8 is refused."""
    source: str
    rates: Rates | None = None
    """None: nothing was measured, and no step time is estimated."""
