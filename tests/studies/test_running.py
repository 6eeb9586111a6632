"""Consecutive calls of a study; a stub for the ranks writes the run folders."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_spec import COLUMNS, written

from bench import studies
from bench.console import study as study_sheets
from bench.contract import plan_kinds, run_files
from bench.contract.plan import Plan
from bench.errors import ConfigError, Stopped, SubmitError
from bench.launch import run_here
from bench.results.study import StudyResult
from bench.runs.status import Ending, Status
from bench.studies import library, run_missing
from helpers import study_runs

STUDY = f"""
title: t
question: q
source: s
{COLUMNS}
overrides: [task=pretrain_tiny, model.weights=random, cluster.ranks_per_node=1]
arms: {{a: {{overrides: [precision=fp32]}}, b: {{overrides: [precision=bf16]}}}}
runs: 2
"""


class Ranks:
    """Replaces `run_here.run`: records each run and ends it as the test defines, by default as valid."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.seeds: dict[str, int] = {}
        self.ends: dict[str, BaseException | str] = {}

    def run(self, plan: Plan, folder: Path) -> int:
        self.began.append(folder.name)
        self.seeds[folder.name] = plan.trials[0].seed
        end = self.ends.get(folder.name)
        if isinstance(end, str):
            study_runs.fail(folder, end, "it failed")
            raise SubmitError("it failed", where=str(folder), fix="none", rule=end)
        if end is not None:
            raise end
        study_runs.prove(folder, [1.0, 2.0])
        return 0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    stub = Ranks()
    monkeypatch.setattr(run_here, "run", stub.run)
    return stub


def paths(folder: Path) -> list[str]:
    return [f"cluster.paths.{name}={folder}" for name in ("logs", "data", "model")]


def left(folder: Path) -> list[str]:
    """Return what a dry run prints about the runs that another call would start or resume."""
    session = studies.begin("mine", paths(folder))
    blocks = session.blocks_left(session.statuses())
    return study_sheets.plan_sheet("mine", session.planned, blocks).caption.splitlines()


Call = Callable[..., tuple[int, StudyResult]]


@pytest.fixture
def call(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(library, "CONF", tmp_path)

    def call(study: str = STUDY, *words: str, runs: int | None = None) -> tuple[int, StudyResult]:
        written(tmp_path, study)
        session = studies.begin("mine", [*words, *paths(tmp_path)], runs=runs)
        code = run_missing.run_missing(session)
        return code, studies.read(session.folder)

    return call


@pytest.mark.long
def test_a_failed_run_is_tried_once_per_call_and_the_others_run(call: Call, ranks: Ranks, tmp_path: Path) -> None:
    ranks.ends["a.1"] = "RUN-02"
    code, result = call()
    assert code == 1 and sorted(ranks.began) == ["a.1", "a.2", "b.1", "b.2"]
    total, *blocks = left(tmp_path)
    assert total.startswith("1 of 4 runs to do; ") and blocks == ["block 1: a"]
    assert result.row("a").cells["step_time"].reason == "1 of 2 runs have no value (failed: RUN-02: it failed)"
    del ranks.ends["a.1"]
    ranks.began.clear()
    code, result = call()
    assert (code, ranks.began) == (0, ["a.1"])
    assert all(cell.n == 2 for row in result.rows for cell in row.cells.values())
    ranks.began.clear()
    assert call()[0] == 0 and not ranks.began, "valid runs are never run again"
    assert left(tmp_path) == ["all 4 runs are done"]


@pytest.mark.long
def test_arms_of_a_block_share_a_seed_and_runs_can_be_added(call: Call, ranks: Ranks) -> None:
    call(STUDY, "seed_base=5")
    assert ranks.seeds == {"a.1": 5, "b.1": 5, "a.2": 6, "b.2": 6}
    ranks.began.clear()
    _, result = call(STUDY, "seed_base=5", runs=4)
    assert sorted(ranks.began) == ["a.3", "a.4", "b.3", "b.4"]
    assert result.command.endswith(" --runs 4"), "the printed command has the number of runs"


@pytest.mark.long
def test_after_a_stop_the_next_call_resumes_with_the_same_plan(call: Call, ranks: Ranks) -> None:
    ranks.ends |= dict.fromkeys(("a.1", "b.1"), Stopped(15))
    with pytest.raises(Stopped):
        call()
    (interrupted,) = ranks.began
    ranks.ends.clear()
    assert call()[0] == 0 and ranks.began.count(interrupted) == 2 and len(ranks.began) == 5


@pytest.mark.long
def test_an_incomplete_folder_is_created_again(call: Call, ranks: Ranks, tmp_path: Path) -> None:
    """The call was killed while it wrote the plan: nothing had run there."""
    folder = tmp_path / "studies/mine-local/a.1"
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text('{"version": ')
    assert call()[0] == 0 and plan_kinds.load(folder / "plan.json").trials[0].seed == 1


@pytest.mark.long
def test_after_out_of_memory_all_blocks_use_the_next_smaller_batch(call: Call, ranks: Ranks) -> None:
    searched = STUDY.replace("arms:", "max_batch: {limit: 16}\narms:")
    ranks.ends |= {"b.b16.1": "RUN-01", "b.b14.2": "RUN-01"}
    code, result = call(searched)
    assert code == 0 and {"b.b16.1", "b.b14.1", "b.b14.2", "b.b13.1", "b.b13.2"} <= set(ranks.began)
    cell = result.row("b").cells["step_time"]
    assert cell.runs == ("b.b13.1", "b.b13.2") and "micro-batches of 16, 14" in cell.reason
    assert result.row("a").cells["step_time"].runs == ("a.b16.1", "a.b16.2")


@pytest.mark.long
def test_out_of_memory_is_detected_from_the_traceback_of_a_rank(
    call: Call, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine status.json has no rule, but a whole traceback."""

    def run(plan: Plan, folder: Path) -> int:
        if plan.batch.micro_batch_size < 16:  # type: ignore[union-attr]
            return ranks.run(plan, folder)
        last = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        if folder.name.startswith("b"):
            last = "RuntimeError: the shapes differ"
        what = f"Traceback (most recent call last):\n  File x\n{last}"
        account = {"time": 1.0, "exit_code": 1, "rule": None, "what": what, "where": "x", "fix": "y"}
        (folder / run_files.rank_error("trial 0", 0)).write_text(json.dumps(account))
        study_runs.ended(folder, "aborted", Status(outcome=Ending.failed, exit_code=1, what=what))
        raise SubmitError(what, where="x", fix="y")

    monkeypatch.setattr(run_here, "run", run)
    code, result = call(STUDY.replace("arms:", "max_batch: {limit: 16}\narms:"))
    assert code == 1 and result.row("a").cells["step_time"].runs == ("a.b14.1", "a.b14.2")
    reason = "failed: RUN-13: a Python exception ended a rank: RuntimeError: the shapes differ"
    assert result.row("b").cells["step_time"].reason.startswith(reason)


@pytest.mark.long
def test_a_run_that_cannot_start_has_a_reason(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.launch import start

    def refuse(*ignored: object) -> int:
        raise ConfigError("no rows in DATADIR", where="here", fix="make them")

    monkeypatch.setattr(start, "run", refuse)
    code, result = call()
    assert code == 1 and result.row("a").cells["step_time"].reason == "not run: no rows in DATADIR"


@pytest.mark.long
@pytest.mark.parametrize(
    ("there", "now", "message"),
    [
        ("precision=bf16", "recipe.lr=1", r"the arm 'b' no longer has precision=bf16 and now has recipe.lr=1"),
        ("runs: 2", "window: {skip_steps: 30, steps: 1}\nruns: 2", r"the arm 'a' now has window="),
    ],
)
def test_a_study_whose_arms_have_changed_is_refused(call: Call, there: str, now: str, message: str) -> None:
    call()
    with pytest.raises(
        ConfigError,
        match=rf"the study has changed since its runs started, so .*: {message}[\s\S]*rename ",
    ):
        call(STUDY.replace(there, now))
    with pytest.raises(ConfigError, match=r"the arm 'a' now has recipe.lr=1"):
        call(STUDY, "recipe.lr=1")
    call(STUDY.replace("runs: 2", "runs: 2\nmargin: 0.1"), "launch.attempts=2")  # neither affects the measurements


@pytest.mark.long
def test_a_study_without_a_runnable_arm_has_a_table(call: Call, ranks: Ranks) -> None:
    """The table has the reasons and the published figures."""
    code, result = call(STUDY.replace("precision=", "engine=accelerate,precision="))
    assert code == 1 and not ranks.began
    assert [row.cells["step_time"].reason for row in result.rows] == ["engine accelerate does not exist"] * 2
