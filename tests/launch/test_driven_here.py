"""A whole run that is driven from here, with nodes that only take notes: what it runs, says and leaves."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.nodes.interruption import NodeLostError
from bench.backends.ssh import SshBackend
from bench.contract import mllog, plan_kinds, plan_paths, run_files
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.contract.task import Kind
from bench.errors import BenchError, ConfigError, SubmitError
from bench.launch import run_local
from bench.planning import compose
from bench.rules.check import broken
from bench.rules.finding import Finding
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending
from bench.runs.trial import Judged
from helpers.noted_nodes import Noted
from helpers.types import MakeLog


@dataclass
class Run:
    """A run of two trials on two hosts, whose ranks leave logs as planned."""

    plan: Plan
    folder: Path
    nodes: Noted
    findings: list[Finding]
    shown: list[tuple[int, bool]]
    capsys: pytest.CaptureFixture[str]
    pid: int = 0
    last: float = 0.92
    """The loss of the last evaluation."""

    def drive(self) -> int:
        """Run it as a process of its own."""
        self.pid += 1
        self.nodes.plan = self.plan
        (self.folder / run_files.PLAN).write_text(plan_kinds.dumps(self.plan))
        return run_local.run(self.plan, self.folder)

    def said(self) -> list[str]:
        return self.capsys.readouterr().err.splitlines()

    @property
    def status(self) -> statuses.Status:
        found = statuses.read(self.folder)
        assert found is not None
        return found

    @property
    def outcomes(self) -> list[Outcome]:
        return [entry.outcome for entry in ledger.read(self.folder)]


@pytest.fixture
def run(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    where = ["cluster=hosts", "cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=1"]
    paths = [f"cluster.paths.{name}={tmp_path}" for name in ("data", "model", "logs")]
    plan = compose.compose(["task=lora_tiny", "trials=2", "launch.health=true", *where, *paths])
    facts, *rest = plan.commands
    closed = replace(plan.submission, division="closed")
    plan = replace(plan, submission=closed, commands=[facts, replace(facts, name=plans.NODE_CHECK), *rest])
    made = Run(plan, tmp_path / "run", Noted(plan, ["rig0", "rig1"]), [], [], capsys)
    (made.folder / run_files.FACTS).mkdir(parents=True)
    (made.folder / run_files.RANK_LOGS).mkdir()

    def trained(index: int) -> None:
        trial = plan.trials[index]
        start = {"data_source": "grammar", "initial_weights": "task"}
        planned = start | {"seed": trial.seed, "submission_division": plan.submission.division}
        binding = mllog.load(made.folder, index)
        written_log(**planned, evals=(0.95, 0.94, made.last), binding=binding).rename(made.folder / trial.log)

    def prepared() -> None:
        (made.folder / run_files.PREPARE_LOG).touch()
        for path in plan_paths.to_prepare(plan):
            Path(path).mkdir()

    def show(folder: Path, trial: Trial, judged: Judged) -> None:
        assert folder == made.folder and not list(judged.differences), list(judged.differences)
        made.shown.append((trial.index, judged.valid))

    @contextmanager
    def nodes(backend: SshBackend, plan: Plan, folder: Path) -> Iterator[Noted]:
        assert (plan, folder) == (made.plan, made.folder)
        yield made.nodes

    made.nodes.acts = {"prepare": prepared, "trial 0": lambda: trained(0), "trial 1": lambda: trained(1)}
    monkeypatch.setattr(SshBackend, "nodes", nodes)
    monkeypatch.setattr(run_local.node_checks, "load", lambda folder: sorted((folder / run_files.FACTS).iterdir()))
    monkeypatch.setattr(run_local.node_checks, "judge", lambda plan, facts: [] if facts else made.findings)
    monkeypatch.setattr(run_local.trial_sheets, "show", show)
    monkeypatch.setattr(os, "getpid", lambda: made.pid)
    return made


def test_every_command_runs_once_and_what_is_done_is_not_done_again(run: Run) -> None:
    stale = run.folder / run_files.FACTS / "rank_0007.json"
    stale.write_text("of an earlier start")
    run.findings = [broken("NCC-05", "one [node] is slow", "here", fix="look", severity="warning")]
    assert run.drive() == 0
    names = [command.name for command in run.plan.commands]
    assert run.nodes.started == [name for name in names if name != "prepare"][:-2] + ["prepare", "trial 0", "trial 1"]
    assert names[0] == "node facts" and not stale.exists()
    assert run.shown == [(0, True), (1, True)] and run.outcomes == [Outcome.proven] * 2
    assert (run.status.outcome, run.status.exit_code) == (Ending.proven, 0) and manifest.read(run.folder) is not None
    assert run.nodes.asked == plan_paths.to_prepare(run.plan) and run.nodes.num_stopped == len(names)
    said = run.said()
    assert said[1].startswith(f"{run.plan.name} on 2 ranks, results in ")
    assert said[2:5] == ["node facts: 2 nodes, rig0, rig1", str(run.findings[0]), "node check: 2 nodes, rig0, rig1"]
    assert said[5] == "preparing (not timed): rows, then the base checkpoint"
    assert said[-1].startswith("what the trials are worth together: python -m bench score ")
    entries = ledger.read(run.folder)
    assert [len(entry.attempts) for entry in entries] == [1, 1]
    run.nodes.started.clear()
    run.nodes.acts.pop("prepare")
    assert run.drive() == 0 and run.nodes.started == names[:2]
    said = run.said()
    assert said[5:8] == [
        "prepared before: rows and base checkpoint are there",
        "trial 0, seed 1: was finished before",
        "trial 1, seed 2: was finished before",
    ]


def test_a_finding_ends_the_run_before_it_costs_anything_unless_it_is_forced(run: Run) -> None:
    run.findings = [broken("NCC-05", "no facts of a rank", "here", fix="look")]
    with pytest.raises(ConfigError, match="NCC-05: no facts of a rank"):
        run.drive()
    assert run.nodes.started == ["node facts"] and run.outcomes[0].is_open
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ending.failed, 2, "NCC-05")
    assert run.status.what == "no facts of a rank" and "python -m bench why" in run.said()[-1]
    run.plan.config.launch.force = True
    run.nodes.codes = {"node check": {0: 0, 1: 3}}
    with pytest.raises(SubmitError, match="node check ended without a result"):
        run.drive()
    assert run.nodes.started[1:] == ["node facts", "node check"]


def test_a_trial_that_fails_is_aborted_and_one_that_proves_nothing_is_no_success(run: Run) -> None:
    trained = run.nodes.acts.pop("trial 1")
    run.nodes.codes["trial 1"] = {0: 0, 1: 9}
    with pytest.raises(SubmitError, match="trial 1 ended without a result"):
        run.drive()
    assert run.outcomes == [Outcome.proven, Outcome.aborted] and run.shown == [(0, True)]
    job = ledger.read(run.folder)[1].attempts[0].job
    assert job == f"{socket.gethostname()}-1"
    assert "python -m bench why" in run.said()[-1]
    run.nodes.codes.clear()
    run.nodes.acts["trial 1"] = trained
    run.last = 0.93
    assert run.drive() == 1 and run.outcomes == [Outcome.proven, Outcome.not_proven]
    assert (run.status.outcome, run.status.exit_code) == (Ending.not_proven, 1) and run.shown[1:] == [(1, False)]
    assert "python -m bench why" in run.said()[-1]


def test_what_is_followed_is_the_log_of_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial has its curves and its GPUs; preparing is measured by the plan of its base."""
    followed: list[dict[str, Any]] = []
    planned: list[tuple[Plan, Command]] = []

    def follow(log: Path, expected: object, **how: Any) -> None:
        followed.append({"log": log, "alive": how.pop("is_alive")(), **how})

    def expected(plan: Plan, command: Command) -> None:
        planned.append((plan, command))

    monkeypatch.setattr(run_local, "follow", follow)
    monkeypatch.setattr(run_local.sources, "planned", expected)
    monkeypatch.setattr(run_local.trackers, "curves", lambda plan, folder, *, trial: (plan, folder, trial))
    monkeypatch.setattr(run_local, "Gpus", lambda folder, number: (folder, number))
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
    run.plan = run.nodes.plan = replace(plan_kinds.required(run.plan, plan_kinds.TrainingPlan), base=None)
    del run.nodes.acts["prepare"]
    run_local._follow(run.nodes, prepare, run.folder, run_local.sheet.to_stderr())  # type: ignore[arg-type]
    assert planned[-1] == (run.plan, prepare)


def test_a_full_disk_is_named_even_where_no_status_can_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*ignored: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    run.nodes.acts["trial 0"] = full
    with pytest.raises(
        BenchError, match="^CFG-08: cannot write: No space left on device\n  where: /somewhere\n"
    ) as error:
        run.drive()
    assert error.value.exit_code == run.status.exit_code == 1
    assert (run.status.rule, run.status.what) == ("CFG-08", "cannot write: No space left on device")
    monkeypatch.setattr(statuses, "write", full)
    with pytest.raises(BenchError, match="CFG-08"):
        run.drive()
    assert "CFG-08: status.json cannot be written: No space left on device" in run.said()


def test_what_nobody_has_foreseen_ends_the_run_too(run: Run) -> None:
    run.nodes.acts["trial 0"] = lambda: [][1]
    with pytest.raises(IndexError):
        run.drive()
    assert (run.status.outcome, run.status.exit_code, run.status.what) == (Ending.failed, 1, None)


def test_a_lost_node_ends_the_run(run: Run) -> None:
    run.nodes.lost = NodeLostError("node 1 (rig1)", "no beat")
    with pytest.raises(NodeLostError, match="HST-01"):
        run.drive()
    assert (run.status.outcome, run.status.rule, run.status.exit_code) == (Ending.failed, "HST-01", 1)


@pytest.mark.parametrize(
    ("kind", "target", "num_trials", "said"),
    [
        (Kind.kernels, None, 1, "every point, and its figures: python -m bench report {} -o FOLDER"),
        (Kind.generate, None, 1, "every answer, and its figure: python -m bench report {} -o FOLDER"),
        (Kind.serve, None, 2, "every load, and its figures: python -m bench report {} -o FOLDER"),
        (Kind.train, None, 2, "beside published systems: python -m bench report {}"),
        (Kind.train, 0.9, 2, "what the trials are worth together: python -m bench score {}"),
        (Kind.train, 0.9, 1, ""),
    ],
)
def test_what_one_would_type_next_is_shown(
    run: Run, kind: Kind, target: float | None, num_trials: int, said: str
) -> None:
    plan = replace(plan_kinds.required(run.plan, plan_kinds.TrainingPlan), trials=run.plan.trials[:num_trials])
    plan.config.task.kind, plan.config.training.target_eval_loss = kind, target
    assert run_local._next(plan, run.folder, 0) == said.format(run_local.short(run.folder))
    assert (
        run_local._next(plan, run.folder, 1)
        == f"to have it explained: python -m bench why {run_local.short(run.folder)}"
    )
