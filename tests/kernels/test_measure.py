"""Ranks measure a point together: the slowest rank counts, and a point that fails on one rank is not measured."""

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
    """Make this process rank 2 of 4, with collectives that return at once."""
    distributed.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls; they do nothing."""
    called: list[str] = []

    def prepare(point: Point, *_: Any) -> measure.Prepared:
        if point.variant == "impossible":
            raise RuntimeError("no such kernel\nin this version")
        return measure.Prepared(lambda: called.append(point.name), implementation="made up")

    monkeypatch.setitem(measure._LOCAL, "gemm", prepare)
    monkeypatch.setattr(measure.collectives, "prepare", prepare)
    return called


def point(name: str, *, family: str = "gemm", ranks: int = 1, variant: str = "fp32") -> Point:
    sizes: dict[str, Any] = {"sizes": [1], "is_sustained": False, "work": 1.0, "peak": None, "limit": None}
    return Point(
        name=name, kernel="k", family=family, operation="o", variant=variant, ranks=ranks, unit="GB/s", **sizes
    )


def fake_gathers(monkeypatch: pytest.MonkeyPatch, *answers: Callable[[Any], list[Any]]) -> None:
    """Replace the results of all_gather, in this order, as if there were other ranks."""
    left = iter(answers)
    monkeypatch.setattr(measure, "all_gather", lambda value, group=None: next(left)(value))


def took(median_us: float) -> Times:
    return Times(n=3, median_us=median_us, p10_us=median_us - 1, p90_us=median_us + 1)


def measured(point: Point) -> measure.PointResult:
    (result,) = measure.measure_points([point], KERNELS, CPU)
    return result


@pytest.mark.usefixtures("second_of_four", "calls")
def test_the_times_of_the_slowest_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = lambda mine: [mine] * 4  # noqa: E731
    fake_gathers(monkeypatch, fine, lambda mine: [took(10), took(30), took(20), took(29)])
    expected = {"n": 3, "median_us": 30, "p10_us": 29, "p90_us": 31, "rank": 1, "implementation": "made up"}
    assert measured(point("p")).measured == expected


@pytest.mark.usefixtures("second_of_four")
def test_number_of_repeats_follows_the_slowest_rank(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Half a second holds five calls of 0.1 s; two more warm up."""
    fake_gathers(monkeypatch, lambda mine: [mine, ("", 0.1), mine, mine], lambda mine: [mine] * 4)
    assert measured(point("p")).measured is not None
    assert len(calls) == 2 + 5


@pytest.mark.usefixtures("second_of_four")
def test_point_that_fails_on_one_rank_is_not_measured(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    fake_gathers(monkeypatch, lambda mine: [mine, ("rank 1: out of memory", 0.0), mine, mine])
    result = measured(point("p"))
    assert (result.measured, result.reason, len(calls)) == (None, "rank 1: out of memory", 2)
    fake_gathers(monkeypatch, lambda mine: [("", 0.1), ("", 0.1), mine, ("", 0.1)])
    assert measured(point("q", variant="impossible")).reason == "rank 2: no such kernel"


@pytest.mark.usefixtures("second_of_four")
def test_rank_takes_part_in_the_points_of_its_groups(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(measure, "all_gather", lambda value, group=None: [value])
    monkeypatch.setattr(measure, "_first_ranks", lambda count, timeout_s: None)
    points = [point(f"{n} ranks", family="collectives", ranks=n) for n in (2, 2, 3, 4)] + [point("own")]
    progress: list[tuple[str, int]] = []
    alive = lambda phase, number, _: progress.append((phase, number))  # noqa: E731
    done = [result.point.name for result in measure.measure_points(points, KERNELS, CPU, alive=alive)]
    assert done == ["3 ranks", "4 ranks", "own"] and set(calls) == set(done)
    assert progress == [("measuring", number) for number in (2, 2, 3, 3, 4, 4)], (
        "at the start, and when all ranks are ready"
    )
    silences = [measure.max_silence_s(points, KERNELS, rank) for rank in (0, 2, 3)]
    assert silences == [1.25, 3 * 1.25, 4 * 1.25], "1 s sustained, after 0.25; two and three points without the rank"


@pytest.mark.usefixtures("second_of_four", "calls")
def test_error_in_a_collective_ends_the_trial() -> None:
    """The other ranks may be blocked in the collective."""
    with pytest.raises(RuntimeError, match="no such kernel"):
        measured(point("p", family="collectives", ranks=4, variant="impossible"))


def test_links_are_timed_back_to_back_and_gemms_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_back_to_back", lambda call, repeats, device: ["back to back"])
    monkeypatch.setattr(timing, "time_cool", lambda call, repeats, device: ["cool"])
    prepared = measure.Prepared(lambda: None)
    how = {
        family: measure._timed(point("p", family=family), prepared, KERNELS, CPU, 0.1)[0]
        for family in ("memcpy", "collectives", "attention", "gemm")
    }
    assert how == {"memcpy": "back to back", "collectives": "back to back", "attention": "cool", "gemm": "cool"}
