"""The windows of one rank, by a clock of the test: what a step takes, what of it is waiting, and what follows."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog
from bench.errors import BenchError
from helpers import alone, written_records
from jobs.ranks import process_group, rank_times
from jobs.ranks.identity import Rank
from jobs.ranks.rank_times import RankTimes
from jobs.ranks.replacement import Replacement
from jobs.ranks.slow_ranks import COMPUTATION, Place, Slow, SlowRanks, Window

SLOW = Slow("dgx-1", (4, 5), COMPUTATION, 0.5, 0.25, 12.345, (), excess_s=0.25)
ABOUT = '"node": "dgx-1", "cause": "computation", "own_ms": 500.0, "usual_ms": 250.0, "percent": 12.35'


class Clock:
    def __init__(self) -> None:
        self.now_s, self.waited_s = 64.0, 8.0

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    for name in ("now", "perf_counter"):
        monkeypatch.setattr(rank_times, name, lambda: clock.now_s)
    monkeypatch.setattr(rank_times, "waited_for_cpu_s", lambda: clock.waited_s)
    monkeypatch.setattr(process_group, "device", lambda: "cpu")
    with alone.joined():
        yield clock
    RankTimes().begin(0.0)


class Judge:
    """Gets the windows of all ranks, and returns what the test has set for each of them."""

    def __init__(self, *new: list[Slow], candidates: tuple[Slow | None, ...] = ()) -> None:
        self.windows: list[list[Window]] = []
        self._new, self._candidates = [*new], [*candidates]

    def add(self, windows: list[Window]) -> list[Slow]:
        self.windows.append(windows)
        return self._new.pop(0) if self._new else []

    def to_replace(self) -> Slow | None:
        return self._candidates.pop(0) if self._candidates else None

    def summary(self) -> dict[str, Any] | None:
        return {"windows": len(self.windows)} if self.windows else None


def train(times: RankTimes, clock: Clock, num_steps: int, *, compute_s: float = 0.0625) -> None:
    """Take steps that compute, wait for 0.03125 s in two parts, and read rows for 0.03125 s."""
    for number in range(num_steps):
        clock.pass_(compute_s if number else 2 * compute_s)
        with rank_times.loading():
            clock.pass_(0.03125)
        rank_times.wait_from_here()
        clock.pass_(1.0 if number == 1 else 0.0)
        rank_times.wait_from_here()  # the last mark counts
        clock.pass_(0.015625)
        rank_times.wait_until_here()
        rank_times.wait_until_here()
        with rank_times.waiting():
            clock.pass_(0.015625)
        times.stepped(clock.now_s)


def window(num_steps: float, **others: float) -> Window:
    """Return a window of steps as `train` takes them."""
    known = {"step_s": 0.125, "own_s": 0.09375, "noise_s": 0.0, "loading_s": 0.03125, "host_wait_s": 0.0}
    return Window(num_steps=num_steps, **(known | {"evaluation_s": 0.0} | others))  # type: ignore[arg-type]


def test_the_medians_of_windows_are_judged_at_the_next_log_line(clock: Clock, tmp_path: Path) -> None:
    """A window has 10 steps or more. From the second one on it takes 2 s or more: 16 steps of 0.125 s."""
    judge = Judge([SLOW], [], [SLOW, SLOW])
    with mllog.Writer(tmp_path / "log") as log:
        times = RankTimes(judge, log)  # type: ignore[arg-type]
        clock.pass_(1.0)
        times.begin(clock.now_s)
        train(times, clock, 9)
        times.exchange(9)
        clock.waited_s += 2.5
        train(times, clock, 1)
        times.exchange(10)
        assert judge.windows == []
        with rank_times.waiting():
            clock.pass_(4.0)
        with times.evaluating():
            clock.pass_(2.0)
            with rank_times.waiting(), rank_times.loading():
                clock.pass_(1.0)
        times.begin(clock.now_s)
        train(times, clock, 10, compute_s=0.125)
        times.exchange(20)
        train(times, clock, 15)
        times.exchange(35)
        assert len(judge.windows) == 1
        train(times, clock, 1)
        times.exchange(36)
        assert len(judge.windows) == 2
        times.finish()
        times.stepped(clock.now_s)
    shown = written_records.of_log(tmp_path / "log")
    first_s = 1.0 + 10 * 0.125 + 1.0 + 2 * 0.0625
    second_s = first_s + 4.0 + 3.0 + 10 * 0.1875 + 1.0 + 0.125
    assert [windows for [windows] in judge.windows] == [
        window(10, host_wait_s=0.25, elapsed_s=first_s),
        window(10, step_s=0.1875, own_s=0.15625, evaluation_s=2.0, elapsed_s=second_s),
        window(16, elapsed_s=second_s + 16 * 0.125 + 1.0 + 2 * 0.0625),
    ]
    assert shown == [
        f'. slow_ranks [4, 5] {{{ABOUT}, "step": 20}}',
        f". slow_ranks [4, 5] {{{ABOUT}}}",
        f". slow_ranks [4, 5] {{{ABOUT}}}",
        '. rank_times {"windows": 3}',
    ]


def test_all_ranks_end_one_window_after_rank_0_has_chosen_a_node_to_replace(clock: Clock, tmp_path: Path) -> None:
    """A replacement must save more than twice what the start has cost: here 0.25 s in each of the steps left."""
    (tmp_path / "run").mkdir()
    other = Slow("dgx-2", (9,), COMPUTATION, 0.5, 0.25, 1.0, (), excess_s=9.0)
    judge = Judge(candidates=(None, SLOW, SLOW, other))
    with mllog.Writer(None) as log:
        times = RankTimes(judge, log, Replacement(tmp_path / "run", max_steps=100, start_s=4.9))  # type: ignore[arg-type]
        times.begin(clock.now_s)
        chosen = []
        for step in (20, 40, 61, 60, 80, 90):
            train(times, clock, 20)
            times.exchange(step)
            chosen.append((times.to_replace, times.must_end))
        assert chosen == [(None, False)] * 3 + [(SLOW, False)] + [(SLOW, True)] * 2
        with pytest.raises(BenchError, match="ranks 4, 5 on dgx-1 stayed slow") as raised:
            times.end_attempt()
    assert raised.value.rule == "RUN-26"
    with pytest.raises(BenchError, match="the node of a slow rank is replaced") as raised:
        RankTimes(judge).end_attempt()  # type: ignore[arg-type]
    assert (raised.value.rule, raised.value.where) == ("RUN-26", "this rank")


def test_other_ranks_read_the_windows_and_log_nothing(clock: Clock) -> None:
    judge = Judge([SLOW])
    times = RankTimes(judge)  # type: ignore[arg-type]
    times.begin(clock.now_s)
    train(times, clock, 12)
    times.exchange(12)
    times.finish()
    assert times.is_on and judge.windows == []


def test_without_a_measurement_marks_and_steps_do_nothing(clock: Clock) -> None:
    times = RankTimes()
    times.begin(clock.now_s)
    train(times, clock, 20)
    with times.evaluating():
        clock.pass_(1.0)
    times.exchange(20)
    times.finish()
    assert not times.is_on and not times.must_end and not rank_times._marks.waits
    assert rank_times._marks.loading_s == 0.0 and rank_times._marks.wait_since is None


def test_a_run_without_a_window_has_no_record(clock: Clock, tmp_path: Path) -> None:
    with mllog.Writer(tmp_path / "log") as log:
        times = RankTimes(Judge(), log)  # type: ignore[arg-type]
        times.begin(clock.now_s)
        train(times, clock, 9)
        times.exchange(9)
        times.finish()
    assert written_records.of_log(tmp_path / "log") == []


def test_the_ranks_of_a_trial_and_their_pipeline_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_group, "gathered", lambda who, own: [own, ("dgx-2", 0), ("dgx-2", 1), ("dgx-2", 2)])
    monkeypatch.setenv("SLURMD_NODENAME", "dgx-1")
    created: list[SlowRanks] = []
    monkeypatch.setattr(rank_times, "SlowRanks", lambda *each: created.append(SlowRanks(*each)) or created[-1])
    with mllog.Writer(None) as log:
        for rank, size, groups, is_on in (
            (0, 4, None, True),
            (3, 4, None, True),
            (0, 1, None, False),
            (0, 4, 2, False),
        ):
            plan: Any = SimpleNamespace(world=SimpleNamespace(groups=groups, pp=2))
            times = rank_times.of_trial(plan, Rank(rank, 5, size, "here", 1), log, tmp_path, 7)
            assert times.is_on == is_on
    places = [Place("dgx-1", 5), Place("dgx-2", 0), Place("dgx-2", 1), Place("dgx-2", 2)]
    assert created == [SlowRanks(places, [0, 0, 1, 1], tmp_path, 7)] * 2


@pytest.mark.parametrize(("text", "seconds"), [("5 3250000000 7\n", 3.25), ("5\n", 0.0), ("a b c", 0.0), (None, 0.0)])
def test_the_time_of_waiting_for_a_cpu(
    text: str | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedstat"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(rank_times, "SCHEDSTAT", path)
    assert rank_times.waited_for_cpu_s() == seconds
