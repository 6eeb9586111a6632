"""Every operation of the trained layer except its GEMMs, in Triton and in plain torch, compared with torch in FP64.

Without a GPU, Triton's interpreter runs the kernels (conftest.py says how).
"""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from helpers import ranks
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.trained.ops import NormStats, NormWeights, Operand, TrainedOps
from jobs.engines.megatron.trained.torch_ops import Fp8TorchOps, PlainTorchOps

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from jobs.engines.megatron.trained import fp8_weights
from jobs.engines.megatron.trained.fp8_weights import quantize_tensor, tokens_last
from jobs.engines.megatron.trained.gpu_ops import Bf16GpuOps, Fp8GpuOps

pytestmark = [
    pytest.mark.usefixtures("interpreter_that_rounds"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # in the interpreter: 1 / (1 + inf) is 0
]
DEVICE = ranks.DEVICE
OPS = {
    "torch BF16": PlainTorchOps(torch.bfloat16),
    "torch FP8": Fp8TorchOps(),
    "triton BF16": Bf16GpuOps(),
    "triton FP8": Fp8GpuOps(),
}
TOLERANCE = 5e-3
"""Tolerance relative to a row's norm or scale: BF16 rounds to 2^-9, and a GPU's tanh is accurate to 2^-11."""
HALF_ULP = 2.0**-4
"""Spacing of E4M3 numbers between 1 and 2."""
LARGEST, SMALLEST_EXPONENT = 448, -6
EPS = 0.01
FEW, MANY = 5, 70
"""Numbers of rows: for kernels with one row per program; more than there are programs, and more than a tile (32)."""
WIDE = 4096 + 96
"""More columns of an MLP than its kernels process at once."""


def random(*shape: int, spread: float = 1.0) -> Tensor:
    """Return BF16 values whose rows differ in magnitude, some of them by a lot."""
    rows = torch.logspace(-2, 2, shape[0], device=DEVICE)[:, None] if len(shape) > 1 else 1
    return (torch.randn(shape, device=DEVICE) * rows * spread).bfloat16()


def random_fp8(*shape: int, exponents: tuple[int, int] = (-10, 3)) -> Operand:
    """Return FP8 values with scales that are powers of two."""
    values = (torch.randn(shape, device=DEVICE) * 100).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Operand(values, torch.linspace(*exponents, shape[0], device=DEVICE).round().exp2())


def fp64(x: Tensor | Operand) -> Tensor:
    values, scale = x if isinstance(x, Operand) else (x, None)
    return values.double() if scale is None else values.double() * scale.double()[:, None]


def check(got: Tensor | Operand, expected: Tensor, *, most: Tensor | None = None) -> None:
    """Compare with FP64: a tensor by rows, a quantised one by elements with the rounding error of FP8.

    most: at least the largest magnitude of each row, from which its scale was computed; None: that magnitude.
    """
    values, scale = got if isinstance(got, Operand) else (got, None)
    assert values.shape == expected.shape
    if scale is None:
        error = (values.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert values.isfinite().all() and error.max() <= TOLERANCE
        return
    most = expected.abs().amax(1) if most is None else most
    assert values.dtype is torch.float8_e4m3fn and scale.isfinite().all()
    assert (scale * LARGEST >= most * (1 - TOLERANCE)).all(), "no value may be clipped"
    assert (scale * LARGEST <= 2 * most * (1 + TOLERANCE)).all(), "a power of two is at most twice as large"
    exponent = (expected / scale[:, None]).abs().log2().floor().clamp(min=SMALLEST_EXPONENT)
    allowed = HALF_ULP * 2**exponent * scale[:, None] + TOLERANCE * expected.abs()
    assert ((fp64(got) - expected).abs() <= allowed).all()


def gradients(function: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return autograd's gradients of a function's FP64 inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> TrainedOps:
    torch.manual_seed(0)
    return OPS[request.param]


in_triton = pytest.mark.parametrize("ops", [name for name in OPS if "triton" in name], indirect=True)
kinds = pytest.mark.parametrize("has_bias", [False, True], ids=["RMSNorm", "LayerNorm"])


@in_triton
def test_each_implementation_has_the_operations_of_the_interface(ops: TrainedOps) -> None:
    """Some operations run on GPUs only, so without a GPU no other test would detect that they are missing."""
    names = [name for name, value in vars(TrainedOps).items() if callable(value) and not name.startswith("_")]
    assert "matmul" in names
    for name in names:
        expected, own = (inspect.signature(getattr(x, name)).parameters for x in (TrainedOps, ops))
        assert list(own) == list(expected)[1:], name


def norm_of(width: int, has_bias: bool) -> tuple[NormWeights, Callable[..., Tensor]]:
    """Return a norm's weights, and torch's norm as a function of x, weight and bias."""
    bias = random(width) if has_bias else None
    weights = NormWeights(1 + random(width, spread=0.1), bias, EPS)
    if has_bias:
        return weights, lambda x, weight, bias: layer_norm(x, (width,), weight, bias, eps=EPS)
    return weights, lambda x, weight: rms_norm(x, (width,), weight, eps=EPS)


def stats_of(x: Tensor, has_bias: bool) -> NormStats:
    """Return a norm's statistics of x in FP64."""
    mean = x.mean(1)
    variance = x.var(1, correction=0) if has_bias else x.square().mean(1)
    return NormStats((variance + EPS).rsqrt(), mean if has_bias else None)


def parameters(weights: NormWeights) -> list[Tensor]:
    return [fp64(x) for x in (weights.weight_H, weights.bias_H) if x is not None]


@pytest.mark.parametrize("width", [96, 1344])
@kinds
def test_norms(ops: TrainedOps, has_bias: bool, width: int) -> None:
    x, y, y_bias = random(FEW, width) + 1, random(FEW, width), random(width)
    weights, norm = norm_of(width, has_bias)
    is_fp8 = isinstance(ops, Fp8TorchOps | Fp8GpuOps)
    for bias in (y_bias, None):
        total, out, stats = ops.add_norm(x, y, bias, weights)
        check(total, fp64(x) + fp64(y) + (0 if bias is None else fp64(bias)))
        assert (out.scale is not None) == is_fp8
        check(out, norm(fp64(total), *parameters(weights)))
    expected = norm(fp64(x), *parameters(weights))
    out, stats = ops.norm(x, weights)
    check(out, expected)
    for got, of_x in zip(stats, stats_of(fp64(x), has_bias), strict=True):
        assert (got is None) == (of_x is None)
        if got is not None:
            check(got[None], of_x[None])
    recomputed = ops.recompute_norm(x, stats, weights)
    check(recomputed, expected)
    assert torch.equal(fp64(recomputed), fp64(out)), "the backward pass must use the same values as the forward pass"


@pytest.mark.parametrize(("num_rows", "width"), [(MANY, 96), (FEW, 1344)])
@kinds
def test_norm_backward(ops: TrainedOps, has_bias: bool, num_rows: int, width: int) -> None:
    grad, residual, x = random(num_rows, width).flip(0), random(num_rows, width), random(num_rows, width) + 1
    weights, norm = norm_of(width, has_bias)
    stats = NormStats(*(None if value is None else value.float() for value in stats_of(fp64(x), has_bias)))
    dx, operand, own = ops.norm_backward(grad, residual, x, stats, weights)
    expected, *of_weights = gradients(norm, fp64(x), *parameters(weights), grad=fp64(grad))
    check(dx, expected + fp64(residual))
    check(operand, fp64(dx))
    assert (own.bias_H is not None) == has_bias
    for got, of_weight in zip([own.weight_H, own.bias_H], of_weights, strict=False):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), of_weight, rtol=1e-4, atol=1e-4 * of_weight.abs().max().item())


@pytest.mark.parametrize(
    ("groups", "repeats", "dim", "parts"),
    [(2, 4, 32, ""), (2, 4, 32, "bias rope"), (3, 1, 64, "rope"), (3, 1, 64, "bias"), (2, 4, 32, "norms rope"),
     (3, 1, 64, "bias norms"), (2, 2, 24, "bias rope"), (2, 2, 24, "norms rope")],
    ids=["grouped, learned positions", "grouped, bias, RoPE", "RoPE", "bias, learned positions", "norms, RoPE",
         "bias, norms, learned positions", "no power of two", "no power of two, norms"],
)  # fmt: skip
def test_heads(ops: TrainedOps, groups: int, repeats: int, dim: int, parts: str) -> None:
    """With norms, rows are summed by fewer programs than there are rows, and the last program has fewer rows."""
    num_rows, width = 20, groups * (repeats + 2) * dim
    angles = torch.rand(num_rows, dim // 2, device=DEVICE) * 50
    qkv, bias = random(num_rows, width), random(width) if "bias" in parts else None
    freqs = angles.repeat(1, 2) if "rope" in parts else None
    norms = HeadNorms(1 + random(dim) / 4, 1 + random(dim) / 4, EPS) if "norms" in parts else None

    def split(qkv: Tensor, *weights: Tensor) -> Tensor:
        """Return q, k and v in FP64, concatenated; a head's halves are real and imaginary parts."""
        heads = qkv.view(num_rows, groups, repeats + 2, dim)
        qk, v = [heads[:, :, :-2], heads[:, :, -2:-1]], heads[:, :, -1]
        if weights:
            qk = [rms_norm(x, (dim,), weight, EPS) for x, weight in zip(qk, weights, strict=True)]
        if freqs is not None:
            rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None, None]
            turned = (torch.complex(*x.chunk(2, dim=-1)) * rotation for x in qk)
            qk = [torch.cat([x.real, x.imag], dim=-1) for x in turned]
        return torch.cat([x.flatten(1) for x in (*qk, v)], dim=1)

    weights = [fp64(norms.q_D), fp64(norms.k_D)] if norms else []
    total = fp64(qkv) + (0 if bias is None else fp64(bias))
    got = ops.split_heads(qkv, bias, freqs, groups, dim, norms)
    assert [part.shape[1:] for part in got] == [(groups * repeats, dim), (groups, dim), (groups, dim)]
    check(torch.cat([part.flatten(1) for part in got], dim=1), split(total, *weights))
    grads = [random(num_rows, part[0].numel()).view_as(part) for part in got]
    grad = torch.cat([fp64(part).flatten(1) for part in grads], dim=1)
    if norms is None:
        (expected,) = gradients(split, total, grad=grad)
        check(ops.merge_heads(*grads, freqs), expected)
        return
    check(qkv, total)
    expected, *of_weights = gradients(split, fp64(qkv), *weights, grad=grad)
    merged, own = ops.merge_normed_heads(*grads, freqs, qkv, norms)
    check(merged, expected)
    for got_D, of_weight in zip(own, of_weights, strict=True):
        assert got_D.dtype is torch.float32
        torch.testing.assert_close(got_D.double(), of_weight, rtol=1e-4, atol=1e-4 * of_weight.abs().max().item())


@pytest.mark.parametrize("width", [1344, WIDE])
def test_swiglu(ops: TrainedOps, width: int) -> None:
    gate_up = random(FEW, 2 * width)
    gate_up[::2, [width - 1, -1]] *= 8  # the largest numbers come last, and in other rows first
    gate_up[1::2, [0, width]] *= 8
    gate, up = fp64(gate_up).chunk(2, dim=1)
    hidden, saved = ops.swiglu(gate_up)
    check(hidden, silu(gate) * up)
    grad = random(FEW, width).flip(0)
    grad[::2, -1] *= 100
    grad[1::2, 0] *= 100
    if saved.scale is not None:  # gates and then ups, a row each
        check(saved, torch.cat([gate, up]))
        gate, up = fp64(saved).chunk(2)
    expected = gradients(lambda gate, up: silu(gate) * up, gate, up, grad=fp64(grad))
    gate_up_grad, recomputed = ops.swiglu_backward(grad, saved)
    check(gate_up_grad, torch.cat(expected, dim=1))
    check(recomputed, silu(gate) * up)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("width", [200, 256, WIDE])
def test_gelu(ops: TrainedOps, width: int, has_bias: bool) -> None:
    given, bias = random(FEW, width), random(width) if has_bias else None
    grad = random(FEW, width).flip(0)
    for x in (given, grad):
        x[::2, -1] *= 8  # the largest numbers come last, and in other rows first
        x[1::2, 0] *= 8
    x = fp64(given) if bias is None else fp64(given) + fp64(bias)
    out, saved = ops.gelu(given, bias)
    is_triton = isinstance(ops, Bf16GpuOps)
    check(out, gelu(x), most=gelu(x.amax(1)).clamp(min=0.17) if is_triton else None)
    check(saved, x)
    x = fp64(saved)
    (expected,) = gradients(gelu, x, grad=fp64(grad))
    x_grad, recomputed = ops.gelu_backward(grad, saved)
    check(x_grad, expected, most=1.13 * fp64(grad).abs().amax(1) if is_triton else None)
    check(recomputed, gelu(x), most=gelu(x.amax(1)).clamp(min=0.17) if is_triton else None)


@pytest.mark.long
def test_column_sum(ops: TrainedOps) -> None:
    width = 300
    for x in (random_fp8(MANY, width), random(1100, width)):  # 1100: more than one round of all programs
        got = ops.column_sum(x)
        assert got.dtype is torch.float32
        check(got[None], fp64(x).sum(0, keepdim=True))


@pytest.mark.parametrize("ops", ["triton FP8"], indirect=True)
def test_operand(ops: TrainedOps) -> None:
    x = random(FEW, 1344)
    check(ops.operand(x), fp64(x))
    zeros = ops.operand(torch.zeros_like(x))
    assert (fp64(zeros) == 0).all() and (zeros.scale > 0).all()
    assert (zeros.scale.log2() % 1 == 0).all() and (ops.operand(x).scale.log2() % 1 == 0).all()


def test_common_scale_is_exact_for_powers_of_two() -> None:
    torch.manual_seed(0)
    num_rows, width = 130, 200
    x = random_fp8(num_rows, width, exponents=(0, 5))
    out = tokens_last(x)
    assert out.values.shape == (width, 144) and out.values.is_contiguous() and out.scale.tolist() == [32]
    assert (out.values[:, num_rows:].float() == 0).all()
    got = (out.values.double() * 32)[:, :num_rows].T
    is_normal = fp64(x).abs() >= 32 * 2**SMALLEST_EXPONENT
    assert is_normal.double().mean() > 0.9
    assert torch.equal(got[is_normal], fp64(x)[is_normal])
    assert ((got - fp64(x)).abs() <= 32 * 2.0**SMALLEST_EXPONENT * HALF_ULP).logical_or(is_normal).all()


def test_common_scale_rounds_other_scales_once_more() -> None:
    torch.manual_seed(0)
    x = random_fp8(40, 130)._replace(scale=torch.rand(40, device=DEVICE) + 0.5)
    out = tokens_last(x)
    assert out.scale.tolist() == [x.scale.max().item()]
    got = Operand(out.values[:, :40].T, out.scale.expand(40))
    exponent = (fp64(x) / out.scale.double()).abs().log2().floor().clamp(min=SMALLEST_EXPONENT)
    assert ((fp64(got) - fp64(x)).abs() <= HALF_ULP * 1.01 * 2**exponent * out.scale.double()).all()


def test_quantize_tensor() -> None:
    x, scale = random(3, 5000), torch.full((1,), 0.37, device=DEVICE)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    quantize_tensor(x, scale, out)
    expected = (fp64(x) / fp64(scale)).clamp(-LARGEST, LARGEST)
    exponent = expected.abs().log2().floor().clamp(min=SMALLEST_EXPONENT)
    assert ((fp64(out).clamp(-LARGEST, LARGEST) - expected).abs() <= HALF_ULP * 1.01 * 2**exponent).all()


class TransposesOnRequest:
    """`PrefetchedTransposes` without streams."""

    def __init__(self, linears, transpose, stored) -> None:
        self.forward = stored

    def backward(self, linear: torch.nn.Module) -> Operand:
        weight, scale = self.forward(linear)
        return Operand(weight.T.contiguous(), scale)

    def invalidate(self) -> None:
        pass


@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_copies_are_updated_with_the_weights(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """With tp = 2 the other rank's parts have values twice as large."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda amax, op, group: amax.mul_(group.size()))
    if DEVICE == "cpu":
        monkeypatch.setattr(fp8_weights, "PrefetchedTransposes", TransposesOnRequest)
    torch.manual_seed(0)
    linears = [torch.nn.Linear(*shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((96, 64), (32, 160))]
    for linear in linears:
        linear.tp_group = SimpleNamespace(size=lambda: tp)
    weights = Fp8GpuOps().linear_weights(linears)
    for factor in (1, 50):
        with torch.no_grad():
            for linear in linears:
                linear.weight.mul_(factor)
        weights.refresh()
        for linear in linears:
            expected = fp64(linear.weight.detach())
            for got, wanted in ((weights.forward(linear), expected), (weights.backward(linear), expected.T)):
                assert got.values.is_contiguous()
                scale = (tp * wanted.abs().max() / LARGEST).item()
                assert got.scale.tolist() == pytest.approx([scale], rel=1e-6)
                exponent = (wanted / scale).abs().log2().floor().clamp(min=SMALLEST_EXPONENT)
                allowed = 1.01 * HALF_ULP * 2**exponent * scale
                assert ((got.values.double() * scale - wanted).abs() <= allowed).all()
