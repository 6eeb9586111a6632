"""Sequential runs of a study on three backends: Slurm's commands and the ranks are stubs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_queued import Slurm, slurm
from test_running import Ranks, ranks
from test_spec import COLUMNS, written

from bench import studies
from bench.backends.protocol import Job
from bench.errors import Stopped
from bench.results.study import StudyResult
from bench.runs import run as runs
from bench.studies import run_missing
from helpers import study_runs

__all__ = ["ranks", "slurm"]
STUDY = f"""
title: t
question: q
source: s
{COLUMNS}
overrides: [task=lora_tiny, model.weights=random, cluster.num_nodes=1, cluster.ranks_per_node=1, walltime=10]
arms:
  here: {{}}
  slurm: {{overrides: [cluster=slurm_test]}}
  kubernetes: {{overrides: [cluster=kubernetes_test]}}
runs: 2
jobs: sequential
"""
Call = Callable[[], tuple[int, StudyResult]]


@pytest.fixture
def call(tmp_path: Path, slurm: Slurm, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the study; a job completes its run once a call waits for it."""

    def wait(folder: Path) -> Iterator[Job]:
        assert slurm.jobs() == [folder.name], "one job at a time"
        ranks.began.append(folder.name)
        if end := ranks.ends.pop(folder.name, None):
            assert isinstance(end, Stopped)
            raise end
        study_runs.prove(folder, [1.0, 2.0])
        slurm.forgets()
        yield from ()

    def call() -> tuple[int, StudyResult]:
        written(tmp_path, STUDY)
        session = studies.begin("mine", ["cluster=local"])
        return run_missing.run_missing(session), studies.read(session.folder)

    monkeypatch.setattr(runs, "wait", wait)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return call


@pytest.mark.long
def test_a_run_waits_for_the_previous_one_and_a_missing_backend_has_a_reason(
    call: Call, ranks: Ranks, slurm: Slurm
) -> None:
    code, result = call()
    blocks = [[f"{arm}.{block}" for arm in arms] for block, arms in enumerate(result.order, 1)]
    assert ranks.began == [name for block in blocks for name in block if "kubernetes" not in name]
    missing = result.row("kubernetes").cells["step_time"]
    assert (code, missing.value) == (1, None) and missing.reason.startswith("not run: "), missing
    assert "no configuration" in missing.reason.lower(), missing.reason
    assert [result.row(arm).cells["step_time"].n for arm in ("here", "slurm")] == [2, 2]
    ranks.began.clear()
    call()
    assert ranks.began == slurm.jobs() == [], "valid runs are never run again"


@pytest.mark.long
def test_a_stopped_call_leaves_its_job_to_the_next_call(
    call: Call, ranks: Ranks, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.ends["slurm.1"] = Stopped(2)
    with pytest.raises(Stopped):
        call()
    assert (
        slurm.jobs() == ["slurm.1"] and "the job keeps running; to cancel it: runstop cancel" in capsys.readouterr().err
    )
    before = len(ranks.began)
    call()
    assert ranks.began[before] == "slurm.1" and len(set(ranks.began)) == 4
