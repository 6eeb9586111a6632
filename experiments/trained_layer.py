"""Times every operation of the trained layer on this GPU, in BF16 and FP8, against plain torch; then the whole layer.

    python experiments/trained_layer.py [--model NAME ...] [--tokens M] [--layer] [--json FILE]

The sizes are those of one layer of each model in conf/model. An operation that moves bytes is compared with a
device-to-device copy, and a GEMM with the fastest of its precision, all measured in the same run (medians of CUDA
events, caches cleared before each call). --layer needs megatron-core: forward and backward pass of one layer, as the
engine builds it, with the operations of each precision. The least bytes of an operation count each of its inputs and
outputs once.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu
from triton.testing import do_bench

from jobs.engines.megatron.fp8_gemm import transpose
from jobs.engines.megatron.quantize import FP8, Quantized
from jobs.engines.megatron.trained import gemm
from jobs.engines.megatron.trained.fp8_weights import quantize_tensor, tokens_last
from jobs.engines.megatron.trained.gpu_ops import Bf16GpuOps, Fp8GpuOps
from jobs.engines.megatron.trained.ops import NormWeights, Operand, TrainedOps

MODELS = Path(__file__).parent.parent / "conf/model"
SEQ_LENGTHS = {"llama2_7b": 4096, "llama31_8b": 8192}


@dataclass(frozen=True)
class Case:
    """An operation: what to run, its least bytes or its floating-point operations, and plain torch's way."""

    name: str
    run: Callable[[], object]
    size: float
    is_gemm: bool = False
    plain: Callable[[], object] | None = None


@dataclass(frozen=True)
class Row:
    """A measured operation; times are medians in milliseconds."""

    model: str
    operation: str
    ms: float
    rate: float
    unit: str
    plain_ms: float | None


@dataclass(frozen=True)
class Sizes:
    """One layer of a model: M tokens, H hidden, F width of the MLP, N heads, G groups, D head dimension."""

    name: str
    m: int
    h: int
    f: int
    heads: int
    groups: int
    is_llama: bool

    @property
    def dim(self) -> int:
        return self.h // self.heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return input and output size by name."""
        qkv, fc1 = (self.heads + 2 * self.groups) * self.dim, self.f * (2 if self.is_llama else 1)
        return {"qkv": (self.h, qkv), "proj": (self.h, self.h), "fc1": (self.h, fc1), "fc2": (self.f, self.h)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama31_8b", "llama2_7b"], help="names in conf/model")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the activations")
    parser.add_argument("--layer", action="store_true", help="time the whole layer too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = [measured("", Case("copy", copy_of(2**30), 2**31))]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {rows[0].rate:.0f} GB/s", flush=True)
    for name in given.model:
        sizes = sizes_of(name, given.tokens)
        print(f"\n{name}, {sizes.m} tokens\n{'operation':34}{'ms':>9}{'GB/s, TFLOP/s':>15}{'torch ms':>10}{'ratio':>7}")
        cases = [*of_rows(sizes), *of_gemms(sizes), *(of_layer(sizes) if given.layer else ())]
        rows += [printed(measured(name, case)) for case in cases]
        if given.json:
            header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "argv": sys.argv}
            given.json.write_text(json.dumps(header | {"rows": [asdict(row) for row in rows]}, indent=1))


def measured(model: str, case: Case) -> Row:
    ms, plain = (None if run is None else timed(run) for run in (case.run, case.plain))
    assert ms is not None
    rate, unit = (case.size / ms / 1e9, "TFLOP/s") if case.is_gemm else (case.size / ms / 1e6, "GB/s")
    return Row(model, case.name, ms, rate, unit, plain)


def timed(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=10, rep=60, return_mode="median")


def printed(row: Row) -> Row:
    torch_columns = "" if row.plain_ms is None else f"{row.plain_ms:10.3f}{row.plain_ms / row.ms:7.2f}"
    print(f"{row.operation:34}{row.ms:9.3f}{row.rate:15.0f}{torch_columns}", flush=True)
    return row


def copy_of(size: int) -> Callable[[], object]:
    from_, to = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: to.copy_(from_)


def sizes_of(name: str, tokens: int) -> Sizes:
    m = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    parts = m["ffn_hidden_size"], m["num_attention_heads"], m["num_query_groups"], m["norm"] == "RMSNorm"
    return Sizes(name, tokens, m["hidden_size"], *parts)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def of_rows(s: Sizes) -> Iterator[Case]:
    """Yield what moves bytes, in both precisions; q is the size of a number of an operand."""
    for name, ops, q in (("BF16", Bf16GpuOps(), 2), ("FP8", Fp8GpuOps(), 1)):
        for case in (*of_norms(s, ops, q), *of_heads(s, ops, q), *of_mlp(s, ops, q)):
            yield Case(f"{name} {case.name}", case.run, case.size, plain=case.plain if q == 2 else None)
    yield from of_fp8(s)


def of_norms(s: Sizes, ops: TrainedOps, q: int) -> Iterator[Case]:
    x, y, z, size = random(s.m, s.h), random(s.m, s.h), random(s.m, s.h), s.m * s.h
    parameters = [random(s.h)] if s.is_llama else [random(s.h), random(s.h)]
    bias = None if s.is_llama else parameters[1]
    weights = NormWeights(parameters[0], bias, 1e-5)
    stats = ops.norm(x, weights)[1]
    plain = partial(rms_norm if s.is_llama else layer_norm, normalized_shape=(s.h,), eps=1e-5)
    normalized = lambda x, *parameters: plain(x, **dict(zip(("weight", "bias"), parameters, strict=False)))  # noqa: E731
    forward, backward = partial(normalized, x, *parameters), backward_of(normalized, x, *parameters, grad=y)
    add = lambda: normalized(x + y, *parameters)  # noqa: E731
    yield Case("norm", lambda: ops.norm(x, weights), (2 + q) * size, plain=forward)
    yield Case("add_norm", lambda: ops.add_norm(x, y, bias, weights), (6 + q) * size, plain=add)
    yield Case("recompute_norm", lambda: ops.recompute_norm(x, stats, weights), (2 + q) * size, plain=forward)
    run = lambda: ops.norm_backward(y, z, x, stats, weights)  # noqa: E731
    yield Case("norm_backward", run, (8 if q == 2 else 9) * size, plain=lambda: backward() + z)
    yield Case("column_sum", lambda: ops.column_sum(x), 2 * size, plain=lambda: x.sum(0, dtype=torch.float32))


def of_heads(s: Sizes, ops: TrainedOps, q: int) -> Iterator[Case]:
    qkv = random(s.m, s.linears["qkv"][1])
    bias, freqs = (None, torch.rand(s.m, s.dim, device="cuda")) if s.is_llama else (random(qkv.shape[1]), None)
    heads = ops.split_heads(qkv, bias, freqs, s.groups, s.dim)
    split = partial(ops.split_heads, qkv, bias, freqs, s.groups, s.dim)
    yield Case("split_heads", split, 4 * qkv.numel())
    yield Case("merge_heads", partial(ops.merge_heads, *heads, freqs), (2 + q) * qkv.numel())


def of_mlp(s: Sizes, ops: TrainedOps, q: int) -> Iterator[Case]:
    grad, size = random(s.m, s.f), s.m * s.f
    if s.is_llama:
        x = random(s.m, 2 * s.f)
        saved, moved = ops.swiglu(x)[1], 6 if q == 2 else 7
        yield Case("swiglu", lambda: ops.swiglu(x), moved * size, plain=lambda: swiglu(x))
        backward, run = backward_of(swiglu, x, grad=grad), lambda: ops.swiglu_backward(grad, saved)
        yield Case("swiglu_backward", run, (2 + 5 * q) * size, plain=backward)
        return
    x, bias = random(s.m, s.f), random(s.f)
    saved = ops.gelu(x, bias)[1]
    yield Case("gelu", lambda: ops.gelu(x, bias), (2 + 2 * q) * size, plain=lambda: gelu(x + bias))
    backward, run = backward_of(gelu, x, grad=grad), lambda: ops.gelu_backward(grad, saved)
    yield Case("gelu_backward", run, (2 + 3 * q) * size, plain=backward)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return silu(gate) * up


def backward_of(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """Return autograd's backward pass alone; it returns the gradient of the first input."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)[0]


def of_fp8(s: Sizes) -> Iterator[Case]:
    """Yield what only FP8 needs: rows quantised, operands of weight gradients, weights quantised and transposed."""
    ops, weight = Fp8GpuOps(), random(s.linears["fc1"][1], s.h)
    for name, width in (("H", s.h), ("fc1", s.linears["fc1"][1])):
        x = random(s.m, width)
        rows = ops.operand(x)
        yield Case(f"FP8 operand {name}", partial(ops.operand, x), 3 * x.numel())
        yield Case(f"FP8 tokens_last {name}", partial(tokens_last, rows), 2 * x.numel())
        yield Case(f"FP8 column_sum {name}", partial(ops.column_sum, rows), x.numel())
    copy = Quantized(torch.empty(weight.shape, dtype=FP8, device="cuda"), torch.ones(1, device="cuda"))
    amax = partial(torch.linalg.vector_norm, weight, float("inf"))
    quantize = partial(quantize_tensor, weight, copy.scale, copy.values)
    yield Case("FP8 weight amax", amax, 2 * weight.numel(), plain=lambda: weight.abs().max())
    yield Case("FP8 weight quantised", quantize, 3 * weight.numel(), plain=lambda: weight.to(FP8))
    yield Case("FP8 weight transposed", lambda: transpose(copy), 2 * weight.numel())


def of_gemms(s: Sizes) -> Iterator[Case]:
    """Yield forward, dgrad and wgrad of all linears in both precisions, and other ways to compute wgrad."""
    for name, (num_in, num_out) in s.linears.items():
        weight, x, grad = random(num_out, num_in), random(s.m, num_in), random(s.m, num_out)
        main_grad = torch.zeros(num_out, num_in, device="cuda")
        for case in (*of_bf16_gemm(weight, x, grad, main_grad), *of_fp8_gemm(weight, x, grad, main_grad)):
            yield Case(f"{name} {case.name}", case.run, 2 * s.m * num_in * num_out, is_gemm=True, plain=case.plain)


def of_bf16_gemm(weight: Tensor, x: Tensor, grad: Tensor, main_grad: Tensor) -> Iterator[Case]:
    ops, library = Bf16GpuOps(), gemm.load()
    yield Case("BF16 forward", lambda: ops.matmul(Operand(x), Operand(weight)), 0)
    yield Case("BF16 dgrad", lambda: ops.matmul(Operand(grad), Operand(weight.T)), 0)
    wgrad = partial(ops.add_weight_gradient, main_grad, Operand(grad), Operand(x))
    yield Case("BF16 wgrad", wgrad, 0, plain=lambda: main_grad.add_(grad.T @ x))
    if library is not None:
        yield Case("BF16 wgrad by cuBLASLt", partial(library.add_matmul, main_grad, grad, x), 0)


def of_fp8_gemm(weight: Tensor, x: Tensor, grad: Tensor, main_grad: Tensor) -> Iterator[Case]:
    ops, one = Fp8GpuOps(), torch.full((1,), 0.01, device="cuda")
    rows, grads, weight = ops.operand(x), ops.operand(grad), ops.operand(weight).values
    forward, backward = Operand(weight, one), Operand(weight.T.contiguous(), one)
    yield Case("FP8 forward", lambda: ops.matmul(rows, forward), 0, plain=lambda: tensor_wise(rows, forward))
    yield Case("FP8 dgrad", lambda: ops.matmul(grads, backward), 0, plain=lambda: tensor_wise(grads, backward))
    yield Case("FP8 wgrad with transposes", lambda: ops.add_weight_gradient(main_grad, grads, rows), 0)
    args = (main_grad, tokens_last(grads), tokens_last(rows))
    for fast in (False, True):
        add, by_torch = partial(gemm.fp8_gemm(), *args, fast), partial(gemm.add_by_torch, *args, fast)
        yield Case(f"FP8 wgrad GEMM{', fast' * fast}", add, 0, plain=by_torch)


def tensor_wise(x: Operand, weight: Operand) -> Tensor:
    """Return the product with one scale for all rows, as others compute it."""
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(x.values, weight.values.T, scale_a=weight.scale, scale_b=weight.scale, **options)


def of_layer(s: Sizes) -> Iterator[Case]:
    """Yield both passes of the whole layer, as the engine builds it, in each precision."""
    for precision in ("bf16", "fp8"):
        run, flop = layer_passes(s, precision)
        yield Case(f"layer {precision}", run, flop, is_gemm=True)


def layer_passes(s: Sizes, precision: str) -> tuple[Callable[[], object], float]:
    """Return what runs a layer forward and backward, and its operations: causal attention counts half."""
    from bench.planning import compose
    from jobs.engines.megatron import model
    from jobs.engines.megatron.groups import start_ranks
    from jobs.ranks.identity import Rank

    seq = min(s.m, SEQ_LENGTHS.get(s.name, 2048))
    overrides = {
        "model": s.name, "model.num_layers": 1, "model.vocab_size": 1024, "task": "pretrain_tiny",
        "cluster.device": "cuda", "cluster.ranks_per_node": 1, "precision": precision, "data.seq_length": seq,
        "recipe.micro_batch_size": s.m // seq, "recipe.global_batch_size": s.m // seq,
        **{f"cluster.paths.{name}": "/tmp/unused" for name in ("data", "model", "logs")},
    }  # fmt: skip
    plan = compose.compose([f"{name}={value}" for name, value in overrides.items()])
    if not torch.distributed.is_initialized():
        start_ranks(plan, Rank(rank=0, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=0))
    engine: Any = model.build(plan, 1)
    chunk = engine.unwrapped_chunks()[0]
    layer, freqs = chunk.decoder.layers[0], chunk.rotary_pos_emb(seq) if s.is_llama else None
    x = random(seq, s.m // seq, s.h).requires_grad_()
    grad = random(seq, s.m // seq, s.h)

    def run() -> None:
        x.grad = None
        layer(x, rotary_pos_emb=freqs)[0].backward(grad)

    weights = sum(num_in * num_out for num_in, num_out in s.linears.values())
    return run, 6 * s.m * weights + 3.5 * 2 * s.m * seq * s.h


if __name__ == "__main__":
    main()
