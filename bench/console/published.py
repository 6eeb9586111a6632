"""Show the systems of a round's results repository."""

from collections.abc import Sequence

from bench.mlperf.result import UNVERIFIED
from bench.mlperf.results_repository import Entry
from bench.report.compare import model
from bench.report.tables import TextTable

_COLUMNS = (
    *("submitter", "system", "nodes", "GPUs", "type", "minutes", "GBS", "TP", "PP", "CP", "samples", "tokens/s/GPU"),
    "runs",
)


def published_sheets(entries: Sequence[Entry]) -> list[TextTable]:
    """Return a table of the systems of each benchmark, and one of the notes."""
    by_benchmark: dict[str, list[Entry]] = {}
    for entry in entries:
        by_benchmark.setdefault(entry.benchmark, []).append(entry)
    sheets = [_table(benchmark, group) for benchmark, group in by_benchmark.items()]
    notes = [(_name(entry), note) for entry in entries for note in _notes(entry)]
    return [*sheets, *([TextTable("notes", notes)] if notes else [])]


def _notes(entry: Entry) -> list[str]:
    why = entry.why_not_listed
    return [*entry.notes, *([f"not in the written table: {why}"] if why else [])]


def _name(entry: Entry) -> str:
    return f"{entry.submitter} {entry.system}, {entry.benchmark}"


def _table(benchmark: str, entries: Sequence[Entry]) -> TextTable:
    ordered = sorted(entries, key=lambda one: (one.num_gpus or 0, one.minutes is None, one.minutes or 0))
    caption = f"{UNVERIFIED} minutes: score from the logs; samples: mean to the target; blank: in no log"
    rows = [_row(entry) for entry in ordered]
    return TextTable(f"{benchmark}, {ordered[0].round}", rows, columns=_COLUMNS, caption=caption, num_optional=4)


def _row(entry: Entry) -> tuple[str, ...]:
    failed = f", {entry.num_failed} failed" if entry.num_failed else ""
    return (
        entry.submitter,
        entry.system,
        _text(entry.num_nodes),
        _text(entry.num_gpus),
        model(entry.accelerator) or entry.accelerator or "",
        _text(entry.minutes, ".3f"),
        _text(entry.global_batch_size),
        *map(_text, (entry.tp, entry.pp, entry.cp)),
        _text(entry.mean_samples, ",.0f"),
        _text(entry.tokens_s_gpu, ",.0f"),
        f"{entry.num_runs}{failed}",
    )


def _text(value: float | None, form: str = "") -> str:
    return "" if value is None else f"{value:{form}}"
