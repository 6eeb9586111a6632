"""Run tokenizer jobs in worker processes, and yield their results in the order of the jobs.

The workers are separate programs instead of a multiprocessing pool, which would either fork a process with threads and
a GPU, or import the parent's program, with all of torch, in each worker.
"""

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.errors import BenchError, ConfigError

PREFETCH_JOBS = 2
"""Jobs per process that may be queued, or whose results wait to be consumed."""
Submit = Callable[[Iterable[dict[str, Any]]], Iterator[dict[str, Any]]]


@contextmanager
def started(num: int, settings: dict[str, Any]) -> Iterator[Submit]:
    """Start num processes; yield a function that submits jobs and yields their results in order.

    Raises:
        ConfigError: the first error of a job, in the order of the jobs.
    """
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    argv = [sys.executable, "-m", "jobs.data.worker", str(os.getpid())]
    processes = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(num)
    ]
    idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    threads = ThreadPoolExecutor(num)
    try:
        for process in processes:
            _put(process, settings)
            idle.put(process)
        yield lambda jobs: _in_order(threads, idle, jobs, num * PREFETCH_JOBS)
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


def _in_order(
    threads: ThreadPoolExecutor,
    idle: "queue.SimpleQueue[subprocess.Popen[str]]",
    jobs: Iterable[dict[str, Any]],
    num_pending: int,
) -> Iterator[dict[str, Any]]:
    pending: deque[Future[dict[str, Any]]] = deque()
    try:
        for job in jobs:
            pending.append(threads.submit(_run, idle, job))
            if len(pending) >= num_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _run(idle: "queue.SimpleQueue[subprocess.Popen[str]]", job: dict[str, Any]) -> dict[str, Any]:
    process = idle.get()
    try:
        _put(process, job)
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        idle.put(process)
    if not line:
        raise _ended(process)
    return result_of(line)


def result_of(line: str) -> dict[str, Any]:
    """Return the result in a worker's line, or raise its error."""
    answer = json.loads(line)
    if "error" in answer:
        raise ConfigError(answer["error"].pop("what"), **answer["error"])
    if "os_error" in answer:
        raise OSError(*answer["os_error"])
    return dict(answer["done"])


def _put(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        print(json.dumps(message), file=process.stdin, flush=True)
    except BrokenPipeError as error:
        raise _ended(process) from error


def _ended(process: "subprocess.Popen[str]") -> BenchError:
    return BenchError(
        f"a tokenizer process ended with exit code {process.wait()}",
        where=" ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args),
        fix="read the output of the process above; exit code -9 usually means out of memory: use fewer processes. "
        "Then run the same command again: finished blocks are kept",
    )
