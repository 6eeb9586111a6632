"""Tokenizer workers, with fake processes: results in the order of the jobs, and failing processes."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bench.errors import BenchError, ConfigError
from jobs.data import workers

SETTINGS = {"source": "c4"}
Answer = Callable[[dict[str, Any]], str]


class Process:
    """A process that reads its settings, then writes a line for each job; an empty line is its end."""

    def __init__(self, argv: list[str], answer: Answer, *, how: dict[str, Any]) -> None:
        self.args, self.how, self.answer = argv, how, answer
        self.taken: list[dict[str, Any]] = []
        self.did: list[str] = []
        self.is_broken = False
        self.stdin, self.stdout = SimpleNamespace(write=self.write, flush=lambda: None), self
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write(self, text: str) -> None:
        if self.is_broken:
            raise BrokenPipeError
        if text != "\n":
            self.taken.append(json.loads(text))
            if self.taken[1:]:
                self._lines.put(self.answer(self.taken[-1]))

    def readline(self) -> str:
        return self._lines.get(timeout=5)

    def kill(self) -> None:
        self.did.append("killed")

    def communicate(self) -> None:
        self.did.append("waited for")

    def wait(self) -> int:
        return -9


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Record the started processes; they double numbers, unless a test changes their answers."""
    started: list[Process] = []

    def start(argv: list[str], **how: Any) -> Process:
        started.append(Process(argv, lambda job: json.dumps({"done": {"n": 2 * job["n"]}}), how=how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def numbered(count: int) -> Iterator[dict[str, Any]]:
    return ({"n": number} for number in range(count))


def test_results_are_in_the_order_of_the_jobs(processes: list[Process]) -> None:
    """The first idle process takes the next job: here every process but the first one."""
    with workers.started(2, SETTINGS) as submit:
        first, others = processes[0], threading.Event()

        def last(job: dict[str, Any]) -> str:
            others.wait(5)
            return json.dumps({"done": {"n": -job["n"]}})

        def counted(job: dict[str, Any]) -> str:
            if job["n"] == 3:
                others.set()
            return json.dumps({"done": {"n": 2 * job["n"]}})

        first.answer, processes[1].answer = last, counted
        answers = [answer["n"] for answer in submit(numbered(6))]
    assert answers[1:4] == [2, 4, 6] and [abs(n) for n in answers] in ([0, 2, 4, 6, 4, 10], [0, 2, 4, 6, 8, 5])
    for process in processes:
        assert process.taken[0] == SETTINGS and process.did == ["killed", "waited for"]
        assert process.args == [sys.executable, "-m", "jobs.data.worker", str(os.getpid())]
        assert process.how["env"] == os.environ | {"TOKENIZERS_PARALLELISM": "false"} and process.how["text"]
        assert process.how["stdin"] is process.how["stdout"] is subprocess.PIPE


def test_at_most_two_jobs_per_process_are_taken(processes: list[Process]) -> None:
    """A result is yielded once that many are pending; the rest at the end."""
    taken: list[int] = []

    def jobs() -> Iterator[dict[str, Any]]:
        for job in numbered(7):
            taken.append(job["n"])
            yield job

    with workers.started(2, SETTINGS) as submit:
        seen = [(answer["n"], len(taken)) for answer in submit(jobs())]
    assert seen == [(0, 4), (2, 5), (4, 6), (6, 7), (8, 7), (10, 7), (12, 7)]
    assert len(processes) == 2


def test_the_first_error_in_the_order_of_the_jobs_is_raised(processes: list[Process]) -> None:
    """The error is the process's; later jobs are not submitted."""
    error = {"what": "not JSON", "where": "c4.jsonl:7", "fix": "mend it", "rule": "CFG-06"}
    with workers.started(1, SETTINGS) as submit:
        processes[0].answer = lambda job: json.dumps({"error": error} if job["n"] == 1 else {"done": job})
        answers = submit(numbered(9))
        assert next(answers) == {"n": 0}
        with pytest.raises(ConfigError) as raised:
            next(answers)
    assert (raised.value.what, raised.value.where, raised.value.rule) == ("not JSON", "c4.jsonl:7", "CFG-06")
    assert processes[0].did == ["killed", "waited for"] and len(processes[0].taken) < 9
    with pytest.raises(OSError, match="No space left on device: 'c4.jsonl'") as full:
        workers.result_of(json.dumps({"os_error": [28, "No space left on device", "c4.jsonl"]}))
    assert full.value.errno == 28


def test_the_error_of_a_failed_process_has_its_exit_code(processes: list[Process]) -> None:
    """It fails before a result, or before it takes a job; the other process is ended too."""
    why = "a tokenizer process ended with exit code -9"
    with pytest.raises(BenchError, match=why) as ended, workers.started(2, SETTINGS) as submit:
        for process in processes:
            process.answer = lambda job: ""
        list(submit(numbered(3)))
    assert ended.value.where == f"{sys.executable} -m jobs.data.worker {os.getpid()}"
    assert [process.did for process in processes] == [["killed", "waited for"]] * 2
    with pytest.raises(BenchError, match="exit code -9"), workers.started(1, SETTINGS) as submit:
        processes[2].is_broken = True
        list(submit(numbered(1)))
    named: Any = processes[0]
    named.args = "a command"
    assert workers._ended(named).where == "a command"
