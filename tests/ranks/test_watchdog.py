"""Stalled ranks end their trial and report the cause; slow ranks continue."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contract import mllog, run_files
from bench.contract.stall import Stall
from bench.errors import BenchError
from bench.planning import compose
from helpers import ranks
from jobs.ranks import process_group, stall_report
from jobs.ranks.guard import Guard
from jobs.ranks.identity import Rank
from jobs.ranks.program import Begun
from jobs.ranks.stall_report import Report
from jobs.ranks.watchdog import EVALUATION, LOADING, MEASURING, SAVING, TRAINING, Watchdog

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo, and clocks of the tests' own")
NODES = ("dgx-0", "dgx-0", "dgx-1")


class Ended(Exception):
    """Replaces the end of the process."""


class Watched:
    """The watchdog of one rank, checked every second, and the error with which it ends the trial."""

    def __init__(self, folder: Path, *, rank: int = 0, nodes: tuple[str, ...] = ("dgx-0",), **stall: float) -> None:
        (folder / run_files.RANK_LOGS).mkdir(exist_ok=True)
        who = Rank(rank, 0, len(nodes), "", 0)
        self.dog = Watchdog(who, Stall(**{"factor": 20, "floor_s": 120} | stall), folder, "trial 0", self._fail)
        self.dog._nodes = nodes
        self.folder, self.now_s, self.error = folder, 0, None

    def _fail(self, error: BenchError) -> Any:
        self.error = error
        raise Ended

    def lasts(self, seconds: int) -> "Watched":
        """Let time pass; the watchdog checks every second."""
        for _ in range(seconds):
            self.now_s += 1
            self.dog.check(self.now_s)
        return self

    def steps(self, first: int, last: int, *, every_s: int) -> "Watched":
        for step in range(first, last + 1):
            self.lasts(every_s).dog.alive(TRAINING, step, None)
        return self

    @property
    def has_reported(self) -> bool:
        return any(self.folder.glob(run_files.stack("trial 0", "*")))


@pytest.fixture(autouse=True)
def no_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the test process from ending where a rank would."""
    monkeypatch.setattr(stall_report.faulthandler, "dump_traceback_later", lambda *args, **how: None)


def test_the_limit_follows_the_median_step_of_this_run(tmp_path: Path) -> None:
    """Of 10 s each, and then ten times as long: nothing. Ended after 20 times the median, which is 10 s still."""
    rank = Watched(tmp_path)
    rank.dog.expect(step_s=9, eval_s=60)
    rank.dog.alive(TRAINING, 0, None)
    rank.steps(1, 30, every_s=10).steps(31, 35, every_s=100).lasts(199)
    assert not rank.has_reported
    with pytest.raises(Ended):
        rank.lasts(5)
    assert rank.error is not None and rank.error.rule == "RUN-17" and rank.error.exit_code == 1
    assert "no progress for 201 s in training after step 35 (usual: 10 s)" in rank.error.what


def test_steps_between_two_checks_share_their_time(tmp_path: Path) -> None:
    """Ten steps in 100 s are 10 s each: the limit is 200 s, not 2,000 s."""
    rank = Watched(tmp_path)
    rank.dog.alive(TRAINING, 0, None)
    for last in range(10, 60, 10):
        rank.lasts(99)
        for step in range(last - 9, last + 1):
            rank.dog.alive(TRAINING, step, None)
        rank.lasts(1)
    with pytest.raises(Ended):
        rank.lasts(205)
    assert rank.error is not None and "(usual: 10 s)" in rank.error.what


def test_short_steps_have_the_minimum_limit(tmp_path: Path) -> None:
    rank = Watched(tmp_path)
    rank.dog.alive(TRAINING, 0, None)
    rank.steps(1, 30, every_s=1).lasts(120)
    assert not rank.has_reported
    with pytest.raises(Ended):
        rank.lasts(3)


def test_phases_without_a_measurement_have_no_limit(tmp_path: Path) -> None:
    """Starting, loading, the first step without a warm-up, and saving."""
    rank = Watched(tmp_path).lasts(10_000)
    for phase, step in ((LOADING, 0), (TRAINING, 0)):
        rank.dog.alive(phase, step, None)
        rank.lasts(10_000)
    rank.steps(1, 5, every_s=1).dog.alive(SAVING, 5, None)
    rank.lasts(10_000)
    assert not rank.has_reported


@pytest.mark.parametrize(("phase", "limit_s"), [(TRAINING, 20 * 8), (EVALUATION, 20 * 70)])
def test_limits_of_the_first_step_and_evaluation_come_from_the_warm_up(
    tmp_path: Path, phase: str, limit_s: int
) -> None:
    rank = Watched(tmp_path)
    assert rank.dog.expect(step_s=8, eval_s=70) == 20 * 70
    rank.dog.alive(phase, 0, None)
    rank.lasts(limit_s)
    assert not rank.has_reported
    with pytest.raises(Ended):
        rank.lasts(3)


def test_evaluations_are_measured_too(tmp_path: Path) -> None:
    rank = Watched(tmp_path)
    for step in (10, 20, 30):
        rank.dog.alive(EVALUATION, step, None)
        rank.lasts(30).dog.alive(TRAINING, step, None)
        rank.lasts(10)
    rank.dog.alive(EVALUATION, 40, None)
    rank.lasts(600)
    assert not rank.has_reported
    with pytest.raises(Ended):
        rank.lasts(3)


class Event:
    """The end of a step on a device."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached


def test_steps_count_when_the_device_completes_them(tmp_path: Path) -> None:
    """It launches ten steps at once and waits; the device takes 10 s for each. It stalls after five."""
    rank, events = Watched(tmp_path), [Event() for _ in range(10)]
    rank.dog.alive(TRAINING, 0, None)
    for step, event in enumerate(events, 1):
        rank.dog.alive(TRAINING, step, event)
    for event in events[:5]:
        rank.lasts(10)
        event.is_reached = True
    rank.lasts(200)
    assert not rank.has_reported
    with pytest.raises(Ended):
        rank.lasts(5)
    assert rank.error is not None and "after step 5 (usual: 10 s)" in rank.error.what


def stalled(folder: Path, **how: Any) -> Watched:
    """Return a rank that has just reported: 121 s without a step."""
    rank = Watched(folder, **how)
    rank.dog.alive(TRAINING, 0, None)
    rank.steps(1, 3, every_s=1).lasts(122)
    assert rank.has_reported
    return rank


def test_a_rank_that_continues_withdraws_its_report(tmp_path: Path) -> None:
    rank = stalled(tmp_path, nodes=NODES).steps(4, 100, every_s=1)
    assert not rank.has_reported and rank.error is None


def test_a_rank_without_a_limit_reports_when_another_rank_stalls(tmp_path: Path) -> None:
    """It is still loading while the other one waits for it, so it must not count as unresponsive."""
    loading = Watched(tmp_path, rank=1, nodes=NODES[:2])
    loading.dog.alive(LOADING, 0, None)
    waiting = stalled(tmp_path, nodes=NODES[:2])
    loading.lasts(150)
    assert {path.name for path in tmp_path.glob("rank_logs/*")} == {"trial_0_rank_0.stack", "trial_0_rank_1.stack"}
    with pytest.raises(Ended):
        waiting.lasts(1)
    assert waiting.error is not None and "did not respond" not in waiting.error.what


def test_the_lowest_reporting_rank_ends_the_trial_and_another_one_if_it_does_not(tmp_path: Path) -> None:
    lowest, other = (stalled(tmp_path, rank=rank, nodes=NODES) for rank in (0, 2))
    other.lasts(60)
    with pytest.raises(Ended):
        lowest.lasts(61)
    assert lowest.error is not None and "; rank 1 on dgx-0 did not respond and wrote no stack" in lowest.error.what
    with pytest.raises(Ended):
        other.lasts(65)


def report(rank: int, at: str = "a.py:1 in all_reduce", *, is_waiting: bool = True) -> Report:
    return Report(
        rank=rank, node=NODES[rank], phase=TRAINING, step=7, silent_s=130.2, usual_s=0.5, at=at, is_waiting=is_waiting
    )


SLEEPS = report(2, "b.py:9 in step: sleep(99)", is_waiting=False)


@pytest.mark.parametrize(
    ("reports", "blamed"),
    [
        ([report(0), report(1)], "rank 2 on dgx-1 did not respond and wrote no stack"),
        (
            [SLEEPS],
            "rank 2 on dgx-1 stopped at b.py:9 in step: sleep(99); "
            "ranks 0, 1 on dgx-0 did not respond and wrote no stack",
        ),
        (
            [report(0), report(1), SLEEPS],
            "rank 2 on dgx-1 stopped at b.py:9 in step: sleep(99); 2 other ranks waited",
        ),
        (
            [report(rank) for rank in range(3)],
            "every rank waited for data that did not arrive; likely cause: the network between dgx-0, dgx-1; "
            "rank 0 at a.py:1 in all_reduce",
        ),
    ],
)
def test_cause_of_a_stall(reports: list[Report], blamed: str) -> None:
    error = stall_report.verdict({report.rank: report for report in reports}, NODES, "rank_logs/*")
    assert error.what == f"{blamed}; no progress for 130 s in training after step 7 (usual: 0.5 s)"


def test_a_rank_ends_even_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stall_report, "write", full)
    rank = Watched(tmp_path)
    rank.dog.expect(step_s=1, eval_s=1)
    rank.dog.alive(TRAINING, 0, None)
    with pytest.raises(Ended):
        rank.lasts(200)


def test_collectives_time_out_after_the_watchdog(tmp_path: Path) -> None:
    """The time-out of each group is kept if it is long enough, else raised."""
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        short, long = (group.new_group(timeout=timedelta(minutes=minutes)) for minutes in (10, 120))
        groups = (short, group.group.WORLD, long)
        timeouts_s = {}
        for limit_s in (120, 180, 1000):
            process_group.outlast(limit_s)
            backends = [each._get_backend(torch.device("cpu")) for each in groups]
            timeouts_s[limit_s] = [backend.options._timeout.total_seconds() for backend in backends]
        assert timeouts_s == {120: [600, 1800, 7200], 180: [720, 1800, 7200], 1000: [4000, 4000, 7200]}
    finally:
        group.destroy_process_group()


class Stream:
    """The default stream of a GPU that has work left."""

    def __init__(self, gpu: int) -> None:
        if gpu >= 2:
            raise RuntimeError("invalid device ordinal")

    def query(self) -> bool:
        return False


@pytest.mark.long
def test_a_rank_that_shares_a_gpu_queries_that_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two GPUs; rank 3 uses GPU 1. A rank with a busy GPU is waiting, and not the cause."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", Stream)
    shared = ["parallel.groups=4", "parallel.tp=1", "parallel.share_gpu=true", "cluster.ranks_per_node=2"]
    plan = compose.compose(["task=generate_tiny", "cluster.device=cuda", *shared])
    (tmp_path / run_files.RANK_LOGS).mkdir()
    who, guard = Rank(3, 3, 4, "", 0), Guard(tmp_path / "error")
    with mllog.Writer(None) as log:
        dog = Begun(plan, plan.trials[0], who, log, tmp_path, guard).watchdog()
    assert dog is not None
    dog._nodes = ("dgx-0",) * 4
    dog.expect_points(1)
    dog.alive(MEASURING, 0, None)
    dog.check(1)
    dog.check(1000)
    (stall,) = stall_report.read(tmp_path.glob(run_files.stack("trial 0", "*"))).values()
    assert stall.rank == 3 and stall.is_waiting
