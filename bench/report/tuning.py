"""The tables of `runstop tune`: the ranking by the model, next to the measurements."""

from collections.abc import Iterator, Sequence

from bench.mlperf.reader import clean
from bench.report.tables import TextTable
from bench.results.tuning import Outcome, Tried, Tuning, left
from bench.texts import counted

MOST_ROWS = 20
"""Candidates that a dry run shows on the screen; --json has all."""


def table(tuning: Tuning) -> TextTable:
    """Return the table: one row for each of the settings, in the order of the model."""
    is_measured = any(one.values_ms or one.outcome is Outcome.failed for one in tuning.tried)
    columns = ["rank", "settings", "estimate (ms)", "memory (GiB)"]
    if is_measured:
        columns += ["measured (ms)", "95 % interval", "runs", "longer than the fastest", "verdict"]
    rows = [_row(one, tuning, is_measured=is_measured) for one in tuning.tried[:MOST_ROWS]]
    return TextTable(f"settings of {tuning.task} on {tuning.cluster}", rows, columns, "\n".join(_caption(tuning)))


def _row(one: Tried, tuning: Tuning, *, is_measured: bool) -> list[str]:
    candidate = one.candidate
    estimate = "-"
    if candidate.step_ms is not None and candidate.low_ms is not None and candidate.high_ms is not None:
        estimate = f"{number(candidate.step_ms)} (estimated, {number(candidate.low_ms)} to {number(candidate.high_ms)})"
    capacity = "" if candidate.capacity_gib is None else f" of {candidate.capacity_gib:.1f}"
    row = [str(candidate.rank), candidate.name, estimate, f"{candidate.memory_gib:.2f}{capacity}"]
    if not is_measured:
        return row
    interval = "-" if one.low_ms is None or one.high_ms is None else f"{number(one.low_ms)} to {number(one.high_ms)}"
    median = "-" if one.median_ms is None else number(one.median_ms)
    return [*row, median, interval, str(len(one.values_ms)), _longer(one, tuning), _verdict(one)]


def _longer(one: Tried, tuning: Tuning) -> str:
    if one.slower_percent is None or one.slower_low is None or one.slower_high is None:
        return "-"
    than = f" than {one.than}" if one.than != tuning.best else ""
    return f"{one.slower_percent:+.1f} % ({one.slower_low:+.1f} to {one.slower_high:+.1f}){than}"


def _verdict(one: Tried) -> str:
    return f"{one.outcome}: {one.reason}" if one.reason else str(one.outcome)


def number(value_ms: float) -> str:
    """Return milliseconds with three digits, or all digits of the whole part."""
    return f"{value_ms:,.0f}" if value_ms >= 999.5 else f"{value_ms:.3g}"  # 999.7 would be 1e+03


def _caption(tuning: Tuning) -> Iterator[str]:
    """Yield what the table needs to be understood, and what to do next."""
    hidden = len(tuning.tried) - MOST_ROWS
    if hidden > 0:
        yield f"{hidden} further candidates are not shown; --json lists all"
    if any(one.candidate.step_ms is not None for one in tuning.tried):
        yield f"estimates: by the plan; in brackets, where measured steps would be, by {tuning.estimated_by}"
    else:
        yield f"no estimates: {tuning.estimated_by}"
    if not tuning.best:
        yield "nothing here is measured"
        return
    yield f"measured: the median of {tuning.steps} steps of a run, then the median over runs; {_settings(tuning)}"
    yield f"{tuning.num_candidates} candidates fit; stopped after {counted(tuning.num_blocks, 'block')}: " + (
        tuning.stopped_by
    )
    yield from _conclusion(tuning)


def _settings(tuning: Tuning) -> str:
    return (
        f"verdicts hold together at 95 %: each interval of a difference has {100 * tuning.confidence:.2f} %, and "
        f"differences within {100 * tuning.margin:g} % count as equivalent"
    )


def _conclusion(tuning: Tuning) -> Iterator[str]:
    open_ones = left(tuning.tried)
    if tuning.num_blocks < 2:
        yield f"{tuning.best} was fastest in one run of each, which has no interval: this is no proof"
    elif open_ones:
        yield f"{tuning.best} is fastest so far, but is not separated from {'; '.join(open_ones)}"
        yield f"to measure more: {tuning.command}"
    else:
        yield f"{tuning.best} is the fastest of those that were measured"
    if tuning.regret is not None and tuning.tried[0].candidate.step_ms is not None:
        yield f"the model's first choice takes {100 * tuning.regret:.1f} % longer than the best (regret)"
    yield f"to run the task with these settings: runstop launch @{tuning.overrides_file}"


def markdown(tuning: Tuning) -> str:
    """Return the proof as a page of Markdown."""
    shown = table(tuning)
    cells = [list(shown.columns), ["---"] * len(shown.columns), *shown.rows]
    best = tuning.settings(tuning.best)
    overrides = best.candidate.overrides if best is not None else ()
    measured = [f"- Command: `{tuning.command}`", f"- Hardware: {tuning.hardware or '-'}"]
    measured += [f"- Commit: {tuning.commit}"] if tuning.commit else []
    measured.append("- Steps of each run in ms, in the order of blocks:")
    measured += [f"  - {one.candidate.name}: {_values(one.values_ms)}" for one in tuning.tried]
    parts = [
        f"# Settings of {_text(tuning.task)} on {_text(tuning.cluster)}",
        "\n".join(f"| {' | '.join(map(_text, row))} |" for row in cells),
        "\n".join(f"- {_text(line)}" for line in shown.caption.splitlines()),
        "## The fastest",
        "\n".join(f"    {_text(override)}" for override in overrides),
        "## How it was measured",
        "\n".join(map(_text, measured)),
    ]
    return "\n\n".join(parts) + "\n"


def _values(values_ms: Sequence[float]) -> str:
    return ", ".join(map(number, values_ms)) or "none"


def _text(text: str) -> str:
    return clean(text).replace("|", "\\|")
