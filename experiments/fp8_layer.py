"""Times every operation of the FP8 layer on this GPU against its lower bound: one Llama-2-70B layer and 8192 tokens.

    python experiments/fp8_layer.py [--tp N]

The floor of an operation that moves bytes is its least bytes over the rate of a device-to-device copy, and that of a
GEMM its operations over the rate of the fastest of them, both measured in the same run.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from triton.testing import do_bench

from jobs.engines.megatron.attention import attend, attend_backward
from jobs.engines.megatron.frozen.gpu_ops import GpuOps
from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized

TOKENS, HIDDEN, FFN, HEADS, GROUPS, DIM, RANK = 8192, 8192, 28672, 64, 8, 128, 16


class Alone:
    """A process group of one."""

    def size(self) -> int:
        return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the layer")
    tp = parser.parse_args().tp
    torch.manual_seed(0)
    rows = [(name, do_bench(run, warmup=50, rep=200, return_mode="median"), size) for name, run, size in cases(tp)]
    copy, matmuls = rows[0][2] / rows[0][1], [(size / ms) for name, ms, size in rows if name.startswith("matmul")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tp {tp}: copy {copy / 1e6:.0f} GB/s")
    print(f"{'operation':24}{'ms':>9}{'floor ms':>10}{'ratio':>7}{'TFLOP/s, GB/s':>16}")
    for name, ms, size in rows[1:]:
        is_gemm = name.startswith(("matmul", "attend"))
        floor = size / (max(matmuls) if name.startswith("matmul") else copy) if not name.startswith("attend") else ms
        print(f"{name:24}{ms:9.3f}{floor:10.3f}{ms / floor:7.2f}{size / ms / (1e9 if is_gemm else 1e6):16.0f}")


def cases(tp: int) -> list[tuple[str, Callable[[], object], float]]:
    """Return each operation's name, what to run, and its bytes (of a GEMM or of attention: its operations)."""
    ops = GpuOps()
    m, h, f, heads, groups = TOKENS, HIDDEN, FFN // tp, HEADS // tp, GROUPS // tp
    qkv, drop, norm = (heads + 2 * groups) * DIM, Dropout(0.1, 12345), random(h)
    x, y, gate_up, act = random(m, h), random(m, h), random(m, 2 * f), random(m, f)
    normed, rstd = ops.norm_quantize(x, norm, 1e-5)
    a, low, lora = random(RANK, h), random(m, RANK), Lora(random(m, RANK), random(qkv, RANK), 2.0)
    kept, freqs = ops.swiglu_quantize(gate_up)[1], torch.rand(m, DIM, device="cuda")
    projected = random(m, qkv)
    heads_of = ops.rope(projected, freqs, groups)
    q, k, v = (part[:, None] for part in heads_of)
    out, lse = attend(q, k, v, scale=DIM**-0.5, group=Alone())
    operations = 2 * m * m * heads * DIM
    operations = [
        ("copy", lambda: x.clone(), 4 * m * h),
        ("norm_quantize", lambda: ops.norm_quantize(x, norm, 1e-5), 3 * m * h),
        ("add_norm_quantize", lambda: ops.add_norm_quantize(x, y, norm, 1e-5), 7 * m * h),
        ("norm_backward", lambda: ops.norm_backward(x, y, normed, rstd, norm), 7 * m * h),
        (
            "norm_backward, adapted",
            lambda: ops.norm_backward(x, y, normed, rstd, norm, Adapted(y, drop)),
            9 * m * h,
        ),
        ("norm_backward_quantize", lambda: ops.norm_backward_quantize(x, y, normed, rstd, norm), 8 * m * h),
        ("quantize", lambda: ops.quantize(x), 3 * m * h),
        ("down, of FP8", lambda: ops.down(normed, a, drop), m * h),
        ("down", lambda: ops.down(x, a, drop), 2 * m * h),
        ("down_backward, of FP8", lambda: ops.down_backward(low, normed, drop), m * h),
        ("down_backward", lambda: ops.down_backward(low, x, drop), 2 * m * h),
        ("add_down_gradient", lambda: ops.add_down_gradient(y, low, a, drop), 4 * m * h),
        ("rope", lambda: ops.rope(projected, freqs, groups, lora), 4 * m * qkv),
        ("rope_backward", lambda: ops.rope_backward(*heads_of, freqs), 5 * m * qkv),
        ("swiglu_quantize", lambda: ops.swiglu_quantize(gate_up), 7 * m * f),
        ("swiglu_backward", lambda: ops.swiglu_backward_quantize(act, kept), 6 * m * f),
        ("attend", lambda: attend(q, k, v, scale=DIM**-0.5, group=Alone()), operations),
        (
            "attend_backward",
            lambda: attend_backward(out, q, k, v, out, lse, scale=DIM**-0.5, group=Alone()),
            2.5 * operations,
        ),
    ]
    for name, num_in, num_out in (("qkv", h, qkv), ("proj", heads * DIM, h), ("fc1", h, 2 * f), ("fc2", f, h)):
        weight, gradient = weighted(ops, num_out, num_in), ops.quantize(random(m, num_out))
        transposed, rows = ops.transpose(weight), ops.quantize(random(m, num_in))
        count = 2 * m * num_in * num_out
        operations += [
            (f"matmul {name}", lambda a=rows, w=weight: ops.matmul(a, w), count),
            (f"matmul {name} backward", lambda a=gradient, w=transposed: ops.matmul(a, w), count),
            (f"transpose {name}", lambda w=weight: ops.transpose(w), 2 * num_in * num_out),
        ]
    return operations


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weighted(ops: GpuOps, num_out: int, num_in: int) -> Quantized:
    return Quantized(ops.quantize(random(num_out, num_in)).values, torch.full((1,), 0.01, device="cuda"))


if __name__ == "__main__":
    main()
