"""Every operation of the frozen layer, in Triton and in torch, in FP8 and in BF16, compared with torch in FP64.

Without a GPU, Triton's interpreter runs the kernels (conftest.py says how).
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from helpers import ranks
from jobs.engines.megatron.frozen.ops import Fp8Ops
from jobs.engines.megatron.frozen.torch_ops import TorchOps
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from jobs.engines.megatron import rope_kernels
from jobs.engines.megatron.frozen.gpu_ops import GpuOps, PlainGpuOps

pytestmark = [
    pytest.mark.usefixtures("interpreter_that_rounds"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # in the interpreter: 1 / (1 + inf) is 0
]
DEVICE = ranks.DEVICE
OPS = {"torch": TorchOps(), "triton": GpuOps()}
PLAIN = {"plain torch": TorchOps(None), "plain triton": PlainGpuOps()}
"""Operations without quantisation."""
TOLERANCE = 5e-3
"""Tolerance relative to a row's norm or scale: BF16 rounds to 2^-9, and a GPU's tanh is accurate to 2^-11."""
HALF_ULP = 2.0**-4
"""Spacing of E4M3 numbers between 1 and 2."""
LARGEST, SMALLEST_EXPONENT = 448, -6
EPS = 0.01
RANK, LARGE_RANK = 12, 40
"""LoRA ranks; tiles are higher for the large one."""
DROP, KEEP_ALL = Dropout(0.1, 2_000_000_011), Dropout(0.0, 1)
SEED_IN_MEMORY = Dropout(0.1, torch.tensor(2_000_000_011, device=DEVICE))
FEW, SOME, MANY = 5, 40, 300
"""Numbers of rows: for kernels with one row per program; more than a tile (32); more than one split-K round (256)."""
WIDE = 4096 + 96
"""More columns of an MLP than its kernels process at once."""


def random(*shape: int, spread: float = 1.0) -> Tensor:
    """Return BF16 values whose rows differ in magnitude, some of them by a lot."""
    rows = torch.logspace(-2, 2, shape[0], device=DEVICE)[:, None] if len(shape) > 1 else 1
    return (torch.randn(shape, device=DEVICE) * rows * spread).bfloat16()


def random_fp8(*shape: int) -> Quantized:
    """Return FP8 values with different scales."""
    values = (torch.randn(shape, device=DEVICE) * 100).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Quantized(values, torch.logspace(-3, 1, shape[0], device=DEVICE))


def operand(ops: Fp8Ops, *shape: int) -> Quantized:
    """Return an operand in FP8, or in BF16 for operations without quantisation."""
    return Quantized(random(*shape), None) if is_plain(ops) else random_fp8(*shape)


def is_plain(ops: Fp8Ops) -> bool:
    return ops.quantized_dtype is None


def fp64(x: Tensor | Quantized) -> Tensor:
    values, scale = x if isinstance(x, Quantized) else (x, None)
    return values.double() if scale is None else values.double() * scale.double()[:, None]


def check(got: Tensor | Quantized, expected: Tensor) -> None:
    """Compare with FP64: a tensor by rows, a quantised one by elements with the rounding error of FP8."""
    got = got.values if isinstance(got, Quantized) and got.scale is None else got
    assert got.scale.isfinite().all() if isinstance(got, Quantized) else got.isfinite().all()
    if not isinstance(got, Quantized):
        assert got.shape == expected.shape
        error = (got.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() <= TOLERANCE
        return
    assert got.values.shape == expected.shape and got.values.dtype is torch.float8_e4m3fn
    scale = expected.abs().amax(1) / LARGEST
    torch.testing.assert_close(got.scale.double(), scale, rtol=TOLERANCE, atol=1e-12 / LARGEST)
    exponent = (expected / scale[:, None]).abs().log2().floor().clamp(min=SMALLEST_EXPONENT)
    allowed = HALF_ULP * 2**exponent * scale[:, None] + TOLERANCE * expected.abs()
    assert ((fp64(got) - expected).abs() <= allowed).all()


def scaled_mask(shape: tuple[int, ...], drop: Dropout) -> Tensor:
    """Return 0 for dropped elements and 1 / (1 - p) for others, by Wellons's lowbias32 in NumPy's 32-bit integers."""
    index = np.arange(np.prod(shape), dtype=np.uint32)
    bits = (index >> 1) ^ np.uint32(int(drop.seed))
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    bits ^= bits >> 16
    halves = np.where(index % 2 == 0, bits % 2**16, bits // 2**16)
    kept = torch.from_numpy(halves >= drop.p * 2**16).view(shape).to(DEVICE)
    return kept / (1 - drop.p)


def gradients(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return autograd's gradients of a function's FP64 inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Fp8Ops:
    torch.manual_seed(0)
    return (OPS | PLAIN)[request.param]


def defaults(function: Callable[..., object]) -> list[object]:
    """Return the default of each parameter; Parameter.empty if there is none."""
    return [p.default for p in inspect.signature(function).parameters.values() if p.name != "self"]


def test_each_implementation_has_the_operations_of_the_interface(ops: Fp8Ops) -> None:
    """Some operations run on GPUs only, so without a GPU no other test would detect that they are missing."""
    names = [name for name, value in vars(Fp8Ops).items() if callable(value) and not name.startswith("_")]
    assert "matmul" in names
    for name in names:
        expected, own = defaults(getattr(Fp8Ops, name)), defaults(getattr(ops, name))
        assert own[: len(expected)] == expected, name
        assert inspect.Parameter.empty not in own[len(expected) :], name


widths = pytest.mark.parametrize("width", [256, 1344])
with_plain = pytest.mark.parametrize("ops", [*OPS, *PLAIN], indirect=True)
drops = pytest.mark.parametrize(
    "drop", [DROP, SEED_IN_MEMORY, KEEP_ALL], ids=["dropout", "seed in memory", "no dropout"]
)


@pytest.mark.parametrize("ops", PLAIN, indirect=True)
def test_plain_operations_quantise_nothing(ops: Fp8Ops) -> None:
    x = random(FEW, 256)
    assert torch.equal(ops.quantize(x).values, x) and ops.quantize(x).scale is None


@widths
def test_quantize(ops: Fp8Ops, width: int) -> None:
    x = random(FEW, width)
    check(ops.quantize(x), fp64(x))
    zeros = ops.quantize(torch.zeros_like(x))
    assert (fp64(zeros) == 0).all() and (zeros.scale > 0).all()


@with_plain
@widths
def test_norm_quantize(ops: Fp8Ops, width: int) -> None:
    x, y, weight = random(FEW, width), random(FEW, width), 1 + random(width, spread=0.1)
    for total, (normed, rstd) in (
        (fp64(x), ops.norm_quantize(x, weight, 0.01)),
        (fp64(x) + fp64(y), ops.add_norm_quantize(x, y, weight, 0.01)[1:]),
    ):
        assert (normed.scale is None) == (is_plain(ops))
        check(normed, rms_norm(total, (width,), fp64(weight), eps=0.01))
        check(rstd[:, None], (total.square().mean(1) + 0.01).rsqrt()[:, None])
    check(ops.add_norm_quantize(x, y, weight, 0.01)[0], fp64(x) + fp64(y))


@with_plain
@pytest.mark.parametrize(
    "adapted", [None, DROP, SEED_IN_MEMORY, KEEP_ALL], ids=["plain", "dropout", "seed in memory", "no dropout"]
)
@widths
def test_norm_backward(ops: Fp8Ops, width: int, adapted: Dropout | None) -> None:
    grad, residual, more = random(FEW, width), random(FEW, width), random(FEW, width)
    weight, rstd, normed = 1 + random(width, spread=0.1), torch.rand(FEW, device=DEVICE) + 0.5, random_fp8(FEW, width)
    weight[3], normed.values.view(torch.uint8)[:, 3] = 0, 0
    unit = torch.where(weight == 0, 0, fp64(normed) / fp64(weight))
    rms = unit.square().mean(1).sqrt()
    normed, unit = Quantized(normed.values, (normed.scale / rms).float()), unit / rms[:, None]
    if is_plain(ops):
        normed = Quantized(fp64(normed).bfloat16(), None)
    of_output = fp64(grad) + (fp64(more) * scaled_mask(more.shape, adapted) if adapted else 0)
    x = unit / rstd[:, None].double()
    (expected,) = gradients(lambda x: rms_norm(x, (width,), fp64(weight), eps=0), x, grad=of_output)
    expected += fp64(residual)
    args = (grad, residual, normed, rstd, weight)
    check(ops.norm_backward(*args, Adapted(more, adapted) if adapted else None), expected)
    if adapted is None:
        dense, quantized = ops.norm_backward_quantize(*args)
        check(dense, expected)
        check(quantized, expected)


@with_plain
@pytest.mark.parametrize("width", [1344, WIDE])
def test_swiglu(ops: Fp8Ops, width: int) -> None:
    gate_up = random(FEW, 2 * width)
    gate_up[:, [width - 1, -1]] *= 8  # the largest values come last
    gate, up = fp64(gate_up).chunk(2, dim=1)
    hidden, saved = ops.swiglu_quantize(gate_up)
    check(hidden, silu(gate) * up)
    check(saved, fp64(gate_up) if is_plain(ops) else torch.cat([gate, up]))
    assert ops.swiglu_quantize(gate_up, keep=False)[1] is None
    grad, saved = random(FEW, width), random_fp8(2 * FEW, width)
    grad[:, -1] *= 100
    saved.scale[[0, FEW]] = saved.scale[[FEW, 0]]  # a row whose largest gradient is of up, and others of gate
    if is_plain(ops):
        saved = Quantized(gate_up, None)
    else:
        gate, up = fp64(saved).chunk(2)
    expected = gradients(lambda gate, up: silu(gate) * up, gate, up, grad=fp64(grad))
    check(ops.swiglu_backward_quantize(grad, saved), torch.cat(expected, dim=1))


@pytest.mark.long
@with_plain
@pytest.mark.parametrize("is_fp8", [False, True], ids=["BF16", "FP8"])
@drops
def test_adapter_gemms(ops: Fp8Ops, drop: Dropout, is_fp8: bool) -> None:
    width, rank = 1344, LARGE_RANK if is_fp8 else RANK
    make = partial(operand, ops) if is_fp8 else random
    x, many, a = make(SOME, width), make(MANY, 256), random(rank, width)
    check(ops.down(x, a, drop), fp64(x) * scaled_mask((SOME, width), drop) @ fp64(a).T)
    low_grad = random(MANY, rank)
    check(ops.down_backward(low_grad, many, drop), fp64(low_grad).T @ (fp64(many) * scaled_mask((MANY, 256), drop)))


@drops
def test_add_down_gradient(ops: Fp8Ops, drop: Dropout) -> None:
    rank = RANK if drop.p else LARGE_RANK
    grad, low_grad, a = random(SOME, 160), random(SOME, rank), random(rank, 160)
    expected = fp64(grad) + fp64(low_grad) @ fp64(a) * scaled_mask(grad.shape, drop)
    got = ops.add_down_gradient(grad, low_grad, a, drop)
    check(got, expected)
    assert got.data_ptr() == grad.data_ptr()


@pytest.mark.long
@with_plain
@pytest.mark.parametrize(
    ("groups", "repeats", "dim", "added"),
    [(2, 4, 32, ""), (2, 4, 32, "lora"), (3, 1, 64, "lora"), (3, 7, 32, "bias lora"), (1, 2, 32, "norms"),
     (3, 1, 64, "bias lora norms"),
     (2, 2, 24, "lora"), (2, 2, 24, "norms")],
    ids=["grouped", "grouped, adapted", "adapted", "bias", "norms", "all", "no power of two",
         "no power of two, norms"],
)  # fmt: skip
def test_rope(monkeypatch: pytest.MonkeyPatch, ops: Fp8Ops, groups: int, repeats: int, dim: int, added: str) -> None:
    monkeypatch.setattr(rope_kernels, "_PROGRAMS", 1)  # one program takes all groups of its rows, if the rank is large
    num_rows, heads, rank = 20, groups * (repeats + 2), RANK if dim < 64 else LARGE_RANK
    angles = torch.rand(num_rows, dim // 2, device=DEVICE) * 50
    freqs, qkv = angles.repeat(1, 2), random(num_rows, heads * dim)
    lora = Lora(random(num_rows, rank), random(heads * dim, rank, spread=0.01), 2.0) if "lora" in added else None
    bias = random(heads * dim) if "bias" in added else None
    norms = HeadNorms(1 + random(dim) / 4, 1 + random(dim) / 4, EPS) if "norms" in added else None

    def rotated(qkv: Tensor) -> Tensor:
        """Return q, k and v in FP64, concatenated; a head's halves are real and imaginary parts."""
        heads = qkv.view(num_rows, groups, repeats + 2, dim)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1]
        if norms:
            q, k = (rms_norm(x, (dim,), fp64(w), EPS) for x, w in ((q, norms.q_D), (k, norms.k_D)))
        rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
        qk = torch.complex(*torch.cat([q, k], dim=2).chunk(2, dim=-1)) * rotation[:, None, None]
        qk = torch.cat([qk.real, qk.imag], dim=-1)
        return torch.cat([qk[:, :, :-1].flatten(1), qk[:, :, -1].flatten(1), v.flatten(1)], dim=1)

    total = fp64(qkv) + (lora.scale * fp64(lora.low) @ fp64(lora.b).T if lora else 0)
    total += 0 if bias is None else fp64(bias)
    got = ops.rope(qkv, freqs, groups, lora, bias, norms)
    assert [part.shape[1:] for part in got] == [(groups * repeats, dim), (groups, dim), (groups, dim)]
    check(torch.cat([part.flatten(1) for part in got], dim=1), rotated(total))
    grads = [random(num_rows, part[0].numel()).view_as(part) for part in got]
    grad = torch.cat([fp64(part).flatten(1) for part in grads], dim=1)
    if norms:
        check(qkv, total)
        total = fp64(qkv)
    (expected,) = gradients(rotated, total, grad=grad)
    for gradient in ops.normed_rope_backward(*grads, freqs, qkv, norms) if norms else ops.rope_backward(*grads, freqs):
        check(gradient, expected)


def test_transpose(ops: Fp8Ops) -> None:
    weight = Quantized(random_fp8(130, 300).values, torch.full((1,), 0.37, device=DEVICE))
    transposed = ops.transpose(weight)
    assert transposed.values.is_contiguous() and transposed.values.dtype is torch.float8_e4m3fn
    assert torch.equal(transposed.values.float(), weight.values.float().T) and transposed.scale is weight.scale


@pytest.mark.parametrize("ops", OPS if DEVICE == "cuda" else ["torch"], indirect=True)  # FP8 in cuBLAS is for GPUs
def test_gemm(ops: Fp8Ops) -> None:
    x, weight = random_fp8(64, 512), Quantized(random_fp8(256, 512).values, torch.full((1,), 0.37, device=DEVICE))
    check(ops.matmul(x, weight), fp64(x) @ (weight.values.double() * 0.37).T)
    repeated = Quantized(weight.values, weight.scale.repeat(512))
    assert torch.equal(ops.matmul(x, repeated), ops.matmul(x, weight))


@pytest.mark.parametrize("ops", PLAIN, indirect=True)
def test_plain_gemm(ops: Fp8Ops) -> None:
    x, weight = operand(ops, 64, 512), operand(ops, 256, 512)
    check(ops.matmul(x, weight), fp64(x) @ fp64(weight).T)
    check(ops.matmul(x, ops.transpose(ops.transpose(weight))), fp64(x) @ fp64(weight).T)


class Linear(torch.nn.Module):
    """A frozen FP8 linear, without megatron-core."""

    weight_dtype = torch.float8_e4m3fn

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.quantized = random_fp8(num_out, num_in)
        self.weight, self.weight_scale = self.quantized.values.view(torch.uint8), self.quantized.scale[:1]


@pytest.mark.parametrize("ops", [DEVICE == "cuda" and "triton" or "torch"], indirect=True)
def test_transposed_weights_in_and_out_of_order(ops: Fp8Ops) -> None:
    linears = [Linear(64, 96), Linear(128, 32), Linear(32, 160), Linear(48, 48)]
    weights = ops.frozen_weights(linears)
    for linear in [*linears, *linears, *reversed(linears), linears[2], linears[2]]:
        assert torch.equal(weights.backward(linear).values.float(), linear.quantized.values.float().T)
        assert torch.equal(weights.forward(linear).values.float(), linear.quantized.values.float())


def mask(drop: Dropout) -> Tensor:
    """Return the dropout factors of TorchOps for half a million elements."""
    return TorchOps().add_down_gradient(torch.zeros(500, 1000), torch.ones(500, 1), torch.ones(1, 1000), drop)


def share_dropped_by_both(one: Tensor, other: Tensor) -> float:
    return ((one == 0) & (other == 0)).double().mean().item()


@pytest.mark.long
def test_dropout_has_its_probability_and_is_independent_of_seeds_and_neighbours() -> None:
    masks = [mask(Dropout(0.1, seed)) for seed in (1, 2, 3)]
    for kept in masks:
        assert kept.unique().tolist() == pytest.approx([0, 1 / 0.9], rel=1e-4)
        assert (kept == 0).double().mean().item() == pytest.approx(0.1, abs=0.001)
    for one, other in ((masks[0], masks[1]), (masks[0][:, ::2], masks[0][:, 1::2])):
        assert share_dropped_by_both(one, other) == pytest.approx(0.01, abs=0.0005), "masks must be independent"


class Ranks:
    """A fake TP group of two ranks, as one of them sees it."""

    def __init__(self, rank: int) -> None:
        self.size, self.rank = lambda: 2, lambda: rank


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp_sp"])
def test_tp_ranks_with_different_inputs_have_different_dropout(
    monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
        from jobs.engines.megatron.frozen import layer
    monkeypatch.setattr(layer.parallel_state, "get_context_parallel_group", lambda: None)
    lora, linear, weights = SimpleNamespace(dropout=0.1), SimpleNamespace(scale=2.0), [torch.ones(1)] * 4
    config = SimpleNamespace(layernorm_epsilon=0.0, sequence_parallel=sequence_parallel, lora=lora)

    def drops(rank: int, is_training: bool = True) -> list[Dropout]:
        fake = SimpleNamespace(
            ops=TorchOps(),
            weights=None,
            config=config,
            tp_group=Ranks(rank),
            qkv=linear,
            proj=linear,
            self_attention=SimpleNamespace(q_layernorm=None),
            training=is_training,
        )
        layer_pass = layer._LayerPass(fake, torch.zeros(4, 1, 1, 2), None, 1, [5, 2**31 - 1], weights)
        return [layer_pass.qkv.drop, layer_pass.proj.drop]

    (qkv, proj), (other_qkv, other_proj) = drops(0), drops(1)
    assert qkv.p == proj.p == 0.1 and qkv.seed != proj.seed
    assert share_dropped_by_both(mask(proj), mask(other_proj)) == pytest.approx(0.01, abs=0.0005)
    if sequence_parallel:  # each rank has its own rows
        assert share_dropped_by_both(mask(qkv), mask(other_qkv)) == pytest.approx(0.01, abs=0.0005)
    else:
        assert qkv == other_qkv, "all ranks have the same input"
    assert {drop.p for drop in drops(0, is_training=False)} == {0.0}
