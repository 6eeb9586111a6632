"""Who a process is, as each starter says it."""

import pytest

from bench.errors import SubmitError
from jobs.ranks.identity import Rank, first_host, from_environment

STARTERS = {
    "nobody": ({}, Rank(0, 0, 1, "127.0.0.1", 29500)),
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
    "a runner, inside an allocation": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0"},
        Rank(1, 1, 2, "127.0.0.1", 29500),
    ),
}


@pytest.mark.parametrize("starter", STARTERS)
def test_a_rank_knows_itself(starter: str) -> None:
    environment, expected = STARTERS[starter]
    assert from_environment(environment) == expected


@pytest.mark.parametrize("broken", [{"RANK": "0"}, {"MASTER_PORT": "http"}])
def test_half_an_environment_is_refused(broken: dict[str, str]) -> None:
    with pytest.raises(SubmitError, match="does not say which rank this is"):
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
