"""What Triton kernels are launched with for the layers of real models: programs, tensors, tiles, warps and stages.

The golden file has the sizes that were measured on an H200, which no test without a GPU can time. Tensors have no data.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.generation import Sampling, WeightPrecision
from bench.contract.schema import Precision
from helpers import golden, ranks

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import fp8_gemm, head_norm_kernels, loss_kernels
    from jobs.engines.megatron.device_ops import trained_ops
    from jobs.engines.megatron.frozen.gpu_ops import GpuOps, PlainGpuOps
    from jobs.engines.megatron.frozen.nf4_kernels import dequantize
    from jobs.engines.megatron.generation import kv_cache, peer_memory
    from jobs.engines.megatron.generation.gpu_ops import GpuOps as GenerationGpuOps
    from jobs.engines.megatron.generation.ops import TorchOps
    from jobs.engines.megatron.generation.ranks import Ranks
    from jobs.engines.megatron.generation.weights import Linear
    from jobs.engines.megatron.head_norms import HeadNorms
    from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized
    from jobs.engines.megatron.trained import fp8_weights, norm_kernels
    from jobs.engines.megatron.trained.gpu_ops import Bf16GpuOps, Fp8GpuOps
    from jobs.engines.megatron.trained.ops import NormStats, NormWeights
    from jobs.weights.nf4 import Nf4

GOLDEN = Path(__file__).with_name("golden_launches.txt")
BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
NAMES = {BF16: "bf16", FP8: "fp8", FP32: "fp32"}
ROWS, DIM, EPS = 8192, 128, 1e-5
MULTIPROCESSORS = 132


class Launches:
    """The launches of all kernels as text, in place of Triton's interpreter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run(self, kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        assert not warmup
        words = [f"{name}={shown(arg)}" for name, arg in zip(kernel.arg_names, args, strict=False)]
        words += [f"{name}={shown(arg)}" for name, arg in options.items()]
        self.lines.append(f"{kernel.__name__} {list(grid)}: {' '.join(words)}")


def shown(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return f"{NAMES.get(arg.dtype, str(arg.dtype).removeprefix('torch.'))}{list(arg.shape)}".replace(" ", "")
    return f"{arg:.6g}" if isinstance(arg, float) else str(arg).replace(" ", "")


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(*shape: int) -> Quantized:
    return Quantized(empty(*shape, dtype=FP8), empty(shape[0], dtype=FP32))


def heads(num_rows: int, num_heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    return empty(num_rows, num_heads, DIM), empty(num_rows, groups, DIM), empty(num_rows, groups, DIM)


def frozen_layers(ops: Any, hidden: int, inner: int, groups: int) -> None:
    """The operations of a layer with 8 queries per group, and an adapter of rank 16 and of rank 64."""
    x, weight, rstd, freqs = empty(ROWS, hidden), empty(hidden), empty(ROWS, dtype=FP32), empty(ROWS, DIM, dtype=FP32)
    is_fp8 = ops.quantized_dtype is FP8
    normed = fp8(ROWS, hidden) if is_fp8 else Quantized(x)
    ops.norm_quantize(x, weight, EPS)
    ops.add_norm_quantize(x, x, weight, EPS)
    ops.norm_backward(x, x, normed, rstd, weight)
    ops.norm_backward(x, x, normed, rstd, weight, Adapted(x, Dropout(0.1, 1)))
    ops.norm_backward_quantize(x, x, normed, rstd, weight)
    qkv, grads, norms = empty(ROWS, groups * 10 * DIM), heads(ROWS, 8 * groups, groups), norms_of_heads()
    for rank in (16, 64):
        low, a = empty(ROWS, rank), empty(rank, hidden)
        ops.rope(qkv, freqs, groups, Lora(low, empty(qkv.shape[1], rank), 0.5))
        for drop in (Dropout(0.1, 1), Dropout(0.0, 1)):
            ops.down(normed, a, drop)
            ops.down_backward(low, normed, drop)
            ops.add_down_gradient(x, low, a, drop)
    ops.rope(qkv, freqs, groups, bias=empty(qkv.shape[1]), norms=norms)
    ops.rope(qkv, freqs, groups, norms=norms)
    ops.rope_backward(*grads, freqs)
    ops.normed_rope_backward(*grads, freqs, qkv, norms)
    ops.quantize(x)
    for keep in (True, False):
        ops.swiglu_quantize(empty(ROWS, 2 * inner), keep=keep)
    kept = fp8(2 * ROWS, inner) if is_fp8 else Quantized(empty(ROWS, 2 * inner))
    ops.swiglu_backward_quantize(empty(ROWS, inner), kept)


def norms_of_heads() -> HeadNorms:
    return HeadNorms(empty(DIM), empty(DIM), EPS)


def trained_layers(ops: Bf16GpuOps, hidden: int, inner: int) -> None:
    x, stats, freqs = empty(ROWS, hidden), NormStats(*2 * [empty(ROWS, dtype=FP32)]), empty(ROWS, DIM, dtype=FP32)
    for weights, of_x in (
        (NormWeights(empty(hidden), empty(hidden), EPS), stats),
        (NormWeights(empty(hidden), None, EPS), NormStats(stats.rstd_M, None)),
    ):
        ops.norm(x, weights)
        ops.add_norm(x, x, weights.bias_H, weights)
        ops.recompute_norm(x, of_x, weights)
        ops.norm_backward(x, x, x, of_x, weights)
    ops.column_sum(x)
    ops.column_sum(fp8(ROWS, hidden))
    ops.operand(x)
    ops.merge_heads(*heads(ROWS, 12, 4), None)
    ops.merge_normed_heads(*heads(ROWS, 12, 4), freqs, empty(ROWS, 20 * DIM), norms_of_heads())
    ops.swiglu_backward(empty(ROWS, inner), ops.swiglu(empty(ROWS, 2 * inner))[1])
    for bias in (empty(inner), None):
        ops.gelu_backward(empty(ROWS, inner), ops.gelu(empty(ROWS, inner), bias)[1])


def weights_and_losses() -> None:
    weight = fp8(10240, 8192)
    fp8_gemm.transpose(weight)
    fp8_weights.tokens_last(fp8(ROWS + 5, 8192))
    fp8_weights.quantize_tensor(empty(10240, 8192), empty(1, dtype=FP32), empty(10240, 8192, dtype=FP8))
    logits, labels, of_rows = empty(ROWS, 32000), empty(ROWS, dtype=torch.int64), empty(ROWS, dtype=FP32)
    loss_kernels.forward(logits, labels)
    loss_kernels.backward_(logits, labels, of_rows, of_rows)
    loss_kernels.quantized_gradient(logits, (labels, of_rows), of_rows)
    num_blocks = 10240 * 8192 // 64
    nf4 = Nf4(
        empty(num_blocks * 32, dtype=torch.uint8), empty(num_blocks, dtype=torch.uint8),
        empty(num_blocks // 256, dtype=FP32), empty(1, dtype=FP32),
    )  # fmt: skip
    dequantize(nf4, empty(10240, 8192))
    dequantize(nf4, empty(10240, 8192), programs=132)


def generation(num_slots: int) -> None:
    """The linears of Llama 8B and 70B, whose sizes also select the tile."""
    ops = GenerationGpuOps(TorchOps(trained_ops(torch.device("cpu"), Precision.bf16)))
    for precision in (WeightPrecision.bf16, WeightPrecision.fp8, WeightPrecision.nf4):
        for hidden, outputs in ((4096, 6144), (8192, 10240), (8192, 57344)):
            weight, norm = linear(precision, outputs, hidden), NormWeights(empty(hidden), None, EPS)
            x = empty(num_slots, hidden)
            ops.linear(x, weight, norm=norm)
            ops.linear(x, weight, residual_MO=empty(num_slots, outputs))
            ops.gated(x, weight, norm)
    for groups, repeats, capacity in ((8, 4, 4096), (2, 8, 8192), (8, 32, 64)):
        cache = empty(num_slots, groups, capacity, DIM)
        positions, angles = empty(num_slots, dtype=torch.int64), empty(capacity, DIM, dtype=FP32)
        qkv = empty(num_slots, groups * (repeats + 2) * DIM)
        ops.attend(qkv, cache, cache, positions, angles)
        ops.attend(qkv, cache, cache, positions, angles, bias_O=empty(qkv.shape[1]), norms=norms_of_heads())
    logits = empty(num_slots, 128256, dtype=FP32)
    batch = kv_cache.empty(num_slots, 4096, layers=1, groups=8, dim=DIM, like=logits)
    for sampling in (Sampling(), Sampling(temperature=0.7)):
        ops.append(logits, batch, sampling, Ranks())
    ops.own_rows(empty(num_slots, dtype=torch.int64), empty(32064, 5120), 32064)
    buffer = peer_memory.Buffer((4096, 8192), empty(512, dtype=torch.int32), peer_memory.most_values(2))
    peers = peer_memory.PeerMemory(1, 2, buffer, buffer)
    peers.sum_(empty(num_slots, 8192))


def linear(precision: WeightPrecision, outputs: int, inputs: int) -> Linear:
    if precision is WeightPrecision.nf4:
        return Linear(empty(outputs, inputs // 2, dtype=torch.uint8), empty(outputs, inputs // 64, dtype=FP32))
    if precision is WeightPrecision.fp8:
        return Linear(empty(outputs, inputs, dtype=FP8), empty(outputs, dtype=FP32))
    return Linear(empty(outputs, inputs))


PARTS: dict[str, Callable[[], None]] = {
    "frozen layer of Llama 70B in FP8": lambda: frozen_layers(GpuOps(), 8192, 28672, 8),
    "frozen layer of Llama 70B in BF16, a rank of TP 4": lambda: frozen_layers(PlainGpuOps(), 8192, 7168, 2),
    "frozen layer of 96 columns in FP8": lambda: frozen_layers(GpuOps(), 96, 160, 1),
    "trained layer of GPT-3 in FP8": lambda: trained_layers(Fp8GpuOps(), 12288, 49152),
    "trained layer of 1536 columns in BF16": lambda: trained_layers(Bf16GpuOps(), 1536, 6000),
    "trained layer of 96 columns in BF16": lambda: trained_layers(Bf16GpuOps(), 96, 384),
    "weights and losses": weights_and_losses,
    "one slot": lambda: generation(1),
    "five slots": lambda: generation(5),
    "64 slots": lambda: generation(64),
}


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="on a GPU, kernels are not those of the interpreter")
@pytest.mark.long
def test_launches_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    launches = Launches()
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **named: launches.run(kernel, *args, **named))
    for module in (norm_kernels, head_norm_kernels):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _device: MULTIPROCESSORS)
    for title, part in PARTS.items():
        launches.lines.append(f"\n# {title}")
        part()
    text = "\n".join(dict.fromkeys(launches.lines)).lstrip() + "\n"
    golden.require(text, GOLDEN, variable="WRITE_LAUNCHES")
