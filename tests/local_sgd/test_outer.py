"""The outer step of groups that train apart, against torch's SGD on the whole batch and against NumPy; real gloo."""

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
from jobs.local_sgd import joining, merging
from jobs.local_sgd.groups import Groups
from jobs.local_sgd.merging import Meeting
from jobs.local_sgd.outer import Outer, on_host

ROWS, COLUMNS, BATCH, RATE = 24, 300, 8, 2e-3
"""Of a linear regression with 300 weights, which is no multiple of what is exchanged at once."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be exchanged in several pieces, the last one short."""
    monkeypatch.setattr(merging, "PIECE", 128)
    monkeypatch.setattr(joining, "PIECE", 128)


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


def meeting_of(groups: Groups, time_limit_s: float) -> Meeting:
    """Return a meeting once all groups have theirs, as before training: to connect to the store may take torch 5 s."""
    meeting = Meeting(groups, Compress.none, time_limit_s)
    groups.gather(None)
    return meeting


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
    outer = Outer([inner.data], settings)
    meeting = Meeting(groups, settings.compress, settings.time_limit_s)
    share = BATCH // groups.count
    for step in range(steps):
        rows = batch(step)
        inner.grad = gradient(inner.data, rows[groups.number * share : (groups.number + 1) * share])
        sgd.step()
        if (step + 1) % settings.every_steps == 0:
            meeting.merge(f"{step}", None, lambda: outer.pieces(outer.inner), outer.take)
            outer.step([])
    return inner.data.clone()


@pytest.mark.parametrize("average", list(Average))
def test_a_merge_after_each_step_is_data_parallelism(average: Average) -> None:
    settings = LocalSgd(every_steps=1, average=average)
    found = together(2, lambda groups: trained(groups, settings, 20))
    whole = torch.nn.Parameter(torch.zeros(COLUMNS))
    sgd = torch.optim.SGD([whole], lr=RATE)
    for step in range(20):
        whole.grad = gradient(whole.data, batch(step))
        sgd.step()
    assert whole.abs().max() > 0.01, "something was learned"
    for weights in found:
        torch.testing.assert_close(weights, whole.data, rtol=0, atol=1e-6)


def by_numpy(count: int, every: int, merges: int, *, rate: float, mu: float) -> np.ndarray:
    """Return the outer weights by DiLoCo's algorithm 1, with SGD as the inner optimizer."""
    x, y = (part.numpy().astype(np.float64) for part in data())
    outer, momentum, share, step = np.zeros(COLUMNS), np.zeros(COLUMNS), BATCH // count, 0
    for _ in range(merges):
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


def test_three_merges_with_momentum_are_those_of_numpy() -> None:
    settings = LocalSgd(every_steps=5, average=Average.nesterov, outer_lr=0.7, outer_momentum=0.9)
    found = together(4, lambda groups: trained(groups, settings, 15))
    np.testing.assert_allclose(found[0].numpy(), by_numpy(4, 5, 3, rate=0.7, mu=0.9), rtol=0, atol=1e-6)
    assert all(torch.equal(found[0], other) for other in found[1:]), "all groups have the same bits"


def test_a_late_merge_keeps_what_was_trained_meanwhile() -> None:
    inner = torch.tensor([1.0, 2.0])
    outer = Outer([inner], LocalSgd(every_steps=2, average=Average.nesterov, outer_lr=0.5))
    inner.sub_(torch.tensor([0.4, 0.0]))
    copy = on_host(outer.inner)
    inner.sub_(torch.tensor([0.0, 0.25]))  # while the other group's change, 0.8 and 0, is on its way
    outer.take(0, torch.tensor([(0.4 + 0.8) / 2, 0.0]))
    outer.step(copy)
    torch.testing.assert_close(inner, torch.tensor([1.0 - 0.5 * 0.6, 2.0 - 0.25]))
    (change,) = outer.pieces(outer.inner)
    torch.testing.assert_close(change, torch.tensor([0.0, 0.25]))


def test_late_merges_of_several_pieces_are_steps_of_torchs_sgd() -> None:
    """Of one group: two tensors in four pieces, and what is trained while they are exchanged."""
    settings = LocalSgd(every_steps=2, average=Average.nesterov, outer_lr=0.7, outer_momentum=0.9, overlap_steps=1)
    random = torch.Generator().manual_seed(2)
    inner = [torch.randn(length, generator=random) for length in (300, 70)]
    whole = [torch.nn.Parameter(one.clone()) for one in inner]
    sgd, outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True), Outer(inner, settings)
    for _ in range(3):
        changes, late_changes = ([torch.randn(len(one), generator=random) for one in inner] for _ in range(2))
        for number, one in enumerate(inner):
            one.sub_(changes[number])
            whole[number].grad = whole[number].data - one
        copy = outer.copy()
        for number, one in enumerate(inner):
            one.sub_(late_changes[number])
        for number, piece in enumerate(outer.pieces(copy)):
            outer.take(number, piece)
        outer.step(copy)
        sgd.step()
        for one, merged, late in zip(inner, whole, late_changes, strict=True):
            torch.testing.assert_close(one, merged.data - late, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("compress", "bits"), [(Compress.bf16, 8), (Compress.int8, 0)])
def test_the_error_of_compression_is_bounded(compress: Compress, bits: int) -> None:
    """Numbers cross twice: on their way to the mean, and as the mean."""
    count, length = 3, 1000
    sizes = torch.logspace(-6, 2, length)
    numbers = [torch.randn(length, generator=torch.Generator().manual_seed(k)) * sizes for k in range(count)]

    def mean(groups: Groups) -> Tensor:
        found: list[Tensor] = []
        Meeting(groups, compress, 60).merge("0", None, lambda: [numbers[groups.number]], lambda _, x: found.append(x))
        return found[0]

    found, exact = together(count, mean), torch.stack(numbers).double().mean(dim=0)
    assert all(torch.equal(found[0], other) for other in found[1:])
    blocks = [torch.nn.functional.pad(x.double(), (0, -length % 256)).view(-1, 256) for x in (*numbers, exact)]
    if compress is Compress.int8:  # half of a scale, the largest of 256 numbers over 127
        each = [x.abs().amax(dim=1, keepdim=True).expand_as(x).reshape(-1)[:length] / 254 for x in blocks]
    else:
        each = [x.abs().view(-1)[:length] * 2.0**-bits for x in blocks]
    bound = torch.stack(each[:count]).mean(dim=0)
    error = (found[0].double() - exact).abs()
    assert bool((error <= bound + each[count] + bound / 250).all())
    assert error.max() > 0, "something was rounded"


def test_the_others_go_on_without_a_group_that_does_not_come() -> None:
    def merged(groups: Groups) -> Any:
        meeting = meeting_of(groups, 3.0)
        if groups.number == 1:
            return None
        taken: list[Tensor] = []
        pieces = [torch.full((5,), float(groups.number))]
        said = meeting.merge("a", groups.number, lambda: pieces, lambda _, mean: taken.append(mean))
        return said, taken[-1].tolist()

    found = together(3, merged)
    for said, mean in (found[0], found[2]):
        assert (said.groups, said.said, said.left, mean) == ([0, 2], [0, 2], [1], [1.0] * 5)


@pytest.mark.long
def test_an_exchange_that_breaks_off_is_made_again_without_the_group() -> None:
    def merged(groups: Groups) -> Any:
        taken: dict[int, Tensor] = {}
        meeting = meeting_of(groups, 5.0)

        def pieces() -> list[Tensor]:
            if groups.number == 2:
                raise BenchError("killed", where="here", fix="nothing")
            return [torch.full((300,), float(10 * groups.number + place)) for place in range(3)]

        said = meeting.merge("a", None, pieces, lambda place, mean: taken.update({place: mean.clone()}))
        return said, [mean[0].item() for mean in taken.values()]

    found = together(3, merged)
    assert str(found[2]).startswith("killed")
    for said, means in found[:2]:
        assert (said.groups, said.left, means) == ([0, 1], [2], [5.0, 6.0, 7.0])


def test_a_group_that_was_started_again_goes_on_as_a_copy_of_a_living_one() -> None:
    """It dies behind the first merge, and its second life is let in behind the second one, once."""
    state = [torch.arange(300.0), torch.linspace(0, 1, 130).bfloat16()]

    def merged(groups: Groups) -> Any:
        second_life = Meeting(groups, Compress.none, 2.5)
        meeting, means = meeting_of(groups, 2.5), []
        pieces, take = [torch.full((3,), float(groups.number))], lambda _, mean: means.append(mean)
        meeting.merge("a", None, lambda: pieces, take)
        own = state
        if groups.number == 1:
            groups.life, own = 1, [torch.zeros_like(one) for one in state]
            groups.living = joining.take(groups, tensors=own, limit_s=10)
            meeting = second_life
            meeting.begin()
        else:
            second = meeting.merge("b", None, lambda: pieces, take)
            assert (second.left, second.joined) == ([1], {1: 1})
            joining.give(groups, 1, life=1, about=[0, 1], tensors=state, limit_s=10)
        third = meeting.merge("c", None, lambda: pieces, take)
        if groups.number == 0:
            fourth = meeting.merge("d", None, lambda: pieces, lambda _, mean: None)
            assert (fourth.left, fourth.joined) == ([1], {}), "that life has ended"
        return own, third.groups, third.joined, means[-1].tolist()

    for own, living, joined, mean in together(2, merged):
        assert all(torch.equal(one, other) for one, other in zip(own, state, strict=True))
        assert (living, joined, mean) == ([0, 1], {}, [0.5, 0.5, 0.5])


def test_a_group_that_comes_too_late_hears_that_it_was_left_behind() -> None:
    def merged(groups: Groups) -> Any:
        if groups.number == 1:
            groups.store.wait(["a/0/done"], timedelta(seconds=30))
        return Meeting(groups, Compress.none, 0.5).merge("a", None, lambda: [torch.ones(3)], lambda _, mean: None)

    first, late = together(2, merged)
    assert first.groups == [0] and first.left == [1]
    assert isinstance(late, BenchError) and "waited 0.5 s for this one and gone on without it" in late.what
    assert late.rule == "RUN-19"
