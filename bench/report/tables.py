"""Rows of a table of measurements: what was measured, its value, and a remark."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.mlperf.reader import clean
from bench.mlperf.result import PeakMemory, Result
from bench.mlperf.speed import Spread
from bench.mlperf.telemetry import Telemetry

if TYPE_CHECKING:
    from pandas import DataFrame

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.contract.plan import Plan
from bench.rules.finding import Finding

Row = tuple[str, str, str]
"""What was measured, its value, and a remark."""
TRAINING_ONLY = "training only: loading, checkpoints and evaluations excluded"


def memory_row(peak: PeakMemory | None, why_none: str = "") -> Row:
    """Return what the fullest GPU held at most, beside the plan's estimate; or why that is not known."""
    name = "peak memory (GiB)"
    if peak is None:
        return name, "", why_none or "not measured on GPUs"
    reserved = "" if peak.reserved is None else f"{peak.reserved:,.1f} reserved"
    estimated = "" if peak.estimated is None else f"the plan estimated {peak.estimated:,.1f}"
    return name, f"{peak.allocated:,.1f}", "; ".join(filter(None, ("fullest GPU", reserved, estimated)))


def telemetry_rows(telemetry: Telemetry | None) -> list[Row]:
    """Return what the GPUs did meanwhile; no rows where nobody looked, as on CPUs."""
    if telemetry is None:
        return []
    t, n = telemetry, telemetry.num_gpus
    found = [_level_row(t, *row) for row in _LEVELS if t.levels(row[0])]
    if n:
        gpus = "1 GPU" if n == 1 else f"{n} GPUs"
        shares = [f"{name} {100 * share:.0f} %" for name, share in t.throttle.items() if share]
        found += [("clocks held down by", ", ".join(shares) or "never", "share of time")] if t.throttle_is_known else []
        found += measured_rows(
            ("energy of the run (J)", t.energy_j, "{:,.0f}", f"{gpus}, run_start to run_stop"),
            ("energy of a step (J)", t.energy_per_step_j, "{:,.1f}", f"{gpus}; {TRAINING_ONLY}"),
            ("energy of a token (J)", t.energy_per_token_j, "{:,.4g}", f"{gpus}; {TRAINING_ONLY}"),
        )
    refused = (f"no {_quantity(name)}: {reason}" for name, reason in t.refused.items())
    why = "; ".join([*t.missing, *refused])
    return found + ([("not measured of the GPUs", "", why)] if why else [])


_LEVELS = (
    ("power_w", "power of a GPU (W)"),
    ("sm_clock_mhz", "SM clock (MHz)"),
    ("memory_clock_mhz", "memory clock (MHz)"),
    ("temperature_c", "GPU temperature (°C)"),
    ("memory_gib", "GPU memory used (GiB)"),
)


def _quantity(name: str) -> str:
    """Return the name of a measured quantity in words, without its unit: of sm_clock_mhz, sm clock."""
    return (name.rpartition("_")[0] or name).replace("_", " ")


def _level_row(telemetry: Telemetry, name: str, title: str) -> Row:
    medians = [level.median for level in telemetry.levels(name)]
    between = f"; GPUs {min(medians):,.0f} to {max(medians):,.0f}" if min(medians) < max(medians) else ""
    limit = f"; limit {t:,.0f}" if name == "power_w" and (t := telemetry.power_limit_w) else ""
    return title, f"{median(medians):,.0f}", f"median; highest {telemetry.peak(name):,.0f}{between}{limit}"


def spread_row(name: str, s: Spread | None, what: str) -> Row:
    if s is None:
        return name, "", "not timed"
    spread_text = f"median of {s.count} {what}s; p10 {s.p10:,.4g}, p90 {s.p90:,.4g}" if s.count > 1 else f"one {what}"
    return name, f"{s.median:,.1f}" if s.median >= 1000 else f"{s.median:,.4g}", spread_text


def measured_rows(*rows: tuple[str, float | None, str, str]) -> list[Row]:
    """Return the rows (name, number, its form, remark) whose number was measured."""
    return [(name, form.format(number), remark) for name, number, form, remark in rows if number is not None]


def value_text(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


MOST_DECIMALS = 6


def digits(number: float) -> int:
    """Return how many decimals show four significant digits, two decimals at most; below 1 three digits."""
    if not 0 < abs(number) < math.inf:
        return 0
    magnitude = math.floor(math.log10(abs(number)))
    return min(MOST_DECIMALS, 2 - magnitude) if magnitude < 0 else max(0, min(2, 3 - magnitude))


def number_text(number: float) -> str:
    """Return a measured number with four significant digits, two decimals at most; below 1 with three digits."""
    return f"{number:,.{digits(number)}f}"


def minutes_text(minutes: float) -> str:
    """Return minutes to the hundredth, and below one minute to the thousandth."""
    return f"{minutes:.{3 if minutes < 1 else 2}f}"


def frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> "DataFrame":
    """Return a data frame in which whole numbers stay whole where some are missing."""
    from pandas import DataFrame

    return DataFrame([[inert(value) for value in row] for row in rows], columns=columns).convert_dtypes()


def inert(value: Any) -> Any:
    """Return a value as it may be written: logs are not ours."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def set_rows(results: Iterable[Result]) -> list[Row]:
    """Return those of several trials, one after the other."""
    return [row for result in results for row in apart_rows(result)]


def apart_rows(result: Result) -> list[Row]:
    """Return how groups trained apart, and what became of the merged model; no rows where all trained together."""
    apart, merged_loss = result.apart, None if result.has_random_rows else result.eval_final
    if apart is None:
        return []
    every = f"merged every {apart.every_steps} steps, {apart.merges} times"
    left = "".join(f"; group {group} LEFT after step {step}" for group, step in apart.left.items())
    left += "".join(f"; group {group} joined again after step {step}" for group, step in apart.joined.items())
    efficiency = apart.efficiency(result.steps_time_s)
    sent = "" if apart.rank_bytes is None else f"rank 0 sent {apart.rank_bytes / 1e6:,.4g} MB; "
    waited = "" if apart.waited_s is None else f"{apart.waited_s:,.3g} s more for groups that were behind; "
    stopped = f"training stood still for {apart.stopped_s:,.1f} s in all"
    inner = min(apart.inner_step_ms.values(), default=None)
    return [
        ("groups that trained apart", f"{apart.groups}", every + left),
        *measured_rows(
            ("inner step (ms)", inner, "{:,.1f}", f"of the fastest group; {_by_group(apart.inner_step_ms, ',.1f')}"),
            ("merge (s)", apart.exchange_s, "{:,.3g}", f"median; {waited}{sent}{stopped}"),
            ("efficiency (%)", efficiency and 100 * efficiency, "{:.1f}", "steps over steps and merges"),
            ("loss of the merged model", merged_loss, "{:.4f}", f"training: {_by_group(apart.losses, '.4f')}"),
        ),
    ]


def _by_group(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"group {group} {value:{form}}" for group, value in values.items())


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows of text to show: a table on a terminal, plain lines in a pipe."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings of the columns; none for rows of name, value and an optional remark."""
    caption: str = ""
    num_optional: int = 0
    """How many of the last columns are left out on a terminal that is too narrow. A pipe gets all of them."""


def findings_table(findings: "Sequence[Finding]") -> TextTable:
    """Return where a log differs from that of a valid trial, worst first."""
    ordered = sorted(findings, key=lambda finding: finding.severity)
    rows = [(f.rule, f.severity, str(f.line or ""), f.what) for f in ordered]
    return TextTable("findings", rows, columns=("rule", "severity", "line", "what"))


def trials_row(plan: "Plan") -> str:
    seeds = ", ".join(str(trial.seed) for trial in plan.trials)
    return f"{len(plan.trials)}, with seed{'s' if len(plan.trials) > 1 else ''} {seeds}"


def time_limit(plan: "Plan") -> str:
    """Return the job's time limit, and what it is made of."""
    c, total = plan.config, plan.walltime_min
    if total is None or c.walltime is None:
        return "none"
    if c.launch.array:
        return f"{total} min for each trial, which is an array element of its own"
    each = f"{c.trials} trial{'s' if c.trials > 1 else ''} of {c.walltime} min"
    return f"{total} min: {each}, and {total - c.trials * c.walltime} min to start, check and judge them"
