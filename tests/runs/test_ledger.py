"""The ledger over the life cycle of a run: started, interrupted, ended, resumed by the same job or another one."""

import fcntl
import json
import os
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.contract import atomic_files, mllog
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning import compose
from bench.runs import ledger
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.ledger import Attempt, Entry, Outcome
from bench.runs.status import Ending, Status
from helpers.examples import in_proportion

ATTEMPTS = 3
TRIALS = st.integers(0, 2)
FINAL = (Outcome.valid, Outcome.invalid)
PLAN = compose.compose(["task=lora_tiny", "cluster=local", "trials=3"])


class AnyRun(RuleBasedStateMachine):
    """A run of three trials; each attempt writes its own mark into the log and into rank_logs."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        (self.folder / "rank_logs").mkdir()
        self.marks, self.job = 0, 0
        self.finished: dict[int, tuple[Entry, bytes]] = {}
        ledger.create(self.folder, PLAN)

    def teardown(self) -> None:
        self.directory.cleanup()

    @property
    def running(self) -> list[int]:
        return [entry.trial for entry in ledger.read(self.folder) if entry.outcome is Outcome.running]

    @rule(trial=TRIALS)
    def begin(self, trial: int) -> None:
        """The previous job may have been killed: open trials are started, finished ones are not."""
        plan, before = PLAN.trials[trial], ledger.read(self.folder)[trial]
        mine = [attempt for attempt in before.attempts if attempt.job == str(self.job)]
        was_open = before.outcome in (Outcome.planned, Outcome.running, Outcome.interrupted)
        try:
            is_open = ledger.begin(self.folder, plan, attempts=ATTEMPTS, job=str(self.job))
        except SubmitError as error:
            assert was_open and len(mine) == ATTEMPTS and "was started 3 times and interrupted each time" in error.what
            assert not (self.folder / plan.log).exists()
            return
        assert is_open == was_open and (len(mine) < ATTEMPTS or not was_open)
        if is_open:
            assert len(mine) < ATTEMPTS
            self.marks += 1
            for name in (plan.log, f"rank_logs/trial_{trial}.out"):
                with (self.folder / name).open("x") as log:
                    log.write(f"mark {self.marks}\n")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from([*FINAL, Outcome.aborted]))
    def end(self, data: st.DataObject, outcome: Outcome) -> None:
        trial = data.draw(st.sampled_from(self.running))
        ledger.end(self.folder, trial, outcome, minutes=1.5)
        if outcome in FINAL:
            entry = ledger.read(self.folder)[trial]
            self.finished[trial] = entry, (self.folder / PLAN.trials[trial].log).read_bytes()

    @rule(why=st.sampled_from(["preempted", "the time limit is near", ""]), trial=st.none() | TRIALS)
    def interrupt(self, why: str, trial: int | None) -> None:
        """The batch script has time to write a cause; without this rule it was killed."""
        (self.folder / ("interrupted.txt" if trial is None else f"interrupted_{trial}.txt")).write_text(why)

    @rule()
    def resume(self) -> None:
        (self.folder / "status.json").write_text("{}")
        ledger.reopen(self.folder)
        self.job += 1

    @invariant()
    def finished_trials_never_change(self) -> None:
        for trial, (entry, log) in self.finished.items():
            assert ledger.read(self.folder)[trial] == entry
            assert (self.folder / PLAN.trials[trial].log).read_bytes() == log

    @invariant()
    def seeds_never_change(self) -> None:
        assert [entry.seed for entry in ledger.read(self.folder)] == [trial.seed for trial in PLAN.trials]

    @invariant()
    def no_log_holds_two_attempts_and_none_is_lost(self) -> None:
        logs = [log.read_text().split() for log in self.folder.rglob("result_*.txt")]
        assert sorted(logs) == sorted(["mark", str(mark + 1)] for mark in range(self.marks))
        texts = [log.read_text().split() for log in self.folder.rglob("trial_*.out")]
        assert sorted(texts) == sorted(logs)


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=in_proportion(20), stateful_step_count=20, deadline=None)


def test_the_cause_of_an_interruption_is_stored_with_the_attempt(tmp_path: Path) -> None:
    ledger.create(tmp_path, PLAN)
    ledger.begin(tmp_path, PLAN.trials[0], attempts=3, job="7", nodes="dgx-[0-1]")
    (tmp_path / "interrupted.txt").write_text("SLU-10: preempted\n")
    ledger.begin(tmp_path, PLAN.trials[0], attempts=3, job="7", nodes="dgx-[2-3]")
    ledger.begin(tmp_path, PLAN.trials[0], attempts=3, job="7", nodes="dgx-[4-5]")
    attempts = ledger.read(tmp_path)[0].attempts
    assert [attempt.nodes for attempt in attempts] == ["dgx-[0-1]", "dgx-[2-3]", "dgx-[4-5]"]
    assert attempts[0].cause == "SLU-10: preempted" and "was killed before it could report" in str(attempts[1].cause)


def test_attempts_with_a_new_checkpoint_do_not_count(tmp_path: Path) -> None:
    ledger.create(tmp_path, PLAN)
    begin = partial(ledger.begin, tmp_path, PLAN.trials[0], attempts=2, job="7")
    checkpoints = tmp_path / "checkpoints" / "trial_0"
    for step in (20, 40, 60):
        assert begin()
        (checkpoints / f"step_{step}").mkdir(parents=True)
    (checkpoints / "step_80.part").mkdir()
    assert begin() and begin()
    with pytest.raises(SubmitError, match="was started 2 times and interrupted each time"):
        begin()
    assert [attempt.checkpoint for attempt in ledger.read(tmp_path)[0].attempts] == [None, 20, 40, 60, 60]


def test_a_folder_with_other_seeds_is_refused(tmp_path: Path) -> None:
    ledger.create(tmp_path, PLAN)
    other = compose.compose(["task=lora_tiny", "cluster=local", "trials=3", "seed_base=5"])
    with pytest.raises(ConfigError, match="other trials or seeds than the plan"):
        ledger.create(tmp_path, other)


DAMAGED = ["", "{", "[1]", '[{"trial": 0}]', "null", '[{"trial": 0, "outcome": "done"}]', "[" * 100_000]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:40])
def test_a_damaged_ledger_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(BenchError, match="the ledger cannot be read"):
        ledger.read(tmp_path)


def test_resuming_keeps_the_previous_final_status(tmp_path: Path) -> None:
    """Each one is in a folder with another number."""
    ledger.create(tmp_path, PLAN)
    for number in (1, 2):
        (tmp_path / "status.json").write_text(json.dumps({"outcome": f"end {number}"}))
        ledger.reopen(tmp_path)
    outcomes = [json.loads((tmp_path / f"attempts/run.{n}/status.json").read_text())["outcome"] for n in (1, 2)]
    assert outcomes == ["end 1", "end 2"] and not (tmp_path / "status.json").exists()


@pytest.mark.parametrize(("ended", "is_result"), [("success", True), ("aborted", False)])
def test_a_job_that_is_killed_after_run_stop_loses_no_trial(
    ended: str, is_result: bool, tmp_path: Path, written_log: Callable[..., Path]
) -> None:
    """The job was killed before its trial was judged: the next attempt judges it. An aborted trial is run again."""
    ledger.create(tmp_path, PLAN)
    ledger.begin(tmp_path, PLAN.trials[0], attempts=3, job="7")
    bound = mllog.load(tmp_path, 0)
    log = written_log(status=ended, seed=PLAN.trials[0].seed, binding=bound).read_bytes()
    trials.settle(tmp_path, PLAN, PLAN.trials[0])
    assert ledger.begin(tmp_path, PLAN.trials[0], attempts=3, job="7") is not is_result
    where = tmp_path / ("result_0.txt" if is_result else "attempts/0.1/result_0.txt")
    assert where.read_bytes() == log
    assert (ledger.read(tmp_path)[0].outcome in FINAL) is is_result


OLD = """[
 {"trial": 0, "outcome": "invalid", "seed": 1, "attempts": [
   {"outcome": "interrupted", "job": "7", "nodes": "dgx-0", "cause": "SLU-10: preempted"},
   {"outcome": "invalid", "job": "7", "nodes": "dgx-1"}],
  "minutes": 3.25, "samples_to_target": null, "eval_final": 0.95, "official": {"5.1.0": false}, "not_as_planned": []},
 {"trial": 1, "outcome": "planned", "seed": 2}
]"""
"""A ledger of a version before the typed entries."""


@pytest.mark.parametrize(("old", "outcome"), [("proven", "valid"), ("not proven", "invalid")])
def test_ledger_and_status_with_the_older_outcomes_are_read(old: str, outcome: str, tmp_path: Path) -> None:
    entry = {"trial": 0, "seed": 1, "outcome": old, "attempts": [{"outcome": old}]}
    (tmp_path / "ledger.json").write_text(json.dumps([entry]))
    (tmp_path / "status.json").write_text(json.dumps({"outcome": old, "exit_code": 1}))
    (read,) = ledger.read(tmp_path)
    assert (read.outcome, read.attempts[0].outcome) == (Outcome(outcome), Outcome(outcome))
    assert statuses.read(tmp_path) == Status(outcome=Ending(outcome), exit_code=1)


def test_a_status_of_node_checks_with_the_older_outcome_is_read(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"outcome": "fine", "exit_code": 0}')
    assert statuses.read(tmp_path) == Status(outcome=Ending.passed, exit_code=0)


def test_an_old_ledger_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text(OLD)
    first, second = ledger.read(tmp_path)
    assert first == Entry(
        trial=0,
        seed=1,
        outcome=Outcome.invalid,
        minutes=3.25,
        eval_final=0.95,
        official={"5.1.0": False},
        not_as_planned=[],
        attempts=(
            Attempt(outcome=Outcome.interrupted, job="7", nodes="dgx-0", cause="SLU-10: preempted"),
            Attempt(outcome=Outcome.invalid, job="7", nodes="dgx-1"),
        ),
    )
    assert second == Entry(trial=1, seed=2, outcome=Outcome.planned)
    ledger.end(tmp_path, 1, Outcome.aborted)
    raw = json.loads(OLD)
    del raw[0]["samples_to_target"]  # null is equal to a missing key
    assert json.loads((tmp_path / "ledger.json").read_text()) == [raw[0], raw[1] | {"outcome": "aborted"}]


def in_a_child(work: Callable[[], object]) -> int:
    """Return the exit code of a process of its own: 0, or 1 if the work raised OSError."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.long
def test_the_ledger_is_locked_while_it_is_changed(tmp_path: Path) -> None:
    def look() -> None:
        with (tmp_path / ".ledger.lock").open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    with ledger.locked(tmp_path):
        assert in_a_child(look) == 1
    assert in_a_child(look) == 0


def test_a_file_is_replaced_and_never_rewritten(tmp_path: Path) -> None:
    """A process that has opened the old file can still read all of it."""
    path = tmp_path / "status.json"
    atomic_files.write(path, {"word": "first"})
    with path.open() as old:
        atomic_files.write(path, {"word": "second"})
        assert json.load(old) == {"word": "first"}
    assert atomic_files.read(path) == {"word": "second"} and [*tmp_path.iterdir()] == [path]


@pytest.mark.long
def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    """The file system is full, simulated by a limit on the file size."""
    path = tmp_path / "ledger.json"
    atomic_files.write(path, ["old"])

    def write_more() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        atomic_files.write(path, ["new" * 100_000])

    assert in_a_child(write_more) == 1
    assert atomic_files.read(path) == ["old"] and [*tmp_path.iterdir()] == [path]


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert statuses.read(tmp_path) is None
    final_status = Status(
        outcome=Ending.failed, exit_code=2, what="x", fix="y", during="trial 0", rule="RUN-02", evidence="z"
    )
    statuses.write(tmp_path, final_status)
    raw = json.loads((tmp_path / "status.json").read_text())
    assert statuses.read(tmp_path) == final_status and raw.pop("while") == "trial 0"
    assert raw == {"outcome": "failed", "exit_code": 2, "what": "x", "fix": "y", "rule": "RUN-02", "evidence": "z"}


def test_a_failed_resume_restores_every_file(tmp_path: Path) -> None:
    """The trial stays aborted, status.json is restored, and earlier attempts are unchanged."""
    ledger.create(tmp_path, PLAN)
    ledger.begin(tmp_path, PLAN.trials[0], attempts=3)
    ledger.end(tmp_path, 0, Outcome.aborted)
    (tmp_path / "attempts/run.1").mkdir(parents=True)
    statuses.write(tmp_path, Status(outcome=Ending.failed, exit_code=1))
    before = ledger.read(tmp_path)
    with pytest.raises(SubmitError), ledger.reopened(tmp_path):
        assert ledger.read(tmp_path)[0].outcome is Outcome.interrupted and statuses.read(tmp_path) is None
        raise SubmitError("refused", where="sbatch", fix="")
    assert ledger.read(tmp_path) == before and statuses.read(tmp_path) is not None
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["run.1"]
