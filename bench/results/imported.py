"""Read the results of other load generators from their JSON: AIPerf, GuideLLM and `vllm bench serve`.

Their numbers are only shown next to ours: their percentiles exclude failed requests.
Sources: AIPerf 0.13, "profile_export_aiperf.json Schema"; GuideLLM 0.8.1, benchmark/schemas; vLLM 0.32.0,
benchmarks/serve.py.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import regular_files
from bench.errors import LogError
from bench.mlperf import reader
from bench.mlperf.reader import is_number

MAX_BYTES = 1 << 30
FIX = "give the JSON file that AIPerf (profile_export_aiperf.json), GuideLLM or vllm bench serve wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of one load; times in seconds, None for missing values."""

    source: str
    """The tool, or the log."""
    load: str
    requests: int
    failed: int | None
    output_throughput: float | None
    request_throughput: float | None
    latency_p50: float | None
    latency_p99: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    why_no_tokens: str = ""
    """Why there are no token times, if known."""


def is_json(path: Path) -> bool:
    """Return whether a file is a JSON object, and not a log, which may begin with any text.

    JSON that quotes a log has no records: their quotation marks are escaped.
    """
    try:
        with regular_files.opened(path, follows_links=True) as file:
            is_object = file.read(64).lstrip().startswith(b"{")
        return is_object and not reader.read(path)[0]
    except (OSError, LogError):
        return False


def read(path: Path) -> list[Summary]:
    """Return the loads of a file.

    Raises:
        LogError: the file is of no such tool, or all requests of a load failed.
    """
    try:
        raw = json.loads(regular_files.read_bytes(path, max_bytes=MAX_BYTES, follows_links=True))
    except (OSError, ValueError, RecursionError) as error:
        raise LogError(f"the file cannot be read: {error}", where=str(path), fix=FIX) from error
    for is_of, summaries in _TOOLS:
        if isinstance(raw, dict) and is_of(raw):
            loads = list(summaries(raw))
            _require_answers(loads, path)
            return loads
    raise LogError("the file is not a result of AIPerf, GuideLLM or vllm bench serve", where=str(path), fix=FIX)


def _require_answers(loads: list[Summary], path: Path) -> None:
    if not loads:
        raise LogError(
            "the file has no results for any load level (a request rate, or a number of concurrent requests)",
            where=str(path),
            fix=FIX,
        )
    for level in loads:
        failed = level.failed or 0
        if level.requests - failed <= 0:
            raise LogError(
                f"the load level {level.load!r} has no results: {failed} of {level.requests} requests failed",
                where=str(path),
                fix="find out from the server's responses why the requests failed, then run this load level again",
            )


def _of_vllm(raw: dict[str, Any]) -> Iterator[Summary]:
    failed, rate = _failed_of_vllm(raw), raw.get("request_rate")
    yield Summary(
        source=f"vllm bench serve: {raw.get('model_id') or 'model not named'}",
        load="burst" if rate in ("inf", float("inf")) else f"{rate}/s",
        requests=_count(raw.get("completed")) + (failed or 0),
        failed=failed,
        output_throughput=_number(raw.get("output_throughput")),
        request_throughput=_number(raw.get("request_throughput")),
        **_times(
            (f"{ours}_p{share}", _scaled(raw.get(f"{name}_{theirs}_ms")))
            for ours, theirs in (("latency", "e2el"), ("ttft", "ttft"), ("tpot", "tpot"))
            for share, name in ((50, "median"), (99, "p99"))
        ),
    )


def _failed_of_vllm(raw: dict[str, Any]) -> int | None:
    """Return the number of failed requests: as counted, else sent minus completed; None if unknown."""
    if is_number(raw.get("failed")):
        return _count(raw["failed"])
    lacking = _count(raw.get("num_prompts")) - _count(raw.get("completed"))
    return lacking if lacking >= 0 else None


def _of_guidellm(raw: dict[str, Any]) -> Iterator[Summary]:
    for one in raw["benchmarks"]:
        metrics = _object(one, "metrics")
        totals = _object(metrics, "request_totals")
        strategy = _object(_object(one, "config"), "strategy").get("type_") or "load"
        rate = _object(_object(one, "config"), "strategy").get("rate")
        total, good = _count(totals.get("total")), _count(totals.get("successful"))

        def successful(name: str, metrics: dict[str, Any] = metrics) -> dict[str, Any]:
            return _object(_object(metrics, name), "successful")

        yield Summary(
            source="GuideLLM",
            load=f"{strategy} {rate}/s" if is_number(rate) else str(strategy),
            requests=total,
            failed=total - good,
            output_throughput=_number(successful("output_tokens_per_second").get("mean")),
            request_throughput=_number(successful("requests_per_second").get("mean")),
            **_times(
                (f"{ours}_p{share}", _scaled(_object(successful(theirs), "percentiles").get(f"p{share}"), scale))
                for ours, theirs, scale in (
                    ("latency", "request_latency", 1.0),
                    ("ttft", "time_to_first_token_ms", 1e-3),
                    ("tpot", "inter_token_latency_ms", 1e-3),
                )
                for share in (50, 99)
            ),
        )


_MS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "us": 1e-6, "ns": 1e-9}


def _of_aiperf(raw: dict[str, Any]) -> Iterator[Summary]:
    good, failed = (_count(_object(raw, name).get("avg")) for name in ("request_count", "error_request_count"))
    yield Summary(
        source=f"AIPerf {raw.get('aiperf_version', '')}".strip(),
        load="load",
        requests=good + failed,
        failed=failed,
        output_throughput=_number(_object(raw, "output_token_throughput").get("avg")),
        request_throughput=_number(_object(raw, "request_throughput").get("avg")),
        **_times(
            (f"{ours}_p{share}", _scaled(metric.get(f"p{share}"), _MS.get(str(metric.get("unit")), 1e-3)))
            for ours, theirs in (
                ("latency", "request_latency"),
                ("ttft", "time_to_first_token"),
                ("tpot", "inter_token_latency"),
            )
            for metric in (_object(raw, theirs),)
            for share in (50, 99)
        ),
    )


_TOOLS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], Iterator[Summary]]], ...] = (
    (lambda raw: isinstance(raw.get("benchmarks"), list) and "metadata" in raw, _of_guidellm),
    (lambda raw: "request_latency" in raw or "request_count" in raw or "error_request_count" in raw, _of_aiperf),
    (lambda raw: "completed" in raw and "request_throughput" in raw, _of_vllm),
)


def _times(values: Iterable[tuple[str, float | None]]) -> dict[str, Any]:
    """Return the times of a Summary as keyword arguments."""
    return dict(values)


def _object(raw: Any, key: str) -> dict[str, Any]:
    value = raw.get(key) if isinstance(raw, dict) else None
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return int(value) if is_number(value) and value >= 0 else 0


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _scaled(value: Any, scale: float = 1e-3) -> float | None:
    return float(value) * scale if is_number(value) else None
