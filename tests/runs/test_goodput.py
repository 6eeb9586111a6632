"""What the time of a run went to: run folders whose ledger and logs are written with a clock of the test."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import cli
from bench.contract import mllog, plan_kinds, run_files
from bench.contract.mllog import Writer
from bench.contract.plan import Plan
from bench.errors import ConfigError, LogError
from bench.planning import compose
from bench.runs import goodput, ledger
from bench.runs.ledger import Outcome
from helpers.clock import Clock
from helpers.examples import in_proportion

PLAN = compose.compose(["task=lora_tiny", "cluster=local", "launch.force=true"])


@dataclass
class WrittenRun:
    """A run whose ledger and logs are written at moments that the test sets."""

    folder: Path
    plan: Plan
    clock: Clock = field(default_factory=Clock)

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def now_ms(self) -> int:
        return self.clock.read_ms()[0]

    def begin(self) -> None:
        assert ledger.begin(self.folder, self.plan.trials[0], attempts=9, job="1")

    def end(self, outcome: Outcome) -> None:
        ledger.end(self.folder, 0, outcome)

    def log(self, *, start_s: float, resumed: int = 0) -> Writer:
        log = Writer(self.folder / run_files.result(0), clocks=self.clock.read_ms)
        log.start(mllog.INIT_START)
        log.event(mllog.GLOBAL_BATCH_SIZE, 8)
        self.wait(start_s)
        log.start(mllog.RUN_START)
        if resumed:
            log.event(mllog.RESUMED, resumed, step=resumed)
        return log

    def block(self, log: Writer, first: int, times_s: list[float], *, is_cut: bool = False) -> None:
        log.start(mllog.BLOCK_START, step=first)
        for place, time_s in enumerate(times_s, 1):
            self.wait(time_s)
            log.event(mllog.TRACKED_STATS, {mllog.STEP_TIMES: [time_s]}, step=first + place)
        if not is_cut:
            log.stop(mllog.BLOCK_STOP, step=first + len(times_s))

    def evaluate(self, log: Writer, step: int, seconds: float) -> None:
        log.start(mllog.EVAL_START, step=step)
        self.wait(seconds)
        log.stop(mllog.EVAL_STOP, step=step)

    def save(self, log: Writer, step: int, seconds: float) -> None:
        self.wait(seconds)
        log.event(mllog.CHECKPOINT, seconds, step=step)


def created(folder: Path, plan: Plan = PLAN) -> WrittenRun:
    folder.mkdir()
    (folder / run_files.PLAN).write_text(plan_kinds.dumps(plan))
    (folder / run_files.RANK_LOGS).mkdir()
    ledger.create(folder, plan)
    return WrittenRun(folder, plan)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenRun]:
    run = created(tmp_path / "run")
    monkeypatch.setattr(ledger, "_now_ms", run.now_ms)
    yield run


def seconds(run: WrittenRun) -> dict[str, float]:
    """Return the parts that took time."""
    measured = goodput.of_run(run.folder)
    return {part.name: round(value, 3) for part, value in measured.seconds.items() if value}


@pytest.mark.parametrize(("ended", "outcome"), [("success", Outcome.valid), ("aborted", Outcome.invalid)])
def test_an_uninterrupted_run(run: WrittenRun, ended: str, outcome: Outcome) -> None:
    """It ends by its target, or by its last step."""
    run.begin()
    run.wait(5)
    with run.log(start_s=20) as log:
        run.wait(2)  # rows
        run.block(log, 0, [1.0] * 10)
        run.evaluate(log, 10, 4)
        run.save(log, 10, 3)
        run.block(log, 10, [1.0, 1.0, 9.0, 1.0])
        run.evaluate(log, 14, 4)
        log.finish(ended, step=14)
    run.wait(6)
    run.end(outcome)
    assert seconds(run) == {
        "training": 14,
        "evaluation": 8,
        "checkpoints": 3,
        "stalls": 8,
        "start": 25,
        "end": 6,
        "other": 2,
    }
    measured = goodput.of_run(run.folder)
    assert measured.wall_s == 66 and measured.effective == pytest.approx(14 / 66)
    assert measured.notes == ()
    twice = replace(measured, trials=measured.trials * 2)
    assert twice.wall_s == sum(twice.seconds.values()) == 2 * 66 and twice.effective == pytest.approx(14 / 66)


def test_a_run_without_any_time_has_no_share_of_it(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    with run.log(start_s=0) as log:
        log.finish("success", step=0)
    run.end(Outcome.valid)
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit):
            cli.main(["goodput", str(run.folder), *words])
        assert "ZeroDivision" not in capsys.readouterr().err
    assert goodput.of_run(run.folder).effective == 0


def test_an_interrupted_run_repeats_the_steps_since_its_checkpoint(run: WrittenRun) -> None:
    run.begin()
    with run.log(start_s=10) as log:
        run.block(log, 0, [1.0] * 8)
        run.evaluate(log, 8, 4)
        run.save(log, 8, 2)
        run.block(log, 8, [1.0] * 3)
        run.evaluate(log, 11, 4)
        run.block(log, 11, [1.5], is_cut=True)
        run.wait(0.5)
        log.finish("aborted")  # the ranks got SIGTERM during a step
    run.wait(30)  # silent: killed, and in the queue again
    run.begin()
    with run.log(start_s=12, resumed=8) as log:
        run.block(log, 8, [1.0] * 6)
        log.finish("success", step=14)
    run.end(Outcome.valid)
    assert seconds(run) == {
        "training": 14,
        "evaluation": 4,
        "checkpoints": 2,
        "start": 10,
        "repeated": 3 + 4 + 1.5,
        "down": 30.5,
        "restart": 12,
    }
    assert goodput.of_run(run.folder).trials[0].num_attempts == 2


def test_an_attempt_that_never_trained_is_down_time_and_a_silent_rank_a_stall(run: WrittenRun) -> None:
    run.begin()
    with run.log(start_s=10) as log:
        run.block(log, 0, [1.0] * 4)
        run.save(log, 4, 1)
        run.block(log, 4, [1.0] * 2, is_cut=True)
    report = run.folder / run_files.stack("trial 0", 1)
    report.write_text(json.dumps({"rank": 1, "silent_s": 120.5}) + "\n\nThread 0x1\n")
    (run.folder / run_files.stack("trial 0", 2)).write_text(json.dumps({"rank": 2, "silent_s": 30}) + "\n")
    run.wait(150)
    run.begin()
    run.wait(40)  # it writes no log
    run.begin()
    with run.log(start_s=12, resumed=4) as log:
        run.block(log, 4, [1.0] * 4)
        log.finish("success", step=8)
    run.end(Outcome.valid)
    assert seconds(run) == {
        "training": 8,
        "checkpoints": 1,
        "start": 10,
        "repeated": 2,
        "stalls": 120.5,
        "down": 29.5 + 40,
        "restart": 12,
    }


def test_a_log_without_steps_counts_samples_and_splits_a_block_in_proportion(run: WrittenRun) -> None:
    """Logs of others: eight samples are a step. The second attempt resumes in the middle of a block of the first."""
    for first, last, resumed in ((0, 10, 0), (6, 12, 6)):
        run.begin()
        with run.log(start_s=1, resumed=resumed) as log:
            log.start(mllog.BLOCK_START, samples_count=8 * first)
            run.wait(3 * (last - first))
            log.stop(mllog.BLOCK_STOP, samples_count=8 * last)
            if last == 12:
                log.finish("success", samples_count=8 * last)
    run.end(Outcome.valid)
    assert seconds(run) == {"training": 3 * 12, "repeated": 3 * 4, "start": 1, "restart": 1}
    assert "the log does not list its steps" in goodput.of_run(run.folder).notes[0]


def test_time_of_a_block_outside_its_steps_is_no_stall(run: WrittenRun) -> None:
    run.begin()
    with run.log(start_s=1) as log:
        run.block(log, 0, [1.0, 1.0, 9.0, 1.0], is_cut=True)
        run.wait(12)
        log.stop(mllog.BLOCK_STOP, step=4)
        log.finish("success", step=4)
    run.end(Outcome.valid)
    assert seconds(run) == {"training": 16, "stalls": 8, "start": 1}


def test_after_run_stop_of_an_attempt_that_was_not_the_last_it_is_down(run: WrittenRun) -> None:
    """It was killed before its last checkpoint, and all is done again."""
    for start_s in (1, 2):
        run.begin()
        with run.log(start_s=start_s) as log:
            run.block(log, 0, [1.0] * 5)
            log.finish("success", step=5)
        run.wait(7)
    run.end(Outcome.valid)
    assert seconds(run) == {"training": 5, "repeated": 5, "start": 1, "restart": 2, "down": 7, "end": 7}


def test_gpu_hours_are_of_all_nodes(tmp_path: Path) -> None:
    plan = compose.compose(["task=lora70b", "cluster=dgxh200", "cluster.num_nodes=2", "launch.force=true"])
    run = created(tmp_path / "run", plan)
    run.begin()
    run.log(start_s=9).close()
    assert goodput.of_run(run.folder).num_gpus == 16


def test_without_a_checkpoint_everything_is_done_again(run: WrittenRun) -> None:
    run.begin()
    with run.log(start_s=1) as log:
        run.block(log, 0, [1.0] * 5)
    run.end(Outcome.aborted)
    assert "it is not complete" in goodput.of_run(run.folder).notes[0]
    ledger.reopen(run.folder)
    run.begin()
    with run.log(start_s=1) as log:
        run.block(log, 0, [1.0] * 6)
        log.finish("success", step=6)
    run.end(Outcome.valid)
    assert seconds(run) == {"training": 6, "start": 1, "repeated": 5, "restart": 1}


def test_a_ledger_without_times_counts_from_the_first_record(run: WrittenRun) -> None:
    run.begin()
    run.wait(100)
    with run.log(start_s=7) as log:
        run.block(log, 0, [2.0, 2.0])
        log.finish("success", step=2)
    run.end(Outcome.valid)
    path = run.folder / run_files.LEDGER
    raw = json.loads(path.read_text())
    for name in ("began_ms", "ended_ms"):
        del raw[0]["attempts"][0][name]
    path.write_text(json.dumps(raw))
    assert seconds(run) == {"training": 4, "start": 7}
    assert "the ledger has no times" in goodput.of_run(run.folder).notes[0]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["block", "evaluate", "save", "wait", "kill", "back"]), st.integers(0, 9)), max_size=30
)


@pytest.mark.long
@given(actions=ACTIONS)
@settings(max_examples=in_proportion(20), deadline=None)
def test_the_parts_add_up_to_the_wall_clock(
    actions: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any order of records, and with clocks that go back."""
    run = created(tmp_path_factory.mktemp("any") / "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledger, "_now_ms", run.now_ms)
        run.begin()
        began_ms, step, saved, log = run.now_ms(), 0, 0, run.log(start_s=1)
        for what, size in actions:
            match what:
                case "block":
                    run.block(log, step, [1.0] * size, is_cut=size % 2 == 1)
                    step += size
                case "evaluate":
                    run.evaluate(log, step, size)
                case "save":
                    run.save(log, step, size)
                    saved = step
                case "wait" | "back":
                    run.wait(size if what == "wait" else -0.1 * size)
                case _:
                    log.close()
                    run.begin()
                    log, step = run.log(start_s=size, resumed=saved), saved
        log.finish("success", step=step)
        log.close()
        run.end(Outcome.valid)
    measured = goodput.of_run(run.folder)
    assert all(value >= -1e-9 for value in measured.seconds.values())
    if not any(what == "back" for what, _ in actions):
        assert measured.wall_s == pytest.approx((run.now_ms() - began_ms) / 1000)


def test_the_command_prints_shares_that_add_up(run: WrittenRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    with run.log(start_s=30) as log:
        run.block(log, 0, [1.0] * 60)
        run.evaluate(log, 60, 10)
        log.finish("success", step=60)
    run.end(Outcome.valid)
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["goodput", str(run.folder), *words])
        assert ended.value.code == 0
    table, answer = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "effective training time: 1.00 of 1.67 min, 60.0 %; restarts took 0.0 %" in table
    parsed = json.loads(answer)
    assert parsed["schema"] == "runstop/goodput/1.0" and parsed["effective"] == 0.6
    assert sum(part["share"] for part in parsed["parts"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda folder: None, LogError, "no attempt of this run has reached run_start"),
        (lambda folder: (folder / run_files.PLAN).write_text(_kernels()), ConfigError, "of kind kernels"),
    ],
    ids=["not started", "no training"],
)
def test_a_run_without_training_is_refused(
    run: WrittenRun, change: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    change(run.folder)
    with pytest.raises(error, match=message):
        goodput.of_run(run.folder)


def _kernels() -> str:
    return plan_kinds.dumps(compose.compose(["task=kernels_tiny", "cluster=local", "launch.force=true"]))
