"""The outer step of local SGD, compared with torch's SGD on the whole batch and with NumPy; real gloo."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from bench.backends.local import free_port
from bench.contract.local_sgd import Average, Compress, LocalSgd
from bench.errors import BenchError
from jobs.local_sgd import averaging, rejoin
from jobs.local_sgd.averaging import GroupAllReduce
from jobs.local_sgd.groups import Groups
from jobs.local_sgd.outer_optimizer import OuterOptimizer, on_host

ROWS, COLUMNS, BATCH, RATE = 24, 300, 8, 2e-3
"""Of a linear regression with 300 weights, which is not a multiple of the chunk size."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange weights in several chunks, the last one shorter."""
    monkeypatch.setattr(averaging, "MAX_CHUNK", 128)
    monkeypatch.setattr(rejoin, "CHUNK", 128)


def together(count: int, work: Callable[[Groups], Any]) -> list[Any]:
    """Return what each of so many groups of one rank returns, or raises; each is a thread."""
    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        own = Groups(store.clone(), number, number, 1, count, list(range(count)))
        try:
            results[number] = work(own)
        except BenchError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_reduce_of(groups: Groups, time_limit_s: float) -> GroupAllReduce:
    """Return the all-reduce once all groups have theirs, as before training: connecting to the store may take 5 s."""
    all_reduce = GroupAllReduce(groups, Compress.none, time_limit_s)
    groups.gather(None)
    return all_reduce


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, COLUMNS, generator=random), torch.randn(ROWS, generator=random)


def gradient(weights: Tensor, rows: range) -> Tensor:
    x, y = data()
    own = x[list(rows)]
    return 2 * own.T @ (own @ weights - y[list(rows)]) / len(rows)


def batch(step: int) -> range:
    start = step * BATCH % ROWS
    return range(start, start + BATCH)


def trained(groups: Groups, settings: LocalSgd, steps: int, *, lr: float = RATE) -> Tensor:
    """Return the weights of a group after so many inner steps of torch's SGD, each on its share of the batch."""
    inner = torch.nn.Parameter(torch.zeros(COLUMNS))
    sgd = torch.optim.SGD([inner], lr=lr)
    outer = OuterOptimizer([inner.data], settings)
    all_reduce = GroupAllReduce(groups, settings.compress, settings.time_limit_s)
    share = BATCH // groups.count
    for step in range(steps):
        rows = batch(step)
        inner.grad = gradient(inner.data, rows[groups.number * share : (groups.number + 1) * share])
        sgd.step()
        if (step + 1) % settings.every_steps == 0:
            all_reduce.average(f"{step}", None, lambda: outer.chunks(outer.inner), outer.set_mean)
            outer.step([])
    return inner.data.clone()


@pytest.mark.long
@pytest.mark.parametrize("average", list(Average))
def test_averaging_after_each_step_is_data_parallelism(average: Average) -> None:
    settings = LocalSgd(every_steps=1, average=average)
    groups_weights = together(2, lambda groups: trained(groups, settings, 20))
    whole = torch.nn.Parameter(torch.zeros(COLUMNS))
    sgd = torch.optim.SGD([whole], lr=RATE)
    for step in range(20):
        whole.grad = gradient(whole.data, batch(step))
        sgd.step()
    assert whole.abs().max() > 0.01, "something was learned"
    for weights in groups_weights:
        torch.testing.assert_close(weights, whole.data, rtol=0, atol=1e-6)


def by_numpy(count: int, every: int, averagings: int, *, rate: float, mu: float) -> np.ndarray:
    """Return the outer weights by DiLoCo's algorithm 1, with SGD as the inner optimizer."""
    x, y = (part.numpy().astype(np.float64) for part in data())
    outer, momentum, share, step = np.zeros(COLUMNS), np.zeros(COLUMNS), BATCH // count, 0
    for _ in range(averagings):
        inner = [outer.copy() for _ in range(count)]
        for _ in range(every):
            start = step * BATCH % ROWS
            for k in range(count):
                rows = slice(start + k * share, start + (k + 1) * share)
                inner[k] -= RATE * 2 * x[rows].T @ (x[rows] @ inner[k] - y[rows]) / share
            step += 1
        change = np.mean([outer - one for one in inner], axis=0)
        momentum = mu * momentum + change
        outer = outer - rate * (change + mu * momentum)
    return outer


@pytest.mark.long
def test_three_averagings_with_momentum_match_numpy() -> None:
    settings = LocalSgd(every_steps=5, average=Average.nesterov, outer_lr=0.7, outer_momentum=0.9)
    results = together(4, lambda groups: trained(groups, settings, 15))
    np.testing.assert_allclose(results[0].numpy(), by_numpy(4, 5, 3, rate=0.7, mu=0.9), rtol=0, atol=1e-6)
    assert all(torch.equal(results[0], other) for other in results[1:]), "all groups have the same bits"


def test_an_overlapped_averaging_keeps_the_updates_since_its_copy() -> None:
    inner = torch.tensor([1.0, 2.0])
    outer = OuterOptimizer([inner], LocalSgd(every_steps=2, average=Average.nesterov, outer_lr=0.5))
    inner.sub_(torch.tensor([0.4, 0.0]))
    copy = on_host(outer.inner)
    inner.sub_(torch.tensor([0.0, 0.25]))  # while the other group's change, 0.8 and 0, is being sent
    outer.set_mean(0, torch.tensor([(0.4 + 0.8) / 2, 0.0]))
    outer.step(copy)
    torch.testing.assert_close(inner, torch.tensor([1.0 - 0.5 * 0.6, 2.0 - 0.25]))
    (change,) = outer.chunks(outer.inner)
    torch.testing.assert_close(change, torch.tensor([0.0, 0.25]))


def test_overlapped_averagings_of_several_chunks_match_torchs_sgd() -> None:
    """One group: two tensors in four chunks, and updates while they are exchanged."""
    settings = LocalSgd(every_steps=2, average=Average.nesterov, outer_lr=0.7, outer_momentum=0.9, overlap_steps=1)
    random = torch.Generator().manual_seed(2)
    inner = [torch.randn(length, generator=random) for length in (300, 70)]
    whole = [torch.nn.Parameter(one.clone()) for one in inner]
    sgd, outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True), OuterOptimizer(inner, settings)
    for _ in range(3):
        changes, late_changes = ([torch.randn(len(one), generator=random) for one in inner] for _ in range(2))
        for number, one in enumerate(inner):
            one.sub_(changes[number])
            whole[number].grad = whole[number].data - one
        copy = outer.copy()
        for number, one in enumerate(inner):
            one.sub_(late_changes[number])
        for number, chunk in enumerate(outer.chunks(copy)):
            outer.set_mean(number, chunk)
        outer.step(copy)
        sgd.step()
        for one, averaged, late in zip(inner, whole, late_changes, strict=True):
            torch.testing.assert_close(one, averaged.data - late, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("compress", "bits"), [(Compress.bf16, 8), (Compress.int8, 0)])
def test_the_error_of_compression_is_bounded(compress: Compress, bits: int) -> None:
    """Numbers are sent twice: before averaging, and as the mean."""
    count, length = 3, 1000
    sizes = torch.logspace(-6, 2, length)
    numbers = [torch.randn(length, generator=torch.Generator().manual_seed(k)) * sizes for k in range(count)]

    def mean(groups: Groups) -> Tensor:
        means: list[Tensor] = []
        GroupAllReduce(groups, compress, 60).average(
            "0", None, lambda: [numbers[groups.number]], lambda _, x: means.append(x)
        )
        return means[0]

    results, exact = together(count, mean), torch.stack(numbers).double().mean(dim=0)
    assert all(torch.equal(results[0], other) for other in results[1:])
    blocks = [torch.nn.functional.pad(x.double(), (0, -length % 256)).view(-1, 256) for x in (*numbers, exact)]
    if compress is Compress.int8:  # half of a scale, the largest of 256 numbers over 127
        each = [x.abs().amax(dim=1, keepdim=True).expand_as(x).reshape(-1)[:length] / 254 for x in blocks]
    else:
        each = [x.abs().view(-1)[:length] * 2.0**-bits for x in blocks]
    bound = torch.stack(each[:count]).mean(dim=0)
    error = (results[0].double() - exact).abs()
    assert bool((error <= bound + each[count] + bound / 250).all())
    assert error.max() > 0, "something was rounded"


@pytest.mark.long
def test_the_other_groups_continue_without_a_missing_group() -> None:
    def averaged(groups: Groups) -> Any:
        all_reduce = all_reduce_of(groups, 3.0)
        if groups.number == 1:
            return None
        means: list[Tensor] = []
        chunks = [torch.full((5,), float(groups.number))]
        result = all_reduce.average("a", groups.number, lambda: chunks, lambda _, mean: means.append(mean))
        return result, means[-1].tolist()

    results = together(3, averaged)
    for result, mean in (results[0], results[2]):
        assert (result.groups, result.reports, result.left, mean) == ([0, 2], [0, 2], [1], [1.0] * 5)


@pytest.mark.long
def test_a_failed_exchange_is_repeated_without_the_failed_group() -> None:
    def averaged(groups: Groups) -> Any:
        means: dict[int, Tensor] = {}
        all_reduce = all_reduce_of(groups, 5.0)

        def chunks() -> list[Tensor]:
            if groups.number == 2:
                raise BenchError("killed", where="here", fix="nothing")
            return [torch.full((300,), float(10 * groups.number + place)) for place in range(3)]

        result = all_reduce.average("a", None, chunks, lambda place, mean: means.update({place: mean.clone()}))
        return result, [mean[0].item() for mean in means.values()]

    results = together(3, averaged)
    assert str(results[2]).startswith("killed")
    for result, means in results[:2]:
        assert (result.groups, result.left, means) == ([0, 1], [2], [5.0, 6.0, 7.0])


@pytest.mark.long
def test_a_restarted_group_resumes_from_the_state_of_an_active_one() -> None:
    """It fails after the first averaging, and is readmitted once after the second one."""
    state = [torch.arange(300.0), torch.linspace(0, 1, 130).bfloat16()]

    def averaged(groups: Groups) -> Any:
        restarted = GroupAllReduce(groups, Compress.none, 2.5)
        all_reduce, means = all_reduce_of(groups, 2.5), []
        chunks, set_mean = [torch.full((3,), float(groups.number))], lambda _, mean: means.append(mean)
        all_reduce.average("a", None, lambda: chunks, set_mean)
        own = state
        if groups.number == 1:
            groups.restart_count, own = 1, [torch.zeros_like(one) for one in state]
            groups.active = rejoin.receive_state(groups, tensors=own, limit_s=10)
            all_reduce = restarted
            all_reduce.begin()
        else:
            second = all_reduce.average("b", None, lambda: chunks, set_mean)
            assert (second.left, second.readmitted) == ([1], {1: 1})
            rejoin.send_state(groups, 1, restart_count=1, header=[0, 1], tensors=state, limit_s=10)
        third = all_reduce.average("c", None, lambda: chunks, set_mean)
        if groups.number == 0:
            fourth = all_reduce.average("d", None, lambda: chunks, lambda _, mean: None)
            assert (fourth.left, fourth.readmitted) == ([1], {}), "a restart is readmitted once"
        return own, third.groups, third.readmitted, means[-1].tolist()

    for own, active, readmitted, mean in together(2, averaged):
        assert all(torch.equal(one, other) for one, other in zip(own, state, strict=True))
        assert (active, readmitted, mean) == ([0, 1], {}, [0.5, 0.5, 0.5])


def test_a_late_group_ends_with_an_error() -> None:
    def averaged(groups: Groups) -> Any:
        if groups.number == 1:
            groups.store.wait(["a/0/done"], timedelta(seconds=30))
        return GroupAllReduce(groups, Compress.none, 0.5).average(
            "a", None, lambda: [torch.ones(3)], lambda _, mean: None
        )

    first, late = together(2, averaged)
    assert first.groups == [0] and first.left == [1]
    assert (
        isinstance(late, BenchError)
        and "the other groups waited 0.5 s for this group, then continued without this group" in late.what
    )
    assert late.rule == "RUN-19"
