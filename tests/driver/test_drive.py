"""How the driver runs the commands of a plan, and how runs end; fake nodes record calls in place of ranks."""

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.nodes.interruption import RESTART_EXIT_CODE, STOPPED, TIME_IS_NEAR, Interruption, NodeLostError
from bench.contract import mllog, plan_kinds, plan_paths, run_files
from bench.contract.plan import Plan, Trial
from bench.contract.schema import BackendName
from bench.diagnosis import explain
from bench.driver import between_commands
from bench.driver import drive as drives
from bench.driver.drive import Drive
from bench.errors import BenchError, ConfigError, LogError, Stopped
from bench.planning import compose
from bench.results.kind import Judged
from bench.rules.check import broken
from bench.rules.finding import Finding
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending
from helpers.noted_nodes import Noted
from helpers.types import MakeLog


@dataclass
class Notes:
    """A Progress that records what it receives."""

    lines: list[str] = field(default_factory=list)
    errors: list[BenchError] = field(default_factory=list)
    trials: list[tuple[int, bool]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def failed(self, error: BenchError) -> None:
        self.errors.append(error)

    def follow(self, nodes: Any, command: Any, is_running: Callable[[], bool]) -> None:
        while is_running():
            pass

    def judged(self, trial: Trial, judged: Judged) -> None:
        self.trials.append((trial.index, judged.valid))


@dataclass
class Run:
    """A run of two trials on two nodes, whose ranks write logs as planned."""

    plan: Plan
    folder: Path
    nodes: Noted
    progress: Notes
    interruption: Interruption
    driven: Drive

    def ends(self, joins: Callable[[], None] = lambda: None) -> int:
        @contextmanager
        def connect() -> Iterator[Any]:
            joins()
            self.nodes.started.append("joined")
            yield self.nodes

        return drives.drive(self.driven, connect)

    @property
    def status(self) -> statuses.Status:
        status = statuses.read(self.folder)
        assert status is not None
        return status

    @property
    def outcomes(self) -> list[Outcome]:
        return [entry.outcome for entry in ledger.read(self.folder)]


MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, written_log: MakeLog) -> MakeRun:
    def make_run(*words: str, task: str = "lora70b", last: float = 0.92) -> Run:
        plan = compose.compose([f"task={task}", "cluster=dgx2", "launch.force=true", "trials=2", *words])
        (folder := tmp_path / "run").mkdir()
        (folder / run_files.PLAN).write_text(plan_kinds.dumps(plan))
        (folder / run_files.RANK_LOGS).mkdir()
        training = plan_kinds.required(plan, plan_kinds.TrainingPlan)

        def trained(index: int) -> None:
            trial = plan.trials[index]
            planned = {"seed": trial.seed, "submission_division": training.submission.division}
            binding = mllog.load(folder, index)
            written_log(**planned, evals=(0.95, 0.94, last), binding=binding).rename(folder / trial.log)

        nodes = Noted(plan, ["rig0", "rig1"])
        nodes.acts = {"trial 0": lambda: trained(0), "trial 1": lambda: trained(1)}
        progress, interruption = Notes(), Interruption()
        driven = Drive(
            folder=folder,
            plan=plan,
            progress=progress,
            job="7",
            backend_job_id="7",
            check=interruption.check,
            restarts=True,
        )
        return Run(plan, folder, nodes, progress, interruption, driven)

    return make_run


@pytest.fixture
def run(make: MakeRun) -> Run:
    return make("cluster.drop_caches=sync it")


@pytest.mark.long
def test_every_command_runs_once_in_order_and_the_trials_are_valid(run: Run) -> None:
    facts = run.folder / run_files.FACTS / "rank_9999.json"
    facts.parent.mkdir()
    facts.write_text("of an earlier start")
    assert run.ends() == 0
    assert run.nodes.started == ["joined", *(command.name for command in run.plan.commands)]
    assert run.nodes.num_stopped == len(run.plan.commands) and not facts.exists()
    assert (run.status.outcome, run.status.exit_code, run.outcomes) == (Ending.valid, 0, [Outcome.valid] * 2)
    assert manifest.read(run.folder) is not None and run.progress.trials == [(0, True), (1, True)]
    assert [entry.attempts[0].nodes for entry in ledger.read(run.folder)] == ["rig0,rig1"] * 2
    dropped = "rig0: sync it\nrig1: sync it\n"
    assert [(run.folder / run_files.caches(index)).read_text() for index in (0, 1)] == [dropped] * 2
    assert run.driven.made_progress and not (run.folder / run_files.DISK_RESERVE).exists()
    assert run.progress.lines[0] == "node facts: 2 nodes, rig0, rig1" and not run.progress.errors
    run.nodes.started.clear()
    assert run.ends() == 0 and "trial 0" not in run.nodes.started, "a trial that is valid is not run again"
    assert run.progress.lines[-1] == f"trial 1, seed {run.plan.trials[1].seed}: already finished"


@pytest.mark.long
def test_a_finding_about_the_nodes_ends_the_run_unless_forced(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, findings = make("launch.force=false"), list[Finding]()
    monkeypatch.setattr(between_commands.nodes, "load", lambda folder, *, array_task: array_task)
    monkeypatch.setattr(between_commands.nodes, "judge", lambda plan, facts: findings)
    findings.append(broken("NCC-05", "one [node] is slow", "here", fix="look", severity="warning"))
    assert run.ends() == 0 and str(findings[0]) in run.progress.lines
    (run.folder / run_files.LEDGER).unlink()
    (run.folder / run_files.STATUS).unlink()
    findings[:] = [broken("NCC-05", "no facts of a rank", "here", fix="look")]
    run.nodes.started.clear()
    assert run.ends() == 2 and run.nodes.started == ["joined", "node facts"] and run.outcomes[0].is_open
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ending.failed, 2, "NCC-05")
    (error,) = run.progress.errors
    assert error.what == "no facts of a rank"


@pytest.mark.long
def test_an_invalid_trial_makes_the_run_invalid(make: MakeRun) -> None:
    run = make(last=0.93)
    assert run.ends() == 1 and run.outcomes == [Outcome.invalid] * 2
    assert (run.status.outcome, run.progress.trials) == (Ending.invalid, [(0, False), (1, False)])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "codes", "what"),
    [
        ("node check", {0: 0, 1: 5}, "node check failed"),
        ("trial 1", {3: 137}, "RUN-02: rank 3 got SIGKILL during trial 1"),
        ("trial 1", {3: 7, 4: 9}, "trial 1 failed"),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_its_trial_is_aborted(
    run: Run, name: str, codes: dict[int, int], what: str
) -> None:
    """The exit code of the run is 1, so that the backend does not restart it; the rank's is in its error file."""
    run.nodes.codes[name] = codes
    run.nodes.acts.pop(name, None)
    assert run.ends() == 1 and run.nodes.started[-1] == name, "no command runs after it"
    assert (run.status.outcome, run.status.exit_code) == (Ending.failed, 1) and len(run.progress.errors) == 1
    assert what in str(run.status.during or run.status.what)
    assert name != "trial 1" or run.outcomes == [Outcome.valid, Outcome.aborted]


@pytest.mark.long
@pytest.mark.parametrize(("times", "exit_code"), [(1, 0), (3, 1)])
def test_a_port_that_is_in_use_gets_another_try(run: Run, times: int, exit_code: int) -> None:
    """Rank 0 reports it after it has opened the log, so that the trial needs another attempt."""
    what, write = f"port 4711 {run_files.PORT_IN_USE} on rig0", run.nodes.acts["trial 0"]
    report = {"time": 1.0, "exit_code": 1, "rule": "NCC-05", "what": what, "where": "rank 0 on rig0", "fix": "again"}
    seen: list[int] = []

    def starts() -> None:
        seen.append(len(seen))
        run.nodes.codes.pop("trial 0", None)
        if len(seen) > times:
            write()
        else:
            mllog.Writer(run.folder / "result_0.txt", mllog.load(run.folder, 0)).close()
            (run.folder / run_files.rank_error("trial 0", 0)).write_text(json.dumps(report))
            run.nodes.codes["trial 0"] = {0: 1}

    run.nodes.acts["trial 0"] = starts
    assert run.ends() == exit_code and run.progress.lines.count(f"NCC-05: {what}; trying another port") == min(times, 2)
    attempts = ledger.read(run.folder)[0].attempts
    assert [attempt.cause for attempt in attempts[:1]] == [f"NCC-05: {what}"] and len(seen) == min(times + 1, 3)
    assert run.outcomes[0] is (Outcome.valid if times == 1 else Outcome.aborted)


def test_a_log_that_is_removed_while_the_ranks_run_is_the_cause(run: Run) -> None:
    run.nodes.acts.pop("trial 0")
    assert run.ends() == 1 and run.outcomes[0] is Outcome.aborted
    (error,) = run.progress.errors
    assert (error.rule, error.fix) == (
        "LOG-01",
        "find out what deletes files in this folder, such as a clean-up job; then run `runstop resume RUN`",
    )
    fix = error.fix.replace("RUN", str(run.folder))
    assert (
        error.what
        == "result_0.txt is missing, although the ranks ended without an error: the log was deleted during the trial"
    )
    assert (run.status.rule, run.status.fix) == ("LOG-01", fix)


@pytest.mark.long
def test_an_existing_log_of_another_run_is_reported_as_the_cause(run: Run, written_log: MakeLog) -> None:
    """The ranks only report that the log exists (CFG-05)."""
    written_log(name="run/result_0.txt")
    run.nodes.acts.pop("trial 0")
    run.nodes.codes["trial 0"] = {0: 2}
    assert run.ends() == 1
    error = run.progress.errors[-1]
    assert isinstance(error, LogError) and error.rule == "LOG-17"
    assert "result_0.txt was not written by this attempt" in error.what
    assert (run.status.rule, run.outcomes[0]) == ("LOG-17", Outcome.aborted) and manifest.read(run.folder) is not None


@pytest.mark.parametrize(
    ("why", "made_progress", "restarts", "expected"),
    [
        (TIME_IS_NEAR, True, True, RESTART_EXIT_CODE),
        (TIME_IS_NEAR, False, True, 1),
        (TIME_IS_NEAR, True, False, 1),
        ("HST-01: node 1 is gone", False, True, RESTART_EXIT_CODE),
        ("HST-01: node 1 is gone", True, False, 1),
    ],
)
def test_an_interrupted_run_is_restarted_only_if_the_next_start_can_succeed(
    run: Run, why: str, made_progress: bool, restarts: bool, expected: int
) -> None:
    """A time limit that was too short for any work will be too short again; a lost node may be replaced."""
    ledger.create(run.folder, run.plan)
    run.driven.made_progress, run.driven.restarts = made_progress, restarts
    assert drives._stop_early(run.driven, why, RESTART_EXIT_CODE) == expected
    if expected == RESTART_EXIT_CODE:
        assert statuses.read(run.folder) is None
        assert (run.folder / run_files.interrupted()).read_text() == f"{why}\n"
    else:
        assert (run.status.outcome, run.status.exit_code) == (Ending.failed, 1)
        assert f"{run.status.rule}: " == why[: len("HST-01: ")]
        assert ("has finished nothing" in str(run.status.during)) is not made_progress


@pytest.mark.long
@pytest.mark.parametrize("raises", [True, False], ids=["by an exception", "by a note"])
@pytest.mark.parametrize(("job", "rule"), [("7", "SLU-08"), (None, "RUN-24")])
def test_a_stopped_run_shows_how_to_resume_it(run: Run, raises: bool, job: str | None, rule: str) -> None:
    """In the launching process a signal raises; a node's process records it and checks that while it waits.

    Without a queue no job was cancelled. `status.json` and `why` agree on the rule.
    """
    run.driven = dataclasses.replace(run.driven, backend_job_id=job)

    def stopped() -> None:
        if raises:
            raise Stopped(signal.SIGINT)
        run.interruption._stop(signal.SIGINT, None)

    run.nodes.acts["trial 1"] = stopped
    if raises:
        with pytest.raises(Stopped):
            run.ends()
    else:
        assert run.ends() == 130
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ending.interrupted, 130, rule)
    assert explain([run.folder]).rule == rule
    assert f"resume {run.folder}" in str(run.status.fix) and not (run.folder / run_files.DISK_RESERVE).exists()
    assert run.outcomes[0] is Outcome.valid and run.nodes.num_stopped == len(run.nodes.started) - 1
    assert manifest.read(run.folder) is not None


@pytest.mark.parametrize(
    ("backend", "note", "rule"),
    [
        (BackendName.kubernetes, None, "KUB-18"),
        (BackendName.kubernetes, "an earlier job", "KUB-18"),
        (BackendName.kubernetes, "this", "SLU-08"),
        (BackendName.ray, None, "RAY-08"),
        (BackendName.ray, "this", "SLU-08"),
        (BackendName.ssh, None, "SLU-08"),
    ],
)
def test_a_signal_is_a_cancelled_run_only_if_its_user_has_cancelled_it(
    run: Run, backend: BackendName, note: str | None, rule: str
) -> None:
    """Pods are deleted, and drivers killed, by others than the user, too."""
    run.plan.config.cluster.backend = backend
    cancelled = {} if note is None else {"cancelled": run.driven.job if note == "this" else note}
    (run.folder / "job.json").write_text(json.dumps({"backend": backend.name, "jobs": []} | cancelled))
    run.nodes.acts["trial 0"] = lambda: run.interruption._stop(signal.SIGTERM, None)
    assert run.ends() == 143
    assert (run.status.outcome, run.status.rule) == (Ending.interrupted, rule)
    assert run.outcomes[0] is (Outcome.aborted if rule == "SLU-08" else Outcome.running)
    assert f"{rule}: " in (run.folder / run_files.interrupted()).read_text()
    assert explain([run.folder]).rule == rule


def test_a_lost_node_is_the_cause_unless_this_node_gets_a_signal_a_moment_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drives, "SETTLE_S", 0.15)
    lost = NodeLostError("node 1 (rig1)", "no beat")

    def dies() -> None:
        run.nodes.lost = lost

    run.nodes.acts["trial 0"] = dies
    assert run.ends() == RESTART_EXIT_CODE
    assert "HST-01: node 1 (rig1) was lost: no beat" in (run.folder / run_files.interrupted()).read_text()
    run.interruption.why, run.nodes.lost, began_s = None, None, time.monotonic()
    monkeypatch.setattr(drives.time, "sleep", lambda s: run.interruption._stop(signal.SIGTERM, None))
    assert (run.ends(), run.status.rule) == (128 + 15, STOPPED.partition(":")[0])
    assert time.monotonic() - began_s < 5


@pytest.mark.long
def test_missing_inputs_are_prepared_once_and_every_node_must_have_them(make: MakeRun, tmp_path: Path) -> None:
    paths = [f"cluster.paths.{name}={tmp_path}" for name in ("data", "model", "logs")]
    run = make(*paths, task="lora_tiny")
    prepared = plan_paths.to_prepare(run.plan)

    def prepare() -> None:
        for path in prepared:
            Path(path).mkdir()

    def time_is_near() -> None:
        run.interruption.limit_s = 0.0

    run.nodes.acts = {"prepare": prepare, "trial 0": time_is_near}
    run.nodes.codes["trial 0"] = {}
    assert run.ends() == RESTART_EXIT_CODE and run.driven.made_progress, "the next start need not prepare"
    assert len(prepared) == 2 and run.nodes.required == prepared
    assert run.nodes.started.index("prepare") < run.nodes.started.index("trial 0") == len(run.nodes.started) - 1
    before, run.driven.made_progress = len(run.nodes.started), False
    run.interruption.why = run.interruption.limit_s = None
    assert (run.ends(), run.status.rule) == (1, "SLU-07"), "and this one has finished nothing"
    assert "prepare" not in run.nodes.started[before:] and run.nodes.required == prepared * 2


@pytest.mark.parametrize(
    ("error", "code", "rule", "during"),
    [
        (ConfigError("it cannot be", where="w", fix="f", rule="HST-10"), 2, "HST-10", "HST-10: it cannot be"),
        (BenchError("it is wrong", where="w", fix="f", rule="HST-02"), 1, "HST-02", "HST-02: "),
        (OSError(28, "No space left on device"), 1, "CFG-08", "CFG-08: cannot write: No space left on device"),
        (NodeLostError("node 1", "no beat"), 1, "HST-01", "HST-01: node 1 was lost: no beat"),
    ],
)
def test_errors_between_commands_end_the_run_with_their_cause(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, rule: str, during: str
) -> None:
    monkeypatch.setattr(drives, "SETTLE_S", 0.0)
    run.driven.restarts = False

    def joins() -> None:
        assert (run.folder / run_files.DISK_RESERVE).stat().st_size == 2**18
        raise error

    assert run.ends(joins) == code
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ending.failed, code, rule)
    assert [each.rule for each in run.progress.errors] == [rule]
    assert str(run.status.during).startswith(during) and not run.nodes.started


def test_an_unexpected_exception_ends_the_run_with_a_status_and_is_raised(run: Run) -> None:
    run.nodes.acts["trial 0"] = lambda: [][1]
    with pytest.raises(IndexError):
        run.ends()
    assert (run.status.outcome, run.status.exit_code) == (Ending.failed, 1) and run.outcomes[0] is Outcome.aborted
    assert run.status.during == "the driver failed"


@pytest.mark.long
def test_a_full_disk_is_reported_in_the_final_status(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.create(run.folder, run.plan)
    for free, during in ((2**20, "CFG-08: no space left for results: it failed"), (2**20 + 1, "it failed")):
        monkeypatch.setattr(drives.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert drives._finish(run.driven, 3, "it failed") == 3 and run.status.during == during

    def full(*ignored: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statuses, "write", full)
    for exit_code, expected in ((0, 1), (3, 3)):
        assert drives._finish(run.driven, exit_code, "it failed") == expected
        assert run.progress.lines[-1] == "CFG-08: cannot write status.json: No space left on device"
