"""Show a run of a serving task: what it will load, and what it measured."""

from collections.abc import Sequence

from bench.console.sheet import Row, Sheet
from bench.contract.plan import ServingPlan
from bench.contract.schema import Device
from bench.contract.serving import command
from bench.mlperf.result import Result
from bench.report import serving as serving_report
from bench.report.tables import value_text
from bench.results.imported import Summary
from bench.results.serving import ServingResult

SHOWN = 5
"""So many problems are listed; the others are counted."""
NUM_OPTIONAL = 2


def plan_rows(plan: ServingPlan) -> list[tuple[str, str]]:
    """Return what the plan says, by name, without what every plan says."""
    c, serving = plan.config, plan.config.task.serving
    assert serving is not None
    server, limits = serving.server, serving.limits
    device = c.cluster.gpu.name if c.cluster.gpu else c.cluster.device.name
    weights = plan.base_dir or "random weights, made on the spot"
    if server.url is None:
        words = command(server, precision=c.precision.name, is_cpu=c.cluster.device is Device.cpu)
        place = f"{server.name.name}: {' '.join(words)}"
        model = f"{c.model.name}, {weights}; {c.precision.name}, tp {plan.world.tp} on {device}"
    else:
        place, model = f"{server.name.name} at {server.url}", str(server.model)
    kept = {"TTFT": limits.ttft_s, "TPOT": limits.tpot_s, "latency": limits.latency_s}
    shown = ", ".join(f"{name} {limit:g} s" for name, limit in kept.items() if limit is not None)
    return [
        ("server", place),
        ("model", model),
        ("loads", "; ".join(f"{load.name} ({load.arrivals.scenario})" for load in plan.loads)),
        ("requests", f"{serving.requests:,} of each load: {serving.tokens_in} tokens in, {serving.tokens_out} out"),
        ("limits", shown or "none"),
    ]


def sheets(result: Result, serving: ServingResult, *, more: Sequence[Row] = ()) -> list[Sheet]:
    """Return what a trial of a serving task is worth, and each of its loads."""
    return [_verdict(result, serving, more), _loads(serving)]


def _verdict(result: Result, serving: ServingResult, more: Sequence[Row]) -> Sheet:
    asked = len(serving.loads) + len(serving.missing)
    errors = [finding.titled for finding in result.findings if finding.severity == "error"]
    problems = [*errors, *serving.problems]
    shown = "; ".join(problems[:SHOWN]) + (f"; {len(problems) - SHOWN} more" if problems[SHOWN:] else "")
    rows = [
        ("server", serving.server, serving.about),
        ("run_start → run_stop (min)", value_text(result.minutes, "{:.2f}"), ""),
        ("loads measured", f"{len(serving.loads)} of {asked}", ""),
        ("valid trial", "yes" if result.valid and serving.proven else "no", shown),
        *([] if serving.healthy_s is None else [("healthy after (s)", f"{serving.healthy_s:.1f}", UNTIMED)]),
        _memory(serving),
        *([_knee(serving)] if serving.swept else []),
        ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
    ]
    return Sheet(serving_report.title(result, serving), [*rows, *more], caption="n = 1 run")


def beside(found: Sequence[Summary]) -> Sheet:
    """Return loads of several tools beside each other; `-` is what one does not say."""
    numbers = (
        *("output_throughput", "request_throughput", "latency_p50", "latency_p99"),
        *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"),
    )
    rows = [
        (
            *(one.source, one.load, f"{one.requests:,}", "-" if one.failed is None else f"{one.failed:,}"),
            *(_cell(getattr(one, name)) for name in numbers),
        )
        for one in found
    ]
    columns = (
        *("measured by", "load", "requests", "failed", "output tokens/s", "requests/s", "latency p50 (s)", "p99"),
        *("TTFT p50 (s)", "TTFT p99", "TPOT p50 (s)", "TPOT p99"),
    )
    why = [f"{one.source}, {one.load}: {one.why_no_tokens}." for one in found if one.why_no_tokens]
    return Sheet("loads beside each other", rows, columns=columns, caption="\n".join([CAUTION, *why]))


CAUTION = (
    "Percentiles of other tools leave out the requests that failed; ours count them as the slowest. Compare loads of "
    "the same requests only."
)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


UNTIMED = "not timed with the loads"
KNEE = "the highest rate at which 99 % of the requests keep the limits"


def _knee(serving: ServingResult) -> Row:
    name, knee = "knee (requests/s)", serving.knee
    return (name, "-", serving.no_knee) if knee is None else (name, f"{knee:g}", KNEE)


def _memory(serving: ServingResult) -> Row:
    name = "GPU memory at its peak"
    if serving.memory_gib is None:
        return name, "-", serving.no_memory
    return name, f"{serving.memory_gib:.1f} GiB", "of the fullest GPU"


def _loads(serving: ServingResult) -> Sheet:
    rows, caption = [serving_report.row(load) for load in serving.loads], "\n".join(serving_report.notes(serving))
    return Sheet("loads", rows, columns=serving_report.COLUMNS, caption=caption, num_optional=NUM_OPTIONAL)
