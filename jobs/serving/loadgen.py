"""Load a server with MLPerf's loadgen, which issues the requests and decides whether the result is valid."""

import csv
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlperf_loadgen as loadgen
from tokenizers import Tokenizer

from bench.contract import run_files
from bench.contract.serving import Arrivals, Load, RequestLengths, Serving
from bench.errors import SubmitError
from jobs.serving.answers import Answer, RequestSpec, judged
from jobs.serving.client import Client, Exchange
from jobs.serving.server import Child, RunningServer, ended

POLL_S = 0.1
VERDICT = (
    *("loadgen_version", "result_validity", "result_perf_constraints_met", "result_min_queries_met"),
    *("result_min_duration_met", "early_stopping_met", "early_stopping_result", "result_mean_latency_ns"),
)
"""Keys that are kept from loadgen's log: validity, reasons and latency."""
COLUMNS = (
    *("request", "arrival_s", "sent_s", "first_token_s", "last_token_s", "tokens_in", "tokens_out"),
    *("chunks", "chunks_together", "status", "detail"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load."""

    load: Load
    answers: list[Answer]
    """In the order of arrival."""
    client: dict[str, float]
    """Delays of the client."""
    loadgen: dict[str, Any]
    """Loadgen's verdict on the load."""
    files: tuple[Path, Path]
    """The file of requests, and loadgen's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all loads of a trial share."""

    serving: Serving
    server: RunningServer
    tokenizer: Tokenizer
    lengths: RequestLengths
    """Of the requests of each load; the warm-up requests have them too, from the first on."""
    folder: Path
    trial: int
    seed: int

    def body(self) -> dict[str, Any]:
        """Return the fields that all requests share: all but the prompt and the length of the answer."""
        return {
            "model": self.server.model,
            "temperature": 0.0,
            "stream": True,
            **self.serving.server.request,
        }

    def spec(self, number: int) -> RequestSpec:
        """Return what a request of a load must have; numbers begin at 0."""
        tokens_in, tokens_out = self.lengths.pair(number)
        return RequestSpec(tokens_in=tokens_in, tokens_out=tokens_out, tokenizer=self.tokenizer)

    def exchange(self, number: int, prompt: str, due_s: float) -> Exchange:
        """Return a request that is to be sent."""
        return Exchange(number, prompt, due_s, max_tokens=self.spec(number).tokens_out)

    def judged(self, exchange: Exchange) -> Answer:
        """Return the judged response of a request."""
        return judged(exchange, self.spec(exchange.number))


def warm_up(setting: Setting, prompts: Sequence[str]) -> None:
    """Send requests at the same time, not timed.

    Raises:
        SubmitError: one of them failed, so that no load could be valid.
    """
    timeout_s = setting.serving.request_timeout_s
    with Client(setting.server.url, setting.body(), timeout_s=timeout_s) as client:
        exchanges = [setting.exchange(number, prompt, time.perf_counter()) for number, prompt in enumerate(prompts)]
        finished: queue.SimpleQueue[Exchange] = queue.SimpleQueue()
        for exchange in exchanges:
            client.send(exchange, finished.put)
        left = len(exchanges)
        while left:
            require_alive(setting.server.child, "during the warm-up")
            try:
                finished.get(timeout=POLL_S)
                left -= 1
            except queue.Empty:
                continue
    for answer in map(setting.judged, exchanges):
        if answer.status != "ok":
            rule = "SRV-05" if answer.tokens_out is not None else "SRV-04"
            raise SubmitError(
                f"a warm-up request failed: {answer.status}: {answer.detail}",
                where=setting.server.url,
                fix="read the output of the server to see the cause, and correct task.serving.server",
                rule=rule,
            )


def require_alive(child: Child | None, when: str) -> None:
    """Raise SubmitError if the server has ended."""
    if child is not None and child.exit_code() is not None:
        raise ended(child, when, "SRV-03")


def run_load(setting: Setting, load: Load, prompts: Sequence[str]) -> LoadResult:
    """Run a load and return its result; every prompt is sent once, in the order of loadgen's requests.

    Raises:
        SubmitError: the server has ended.
    """
    exchanges: list[Exchange] = []
    timeout_s = setting.serving.request_timeout_s
    with Client(setting.server.url, setting.body(), timeout_s=timeout_s) as client:
        gate = Gate(client, load.concurrency)

        def issue(samples: Sequence[Any]) -> None:
            due_s = time.perf_counter()
            for sample in samples:
                exchange = setting.exchange(len(exchanges), prompts[len(exchanges)], due_s)
                exchanges.append(exchange)
                gate.send(exchange, _completes(sample.id))

        _run(load, setting, issue)
        late_s = sorted(client.late_s)
    answers = [setting.judged(exchange) for exchange in exchanges]
    detail = setting.folder / run_files.loadgen(setting.trial, load.label)
    loadgen_verdict = verdict(detail)
    rows = setting.folder / run_files.requests(setting.trial, load.label)
    _write(rows, exchanges, answers)
    return LoadResult(
        load=load,
        answers=answers,
        client=delays(exchanges, late_s, loadgen_verdict),
        loadgen=loadgen_verdict,
        files=(rows, detail),
    )


class Gate:
    """Sends requests, of which only `most` are in flight at the same time; None: no limit.

    A request that waits is due when it gets its turn: the time before is no time of the server.
    """

    def __init__(self, client: Client, most: int | None) -> None:
        self._client, self._most = client, most
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Exchange, Callable[[Exchange], object]]] = deque()
        self._in_flight = 0

    def send(self, exchange: Exchange, done: Callable[[Exchange], object]) -> None:
        """Send a request, at once or after an answer to an earlier one."""
        if self._most is None:
            self._client.send(exchange, done)
            return
        with self._lock:
            self._waiting.append((exchange, done))
            self._next()

    def _next(self) -> None:
        """Send waiting requests while there is room; the caller holds the lock."""
        assert self._most is not None
        while self._waiting and self._in_flight < self._most:
            exchange, done = self._waiting.popleft()
            self._in_flight += 1
            now_s = time.perf_counter()
            exchange.waited_s, exchange.due_s = now_s - exchange.due_s, now_s
            self._client.send(exchange, partial(self._ended, done))

    def _ended(self, done: Callable[[Exchange], object], exchange: Exchange) -> None:
        with self._lock:
            self._in_flight -= 1
            self._next()
        done(exchange)


def _completes(sample: int) -> Callable[[Exchange], object]:
    def done(_: Exchange) -> None:
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample, 0, 0)])

    return done


def _run(load: Load, setting: Setting, issue: Callable[[Sequence[Any]], None]) -> None:
    """Run loadgen in a thread, and watch the server. Loadgen cannot be stopped early, except by ending the process."""
    failures: list[BaseException] = []

    def work() -> None:
        sut = loadgen.ConstructSUT(issue, lambda: None)
        library = loadgen.ConstructQSL(load.requests, load.requests, lambda _: None, lambda _: None)
        try:
            loadgen.StartTestWithLogSettings(sut, library, _settings(load, setting), _logging(load, setting))
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            failures.append(error)
        finally:
            loadgen.DestroyQSL(library)
            loadgen.DestroySUT(sut)

    thread = threading.Thread(target=work, name="loadgen", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        require_alive(setting.server.child, f"under load ({load.name})")
    if failures:
        raise failures[0]
    prefix = _prefix(load, setting)
    (setting.folder / f"{prefix}detail.txt").rename(setting.folder / run_files.loadgen(setting.trial, load.label))
    for name in ("summary.txt", "accuracy.json", "trace.json"):
        (setting.folder / f"{prefix}{name}").unlink(missing_ok=True)


def _prefix(load: Load, setting: Setting) -> str:
    return f"{run_files.loadgen(setting.trial, load.label)}_"


def _settings(load: Load, setting: Setting) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, load.arrivals.scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = 0
    settings.min_query_count = settings.max_query_count = load.requests
    settings.qsl_rng_seed = settings.sample_index_rng_seed = settings.schedule_rng_seed = setting.seed
    if load.arrivals in (Arrivals.burst, Arrivals.concurrent):
        settings.offline_expected_qps = 1e-3  # otherwise loadgen sizes the burst for ten minutes
    if load.arrivals is Arrivals.poisson:
        assert setting.serving.limits.latency_s is not None
        settings.server_target_qps = load.rate
        settings.server_target_latency_ns = round(setting.serving.limits.latency_s * 1e9)
    return settings


def _logging(load: Load, setting: Setting) -> Any:
    output, settings = loadgen.LogOutputSettings(), loadgen.LogSettings()
    output.outdir, output.prefix = str(setting.folder), _prefix(load, setting)
    settings.log_output, settings.enable_trace = output, False
    return settings


def verdict(detail: Path) -> dict[str, Any]:
    """Return loadgen's verdict from its log: validity, reasons and latencies."""
    records: dict[str, Any] = {}
    for line in detail.read_text().splitlines():
        record = json.loads(line.removeprefix(":::MLLOG "))
        records[record["key"]] = record["value"]
    return {key: records.get(key) for key in VERDICT}


def delays(exchanges: Sequence[Exchange], late_s: Sequence[float], loadgen_verdict: dict[str, Any]) -> dict[str, float]:
    """Return the delays of the client: percentiles of sending and of its event loop, and loadgen's mean.

    Loadgen measures from the scheduled time of a request until its completion was reported.
    """
    sent_s = sorted(exchange.sent_s - exchange.due_s for exchange in exchanges if exchange.sent_s is not None)
    took_s = [exchange.done_s - exchange.due_s + exchange.waited_s for exchange in exchanges]
    mean_s = sum(took_s) / len(took_s)
    theirs_s = float(loadgen_verdict["result_mean_latency_ns"] or 0) / 1e9
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        **{f"sent_{name}_s": _percentile(sent_s, share) for name, share in shares.items()},
        **{f"loop_{name}_s": _percentile(late_s, share) for name, share in shares.items()},
        "loadgen_mean_s": max(0.0, theirs_s - mean_s),
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _write(path: Path, exchanges: Sequence[Exchange], answers: Sequence[Answer]) -> None:
    """Write a row for each request; times are in seconds from the first arrival."""
    began_s = exchanges[0].due_s
    with path.open("x", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for exchange, answer in zip(exchanges, answers, strict=True):
            due_s = exchange.due_s - began_s
            sent_s = None if exchange.sent_s is None else exchange.sent_s - began_s
            first_s, last_s = (None if one is None else due_s + one for one in (answer.first_s, answer.last_s))
            times = ("" if one is None else f"{one:.6f}" for one in (due_s, sent_s, first_s, last_s))
            counts = (answer.tokens_in, answer.tokens_out, answer.num_chunks, answer.num_together)
            writer.writerow([answer.number, *times, *counts, answer.status, " ".join(answer.detail.split())])
