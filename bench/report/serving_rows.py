"""The rows of a serving task's tables: each load with its latencies and rates."""

from collections.abc import Iterator

from bench.contract import mllog
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.results.loads import LoadResult
from bench.results.serving import ServingResult

COLUMNS = (
    *("load", "requests", "failed", "output tokens/s", "requests/s", "goodput", "latency p50 (s)", "p90", "p99"),
    *("p100", "TTFT p50 (s)", "TTFT p99", "TPOT p50 (ms)", "TPOT p99", "loadgen", "client's share"),
)


def title(result: Result, serving: ServingResult) -> str:
    """Return the name of the task, its server, and where it ran."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "serving"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, count = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    place = f"{count} x {device}" if device else "elsewhere"
    where = ", ".join(str(part) for part in (serving.server, serving.model, place, result.platform) if part)
    return printable(f"{name}: {where}")


def row(load: LoadResult) -> tuple[str, ...]:
    """Return the cells of a load; what was not measured is a dash, whose reason `notes` has."""
    latencies = [_seconds(load.percentile_s(load.latency_s, share)) for share in (50, 90, 99, 100)]
    ttft = [_of_tokens(load, load.ttft_s, share, 1) for share in (50, 99)]
    tpot = [_of_tokens(load, load.tpot_s, share, 1000) for share in (50, 99)]
    rates = [_rate(rate) for rate in (load.output_throughput, load.request_throughput, load.goodput)]
    share = "-" if load.client_share is None else f"{100 * load.client_share:.1f} %"
    counts = (f"{len(load.status):,}", f"{load.num_failed:,}")
    return (load.load.name, *counts, *rates, *latencies, *ttft, *tpot, load.validity, share)


def notes(serving: ServingResult) -> list[str]:
    """Return why cells of these loads are dashes or INVALID, and what the columns mean."""
    found = [
        "Percentiles are of all requests, failed ones as the slowest. The client's share is its own largest delay, of "
        "the latency."
    ]
    of_note: dict[str, list[str]] = {}
    for load in serving.loads:
        for note in _of_load(load):
            of_note.setdefault(note, []).append(load.load.name)
    many = len(serving.loads) if len(serving.loads) > 1 else 0
    return found + [
        f"{'every load' if len(names) == many else ', '.join(names)}: {note}." for note, names in of_note.items()
    ]


def _of_load(load: LoadResult) -> Iterator[str]:
    """Yield why cells of a load are dashes or INVALID."""
    if load.validity != "VALID":
        yield f"{load.validity} by loadgen: {load.reason}"
    if load.no_token_times:
        yield f"TTFT and TPOT are -: {load.no_token_times}"
    if any(load.percentile_s(load.latency_s, share) is None for share in (50, 90, 99, 100)):
        yield "a percentile that falls on a failed request is -"
    if load.goodput is None:
        yield f"goodput is -: {_no_goodput(load)}"


def _no_goodput(load: LoadResult) -> str:
    limits = load.limits
    if limits.ttft_s is None and limits.tpot_s is None and limits.latency_s is None:
        return "no limit is set"
    return load.no_token_times or "no request was answered"


def _of_tokens(load: LoadResult, values: tuple[float | None, ...], share: float, scale: float) -> str:
    seconds = None if load.no_token_times else load.percentile_s(values, share)
    return "-" if seconds is None else _seconds(scale * seconds)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
