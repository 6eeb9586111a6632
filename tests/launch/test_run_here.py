"""A run driven by the launching process, as its user sees it; fake nodes record calls in place of ranks."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.ssh import SshBackend
from bench.contract import mllog, plan_kinds, plan_paths, run_files
from bench.contract.plan import Command, Plan, Trial
from bench.contract.task import Kind
from bench.errors import Stopped
from bench.launch import run_here
from bench.planning import compose
from bench.results.kind import Judged
from bench.runs import ledger
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending
from helpers.noted_nodes import Noted
from helpers.planted_secrets import PLANTED
from helpers.types import MakeLog


@dataclass
class Run:
    """A run of two trials on two hosts, whose ranks leave logs as planned."""

    plan: Plan
    folder: Path
    nodes: Noted
    shown: list[tuple[int, bool]]
    capsys: pytest.CaptureFixture[str]
    pid: int = 0

    def drive(self) -> int:
        """Run it as a process of its own."""
        self.pid += 1
        return run_here.run(self.plan, self.folder)

    def printed(self) -> list[str]:
        return self.capsys.readouterr().err.splitlines()

    @property
    def outcomes(self) -> list[Outcome]:
        return [entry.outcome for entry in ledger.read(self.folder)]


@pytest.fixture
def run(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    where = ["cluster=hosts", "cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=1"]
    paths = [f"cluster.paths.{name}={tmp_path}" for name in ("data", "model", "logs")]
    plan = compose.compose(["task=lora_tiny", "trials=2", "launch.force=true", *where, *paths])
    training = plan_kinds.required(plan, plan_kinds.TrainingPlan)
    plan = replace(training, submission=replace(training.submission, division="closed"))
    run = Run(plan, tmp_path / "run", Noted(plan, ["rig0", "rig1"]), [], capsys)
    (run.folder / run_files.FACTS).mkdir(parents=True)
    (run.folder / run_files.RANK_LOGS).mkdir()
    (run.folder / run_files.PLAN).write_text(plan_kinds.dumps(plan))

    def trained(index: int) -> None:
        trial = plan.trials[index]
        start = {"data_source": "grammar", "initial_weights": "task"}
        planned = start | {"seed": trial.seed, "submission_division": "closed"}
        written_log(**planned, binding=mllog.load(run.folder, index)).rename(run.folder / trial.log)

    def prepared() -> None:
        (run.folder / run_files.PREPARE_LOG).touch()
        for path in plan_paths.to_prepare(plan):
            Path(path).mkdir()

    def show(folder: Path, trial: Trial, judged: Judged) -> None:
        assert folder == run.folder and judged.differences == ()
        run.shown.append((trial.index, judged.valid))

    @contextmanager
    def nodes(backend: SshBackend, plan: Plan, folder: Path) -> Iterator[Noted]:
        assert (plan, folder) == (run.plan, run.folder)
        yield run.nodes

    run.nodes.acts = {"prepare": prepared, "trial 0": lambda: trained(0), "trial 1": lambda: trained(1)}
    monkeypatch.setattr(SshBackend, "nodes", nodes)
    monkeypatch.setattr(run_here.trial_tables, "show", show)
    monkeypatch.setattr(os, "getpid", lambda: run.pid)
    return run


@pytest.mark.long
def test_finished_work_is_not_repeated(run: Run) -> None:
    assert run.drive() == 0
    names = [command.name for command in run.plan.commands]
    assert run.nodes.started == names and run.shown == [(0, True), (1, True)]
    printed = run.printed()
    assert printed[1].startswith(f"{run.plan.name} on 2 ranks, results in ")
    assert "preparing (not timed): rows, then the base checkpoint" in printed
    assert printed[-1].startswith("to see the score of all trials: runstop score ")
    entries = ledger.read(run.folder)
    assert [[attempt.job for attempt in entry.attempts] for entry in entries] == [[f"{socket.gethostname()}-1"]] * 2
    assert not (run.folder / run_files.JOB).exists(), "no backend knows it by an id"
    run.nodes.started.clear()
    assert run.drive() == 0 and run.nodes.started == names[:1]
    printed = run.printed()
    assert "already prepared: rows and base checkpoint exist" in printed
    assert [line for line in printed if line.endswith("already finished")] == [
        "trial 0, seed 1: already finished",
        "trial 1, seed 2: already finished",
    ]


@pytest.mark.long
def test_a_trial_that_failed_gets_another_attempt(run: Run) -> None:
    trained = run.nodes.acts.pop("trial 1")
    run.nodes.codes["trial 1"] = {0: 0, 1: 9}
    assert run.drive() == 1 and run.outcomes == [Outcome.valid, Outcome.aborted]
    printed = run.printed()
    assert "runstop why" in printed[-1] and any("trial 1 ended without a result" in line for line in printed)
    run.nodes.codes.clear()
    run.nodes.acts["trial 1"] = trained
    assert run.drive() == 0 and run.outcomes == [Outcome.valid] * 2 and run.shown == [(0, True), (1, True)]


def test_printed_errors_show_no_secret(run: Run) -> None:
    secret, hidden = PLANTED["GitHub"]

    def full() -> None:
        raise OSError(28, "No space left on device", f"/{secret}")

    run.nodes.acts["trial 0"] = full
    assert run.drive() == 1
    printed = "\n".join(run.printed())
    assert "CFG-08: cannot write: No space left on device" in printed and hidden not in printed


@pytest.mark.long
def test_the_log_of_each_command_is_followed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials also have curves and GPU telemetry."""
    followed: list[dict[str, Any]] = []
    planned: list[tuple[Plan, Command]] = []

    def follow(log: Path, expected: object, **how: Any) -> None:
        followed.append({"log": log, "alive": how.pop("is_alive")(), **how})

    def expected(plan: Plan, command: Command) -> None:
        planned.append((plan, command))

    monkeypatch.setattr(run_here, "follow", follow)
    monkeypatch.setattr(run_here.sources, "planned", expected)
    monkeypatch.setattr(run_here.trackers, "curves", lambda plan, folder, *, trial: (plan, folder, trial))
    monkeypatch.setattr(run_here, "Gpus", lambda folder, number: (folder, number))
    assert run.drive() == 0
    prepare, *trials = run.plan.commands[-3:]
    assert planned == [(run.plan, prepare), (run.plan, trials[0]), (run.plan, trials[1])]
    assert [(each["log"].name, each["name"], each["alive"]) for each in followed] == [
        (run_files.PREPARE_LOG, "prepare", False),
        ("result_0.txt", "trial 0", False),
        ("result_1.txt", "trial 1", False),
    ]
    assert "curves" not in followed[0] and "gpus" not in followed[0]
    assert [each["gpus"] for each in followed[1:]] == [(run.folder, 0), (run.folder, 1)]
    assert [each["curves"] for each in followed[1:]] == [(run.plan, run.folder, f"result_{k}") for k in (0, 1)]


@pytest.mark.long
def test_a_stopped_run_shows_where_its_finished_trials_are(run: Run) -> None:
    def stopped() -> None:
        raise Stopped(signal.SIGTERM)

    run.nodes.acts["trial 1"] = stopped
    with pytest.raises(Stopped):
        run.drive()
    assert any(line.startswith("stopped; finished trials are in ") for line in run.printed())
    status = statuses.read(run.folder)
    assert status is not None and (status.outcome, status.exit_code) == (Ending.interrupted, 143)


@pytest.mark.parametrize(("part", "can_resume"), [("step_5.part", False), ("step_5", True)])
def test_resume_is_suggested_only_if_there_is_a_checkpoint(run: Run, part: str, can_resume: bool) -> None:
    run.nodes.codes["node facts"] = {0: 1, 1: 1}
    (run.folder / run_files.checkpoints(0) / part).mkdir(parents=True)
    assert run.drive() == 1
    assert any("runstop resume" in line for line in run.printed()) is can_resume


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "target", "num_trials", "words"),
    [
        (Kind.kernels, None, 1, "to see every point and its figures: runstop report {} -o page"),
        (Kind.generate, None, 1, "to see every answer and its figure: runstop report {} -o page"),
        (Kind.serve, None, 2, "to see every load and its figures: runstop report {} -o page"),
        (Kind.train, None, 2, "to compare with published systems: runstop report {}"),
        (Kind.train, 0.9, 2, "to see the score of all trials: runstop score {}"),
        (Kind.train, 0.9, 1, ""),
    ],
)
def test_next_commands_are_suggested(run: Run, kind: Kind, target: float | None, num_trials: int, words: str) -> None:
    plan = replace(plan_kinds.required(run.plan, plan_kinds.TrainingPlan), trials=run.plan.trials[:num_trials])
    plan.config.task.kind, plan.config.training.target_eval_loss = kind, target
    folder = run_here.short(run.folder)
    assert run_here._next_commands(plan, run.folder, 0) == words.format(folder)
    assert run_here._next_commands(plan, run.folder, 1) == f"to see why: runstop why {folder}"
