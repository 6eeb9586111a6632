"""The script of a shared job: it starts the script of each run in order, also after a failed run."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench.backends.slurm import script
from bench.planning import compose

WRITES = 'echo "$1" >>"$(dirname "$1")/began"'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's folder next to those of four runs, whose scripts only record that they started."""
    plan = compose.compose(["task=pretrain_tiny", "cluster=slurm_test", "model.weights=random"])
    runs = ["a.1", "b.1", "b.2", "a.2"]
    for run in runs:
        (tmp_path / run).mkdir()
        (tmp_path / run / "job.sbatch").write_text(f"{WRITES}\n")
    (tmp_path / "job.1").mkdir()
    (tmp_path / "job.1/job.sbatch").write_text(script.shared_job([plan] * 4, runs, name="tiny"))
    return tmp_path / "job.1"


def start(job: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["bash", job / "job.sbatch", job], stdout=subprocess.DEVNULL)


def began(job: Path) -> list[str]:
    path = job.parent / "began"
    return [Path(line).name for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.long
def test_runs_follow_each_other_and_one_that_fails_does_not_stop_the_rest(job: Path) -> None:
    """One run was finished by an earlier start of the job, and another one fails."""
    (job.parent / "b.1/status.json").write_text("{}")
    (job.parent / "b.2/job.sbatch").write_text(f"{WRITES}; exit 1\n")
    assert start(job).wait(30) == 1 and began(job) == ["a.1", "b.2", "a.2"]
    (job.parent / "b.2/job.sbatch").write_text(f"{WRITES}\n")
    (job.parent / "began").unlink()
    assert start(job).wait(30) == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_to_the_current_run_and_no_other_starts(job: Path, sent: signal.Signals) -> None:
    """Slurm signals the batch script only; the script waits until the run has ended."""
    waits = f"trap 'sleep 0.3; echo {sent.name} >>\"$1/heard\"; exit 143' {sent.name[3:]}\n{WRITES}\nsleep 60 & wait\n"
    (job.parent / "b.1/job.sbatch").write_text(waits)
    process = start(job)
    deadline = time.monotonic() + 30
    while began(job) != ["a.1", "b.1"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, sent)
    assert process.wait(30) == 143 and (job.parent / "b.1/heard").read_text() == f"{sent.name}\n"
    assert began(job) == ["a.1", "b.1"]


def test_bash_and_shellcheck_accept_it(job: Path) -> None:
    subprocess.run(["bash", "-n", job / "job.sbatch"], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", job / "job.sbatch"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
