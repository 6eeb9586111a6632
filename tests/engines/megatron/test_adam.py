"""AdamW in Triton and in plain torch compared with torch's AdamW in FP64; moments in BF16.

Without a GPU, Triton's interpreter runs the kernels (conftest.py says how).
"""

import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import ranks

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.adam import kernels
    from jobs.engines.megatron.adam import update as torch_update
    from jobs.engines.megatron.adam.shards import BLOCK, Shard, range_table
    from jobs.engines.megatron.adam.update import Moments, Step

pytestmark = pytest.mark.usefixtures("interpreter_that_rounds")
DEVICE = torch.device(ranks.DEVICE)
OPS = {"torch": torch_update, "triton": kernels}
LENGTH = 2 * BLOCK + 500
RANGES = [(0, 3), (5, 700), (701, 702), (BLOCK - 1, BLOCK), (BLOCK + 1, BLOCK + 9), (2 * BLOCK, LENGTH)]
"""Ranges: many in a block, of length one, up to the end of a block, from the start of a block, up to the end."""
BETA1, BETA2, EPS, DECAY, FACTOR = 0.9, 0.999, 1e-6, 0.3, 0.25
RATES = (1e-3, 3e-3, 2e-3)


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> ModuleType:
    torch.manual_seed(0)
    return OPS[request.param]


def shard_of(master: Tensor, weights: Tensor, *, first: int = 0, ranges: list[tuple[int, int]] = RANGES) -> Shard:
    """Return a shard of bucket 2, in which the elements of the ranges have weight decay and count for the norm."""
    marked = range_table(ranges, len(master), DEVICE)
    return Shard(2, first, torch.zeros_like(master), master, weights, [], counted=marked, decayed=marked)


def zero_moments(length: int, dtype: torch.dtype) -> Moments:
    return Moments(*(torch.zeros(length, dtype=dtype, device=DEVICE) for _ in range(2)))


def step_of(count: int, lr: float) -> Step:
    return Step(count, lr, BETA1, BETA2, EPS, DECAY)


def inside(ranges: list[tuple[int, int]], length: int = LENGTH) -> Tensor:
    index = torch.arange(length, device=DEVICE)
    return torch.stack([(index >= begin) & (index < end) for begin, end in ranges]).any(0)


def random_bits(index: np.ndarray, count: int, bucket: int) -> np.ndarray:
    """Return 32 random bits for each index, from Wellons's lowbias32 in NumPy's 32-bit integers."""

    def mixed(bits: np.ndarray) -> np.ndarray:
        bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
        return bits ^ (bits >> np.uint32(16))

    seed = mixed(mixed(np.array([count], np.uint32)) ^ np.uint32(bucket)) & np.uint32(0x7FFFFFFF)
    low, high = (index & 0xFFFFFFFF).astype(np.uint32), (index >> 32).astype(np.uint32)
    return mixed(mixed(low ^ seed) + high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_torch_adamw_in_fp64(ops: ModuleType, dtype: torch.dtype) -> None:
    master = torch.randn(LENGTH, device=DEVICE)
    shard, moments = shard_of(master, master.to(dtype)), zero_moments(LENGTH, torch.float32)
    decays = inside(RANGES)
    expected = [master[mask].double().requires_grad_() for mask in (decays, ~decays)]
    groups = [{"params": [expected[0]], "weight_decay": DECAY}, {"params": [expected[1]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(BETA1, BETA2), eps=EPS)
    for count, lr in enumerate(RATES, 1):
        gradient = torch.randn(LENGTH, device=DEVICE) * 10.0**-count
        for group, mask in zip(adamw.param_groups, (decays, ~decays), strict=True):
            group["lr"], group["params"][0].grad = lr, FACTOR * gradient[mask].double()
        adamw.step()
        shard.grad.copy_(gradient)
        ops.update(shard, moments, torch.tensor(FACTOR, device=DEVICE), step_of(count, lr))
        for mask, numbers in zip((decays, ~decays), expected, strict=True):
            torch.testing.assert_close(master[mask].double(), numbers.detach(), rtol=1e-6, atol=1e-6)
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        state = torch.empty(LENGTH, dtype=torch.float64, device=DEVICE)
        state[decays], state[~decays] = (adamw.state[numbers][name] for numbers in expected)
        torch.testing.assert_close(moment.double(), state, rtol=1e-5, atol=1e-9)
    assert torch.equal(shard.weights, master.to(dtype)) and shard.weights.dtype is dtype


def test_the_norm_counts_the_elements_of_the_ranges(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    shards = [shard_of(torch.zeros(LENGTH, device=DEVICE), torch.zeros(LENGTH)) for _ in range(2)]
    shards.append(shard_of(torch.zeros(9, device=DEVICE), torch.zeros(9), ranges=[]))
    for shard in shards:
        shard.grad.normal_()
    expected = sum(shard.grad[inside(RANGES)].double().square().sum() for shard in shards[:2])
    assert ops.sum_of_squares(shards).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("first", [0, 2**32 - 100], ids=["first", "across 2^32"])
def test_moments_in_bf16_are_rounded_by_the_bits_of_the_hash(ops: ModuleType, first: int) -> None:
    """Computed in FP64, except for the last digits of FP32: a value close to a rounding bound may go either way."""
    master, moments = torch.randn(LENGTH, device=DEVICE), zero_moments(LENGTH, torch.bfloat16)
    shard = shard_of(master, master.bfloat16(), first=first)
    expected = [np.zeros(LENGTH), np.zeros(LENGTH)]
    for count, lr in enumerate(RATES, 1):
        shard.grad.normal_()
        grad = FACTOR * shard.grad.double().cpu().numpy()
        expected[0] = BETA1 * expected[0] + (1 - BETA1) * grad
        expected[1] = BETA2 * expected[1] + (1 - BETA2) * grad**2
        root = np.sqrt(expected[1] / (1 - BETA2**count)) + EPS
        updated = master.double().cpu().numpy() * np.where(inside(RANGES).cpu(), 1 - lr * DECAY, 1)
        updated -= lr * expected[0] / (1 - BETA1**count) / root
        ops.update(shard, moments, torch.tensor(FACTOR, device=DEVICE), step_of(count, lr))
        torch.testing.assert_close(master.double().cpu(), torch.from_numpy(updated), rtol=1e-6, atol=1e-6)
        bits = random_bits(first + np.arange(LENGTH), count, shard.bucket)
        for half, (exact, moment) in enumerate(zip(expected, moments, strict=True)):
            raw = exact.astype(np.float32).view(np.uint32) + ((bits >> np.uint32(16 * half)) & np.uint32(0xFFFF))
            exact[:] = (raw & np.uint32(0xFFFF0000)).view(np.float32)
            got = moment.double().cpu().numpy()
            assert (got == exact).mean() > 0.999
            exact[:] = got


@pytest.mark.long
def test_bf16_moment_follows_gradients_where_round_to_nearest_stalls() -> None:
    """Squared gradients fall from 1 to 1 / 16. After 1000 steps the mean is within 0.5 % of FP32's.

    The bound is 10 standard errors. The spacing of BF16 is at most 2^-7, so the rounding of a step has a standard
    deviation of at most 2^-8, and its effect lasts for 1 / (1 - beta2^2) = 500 steps. Values have a standard deviation
    of 2^-8 * sqrt(500) = 9 %, their mean of 0.05 %.
    """
    length, num_steps = 2**15, 1000
    shard = shard_of(torch.zeros(length), torch.zeros(length), ranges=[])
    moments = Moments(torch.zeros(length, dtype=torch.bfloat16), torch.ones(length, dtype=torch.bfloat16))
    nearest = torch.ones(1, dtype=torch.bfloat16)
    for count in range(1, num_steps + 1):
        shard.grad.fill_(0.25)
        torch_update.update(shard, moments, torch.ones(()), step_of(count, 1e-3))
        nearest = (BETA2 * nearest.float() + (1 - BETA2) / 16).bfloat16()
    expected = 1 / 16 + 15 / 16 * BETA2**num_steps
    assert moments.exp_avg_sq.double().mean().item() == pytest.approx(expected, rel=5e-3)
    assert moments.exp_avg.double().mean().item() == pytest.approx(0.25, rel=5e-3)
    assert nearest.item() > 2 * expected


def test_rounding_up_carries() -> None:
    x, most = torch.tensor([1.0, -(2 - 2**-8), float("inf")]), torch.full((3,), 0xFFFF)
    assert torch_update.rounded(x, most).tolist() == [1.0, -2.0, float("inf")]


def test_nan_stays_nan_in_bf16(ops: ModuleType) -> None:
    """A NaN with all bits set, as GPUs write it, would become 0 when bits are added."""
    shard, moments = shard_of(*torch.zeros(2, LENGTH, device=DEVICE)), zero_moments(LENGTH, torch.bfloat16)
    shard.grad.view(torch.int32)[7] = 0x7FFFFFFF
    ops.update(shard, moments, torch.ones((), device=DEVICE), step_of(1, 1e-3))
    for numbers in (*moments, shard.master, shard.weights):
        assert numbers.isnan().nonzero().tolist() == [[7]]
