"""Ranks without their imports: one process loads torch and megatron-core once, and forks every rank of every command.

A rank's own start takes 4 to 6 s of CPU time, nearly all of it for imports. A forked rank is a process of its own all
the same: its groups, generators and exit code are its own. What only a real start shows (the interpreter's own
start and end, the environment that libraries read when they are loaded) the tests of `bench.launch` and Slurm show.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import psutil

ROOT = Path(__file__).parents[2]
AT_LOADING = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
"""What libraries read when they are loaded; it is that of plans for CPUs."""


def run(
    folder: Path, command: Sequence[str], environments: Sequence[Mapping[str, str]], *, timeout_s: float
) -> list[tuple[int, str]]:
    """Run `python -m COMMAND` in a forked process for each environment; return exit codes and outputs."""
    pool = _pool()
    with TemporaryDirectory() as tmp:
        outputs = [Path(tmp) / str(rank) for rank in range(len(environments))]
        job = {"folder": str(folder), "command": command, "environments": [dict(env) for env in environments]}
        codes = pool.ask(job | {"outputs": [str(path) for path in outputs]}, timeout_s)
        return [(code, path.read_text()) for code, path in zip(codes, outputs, strict=True)]


@dataclass(frozen=True)
class Pool:
    """The process that forks; it ends when the parent process has ended."""

    process: "subprocess.Popen[str]"

    def ask(self, job: dict[str, Any], timeout_s: float) -> list[int]:
        """Return the exit codes of a job's ranks."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        is_answered = select.select([self.process.stdout], [], [], timeout_s)[0]
        if not is_answered or not (answer := self.process.stdout.readline()):
            self.end()
            raise TimeoutError(f"{job['command']}: no answer after {timeout_s} s, or the pool has ended")
        return list(json.loads(answer))

    def end(self) -> None:
        """Kill it and its ranks."""
        _pool.cache_clear()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@cache
def _pool() -> Pool:
    """Return this session's pool, which is started when the first rank is."""
    pool = Pool(
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.pool"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | AT_LOADING,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    )
    atexit.register(pool.end)
    return pool


def cpu_s() -> float:
    """Return the CPU time of the pool and of the ranks that have ended; 0 before it is started."""
    if not _pool.cache_info().currsize:
        return 0.0
    return sum(psutil.Process(_pool().process.pid).cpu_times()[:4])  # user's, system's, and those of children


def serve(lines: IO[str], answers: IO[str]) -> None:
    """Answer each job, a line, with its exit codes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
        from jobs.engines.megatron import cpu_patch

        cpu_patch.install()
        import torch._dynamo  # noqa: F401 - as torch.optim does when its first optimizer is made

        import jobs.engines.megatron.engine  # noqa: F401 - the ranks find it loaded
    for line in lines:
        job = json.loads(line)
        ranks = zip(job["environments"], job["outputs"], strict=True)
        pids = [os.fork() or _be_rank(job["folder"], job["command"], *rank) for rank in ranks]
        answers.write(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]) + "\n")
        answers.flush()


def _be_rank(folder: str, command: list[str], environment: dict[str, str], output: str) -> int:
    """Run the command in this process as `python -m` does, and end; returns never."""
    code: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        out = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0], sys.argv = folder, list(command)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in psutil.Process().children(recursive=True):  # an interpreter that ends tidies up its own
            child.kill()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
