"""Text tables and their rows: measurement, value and remark."""

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
from bench.contract.schema import Config, Device
from bench.rules.finding import Finding
from bench.texts import counted

Row = tuple[str, str, str]
"""Measurement, value and remark."""
TRAINING_ONLY = "training only: loading, checkpoints and evaluations excluded"


def memory_row(peak: PeakMemory | None, why_none: str = "") -> Row:
    """Return the peak memory of the GPU with the highest use and the plan's estimate, or why it is unknown."""
    name = "peak memory (GiB)"
    if peak is None:
        return name, "", why_none or "not measured on GPUs"
    reserved = "" if peak.reserved is None else f"{peak.reserved:,.1f} reserved"
    estimated = "" if peak.estimated is None else f"the plan estimated {peak.estimated:,.1f}"
    return name, f"{peak.allocated:,.1f}", "; ".join(filter(None, ("highest of all GPUs", reserved, estimated)))


def telemetry_rows(telemetry: Telemetry | None) -> list[Row]:
    """Return power, clocks, temperature and energy of the GPUs; no rows without samples, as on CPUs."""
    if telemetry is None:
        return []
    t, n = telemetry, telemetry.num_gpus
    rows = [_level_row(t, *row) for row in _LEVELS if t.levels(row[0])]
    if n:
        gpus = counted(n, "GPU")
        shares = [f"{name} {100 * share:.0f} %" for name, share in t.throttle.items() if share]
        rows += [("clock throttling", ", ".join(shares) or "none", "share of time")] if t.throttle_is_known else []
        rows += measured_rows(
            ("energy of the run (J)", t.energy_j, "{:,.0f}", f"{gpus}, run_start to run_stop"),
            ("energy of a step (J)", t.energy_per_step_j, "{:,.1f}", f"{gpus}; {TRAINING_ONLY}"),
            ("energy of a token (J)", t.energy_per_token_j, "{:,.4g}", f"{gpus}; {TRAINING_ONLY}"),
        )
    refused = (f"no {_quantity(name)}: {reason}" for name, reason in t.refused.items())
    why = "; ".join([*t.missing, *refused])
    return rows + ([("not measured on the GPUs", "", why)] if why else [])


_LEVELS = (
    ("power_w", "power of a GPU (W)"),
    ("sm_clock_mhz", "SM clock (MHz)"),
    ("memory_clock_mhz", "memory clock (MHz)"),
    ("temperature_c", "GPU temperature (°C)"),
    ("memory_gib", "GPU memory used (GiB)"),
)


def _quantity(name: str) -> str:
    """Return the name of a quantity in words without its unit: "sm clock" for sm_clock_mhz."""
    return (name.rpartition("_")[0] or name).replace("_", " ")


def _level_row(telemetry: Telemetry, name: str, title: str) -> Row:
    medians = [level.median for level in telemetry.levels(name)]
    between = f"; GPUs {min(medians):,.0f} to {max(medians):,.0f}" if min(medians) < max(medians) else ""
    limit = f"; limit {t:,.0f}" if name == "power_w" and (t := telemetry.power_limit_w) else ""
    return title, f"{median(medians):,.0f}", f"median; maximum {telemetry.peak(name):,.0f}{between}{limit}"


def spread_row(name: str, s: Spread | None, what: str) -> Row:
    if s is None:
        return name, "", "not timed"
    spread_text = f"median of {s.count} {what}s; p10 {s.p10:,.4g}, p90 {s.p90:,.4g}" if s.count > 1 else f"one {what}"
    return name, f"{s.median:,.1f}" if s.median >= 1000 else f"{s.median:,.4g}", spread_text


def measured_rows(*rows: tuple[str, float | None, str, str]) -> list[Row]:
    """Return rows of (name, number, format, remark), without those that were not measured."""
    return [(name, form.format(number), remark) for name, number, form, remark in rows if number is not None]


def value_text(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


MOST_DECIMALS = 6


def digits(number: float) -> int:
    """Return the decimals for four significant digits, at most two; below 1, for three significant digits."""
    if not 0 < abs(number) < math.inf:
        return 0
    magnitude = math.floor(math.log10(abs(number)))
    return min(MOST_DECIMALS, 2 - magnitude) if magnitude < 0 else max(0, min(2, 3 - magnitude))


def sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def number_text(number: float) -> str:
    """Return a number with four significant digits and at most two decimals; below 1 with three digits."""
    return f"{number:,.{digits(number)}f}"


def minutes_text(minutes: float) -> str:
    """Return minutes with two decimals, below one minute with three."""
    return f"{minutes:.{3 if minutes < 1 else 2}f}"


def frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> "DataFrame":
    """Return a data frame that keeps integer columns with missing values as integers."""
    from pandas import DataFrame

    return DataFrame([[inert(value) for value in row] for row in rows], columns=columns).convert_dtypes()


def inert(value: Any) -> Any:
    """Return a value that is safe in a spreadsheet: text from logs cannot start a formula."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def set_rows(results: Iterable[Result]) -> list[Row]:
    """Return the local SGD rows of several trials."""
    return [row for result in results for row in local_sgd_rows(result)]


def local_sgd_rows(result: Result) -> list[Row]:
    """Return the rows of local SGD; no rows without it."""
    local_sgd, averaged_loss = result.local_sgd, None if result.has_random_rows else result.eval_final
    if local_sgd is None:
        return []
    every = f"weights averaged every {local_sgd.every_steps} steps, {local_sgd.averagings} times"
    left = "".join(f"; group {group} LEFT after step {step}" for group, step in local_sgd.left.items())
    left += "".join(f"; group {group} rejoined after step {step}" for group, step in local_sgd.joined.items())
    efficiency = local_sgd.efficiency(result.steps_time_s)
    sent = "" if local_sgd.rank_bytes is None else f"rank 0 sent {local_sgd.rank_bytes / 1e6:,.4g} MB; "
    waited = "" if local_sgd.waited_s is None else f"{local_sgd.waited_s:,.3g} s waiting for slower groups; "
    stopped = f"{local_sgd.stopped_s:,.1f} s in total without training"
    inner = min(local_sgd.inner_step_ms.values(), default=None)
    return [
        ("local SGD groups", f"{local_sgd.groups}", every + left),
        *measured_rows(
            (
                "inner step (ms)",
                inner,
                "{:,.1f}",
                f"of the fastest group; {_by_group(local_sgd.inner_step_ms, ',.1f')}",
            ),
            ("weight averaging (s)", local_sgd.exchange_s, "{:,.3g}", f"median; {waited}{sent}{stopped}"),
            ("local SGD efficiency (%)", efficiency and 100 * efficiency, "{:.1f}", "time of inner steps / total time"),
            ("loss of the averaged model", averaged_loss, "{:.4f}", f"training: {_by_group(local_sgd.losses, '.4f')}"),
        ),
    ]


def _by_group(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"group {group} {value:{form}}" for group, value in values.items())


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text: drawn on a terminal, printed as plain lines in a pipe."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Column headings; empty for rows of name, value and optional remark."""
    caption: str = ""
    num_optional: int = 0
    """How many of the last columns a narrow terminal may leave out. A pipe gets all columns."""
    is_list: bool = False
    """Whether a terminal shows each row on one line: empty columns, and the last ones that do not fit, are left out,
    and long texts are cut. The first column is never cut."""


def findings_table(findings: "Sequence[Finding]") -> TextTable:
    """Return the problems of a log, errors first."""
    ordered = sorted(findings, key=lambda finding: finding.severity)
    rows = [(f.rule, f.severity, str(f.line or ""), f.what) for f in ordered]
    return TextTable("problems", rows, columns=("rule", "severity", "line", "what"))


def ranks_text(num_ranks: object, device: object) -> str:
    """Return such as "2 ranks on cpu"; what is not in the log is left out."""
    ranks = "" if num_ranks is None else f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    return " on ".join(str(part) for part in (ranks, device) if part)


def nodes_text(config: "Config", *, num_nodes: int, ranks_per_node: int) -> str:
    """Return the nodes of a run and what each has, such as `2 nodes with 8 x NVIDIA H100 SXM 80GB`."""
    is_cpu = config.cluster.device is Device.cpu
    each = counted(ranks_per_node, "CPU rank") if is_cpu else f"{ranks_per_node} x {config.cluster.device_name}"
    return f"{counted(num_nodes, 'node')} with {each}"


def memory_label(config: "Config") -> str:
    return "memory per GPU" if config.cluster.device is Device.cuda else "memory per rank"


def trials_row(plan: "Plan") -> str:
    seeds = ", ".join(str(trial.seed) for trial in plan.trials)
    return f"{len(plan.trials)}, seed{'s' if len(plan.trials) > 1 else ''} {seeds}"


def time_limit(plan: "Plan") -> str:
    """Return the job's time limit, and its parts."""
    c, total = plan.config, plan.walltime_min
    if total is None or c.walltime is None:
        return "none"
    if c.launch.array:
        return f"{total} min for each trial (one array task per trial)"
    each = f"{c.trials} trial{'s' if c.trials > 1 else ''} of {c.walltime} min"
    return f"{total} min: {each}, and {total - c.trials * c.walltime} min for start, checks and evaluation of the logs"
