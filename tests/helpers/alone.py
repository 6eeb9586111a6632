"""This test process as the only rank of a job: how it is started, how it joins, and an end that only raises."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from bench.backends.local import free_port
from bench.contract import mllog
from jobs.ranks import guard, process_group, program

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@contextmanager
def started(patch: pytest.MonkeyPatch, *argv: str | Path) -> Iterator[None]:
    """Set what a launcher sets and the command line; signals stay as they are, and are not checked.

    Logs that the program leaves open for the end of its process are closed behind the block, and so is its group.
    """
    logs: list[mllog.Writer] = []

    class Writer(mllog.Writer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            logs.append(self)

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
    patch.setattr(program, "exit_process", int)
    patch.setattr(mllog, "Writer", Writer)
    patch.setattr(process_group, "gc", SimpleNamespace(unfreeze=int, collect=int))  # it would look at all tests
    try:
        yield
    finally:
        for log in logs:
            log.close()
        if is_joined := distributed.is_initialized():
            distributed.destroy_process_group()
    assert not is_joined, "the program has left its group"


@contextmanager
def joined() -> Iterator[None]:
    """Make this process a group of one rank for as long as the block."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()
