"""Ranks measure together: the slowest one counts, and what one of them cannot do none of them does."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.contract.kernels import Kernels, Point
from jobs.kernels import measure, timing
from jobs.kernels.timing import Times

CPU = torch.device("cpu")
KERNELS = Kernels(repeats=50, point_s=0.5, sustained_s=1.0)


@pytest.fixture
def second_of_four() -> Iterator[None]:
    """Make this process rank 2 of 4, whose collectives return at once."""
    distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what is called; a call takes no time that anybody reads."""
    called: list[str] = []

    def prepare(point: Point, *_: Any) -> measure.Prepared:
        if point.variant == "impossible":
            raise RuntimeError("no such kernel\nin this version")
        return measure.Prepared(lambda: called.append(point.name), ran="made up")

    monkeypatch.setitem(measure._LOCAL, "gemm", prepare)
    monkeypatch.setattr(measure.collectives, "prepare", prepare)
    return called


def point(name: str, *, family: str = "gemm", ranks: int = 1, variant: str = "fp32") -> Point:
    sizes: dict[str, Any] = {"sizes": [1], "is_sustained": False, "work": 1.0, "peak": None, "limit": None}
    return Point(
        name=name, kernel="k", family=family, operation="o", variant=variant, ranks=ranks, unit="GB/s", **sizes
    )


def others_say(monkeypatch: pytest.MonkeyPatch, *answers: Callable[[Any], list[Any]]) -> None:
    """Answer what this rank gathers, in this order, as if other ranks were there."""
    left = iter(answers)
    monkeypatch.setattr(measure, "gathered", lambda value, group=None: next(left)(value))


def took(median_us: float) -> Times:
    return Times(n=3, median_us=median_us, p10_us=median_us - 1, p90_us=median_us + 1)


def measured(point: Point) -> measure.Outcome:
    (outcome,) = measure.outcomes([point], KERNELS, CPU)
    return outcome


@pytest.mark.usefixtures("second_of_four", "calls")
def test_the_times_of_the_slowest_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = lambda mine: [mine] * 4  # noqa: E731
    others_say(monkeypatch, fine, lambda mine: [took(10), took(30), took(20), took(29)])
    expected = {"n": 3, "median_us": 30, "p10_us": 29, "p90_us": 31, "rank": 1, "ran": "made up"}
    assert measured(point("p")).measured == expected


@pytest.mark.usefixtures("second_of_four")
def test_all_ranks_repeat_a_call_as_often_as_the_slowest_can(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Half a second holds five calls of 0.1 s; two more warm up."""
    others_say(monkeypatch, lambda mine: [mine, ("", 0.1), mine, mine], lambda mine: [mine] * 4)
    assert measured(point("p")).measured is not None
    assert len(calls) == 2 + 5


@pytest.mark.usefixtures("second_of_four")
def test_what_one_rank_cannot_do_none_of_them_does(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    others_say(monkeypatch, lambda mine: [mine, ("rank 1: out of memory", 0.0), mine, mine])
    outcome = measured(point("p"))
    assert (outcome.measured, outcome.reason, len(calls)) == (None, "rank 1: out of memory", 2)
    others_say(monkeypatch, lambda mine: [("", 0.1), ("", 0.1), mine, ("", 0.1)])
    assert measured(point("q", variant="impossible")).reason == "rank 2: no such kernel"


@pytest.mark.usefixtures("second_of_four")
def test_a_rank_takes_part_in_the_groups_of_the_first_ranks_that_it_is_in(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(measure, "gathered", lambda value, group=None: [value])
    monkeypatch.setattr(measure, "_first_ranks", lambda count, meeting_s: None)
    points = [point(f"{n} ranks", family="collectives", ranks=n) for n in (2, 2, 3, 4)] + [point("own")]
    told: list[tuple[str, int]] = []
    alive = lambda phase, number, _: told.append((phase, number))  # noqa: E731
    done = [outcome.point.name for outcome in measure.outcomes(points, KERNELS, CPU, alive=alive)]
    assert done == ["3 ranks", "4 ranks", "own"] and set(calls) == set(done)
    assert told == [("measuring", number) for number in (2, 2, 3, 3, 4, 4)], "begun, and met"
    silences = [measure.longest_silence_s(points, KERNELS, rank) for rank in (0, 2, 3)]
    assert silences == [1.25, 3 * 1.25, 4 * 1.25], "1 s sustained, after 0.25; two and three points without the rank"


@pytest.mark.usefixtures("second_of_four", "calls")
def test_an_error_within_a_collective_ends_the_trial() -> None:
    """The other ranks may wait in it for ever."""
    with pytest.raises(RuntimeError, match="no such kernel"):
        measured(point("p", family="collectives", ranks=4, variant="impossible"))


def test_links_are_timed_back_to_back_and_products_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "laps", lambda call, repeats, device: ["laps"])
    monkeypatch.setattr(timing, "cool", lambda call, repeats, device: ["cool"])
    prepared = measure.Prepared(lambda: None)
    how = {
        family: measure._timed(point("p", family=family), prepared, KERNELS, CPU, 0.1)[0]
        for family in ("memcpy", "collectives", "attention", "gemm")
    }
    assert how == {"memcpy": "laps", "collectives": "laps", "attention": "cool", "gemm": "cool"}
