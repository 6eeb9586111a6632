"""A run on this machine whose folder holds a log that is not its own."""

import signal
from pathlib import Path

import pytest

from bench.contract import mllog, plan_kinds, run_files
from bench.errors import BenchError, LogError, Stopped
from bench.launch import run_local
from bench.planning import compose
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from helpers.types import MakeLog


def test_a_log_that_the_ranks_found_is_named_for_what_it_is(
    tmp_path: Path, written_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks say only that there is one (CFG-05)."""
    plan = compose.compose(["task=lora_tiny", "cluster=local", "model.weights=random"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    written_log(name="run/result_0.txt")
    monkeypatch.setattr(run_local, "_follow", lambda *ignored: mllog.Writer(run / "result_0.txt", mllog.load(run, 0)))
    with pytest.raises(LogError, match="LOG-17: result_0.txt was not written by this attempt"):
        run_local.run(plan, run)
    status = statuses.read(run)
    assert status is not None and (status.rule, status.exit_code) == ("LOG-17", 1)
    assert ledger.read(run)[0].outcome is ledger.Outcome.aborted and manifest.read(run) is not None


def test_a_run_that_was_cut_short_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where there is a checkpoint to go on from."""
    plan = compose.compose(["task=pretrain_tiny", "cluster=local", "task.training.checkpoint_every_steps=5"])

    def cut_short(*ignored: object) -> None:
        raise BenchError("a rank has failed", where="here", fix="see why")

    monkeypatch.setattr(run_local, "_follow", cut_short)
    for name, part in (("without", "step_5.part"), ("with", "step_5")):
        run = tmp_path / name
        (run / run_files.checkpoints(0) / part).mkdir(parents=True)
        (run / "plan.json").write_text(plan_kinds.dumps(plan))
        with pytest.raises(BenchError):
            run_local.run(plan, run)
        assert ("python -m bench resume" in capsys.readouterr().err) is (name == "with")


def test_a_run_that_was_stopped_says_where_what_was_finished_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = compose.compose(["task=pretrain_tiny", "cluster=local"])

    def stopped(*ignored: object) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(run_local, "_follow", stopped)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    with pytest.raises(Stopped):
        run_local.run(plan, tmp_path)
    assert f"stopped; what was finished is in {tmp_path}" in capsys.readouterr().err.replace("\n", "")
    status = statuses.read(tmp_path)
    assert status is not None and (status.outcome, status.exit_code) == (statuses.Ending.interrupted, 143)
