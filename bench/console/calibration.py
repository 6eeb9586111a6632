"""Show the measured rates of a GPU."""

from collections.abc import Sequence

from bench.contract.cluster import Gpu
from bench.report.tables import TextTable


def tables(gpu: Gpu, *, skipped: Sequence[str], link_error: str | None = None) -> list[TextTable]:
    """Return the rates of a calibrated GPU: GEMMs by size, then all others."""
    rates = gpu.rates
    assert rates is not None, "calibrate measures rates"
    caption = "rates inside training steps of a hot GPU; a size is the work of all GEMMs of one layer's forward pass"
    if skipped:
        caption += f"\nnot measured, because the GPU has too little memory: {', '.join(skipped)}"
    gemms = [
        (f"{size:g}", f"{bf16:,.0f}", f"{fp8:,.0f}" if gpu.has_fp8 else "-")
        for size, bf16, fp8 in zip(rates.layer_tflop, rates.bf16_tflops, rates.fp8_tflops, strict=True)
    ]
    r, both = rates, _pair
    others = [
        (
            "attention forward, rows of 8192 / 4096 (TFLOP/s)",
            both(r.attention_forward_tflops, r.attention_forward_4096_tflops),
        ),
        (
            "attention backward, rows of 8192 / 4096 (TFLOP/s)",
            both(r.attention_backward_tflops, r.attention_backward_4096_tflops),
        ),
        (
            "with heads of 64: share of these rates, forward / backward",
            both(r.narrow_heads_forward, r.narrow_heads_backward, "{:.2f}"),
        ),
        ("FP8 weight gradients (TFLOP/s)", _number(r.fp8_weight_gradient_tflops)),
        ("copies in GPU memory, read plus written (GB/s)", _number(r.copy_gbs)),
        ("element-wise kernels (GB/s)", _number(r.elementwise_gbs)),
        ("host to GPU (GB/s)", _number(r.host_gbs)),
        ("launch of a kernel (µs)", _number(r.launch_us, "{:.1f}")),
        *(
            (f"all-reduce of {mib:g} MiB, bus bandwidth (GB/s)", _number(rate))
            for mib, rate in zip(r.busbw_mib, r.busbw_gbs, strict=True)
        ),
        *([("all-reduce between the GPUs", f"not measured: {link_error}")] if link_error else []),
    ]
    return [
        TextTable(f"{gpu.name}: GEMMs", gemms, ("TFLOP of a layer", "BF16 (TFLOP/s)", "FP8 (TFLOP/s)"), caption),
        TextTable(f"{gpu.name}: other rates", others),
    ]


def _number(value: float | None, form: str = "{:,.0f}") -> str:
    return "-" if value is None else form.format(value)


def _pair(first: float | None, second: float | None, form: str = "{:,.0f}") -> str:
    return f"{_number(first, form)} / {_number(second, form)}"
