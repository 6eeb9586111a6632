"""The FP8 head compared with torch's logits, loss and gradients in FP64; without a GPU its kernel is interpreted."""

import sys
import warnings

import pytest
import torch
from torch import Tensor

from bench.contract import layers
from bench.contract.layers import has_fp8_head
from bench.planning import compose
from helpers import ranks
from jobs.engines.megatron.frozen.torch_ops import TorchOps
from jobs.engines.megatron.quantize import BF16, FP8
from jobs.engines.megatron.torch_math import dequantize

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import composed, one_rank, random_rows  # noqa: F401

    from jobs.engines.megatron import loop, loss, model
    from jobs.engines.megatron.frozen import head

DEVICE = ranks.DEVICE
HALF_ULP = 2.0**-4
"""Relative rounding error of normal E4M3 numbers; subnormal ones have an absolute error of 2^-10 of the scale."""


class Part:
    """The TP group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the TP group of the loss by one rank, without a process group."""
    monkeypatch.setattr(loss.parallel_state, "get_tensor_model_parallel_group", Part)
    torch.manual_seed(0)


def logits_and_labels(num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return logits of uncertain, of confident and right, and of confident and wrong predictions."""
    logits = torch.randn(num_rows, width, device=DEVICE)
    labels = torch.randint(width, (num_rows,), device=DEVICE)
    logits[range(1, num_rows, 3), labels[1::3]] += 12
    logits[2::3, width // 2] += 12
    return logits.bfloat16(), labels


def implementations() -> list[str]:
    return ["torch", "triton"] if sys.platform == "linux" else ["torch"]


@pytest.mark.usefixtures("interpreter_that_rounds", "alone")
@pytest.mark.parametrize("implementation", implementations())
def test_gradient_of_logits_is_that_of_torch_rounded_to_fp8(implementation: str) -> None:
    """A row's scale is its largest magnitude, and each value has at most the rounding error of FP8."""
    from jobs.engines.megatron import loss_kernels

    logits, labels = logits_and_labels(9, 4096 + 904)  # more columns than the kernel processes at once
    grad = torch.logspace(-4, 1, 9, device=DEVICE) * torch.tensor([1, -1, 1] * 3, device=DEVICE)
    grad[-1] = 0  # a token that does not count
    known = loss.statistics(logits, labels)
    ops = loss_kernels if implementation == "triton" else loss._TorchOps
    got = ops.quantized_gradient(logits, known, grad, FP8)
    leaf = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(leaf, labels, reduction="none").backward(grad.double())
    scale = leaf.grad.abs().amax(1) / 448
    torch.testing.assert_close(got.scale[:-1].double(), scale[:-1], rtol=2e-3, atol=0)
    assert got.scale[-1] > 0 and (got.values[-1].float() == 0).all()
    allowed = torch.maximum((HALF_ULP + 2e-3) * leaf.grad.abs(), 2.0**-9 * 0.51 * got.scale[:, None].double())
    assert ((dequantize(got).double() - leaf.grad).abs() <= allowed).all()


def output_layer(weight_VH: Tensor) -> torch.nn.Module:
    layer = torch.nn.Linear(*reversed(weight_VH.shape), bias=False, device=DEVICE, dtype=BF16)
    layer.weight.requires_grad_(False).copy_(weight_VH)
    layer.tp_group = Part()
    return layer


def ops_of_device() -> object:
    if DEVICE == "cpu":
        return TorchOps()
    from jobs.engines.megatron.frozen.gpu_ops import GpuOps

    return GpuOps()


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return the maximum rounding error of FP8 values with a scale."""
    return torch.maximum(HALF_ULP * x.abs(), 2.0**-10 * scale)


@pytest.mark.usefixtures("alone")
def test_losses_and_gradients_are_within_the_rounding_error_of_fp8() -> None:
    """The bound of each logit and gradient is the sum of the rounding errors of its products."""
    num_rows, batch, width, vocabulary = 16, 2, 64, 4096
    hidden = torch.randn(num_rows, batch, width, device=DEVICE, dtype=BF16).requires_grad_()
    weight = torch.randn(vocabulary, width, device=DEVICE, dtype=BF16) / 4
    labels = torch.randint(vocabulary, (batch, num_rows), device=DEVICE)
    computed = head.Fp8Head(output_layer(weight), ops_of_device(), sp=False)
    losses = computed.losses(hidden, labels)
    grad = torch.rand(batch, num_rows, device=DEVICE)
    losses.backward(grad)

    x = hidden.detach().double().flatten(0, 1).requires_grad_()
    logits, w = x @ weight.double().T, weight.double()
    logits.retain_grad()
    expected = torch.nn.functional.cross_entropy(logits, labels.T.flatten(), reduction="none")
    expected.backward(grad.T.flatten().double())
    x = x.detach()
    dx, dw = rounded(x, x.abs().amax(1, keepdim=True) / 448), rounded(w, w.abs().max() / 448)
    of_logits = dx @ w.abs().T + x.abs() @ dw.T + dx @ dw.T + 2**-8 * logits.detach().abs()
    of_losses = 2 * of_logits.amax(1)  # the label's logit, and all others
    error = (losses.detach().double().T.flatten() - expected.detach()).abs()
    assert (error <= of_losses).all() and error.mean() < 0.03 * expected.mean()
    g = logits.grad
    dg = g.abs() * torch.expm1(of_losses)[:, None] + rounded(g, g.abs().amax(1, keepdim=True) / 448)
    of_gradient = dg @ w.abs() + g.abs() @ dw + dg @ dw
    wanted = (g @ w).view(num_rows, batch, width)
    error = (hidden.grad.double() - wanted).abs().flatten(0, 1)
    assert (error <= of_gradient + 2**-8 * wanted.abs().flatten(0, 1)).all()
    assert error.norm() < 0.05 * wanted.norm(), "weights and gradients together round by about 4 %"


@pytest.mark.usefixtures("alone")
def test_loaded_weight_is_quantised_again() -> None:
    layer = output_layer(torch.randn(256, 64))
    computed = head.Fp8Head(layer, ops_of_device(), sp=False)
    before = dequantize(computed.weights()[0]._replace(scale=None))
    layer.load_state_dict({"weight": -layer.weight})
    after = dequantize(computed.weights()[0]._replace(scale=None))
    assert torch.equal(after, -before) and before.abs().max() == 448
    assert torch.equal(computed.weights()[1].values.float(), after.T)


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="one gloo rank in the tests' own process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning")
def test_only_training_uses_the_fp8_head(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, evaluated = [], []
    for least in (10**9, 1):
        monkeypatch.setattr(layers, "FP8_HEAD_VOCABULARY", least)
        engine = model.build(composed("precision=fp8", "task.training.lora.dropout=0"), seed=1)
        evaluated.append(loop.evaluate(engine, random_rows(6)))
        trained.append(loop._forward(engine, random_rows(10), loop.np.arange(4), forward_only=False).item())
    assert evaluated[0] == evaluated[1]
    assert 1e-6 < abs(trained[0] - trained[1]) < 0.05 * trained[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("task=lora_8b precision=fp8", True),
        ("task=lora_8b precision=bf16", False),
        ("task=pretrain_8b precision=fp8", False),
        ("task=lora70b precision=fp8 cluster=dgxh200", False),
        ("task=lora_8b precision=fp8 model.tied_embeddings=true", False),
    ],
)
def test_only_frozen_heads_of_large_vocabularies_are_in_fp8(overrides: str, expected: bool) -> None:
    random = "model.weights=random" if "lora70b" not in overrides else "recipe.eval_skip=0"
    config = compose.compose([*overrides.split(), random, "cluster.device=cuda"]).config
    assert has_fp8_head(config) is expected
