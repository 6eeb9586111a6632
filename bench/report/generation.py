"""Show generation tasks: plans, results of trials, and a page with every answer."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from bench.contract import mllog, run_files
from bench.contract.generation import GenerationMemory, TokenCost
from bench.contract.plan_kinds import GenerationPlan
from bench.mlperf.reader import printable
from bench.mlperf.result import Result
from bench.report import costs, described_models, drawings, labels
from bench.report.canvas import COLORS, canvas, save
from bench.report.curves import number
from bench.report.drawings import Shown
from bench.report.kinds import ShownTrial, TrialsKindReport
from bench.report.tables import Row, TextTable, memory_label, memory_row, nodes_text, ranks_text, telemetry_rows
from bench.report.template import Card, Charts, axis, chart, text, view
from bench.results.generation import Answered, GenerationResult, OfLength, by_length
from bench.texts import quoted

LENGTH_COLUMNS = ("length (tokens)", "answers", "time (s)", "first token (s)", "time per token (ms)", "tokens/s")
HOW = {"compile": "compiled", "cuda_graph": "captured in a CUDA graph"}
"""Keys of an engine's description in the log, and their text."""


def title(result: Result) -> str:
    """Return the name of the task and its hardware."""
    task = str(result.hyperparameters.get(mllog.CONFIG_FILENAME, "generation"))
    name = task.removeprefix("task/").removesuffix(".yaml")
    device, ranks = (result.hyperparameters.get(key) for key in ("accelerator", "num_ranks"))
    where = ", ".join(str(part) for part in (ranks_text(ranks, device), result.platform) if part)
    return printable(f"{name}: {where}")


def verdict_rows(trial: ShownTrial[GenerationResult]) -> list[Row]:
    """Return the verdict and measurements of a trial; without all answers there are no times."""
    result, generation = trial.judged.result, trial.kind_result
    num_answers, num_requested = len(generation.answers), len(generation.requested_lengths)
    return [
        ("run_start → run_stop (s)", _text(generation.total_s, "{:.3f}"), "all answers; loading and warm-up excluded"),
        (
            "answers of the requested length",
            f"{num_answers} of {num_requested}",
            f"{generation.tokens:,} of {sum(generation.requested_lengths):,} tokens",
        ),
        trial.valid_row,
        *(_times(generation) if generation.valid else []),
        *_engine(generation),
        ("weights", str(generation.about.get("weights", "")), _how(generation)),
        memory_row(result.peak_memory_gib),
        *costs.result_rows(generation.measurements),
        *telemetry_rows(result.telemetry),
        ("initialisation (s)", _text(result.init_s, "{:.1f}"), "not timed"),
        ("software", ", ".join(f"{name} {version}" for name, version in result.software.items()), ""),
    ]


def _times(generation: GenerationResult) -> Iterator[Row]:
    answers, total_s = generation.answers, generation.total_s
    assert total_s is not None
    rate = generation.tokens / total_s
    of_gpu = "" if not generation.num_gpus else f"{rate / generation.num_gpus:,.4g} per GPU"
    yield "throughput (tokens/s)", f"{rate:,.4g}", of_gpu
    yield "time per token (ms)", f"{1000 * total_s / generation.tokens:,.4g}", "total time / all tokens"
    firsts, dones = sorted(one.first_s for one in answers), sorted(one.done_s for one in answers)
    yield "time to first token (s)", f"{_middle(firsts):.4g}", f"median; {firsts[0]:.4g} to {firsts[-1]:.4g}"
    yield "time per answer (s)", f"{_middle(dones):.4g}", f"median; {dones[0]:.4g} to {dones[-1]:.4g}"
    if generation.one_stream_token_s is not None:
        token_s, share = generation.one_stream_token_s, generation.bandwidth_share
        yield "one stream (tokens/s)", f"{1 / token_s:,.4g}", "tokens after the first, median over answers"
        rate_gbs = generation.about.get("bandwidth_gbs")
        remark = f"of {rate_gbs:,.0f} GB/s, measured with copies" if rate_gbs else "the GPU's bandwidth is unknown"
        yield "share of memory bandwidth (%)", _text(share and 100 * share, "{:.1f}"), remark


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _engine(generation: GenerationResult) -> Iterator[Row]:
    """Yield the engine and its mode, such as compiled: they determine the times."""
    about = generation.engine
    if about:
        named = [str(about.get(mllog.STRATEGY)).replace("_", " "), f"{about.get('cache')} cache"]
        named += [text for key, text in HOW.items() if about.get(key) is True]
        yield "engine", str(about.get("engine")), ", ".join(named)


def _how(generation: GenerationResult) -> str:
    about = generation.about
    order = str(about.get("order", "")).replace("_", " ")
    parts = [f"{about.get('model')}", f"{about.get('replicas')} x tp {about.get('tp')}", order]
    if about.get("order") == "side_by_side":
        parts.append(f"{about.get('batching')} batches of {about.get('max_batch') or 'all'}")
    sampling = [f"{name} {about[name]}" for name in ("temperature", "top_k", "top_p") if about.get(name)]
    parts += sampling or ["greedy"]
    return ", ".join([*parts, f"prompts: {about.get('prompts')}"])


def caption(generation: GenerationResult) -> str:
    """Return the caption of the table of lengths."""
    start = "its own start" if generation.about.get("order") == "one_by_one" else "the common start"
    return f"Medians. The times of an answer are counted from {start}; the first token includes the prompt."


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


FIGURE = "answers"
_HEIGHT_INCHES = 4.2


def figure(trials: Sequence[ShownTrial[GenerationResult]], path: Path, *, heading: str) -> None:
    """Draw the time of every answer over its length, a colour for each trial."""
    note = f"{trials[0].judged.result.platform or 'platform not logged'}; one mark for each answer"
    drawing, (axes,) = canvas(_HEIGHT_INCHES, heading, note, panels=1)
    for trial in trials:
        answers = trial.kind_result.answers
        axes.plot([one.tokens for one in answers], [one.done_s for one in answers], "o", ms=4, label=trial.name)
    axes.set_xlabel("length of the answer (tokens)")
    axes.set_ylabel("time of the answer (s)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save(drawing, path)


def plan_rows(plan: GenerationPlan) -> list[tuple[str, str]]:
    w, c = plan.world, plan.config
    assert c.task.generation is not None
    nodes = nodes_text(c, num_nodes=w.num_nodes, ranks_per_node=c.cluster.ranks_per_node)
    weights = "random weights" if plan.base_dir is None else plan.base_dir
    return [
        ("model", f"{c.model.name}, {weights}, in {plan.weights.name}"),
        *described_models.rows(c.model),
        ("engine", c.engine.name.name),
        ("answers", answers(plan)),
        ("order", order(plan)),
        ("replicas", f"{w.dp} of {w.tp} rank{'s' if w.tp > 1 else ''}; {nodes}"),
        ("largest replica share", f"{longest_share(plan):,} of {sum(one.length for one in plan.requests):,} tokens"),
        (memory_label(c), memory(plan.memory)),
        ("time per token", token_time(plan.cost)),
    ]


def answers(plan: GenerationPlan) -> str:
    """Return the number of answers, their lengths and their prompts."""
    lengths = [one.length for one in plan.requests]
    same = len({one.prompt for one in plan.requests}) == 1
    first = plan.requests[0].prompt
    what = f"random prompts of {plan.requests[0].prompt_tokens} tokens" if first is None else "prompts from a file"
    if first is not None and same:
        what = quoted(first)
    span = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else f"{lengths[0]}"
    return f"{len(lengths)} of {span} tokens, {sum(lengths):,} in total; {what}"


def order(plan: GenerationPlan) -> str:
    """Return the order in which a replica generates its answers, and the sampling settings."""
    generation = plan.config.task.generation
    assert generation is not None
    text = generation.order.name.replace("_", " ")
    if generation.order.name == "side_by_side":
        most = f"up to {generation.max_batch}" if generation.max_batch else "all of a replica's share"
        text += f", {most} in a {generation.batching.name} batch"
    sampling = generation.sampling
    if sampling.temperature == 0:
        return f"{text}; greedy"
    top = [f"top_k {sampling.top_k}"] if sampling.top_k else []
    top += [f"top_p {sampling.top_p:g}"] if sampling.top_p else []
    return f"{text}; {', '.join([f'temperature {sampling.temperature:g}', *top])}"


def longest_share(plan: GenerationPlan) -> int:
    """Return the number of tokens of the replica with the most tokens."""
    shares = [0] * plan.world.dp
    for one in plan.requests:
        shares[one.replica] += one.length
    return max(shares)


def memory(needed: GenerationMemory) -> str:
    """Return the estimated memory of a GPU, and its capacity."""
    parts = f"weights {needed.weights_gib:.3g}, KV cache {needed.kv_cache_gib:.2g}"
    parts += f", workspace {needed.workspace_gib:.2g}"
    if needed.capacity_gib is None:
        return f"{needed.total_gib:.3g} GiB (estimate): {parts}"
    return f"{needed.total_gib:.1f} of {needed.capacity_gib:g} GiB (estimate), fits: {parts}"


def token_time(cost: TokenCost | None) -> str:
    """Return the lower bound of the time per token of one stream, given by memory bandwidth."""
    if cost is None:
        return "- (the memory bandwidth of the device is unknown)"
    return (
        f"{1000 * cost.token_s:.2f} ms (estimate for one answer at a time, from memory bandwidth): "
        f"{cost.bytes_per_token / 1e9:.1f} GB at {cost.bandwidth_gbs:,.0f} GB/s"
    )


class GenerationReport(TrialsKindReport[GenerationPlan, GenerationResult]):
    """Shows generation tasks."""

    work, page_shows = "generate", "every answer and its figure"
    table_name, table_columns = "answers.csv", tuple(field.name for field in fields(Answered))
    figure_names = (FIGURE,)

    def plan_rows(self, plan: GenerationPlan) -> list[tuple[str, str]]:
        return plan_rows(plan)

    def title(self, trial: ShownTrial[GenerationResult]) -> str:
        return title(trial.judged.result)

    def tables(self, trial: ShownTrial[GenerationResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        verdict, rows = [*verdict_rows(trial), *more], [length_row(one) for one in by_length(trial.kind_result)]
        columns, note = LENGTH_COLUMNS, caption(trial.kind_result)
        lengths = [TextTable("answers by length", rows, columns=columns, caption=note)] if rows else []
        return [TextTable(self.title(trial), verdict, caption="n = 1 run"), *lengths]

    def files(self, folder: Path, trial: int, result: GenerationResult) -> list[Row]:
        return [("answers", str(folder / run_files.answers(trial)), "")]

    def table_rows(self, trial: ShownTrial[GenerationResult]) -> Iterator[Sequence[object]]:
        yield from (astuple(one) for one in trial.kind_result.answers)

    def cards(self, trial: ShownTrial[GenerationResult]) -> list[Card]:
        generation = trial.kind_result
        count = f"of {len(generation.requested_lengths)}"
        done = Card(name="answers", value=f"{len(generation.answers)}", unit=count, note="of the requested length")
        times = list(_times(generation)) if generation.valid else []
        return [done, *(_card(*row) for row in times[:4])]

    def figures(self, trials: Sequence[ShownTrial[GenerationResult]], out: Path, *, heading: str) -> list[Shown]:
        valid, path = [trial for trial in trials if trial.kind_result.valid], out / f"{FIGURE}.png"
        if not valid:
            return []
        figure(valid, path, heading=heading)
        return [drawings.titled(path, "One mark for each answer.", self.charts(valid))]

    def charts(self, trials: Sequence[ShownTrial[GenerationResult]]) -> Charts:
        names = labels.short([trial.name for trial in trials])
        traces = [
            {
                "mode": "markers",
                "name": text(name),
                "x": [one.tokens for one in trial.kind_result.answers],
                "y": [number(one.done_s) for one in trial.kind_result.answers],
                "marker": {"color": COLORS[place % len(COLORS)], "size": 7},
                "hovertemplate": f"%{{y:.4g}} s for %{{x:,}} tokens<extra>{text(name)}</extra>",
                "showlegend": len(trials) > 1,
            }
            for place, (name, trial) in enumerate(zip(names, trials, strict=True))
            if trial.kind_result.answers
        ]
        lengths = axis("length of the answer (tokens)", rangemode="tozero")
        times = axis("time of the answer (s)", rangemode="tozero")
        return {FIGURE: ("Time of each answer", chart(view("", traces, xaxis=lengths, yaxis=times)))}


def _card(name: str, value: str, remark: str) -> Card:
    title, _, unit = name.partition(" (")
    return Card(name=title, value=value, unit=unit.removesuffix(")"), note=remark)


REPORT = GenerationReport()
