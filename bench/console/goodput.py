"""Table of `runstop goodput`."""

from bench.report.tables import TextTable
from bench.runs.folder import short
from bench.runs.goodput import RESTARTS, Goodput, Part
from bench.texts import counted

NAMES = {
    Part.training: "effective training",
    Part.repeated: "restarts: work done again",
    Part.down: "restarts: down",
    Part.restart: "restarts: start",
}
"""Titles of the parts whose own names say too little."""


def goodput_sheet(measured: Goodput) -> TextTable:
    """Return the parts of a run's time that took any, in minutes, as shares and in GPU hours."""
    has_gpus = measured.num_gpus is not None
    columns = ("part", "min", "share", *(("GPU hours",) if has_gpus else ()), "what is counted")
    parts = {part: seconds for part, seconds in measured.seconds.items() if seconds > 0 or part is Part.training}
    rows = [_row(measured, NAMES.get(part, part.name), seconds, part.value) for part, seconds in parts.items()]
    trials = counted(len(measured.trials), "trial")
    attempts = counted(sum(trial.num_attempts for trial in measured.trials), "attempt")
    rows.append(_row(measured, "all", measured.wall_s, f"{trials}, {attempts}: first begin to last end"))
    lost_s = sum(measured.seconds[part] for part in RESTARTS)
    lines = [
        f"effective training time: {_minutes(measured.seconds[Part.training])} of {_minutes(measured.wall_s)} min, "
        f"{_share(measured.effective)}; restarts took {_share(measured.share(lost_s))}",
        *measured.notes,
    ]
    return TextTable(f"goodput of {short(measured.folder)}", rows, columns, "\n".join(lines))


def _row(measured: Goodput, name: str, seconds: float, what: str) -> tuple[str, ...]:
    hours = measured.gpu_hours(seconds)
    shown = () if hours is None else (f"{hours:,.2f}",)
    return (name, _minutes(seconds), _share(measured.share(seconds)), *shown, what)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.2f}"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"
