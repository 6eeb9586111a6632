"""What node 0 does with the commands of a plan, and how a run ends; nodes that only take notes stand for the ranks."""

import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.backends.nodes.interruption import START_AGAIN, STOPPED, TIME_IS_NEAR, Ending, NodeLostError
from bench.contract import mllog, plan_kinds, plan_paths, run_files
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError
from bench.planning import compose
from bench.runner import lead as leads
from bench.runner.lead import Lead
from bench.runs import ledger
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending as Ended
from helpers.noted_nodes import Noted
from helpers.planted_secrets import PLANTED
from helpers.types import MakeLog


@dataclass
class Run:
    """A run of two trials on two nodes."""

    lead: Lead
    nodes: Noted

    def ends(self) -> int:
        return leads.drive(self.lead, lambda: self.nodes.started.append("joined"))

    @property
    def status(self) -> statuses.Status:
        found = statuses.read(self.lead.run)
        assert found is not None
        return found

    @property
    def outcomes(self) -> list[Outcome]:
        return [entry.outcome for entry in ledger.read(self.lead.run)]


@pytest.fixture
def run(tmp_path: Path, written_log: MakeLog) -> Run:
    words = ("cluster.drop_caches=sync it", "launch.force=true", "trials=2")
    plan = compose.compose(["task=lora70b", "cluster=dgx2", *words])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / run_files.PLAN).write_text(plan_kinds.dumps(plan))
    nodes = Noted(plan, ["rig0", "rig1"])
    lead = Lead(folder, plan, nodes, Ending(), job="7", restarts=True, trials=[0, 1])  # type: ignore[arg-type]

    def trained(index: int) -> None:
        trial = plan.trials[index]
        planned = {"seed": trial.seed, "submission_division": plan.submission.division}
        written_log(**planned, binding=mllog.load(folder, index)).rename(folder / trial.log)

    nodes.acts = {"trial 0": lambda: trained(0), "trial 1": lambda: trained(1)}
    return Run(lead, nodes)


def test_every_command_runs_once_and_in_order_and_the_ledger_proves_the_trials(run: Run) -> None:
    facts = run.lead.run / run_files.FACTS / "rank_9999.json"
    facts.parent.mkdir()
    facts.write_text("of an earlier start")
    assert run.ends() == 0
    assert run.nodes.started == ["joined", *(command.name for command in run.lead.plan.commands)]
    assert run.nodes.num_stopped == len(run.lead.plan.commands) and not facts.exists()
    assert (run.status.outcome, run.status.exit_code, run.outcomes) == (Ended.proven, 0, [Outcome.proven] * 2)
    assert [entry.attempts[0].nodes for entry in ledger.read(run.lead.run)] == ["rig0,rig1"] * 2
    dropped = "rig0: sync it\nrig1: sync it\n"
    assert [(run.lead.run / run_files.caches(index)).read_text() for index in (0, 1)] == [dropped] * 2
    assert run.lead.gain and not (run.lead.run / run_files.RESERVE).exists()
    run.nodes.started.clear()
    assert run.ends() == 0 and "trial 0" not in run.nodes.started, "a trial that is proven is not run again"


@pytest.mark.parametrize(
    ("name", "codes", "expected", "said"),
    [
        ("node check", {0: 0, 1: 5}, 5, "node check failed"),
        ("trial 1", {3: 137}, 137, "trial 1 failed"),
        ("trial 1", {3: 7, 4: 9}, 9, "trial 1 failed"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_exit_code(
    run: Run, name: str, codes: dict[int, int], expected: int, said: str
) -> None:
    run.nodes.codes[name] = codes
    run.nodes.acts.pop(name, None)
    assert run.ends() == expected
    assert run.nodes.started[-1] == name, "nothing runs behind it"
    assert (run.status.outcome, run.status.exit_code) == (Ended.failed, expected)
    assert said in str(run.status.during or run.status.what)


@pytest.mark.parametrize(
    ("why", "gain", "restarts", "expected"),
    [
        (TIME_IS_NEAR, True, True, START_AGAIN),
        (TIME_IS_NEAR, False, True, 1),
        (TIME_IS_NEAR, True, False, 1),
        ("HST-01: node 1 is gone", False, True, START_AGAIN),
        ("HST-01: node 1 is gone", True, False, 1),
    ],
)
def test_a_run_is_started_again_where_somebody_does_and_the_next_start_gets_further(
    run: Run, why: str, gain: bool, restarts: bool, expected: int
) -> None:
    """Time that was too short to finish anything is so the next time, too; a node that was lost may be replaced."""
    ledger.create(run.lead.run, run.lead.plan)
    run.lead.gain, run.lead.restarts = gain, restarts
    assert leads.leave(run.lead, why) == expected
    if expected == START_AGAIN:
        assert statuses.read(run.lead.run) is None
        assert (run.lead.run / run_files.interrupted()).read_text() == f"{why}\n"
    else:
        assert (run.status.outcome, run.status.exit_code) == (Ended.failed, 1)
        assert f"{run.status.rule}: " == why[: len("HST-01: ")]
        assert ("has finished nothing" in str(run.status.during)) is not gain


def test_who_tells_a_run_to_end_finds_how_to_go_on(run: Run) -> None:
    run.nodes.acts["trial 1"] = lambda: run.lead.ending._stop(2, None)
    assert run.ends() == 130
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ended.interrupted, 130, "SLU-08")
    assert f"resume {run.lead.run}" in str(run.status.fix) and not (run.lead.run / run_files.RESERVE).exists()
    assert run.outcomes[0] is Outcome.proven and run.nodes.num_stopped == len(run.nodes.started) - 1


def test_a_lost_node_is_blamed_unless_this_one_is_told_to_end_a_moment_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leads, "SETTLE_S", 0.15)
    lost = NodeLostError("node 1 (rig1)", "no beat")

    def dies() -> None:
        run.nodes.lost = lost

    run.nodes.acts["trial 0"] = dies
    assert run.ends() == START_AGAIN
    assert "HST-01: node 1 (rig1) is gone: no beat" in (run.lead.run / run_files.interrupted()).read_text()
    run.lead.ending.why, run.nodes.lost, began_s = None, None, time.monotonic()
    monkeypatch.setattr(leads.time, "sleep", lambda s: run.lead.ending._stop(15, None))
    assert (run.ends(), run.status.rule) == (128 + 15, STOPPED.partition(":")[0])
    assert time.monotonic() - began_s < 5


def test_what_is_not_prepared_is_made_once_and_every_node_must_have_it(run: Run, tmp_path: Path) -> None:
    paths = [f"cluster.paths.{name}={tmp_path}" for name in ("data", "model", "logs")]
    run.lead.plan = run.nodes.plan = compose.compose(["task=lora_tiny", "cluster=dgx2", "launch.force=true", *paths])
    made = plan_paths.to_prepare(run.lead.plan)

    def prepare() -> None:
        for path in made:
            Path(path).mkdir()

    def cut_short() -> None:
        run.lead.ending.limit_s = 0.0

    run.nodes.acts = {"prepare": prepare, "trial 0": cut_short}
    run.nodes.codes["trial 0"] = {}
    assert run.ends() == START_AGAIN and run.lead.gain, "the next start need not prepare"
    assert len(made) == 2 and run.nodes.asked == made
    assert run.nodes.started.index("prepare") < run.nodes.started.index("trial 0") == len(run.nodes.started) - 1
    before, run.lead.gain = len(run.nodes.started), False
    run.lead.ending.why = run.lead.ending.limit_s = None
    assert (run.ends(), run.status.rule) == (1, "SLU-07"), "and this one has finished nothing"
    assert "prepare" not in run.nodes.started[before:] and run.nodes.asked == made * 2


@pytest.mark.parametrize(
    ("error", "code", "rule", "during"),
    [
        (ConfigError("it cannot be", where="w", fix="f", rule="HST-10"), 2, "HST-10", "HST-10: it cannot be"),
        (BenchError(f"{PLANTED['GitHub'][0]} is wrong", where="w", fix="f", rule="HST-02"), 1, "HST-02", "HST-02: "),
        (OSError(28, "No space left on device"), 1, "CFG-08", "CFG-08: cannot write: No space left on device"),
        (NodeLostError("node 1", "no beat"), 1, "HST-01", "HST-01: node 1 is gone: no beat"),
    ],
)
def test_what_goes_wrong_between_commands_ends_the_run_with_its_reason(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    rule: str,
    during: str,
) -> None:
    monkeypatch.setattr(leads, "SETTLE_S", 0.0)
    run.lead.restarts = False

    def join() -> None:
        assert (run.lead.run / run_files.RESERVE).stat().st_size == 2**18
        raise error

    assert leads.drive(run.lead, join) == code
    assert (run.status.outcome, run.status.exit_code, run.status.rule) == (Ended.failed, code, rule)
    said = capsys.readouterr().err
    assert PLANTED["GitHub"][1] not in said and (isinstance(error, OSError | NodeLostError) or f"{rule}: " in said)
    assert str(run.status.during).startswith(during) and not run.nodes.started


def test_a_question_that_fails_is_one_that_is_answered_no(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect of its own is told with its traceback, as by a process of its own, and does not end this one."""

    def begin(folder: Path, plan: Plan, words: Namespace) -> int:
        assert (folder, plan, vars(words)) == (
            run.lead.run,
            run.lead.plan,
            {"trial": 0, "job": "7", "nodes": "rig0,rig1"},
        )
        raise RuntimeError("a defect")

    monkeypatch.setattr(leads.in_job, "begin", begin)
    assert run.ends() == 1 and "Traceback" in capsys.readouterr().err
    assert run.status.during == "opening trial 0 failed"
    monkeypatch.setattr(leads.in_job, "begin", lambda *ignored: 6)
    assert run.ends() == 6

    def refuses(*ignored: object) -> int:
        raise ConfigError("refused", where="w", fix="f")

    monkeypatch.setattr(leads.in_job, "open_", refuses)
    assert run.ends() == 2 and run.status.during == "opening the run failed"
    assert "refused\n  where: w" in capsys.readouterr().err


def test_a_last_word_that_finds_no_room_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.create(run.lead.run, run.lead.plan)
    for free, said in ((2**20, "CFG-08: no space left for results: it failed"), (2**20 + 1, "it failed")):
        monkeypatch.setattr(leads.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert leads.finish(run.lead, 3, "it failed") == 3 and run.status.during == said

    def full(*ignored: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statuses, "write", full)
    for exit_code, expected in ((0, 1), (3, 3)):
        assert leads.finish(run.lead, exit_code, "it failed") == expected
        assert capsys.readouterr().err == "CFG-08: status.json cannot be written: No space left on device\n"
