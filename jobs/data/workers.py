"""Processes that tokenise at the same time, and their answers in the order of the questions.

They are programs of their own instead of a multiprocessing pool: that would either fork a process that holds threads
and a GPU, or import the program that started it, with all of torch, once for each.
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

AHEAD = 2
"""Questions for each process that may wait for their turn, or whose answers wait to be taken."""
Ask = Callable[[Iterable[dict[str, Any]]], Iterator[dict[str, Any]]]


@contextmanager
def started(num: int, settings: dict[str, Any]) -> Iterator[Ask]:
    """Start so many processes; yield what puts questions to them and yields their answers, in the same order.

    Raises:
        ConfigError: the first error of an answer, in the order of the questions.
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
        yield lambda questions: _in_order(threads, idle, questions, num * AHEAD)
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


def _in_order(
    threads: ThreadPoolExecutor,
    idle: "queue.SimpleQueue[subprocess.Popen[str]]",
    questions: Iterable[dict[str, Any]],
    ahead: int,
) -> Iterator[dict[str, Any]]:
    asked: deque[Future[dict[str, Any]]] = deque()
    try:
        for question in questions:
            asked.append(threads.submit(_answer, idle, question))
            if len(asked) >= ahead:
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()
    finally:
        for future in asked:
            future.cancel()


def _answer(idle: "queue.SimpleQueue[subprocess.Popen[str]]", question: dict[str, Any]) -> dict[str, Any]:
    process = idle.get()
    try:
        _put(process, question)
        assert process.stdout is not None
        line = process.stdout.readline()
    finally:
        idle.put(process)
    if not line:
        raise _ended(process)
    return understood(line)


def understood(line: str) -> dict[str, Any]:
    """Return what an answer says was done, or raise the error that it tells of."""
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
        f"a process that tokenises ended with exit code {process.wait()}",
        where=" ".join(map(str, process.args)) if isinstance(process.args, list) else str(process.args),
        fix="look above for its last words; -9 is the kernel's, out of memory: use fewer processes. "
        "What is done is kept: run it again",
    )
