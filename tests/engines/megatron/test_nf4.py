"""NF4 in torch and Triton compared with QLoRA's definition in NumPy, and with bitsandbytes if it is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import ranks
from jobs.engines.megatron.linear_weights import DequantizedWeights
from jobs.weights import nf4

DEVICE = ranks.DEVICE
LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""Source: Dettmers et al. 2023, appendix E."""
SHAPES = [(5, 64), (96, 192), (300, 1024)]
"""One block per row; less than one group of 256 blocks; several groups, of which the last is not full."""


def weight(shape: tuple[int, int]) -> Tensor:
    """Return BF16 weights whose rows differ in magnitude; one block is zero."""
    torch.manual_seed(0)
    values = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 0, shape[0], device=DEVICE)[:, None]
    values[1, :64] = 0
    return values.bfloat16()


def by_definition(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return, in FP64, the nearest level of each weight, and each block's absmax."""
    blocks = weight.double().cpu().numpy().reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    unit = blocks / np.where(absmax == 0, 1, absmax)[:, None]
    return np.abs(unit[:, :, None] - LEVELS).argmin(axis=2), absmax


def dynamic_levels() -> np.ndarray:
    """Return the 8-bit levels: 1, 2, … 64 of them below 1e-6, 1e-5, … 1, each in the middle of its interval; 0; 1."""
    levels = [0.0, 1.0]
    for power, count in zip(range(-6, 1), (1, 2, 4, 8, 16, 32, 64), strict=True):
        width = 0.9 / count
        middles = [10.0**power * (0.1 + width * (k + 0.5)) for k in range(count)]
        levels += middles + [-x for x in middles]
    return np.sort(levels)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_absmax_are_those_of_the_definition(shape: tuple[int, int]) -> None:
    codes, absmax_OK = nf4.quantize_blocks(weight(shape))
    expected, absmax = by_definition(weight(shape))
    packed = codes.cpu().numpy()
    unpacked = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1, 64)
    assert (unpacked == expected).all()
    assert codes.dtype is torch.uint8 and (absmax_OK.double().cpu().numpy().ravel() == absmax).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_double_quantisation_picks_the_nearest_level_in_groups_of_256(shape: tuple[int, int]) -> None:
    quantized, (_, absmax) = nf4.quantize(weight(shape)), by_definition(weight(shape))
    levels, centred = dynamic_levels(), absmax - absmax.mean()
    np.testing.assert_allclose(nf4.dynamic_map(torch.device("cpu")).numpy(), levels, rtol=1e-6)
    groups = [centred[start : start + 256] for start in range(0, len(centred), 256)]
    scales = np.array([np.abs(group).max() for group in groups])
    np.testing.assert_allclose(quantized.scales.cpu().numpy(), scales, rtol=1e-5)
    np.testing.assert_allclose(quantized.offset.item(), absmax.mean(), rtol=1e-6)
    unit = np.concatenate([group / scale for group, scale in zip(groups, scales, strict=True)])
    error = np.abs(unit - levels[quantized.absmax.cpu().numpy()])
    np.testing.assert_allclose(error, np.abs(unit[:, None] - levels).min(axis=1), atol=1e-5)


@pytest.mark.long
def test_bits_per_weight() -> None:
    quantized = nf4.quantize(weight((1024, 4096)))
    bits = 8 * sum(part.numel() * part.element_size() for part in quantized) / (1024 * 4096)
    assert bits == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-5)
    assert bits == pytest.approx(4.127, abs=5e-4)


def in_fp64(quantized: nf4.Nf4) -> np.ndarray:
    """Return the weight [O, I] by the definition."""
    packed = quantized.codes.cpu().numpy()
    levels = LEVELS[np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1, 64)]
    scales = quantized.scales.double().cpu().numpy().repeat(256)[: len(levels)]
    absmax = dynamic_levels()[quantized.absmax.cpu().numpy()] * scales + quantized.offset.item()
    return (levels * absmax[:, None]).reshape(len(packed), -1)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantised_in_torch_and_in_triton(shape: tuple[int, int], interpreter_that_rounds: None) -> None:
    quantized = nf4.quantize(weight(shape))
    dequantized = nf4.dequantize(quantized, torch.bfloat16)
    expected = in_fp64(quantized)
    np.testing.assert_allclose(
        dequantized.double().cpu().numpy(), expected, rtol=2**-8, atol=1e-7 * np.abs(expected).max()
    )
    relative = np.linalg.norm(expected - weight(shape).double().cpu().numpy()) / np.linalg.norm(expected)
    assert 0.07 < relative < 0.12, "NF4 has a relative error of about 10 % for normally distributed weights"
    if sys.platform == "linux":
        from jobs.engines.megatron.frozen.nf4_kernels import dequantize

        for programs in (1, 3, None):  # fewer than tiles, not a divisor of them, and as a run has it
            out = torch.full((shape[0] * shape[1] + 7,), 5.0, dtype=torch.bfloat16, device=DEVICE)
            dequantize(quantized, out, programs=programs)
            assert torch.equal(out[:-7].view(shape), dequantized) and (out[-7:] == 5).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_tp_rank_quantises_its_part_like_the_full_weight(axis: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(128, 512, device=DEVICE).bfloat16() / 50
    parts = whole.chunk(2, dim=axis)
    codes, absmax = nf4.quantize_blocks(whole)
    of_parts = [nf4.quantize_blocks(part) for part in parts]
    assert torch.equal(torch.cat([codes for codes, _ in of_parts], axis), codes)
    assert torch.equal(torch.cat([absmax for _, absmax in of_parts], axis), absmax)
    dense = torch.cat([nf4.dequantize(nf4.quantize(part), torch.float32) for part in parts], axis)
    expected = nf4.dequantize(nf4.quantize(whole), torch.float32)
    assert 0 < (dense - expected).norm() / expected.norm() < 0.01, "only the absmax are rounded differently"


@pytest.mark.long
def test_bits_and_error_are_those_of_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    dense = weight((512, 4096)).cpu()
    ours = nf4.quantize(dense)
    codes, state = bnb.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    assert torch.equal(ours.codes.flatten(), codes.flatten())
    assert torch.equal(nf4.dynamic_map(torch.device("cpu")), bnb.create_dynamic_map())
    assert torch.equal(ours.scales, state.state2.absmax) and torch.equal(ours.offset[0], state.offset)
    theirs = nf4.Nf4(ours.codes, state.absmax, ours.scales, ours.offset)
    torch.testing.assert_close(
        nf4.dequantize(theirs, torch.bfloat16), bnb.dequantize_4bit(codes, state), rtol=0, atol=0
    )
    # On a CPU bitsandbytes finds the nearest 8-bit level by a coarse table, which is sometimes wrong.
    differs = ours.absmax != state.absmax
    assert differs.double().mean() < 0.01
    absmax = nf4.quantize_blocks(dense)[1].float().flatten()
    error, their_error = ((nf4.dequantize_absmax(x) - absmax).abs() for x in (ours, theirs))
    assert (error <= their_error + 1e-6 * absmax.max()).all()


class Linear(torch.nn.Module):
    """A frozen NF4 linear, without megatron-core."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.nf4 = shape, nf4.quantize(weight(shape))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake CUDA streams and events: everything runs in order."""
    if DEVICE == "cpu":

        @contextmanager
        def stream(_: object) -> Iterator[None]:
            yield

        fake = SimpleNamespace(wait_stream=lambda _: None, record=lambda: None, wait=lambda: None)
        for name, value in {"Stream": lambda: fake, "Event": lambda: fake, "current_stream": lambda: fake}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def test_dequantised_weights_are_right_in_any_order_and_prefetched_in_the_usual_order(streams: None) -> None:
    shapes = [(64, 128), (8, 64), (96, 192), (5, 64), (32, 64), (16, 128)]
    linears = {name: Linear(*shape) for name, shape in zip("abcdef", shapes, strict=True)}
    waited_for, requested = [], ""

    def dequantize(quantized: nf4.Nf4, out: Tensor) -> Tensor:
        if quantized is linears[requested.lower()].nf4:
            waited_for.append(requested)
        out[: 2 * quantized.codes.numel()] = nf4.dequantize(quantized, torch.bfloat16).flatten()
        return out

    weights = DequantizedWeights(list(linears.values()), dequantize)

    def request(order: str) -> None:
        """Request weights: a capital letter is the backward pass. Each is compared before the next request."""
        nonlocal requested
        for requested in order:
            linear = linears[requested.lower()]
            expected = nf4.dequantize(linear.nf4, torch.bfloat16)
            dequantized = weights.forward(linear) if requested.islower() else weights.backward(linear)
            assert dequantized.scale is None and torch.equal(
                dequantized.values, expected if requested.islower() else expected.T
            )

    step = "abcdef" + "eFE" + "dDCB" + "aA"  # e, d and a are recomputed
    request(step)
    assert waited_for == [*"abcdef", *"dCBa"], "the order is unknown before the first step"
    waited_for.clear()
    request(step + step)
    assert not waited_for, "each is dequantised while another is in use"
    request("dacbfDDAbecFA")
    linears["a"].nf4 = nf4.quantize(2 * weight(shapes[0]))
    request("aA")
    for buffer in weights.buffers:
        buffer.zero_()  # like a replayed graph, which overwrites the buffers
    weights.invalidate()
    request(step)
