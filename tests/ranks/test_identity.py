"""The rank of a process, for each launcher."""

import pytest

from bench.errors import SubmitError
from jobs.ranks.identity import Rank, first_host, from_environment

LAUNCHERS = {
    "no launcher": ({}, Rank(0, 0, 1, "127.0.0.1", 29500)),
    "torchrun": (
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        Rank(3, 1, 4, "a", 1),
    ),
    "srun": (
        {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16", "SLURM_STEP_NODELIST": "dgx-[07-08]"},
        Rank(9, 1, 16, "dgx-07", 29500),
    ),
    "srun with Pyxis, which sets two of torchrun's variables in PyTorch images": (
        {
            "RANK": "9",
            "LOCAL_RANK": "1",
            "SLURM_PROCID": "9",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS": "16",
            "SLURM_STEP_NODELIST": "dgx-[07-08]",
            "SLURM_JOB_ID": "4537",
        },
        Rank(9, 1, 16, "dgx-07", 61001),
    ),
    "srun, a second attempt at a trial": (
        {
            "SLURM_PROCID": "9",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS": "16",
            "SLURM_STEP_NODELIST": "dgx-[07-08]",
            "SLURM_JOB_ID": "4537",
            "RUNSTOP_ATTEMPT": "00000002" + "f" * 24,
        },
        Rank(9, 1, 16, "dgx-07", 61003),
    ),
    "a runner, inside an allocation": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0"},
        Rank(1, 1, 2, "127.0.0.1", 29500),
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_from_environment(launcher: str) -> None:
    environment, expected = LAUNCHERS[launcher]
    assert from_environment(environment) == expected


@pytest.mark.parametrize("broken", [{"RANK": "0"}, {"MASTER_PORT": "http"}])
def test_an_incomplete_environment_is_refused(broken: dict[str, str]) -> None:
    with pytest.raises(SubmitError, match="an environment variable of the rank is missing or wrong"):
        from_environment(broken)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("dgx03", "dgx03"),
        ("dgx[03-07,9],login", "dgx03"),
        ("a1,a2", "a1"),
        ("r[1-2]n[03-04]", "r1n03"),
        ("n[5]-ib", "n5-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
