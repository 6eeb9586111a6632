"""What generation tasks measured as files to hand on: a page, every answer as CSV, and the figure of their times."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report import drawings, output_folder, template
from bench.report.canvas import canvas, save
from bench.report.tables import Row, inert, memory_row, telemetry_rows
from bench.report.trials import ReadTrial
from bench.results.generation import Answered, GenerationResult, OfLength, by_length

LENGTH_COLUMNS = ("length (tokens)", "answers", "answer (s)", "first token (s)", "next token (ms)", "tokens/s")
HOW = {"compile": "compiled", "cuda_graph": "captured in a CUDA graph"}
"""What an engine says of its way to compute, in words."""
SHOWN = 5
"""So many problems are listed; the others are counted."""
lengths = by_length


def title(result: Result) -> str:
    """Return the name of the task, and where it ran."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "generation"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, ranks = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    where = ", ".join(str(part) for part in (f"{ranks} ranks on {device}", result.platform) if part)
    return printable(f"{name}: {where}")


def problems(result: Result, generation: GenerationResult) -> list[str]:
    """Return what keeps the log from proving that the task was done."""
    return [*(finding.what for finding in result.findings if finding.severity == "error"), *generation.problems]


def verdict_rows(result: Result, generation: GenerationResult) -> list[Row]:
    """Return what a trial is worth; without a proof of every answer there are no times."""
    found = problems(result, generation)
    shown = "; ".join(found[:SHOWN]) + (f"; {len(found) - SHOWN} more" if found[SHOWN:] else "")
    given, asked = len(generation.answers), len(generation.asked)
    is_proven = result.valid and generation.proven
    return [
        ("run_start → run_stop (s)", _text(generation.total_s, "{:.3f}"), "all answers, without loading and warm-up"),
        ("answers as asked for", f"{given} of {asked}", f"{generation.tokens:,} of {sum(generation.asked):,} tokens"),
        ("valid trial", "yes" if is_proven else "no", shown),
        *(_times(generation) if is_proven else []),
        *_engine(generation),
        ("asked for", str(generation.about.get("weights", "")), _how(generation)),
        memory_row(result.peak_memory_gib),
        *telemetry_rows(result.telemetry),
        ("initialisation (s)", _text(result.init_s, "{:.1f}"), "before the clock"),
        ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
    ]


def _times(generation: GenerationResult) -> Iterator[Row]:
    answers, total_s = generation.answers, generation.total_s
    assert total_s is not None
    rate = generation.tokens / total_s
    of_gpu = "" if not generation.num_gpus else f"{rate / generation.num_gpus:,.4g} a GPU"
    yield "throughput (tokens/s)", f"{rate:,.4g}", of_gpu
    yield "time per token (ms)", f"{1000 * total_s / generation.tokens:,.4g}", "whole time over all tokens"
    firsts, dones = sorted(one.first_s for one in answers), sorted(one.done_s for one in answers)
    yield "time to first token (s)", f"{_middle(firsts):.4g}", f"median; {firsts[0]:.4g} to {firsts[-1]:.4g}"
    yield "time of an answer (s)", f"{_middle(dones):.4g}", f"median; {dones[0]:.4g} to {dones[-1]:.4g}"
    if generation.one_stream_token_s is not None:
        token_s, share = generation.one_stream_token_s, generation.bandwidth_share
        yield "one stream (tokens/s)", f"{1 / token_s:,.4g}", "tokens behind the first one, median over answers"
        rate_gbs = generation.about.get("bandwidth_gbs")
        remark = f"of {rate_gbs:,.0f} GB/s, as copies were measured" if rate_gbs else "the GPU's rate is not known"
        yield "share of memory bandwidth (%)", _text(share and 100 * share, "{:.1f}"), remark


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _engine(generation: GenerationResult) -> Iterator[Row]:
    """Yield what gave the answers: the same task has other times by another engine, or with a compiled model."""
    about = generation.engine
    if about:
        named = [str(about.get(mllog.STRATEGY)).replace("_", " "), f"{about.get('cache')} cache"]
        named += [text for key, text in HOW.items() if about.get(key) is True]
        yield "engine", str(about.get("engine")), ", ".join(named)


def _how(generation: GenerationResult) -> str:
    about = generation.about
    order = str(about.get("order", "")).replace("_", " ")
    words = [f"{about.get('model')}", f"{about.get('replicas')} x tp {about.get('tp')}", order]
    if about.get("order") == "side_by_side":
        words.append(f"{about.get('batching')} batches of {about.get('max_batch') or 'all'}")
    drawn = [f"{name} {about[name]}" for name in ("temperature", "top_k", "top_p") if about.get(name)]
    words += drawn or ["greedy"]
    return ", ".join([*words, f"prompts: {about.get('prompts')}"])


def caption(generation: GenerationResult) -> str:
    """Return what the table of lengths means."""
    since = "its own start" if generation.about.get("order") == "one_by_one" else "the start of all answers"
    return f"Medians, counted from {since}; the first token includes the prompt."


def length_row(one: OfLength) -> tuple[str, ...]:
    return (
        f"{one.length:,}",
        str(one.count),
        f"{one.answer_s:.4g}",
        f"{one.first_s:.4g}",
        "" if one.token_s is None else f"{1000 * one.token_s:.4g}",
        f"{one.length / one.answer_s:,.4g}",
    )


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


PAGE, TABLE, TEMPLATE, FIGURE = "report.html", "answers.csv", "generation.html.j2", "answers.png"
_FILES = re.compile(r"report\.html|answers\.(csv|png)")
"""Names of what such a report consists of."""
_HEIGHT_INCHES = 4.2


def write(trials: Sequence[ReadTrial[GenerationResult]], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every answer and the figure into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ReadTrial[GenerationResult]], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    drawn = [trial for trial in trials if trial.is_proven]
    if drawn:
        figure(drawn, out / FIGURE, heading=heading)
    shown = [drawings.shown(out / FIGURE, "")] if drawn else []
    context = {
        "title": heading,
        "sections": [_section(trial) for trial in trials],
        "figures": shown,
        "charts": {},
        "versions": {"runstop": version("runstop")},
    }
    (out / PAGE).write_text(template.page(TEMPLATE, context | template.context(has_charts=False)), encoding="utf-8")


def _section(trial: ReadTrial[GenerationResult]) -> dict[str, Any]:
    """Return what the page says of a trial."""
    rows = [length_row(one) for one in lengths(trial.found)]
    return {
        "name": trial.name,
        "rows": verdict_rows(trial.result, trial.found),
        "columns": LENGTH_COLUMNS,
        "lengths": rows,
        "caption": caption(trial.found),
    }


def figure(trials: Sequence[ReadTrial[GenerationResult]], path: Path, *, heading: str) -> None:
    """Draw the time of every answer over its length, one colour for each trial."""
    note = f"{trials[0].result.platform or 'platform not logged'}; one mark for each answer"
    drawing, (axes,) = canvas(_HEIGHT_INCHES, heading, note, panels=1)
    for trial in trials:
        answers = trial.found.answers
        axes.plot([one.tokens for one in answers], [one.done_s for one in answers], "o", ms=4, label=trial.name)
    axes.set_xlabel("length of the answer (tokens)")
    axes.set_ylabel("time of the answer (s)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save(drawing, path)


def csv_text(trials: Sequence[ReadTrial[GenerationResult]]) -> str:
    """Return every answer of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *(field.name for field in fields(Answered))])
    writer.writerows(
        [inert(value) for value in (trial.name, *astuple(one))] for trial in trials for one in trial.found.answers
    )
    return text.getvalue()
