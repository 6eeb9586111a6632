"""bench.submit without a queue: submitit's debug and local executors call the driver, which starts the ranks."""

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import bench
from bench.errors import ConfigError

TINY = ["task=kernels_tiny", "cluster=local", "task.kernels.attention=null", "task.kernels.gemm=null"]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.mark.trains
def test_a_run_in_this_process_starts_when_its_result_is_requested(runs: Path) -> None:
    job = bench.submit(TINY, in_process=True)
    (folder,) = runs.iterdir()
    assert not (folder / "ledger.json").exists() and job.state == "QUEUED"
    result = job.result()
    assert result.valid and result.folder.samefile(folder) and len(result.trials) == 1
    assert bench.read_run(folder).trials[0].result.seed == result.trials[0].result.seed


@pytest.mark.trains
def test_two_runs_in_the_background_give_their_own_results() -> None:
    """The one is stopped while it runs: it ends its ranks, keeps its folder and can be resumed."""
    kept, stopped = bench.submit([[*TINY, "seed_base=5"], ["task=lora_tiny", "cluster=local", "seed_base=9"]])
    deadline = time.monotonic() + 120
    while not (ranks := processes(stopped.paths.folder.parent)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stopped.cancel()
    error = stopped.exception()
    assert type(error).__name__ == "UncompletedJobError" and "the run was stopped" in str(error)
    assert ranks and not processes(stopped.paths.folder.parent)
    assert kept.result().valid and kept.result().trials[0].result.seed == 5
    with pytest.raises(bench.BenchError):
        bench.read_run(stopped.paths.folder.parent)


def processes(folder: Path) -> list[int]:
    """Return the ranks that work in a run folder, by their process ids."""
    ranks = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()) == folder and any("jobs.tasks" in argument for argument in process.cmdline()):
                ranks.append(process.pid)
    return ranks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=nosuch"], "task=nosuch does not exist"),
        ([*TINY, "launch.dry_run=true"], "cannot start a run with launch.dry_run"),
        (["task=lora_tiny", "cluster=kuberay"], "cannot start runs on ray, because submitit has no executor"),
        (["task=lora_tiny", "cluster=kubernetes"], "cannot start runs on kubernetes, because submitit has no executor"),
    ],
)
def test_if_one_run_is_refused_none_starts(runs: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.submit([TINY, overrides])
    assert not runs.exists()


def test_a_run_without_a_slurm_job_is_refused(runs: Path) -> None:
    bench.submit(TINY, in_process=True)
    (folder,) = runs.iterdir()
    (folder / "ledger.json").write_text("[]")
    with pytest.raises(ConfigError, match="this run uses local and has no Slurm job"):
        bench.job(folder)
