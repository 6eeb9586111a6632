"""This test process as the only rank of a job: how it is started, how it joins, and an end that only raises."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import distributed

from bench.backends.local import free_port
from jobs.ranks import guard

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def start(patch: pytest.MonkeyPatch, *argv: str | Path) -> None:
    """Set what a launcher sets and the command line; signals stay as they are, and nobody looks for them."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        patch.delenv(name)
    for name, value in (LAUNCHED | {"MASTER_PORT": str(free_port())}).items():
        patch.setenv(name, value)
    patch.setattr(sys, "argv", ["program", *map(str, argv)])
    patch.setattr(guard.signal, "pthread_sigmask", lambda how, signals: None)
    patch.setattr(guard, "_received", sys.exit)  # which ends the thread that looks
    patch.setattr(threading, "excepthook", lambda raised: None)
    patch.setattr(guard.psutil.Process, "children", lambda process, recursive: [])
    patch.setattr(os, "_exit", sys.exit)


@contextmanager
def joined() -> Iterator[None]:
    """Make this process a group of one rank for as long as the block."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
