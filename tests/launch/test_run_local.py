"""A run on this machine whose folder holds a log that is not its own."""

from pathlib import Path

import pytest

from bench.contract import attempt, mllog
from bench.contract import plan as plans
from bench.errors import LogError
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
    (run / "plan.json").write_text(plans.dumps(plan))
    written_log(name="run/result_0.txt")
    monkeypatch.setattr(run_local, "_follow", lambda *ignored: mllog.Writer(run / "result_0.txt", attempt.load(run, 0)))
    with pytest.raises(LogError, match="LOG-17: result_0.txt was not written by this attempt"):
        run_local.run(plan, run)
    status = statuses.read(run)
    assert status is not None and (status.rule, status.exit_code) == ("LOG-17", 1)
    assert ledger.read(run)[0].outcome is ledger.Outcome.aborted and manifest.read(run) is not None
