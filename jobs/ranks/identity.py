"""Read this process's rank from the environment that its launcher set."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from bench.contract.run_files import ATTEMPT_VARIABLE, NODE_VARIABLE
from bench.contract.schema import PORTS
from bench.errors import SubmitError

DEFAULT_PORT = 29500
"""Source: torch.distributed.run's default, and MASTER_PORT of NVIDIA's MLPerf run.sub."""

_LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}


@dataclass(frozen=True, slots=True)
class Rank:
    """One of world_size processes; local_rank is its number on its node and selects the GPU."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int


def from_environment(env: Mapping[str, str] = os.environ) -> Rank:
    """Return this process's rank from the variables of a runner, torchrun or srun; without them, rank 0 of 1.

    A launcher is recognised if all of its variables are set: Pyxis sets RANK and LOCAL_RANK in PyTorch images, without
    WORLD_SIZE.

    Raises:
        SubmitError: only some variables of a launcher are set, or one of them is not a number.
    """
    launchers = [names for names in _LAUNCHERS.values() if names[0] in env]
    complete = [names for names in launchers if all(name in env for name in names)]
    names = next(iter([*complete, *launchers]), None)
    try:
        rank, local_rank, world_size = (0, 0, 1) if names is None else (int(env[name]) for name in names)
        port = int(env.get("MASTER_PORT") or _port(env))
    except (KeyError, ValueError) as error:
        raise SubmitError(
            f"an environment variable of the rank is missing or wrong: {error}",
            where=", ".join(names or ("MASTER_PORT",)),
            fix="start ranks with `runstop launch`, srun or torchrun",
        ) from error
    return Rank(rank, local_rank, world_size, master_addr(env), port)


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this node, which --exclude accepts; else the name from its runner, or the host name."""
    return env.get("SLURMD_NODENAME") or env.get(NODE_VARIABLE) or socket.gethostname()


def _port(env: Mapping[str, str]) -> int:
    job = env.get("SLURM_JOB_ID")
    attempt = int(env.get(ATTEMPT_VARIABLE, "0")[:8], 16)  # each attempt has another port: one may be in use
    return DEFAULT_PORT if job is None else PORTS[(int(job) + attempt) % len(PORTS)]


def master_addr(env: Mapping[str, str]) -> str:
    """Return the host of rank 0: MASTER_ADDR, else the first node of the Slurm step, else this machine."""
    if addr := env.get("MASTER_ADDR"):
        return addr
    return first_host(env["SLURM_STEP_NODELIST"]) if "SLURM_STEP_NODELIST" in env else "127.0.0.1"


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `dgx[03-07,9],login` gives `dgx03`."""
    host = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodelist)
    assert host is not None, nodelist
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", host[0])
