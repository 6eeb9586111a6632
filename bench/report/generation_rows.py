"""The rows of a generation task's tables: what the trial is worth, and what answers of each length took."""

from collections.abc import Iterator

from bench.contract import mllog
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report.rows import Row, memory_row, telemetry_rows
from bench.results.generation import GenerationResult, OfLength, by_length

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
