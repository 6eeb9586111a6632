"""Tests of the test cluster itself."""

import time
from pathlib import Path

import pytest
from slurm_cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def submit(cluster: Cluster, *argv: object) -> str:
    """Return the id of a job on both nodes."""
    return cluster.run(["sbatch", "--parsable", "-N2", "-o", "/dev/null", *argv], check=True).stdout.strip()


def accounted(cluster: Cluster, job: str, *, fields: str, expected: list[str]) -> None:
    """Check what sacct reports for each start of a job; accounting may lag behind the controller."""
    query = ["sacct", "--duplicates", "-X", "-n", "-P", "-j", job, "-o", fields]
    deadline = time.monotonic() + 30
    while (shown := cluster.run(query)).stdout.split() != expected:
        assert time.monotonic() < deadline, f"{shown.stdout}{shown.stderr}"
        time.sleep(0.2)


def test_each_task_sees_its_node_and_its_gpus(cluster: Cluster) -> None:
    """Nodes have separate names, which resolve there, and the requested number of GPUs."""
    see = "echo $(hostname) $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $(getent hosts dgx-1)"
    done = cluster.run(["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-node=3", "bash", "-c", see])
    expected = [f"{node} {rank} 0,1,2 127.0.0.1 dgx-1" for node in ("dgx-0", "dgx-1") for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.parametrize(
    ("option", "refusal"),
    [
        ("--account=nobody", "Invalid account"),
        ("--partition=nowhere", "invalid partition"),
        ("--nodes=3", "Node count specification invalid"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
    ],
)
def test_invalid_requests_are_refused_at_submission(cluster: Cluster, option: str, refusal: str) -> None:
    """As on a managed cluster; elsewhere such a job would wait forever."""
    refused = cluster.run(["sbatch", option, "--wrap=true"])
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refusal in refused.stderr


def test_sacct_records_state_exit_code_and_account(cluster: Cluster) -> None:
    job = submit(cluster, "--wrap=exit 3")
    cluster.wait_for_state(job, "FAILED")
    accounted(cluster, job, fields="state,exitcode,account,nnodes", expected=["FAILED|3:0|test|2"])


def test_a_job_in_low_is_preempted_and_requeued(cluster: Cluster) -> None:
    """Preemption requeues it as soon as a job in batch needs its nodes."""
    victim = submit(cluster, "-p", "low", "--exclusive", "--wrap=sleep 300")
    cluster.wait_for_state(victim, "RUNNING")
    winner = submit(cluster, "--exclusive", "--wrap=true")
    cluster.wait_for_state(winner, "COMPLETED")
    cluster.wait_for_state(victim, "RUNNING")
    accounted(cluster, victim, fields="state", expected=["PREEMPTED", "RUNNING"])


def test_a_job_is_requeued_when_its_node_reboots(cluster: Cluster, tmp_path: Path) -> None:
    """The fastest way to a node failure; the job sees no difference."""
    job = submit(cluster, f"--wrap=echo $SLURM_RESTART_COUNT. >>{tmp_path}/starts; sleep 300")
    cluster.wait_for_state(job, "RUNNING")
    cluster.kill_node("dgx-1")
    cluster.start_node("dgx-1")
    cluster.wait_for_state(job, "PENDING")
    cluster.wait_for_state(job, "RUNNING")
    accounted(cluster, job, fields="state", expected=["NODE_FAIL", "RUNNING"])
    assert (tmp_path / "starts").read_text() == ".\n1.\n"


def test_a_power_cut_kills_all_processes_of_one_node_and_slurm_detects_it(cluster: Cluster, tmp_path: Path) -> None:
    """A detached process dies on dgx-1 and survives on dgx-0; a job with --no-requeue has failed."""
    beat = tmp_path / "beat.sh"
    beat.write_text(f"while :; do date >>{tmp_path}/$SLURMD_NODENAME; sleep 0.05; done\n")
    job = submit(cluster, "--no-requeue", f"--wrap=srun sh -c 'setsid sh {beat} & wait'")
    beats = [tmp_path / "dgx-0", tmp_path / "dgx-1"]
    while not all(file.exists() for file in beats):
        assert cluster.wait_for_state(job, {"PENDING", "RUNNING"})
    cluster.kill_node("dgx-1")
    alive_then, dead_then = (file.stat().st_size for file in beats)
    cluster.wait_for_state(job, "NODE_FAIL")
    assert beats[0].stat().st_size > alive_then
    assert beats[1].stat().st_size == dead_then
