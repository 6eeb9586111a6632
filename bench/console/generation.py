"""Show a run of a generation task: what it will generate, and what that took."""

from collections.abc import Sequence

from bench.console.sheet import Row, Sheet
from bench.contract.generation import GenerationMemory, TokenCost
from bench.contract.plan import GenerationPlan
from bench.mlperf.result import Result
from bench.report import generation as generation_report
from bench.results.generation import GenerationResult
from bench.texts import quoted


def plan_rows(plan: GenerationPlan) -> list[tuple[str, str]]:
    """Return what the plan says, by name, without what every plan says."""
    w, c, asked = plan.world, plan.config, plan.asked
    assert c.task.generation is not None
    device = c.cluster.gpu.name if c.cluster.gpu else c.cluster.device.name
    nodes = f"{w.num_nodes} node{'s' if w.num_nodes > 1 else ''} with {c.cluster.ranks_per_node} x {device}"
    weights = "random weights" if plan.base_dir is None else plan.base_dir
    return [
        ("model", f"{c.model.name}, {weights}, in {plan.weights.name}"),
        ("engine", c.engine.name.name),
        ("answers", answers(plan)),
        ("order", order(plan)),
        ("replicas", f"{w.dp} of {w.tp} rank{'s' if w.tp > 1 else ''}; {nodes}"),
        ("longest share", f"{longest_share(plan):,} of {sum(one.length for one in asked):,} tokens"),
        ("memory per GPU", memory(plan.memory)),
        ("time of a token", token_time(plan.cost)),
    ]


def answers(plan: GenerationPlan) -> str:
    """Return how many answers there are, how long, and to what."""
    lengths = [one.length for one in plan.asked]
    same = len({one.prompt for one in plan.asked}) == 1
    first = plan.asked[0].prompt
    what = f"random prompts of {plan.asked[0].prompt_tokens} tokens" if first is None else "prompts of a file"
    if first is not None and same:
        what = quoted(first)
    span = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else f"{lengths[0]}"
    return f"{len(lengths)} of {span} tokens, {sum(lengths):,} in all; {what}"


def order(plan: GenerationPlan) -> str:
    """Return how a replica works on its answers, and how tokens are drawn."""
    generation = plan.config.task.generation
    assert generation is not None
    words = generation.order.name.replace("_", " ")
    if generation.order.name == "side_by_side":
        most = f"up to {generation.max_batch}" if generation.max_batch else "all of a replica's share"
        words += f", {most} in a {generation.batching.name} batch"
    sampling = generation.sampling
    if sampling.temperature == 0:
        return f"{words}; greedy"
    top = [f"top_k {sampling.top_k}"] if sampling.top_k else []
    top += [f"top_p {sampling.top_p:g}"] if sampling.top_p else []
    return f"{words}; {', '.join([f'temperature {sampling.temperature:g}', *top])}"


def longest_share(plan: GenerationPlan) -> int:
    """Return the tokens of the replica with the most of them."""
    shares = [0] * plan.world.dp
    for one in plan.asked:
        shares[one.replica] += one.length
    return max(shares)


def memory(needed: GenerationMemory) -> str:
    """Return what a GPU needs, and of what it has."""
    parts = f"weights {needed.weights_gib:.3g}, keys and values {needed.kv_cache_gib:.2g}"
    parts += f", workspace {needed.workspace_gib:.2g}"
    if needed.capacity_gib is None:
        return f"{needed.total_gib:.3g} GiB estimated: {parts}"
    return f"{needed.total_gib:.1f} of {needed.capacity_gib:g} GiB estimated, fits: {parts}"


def token_time(cost: TokenCost | None) -> str:
    """Return the bound that the memory bandwidth sets for one stream."""
    if cost is None:
        return "- (the memory bandwidth of the device is not known)"
    return (
        f"{1000 * cost.token_s:.2f} ms estimated for one answer at a time, by memory bandwidth alone: "
        f"{cost.bytes_per_token / 1e9:.1f} GB at {cost.bandwidth_gbs:,.0f} GB/s"
    )


def sheets(result: Result, generation: GenerationResult, *, more: Sequence[Row] = ()) -> list[Sheet]:
    """Return what a trial of a generation task is worth, and what answers of each length took, as far as any did."""
    verdict = [*generation_report.verdict_rows(result, generation), *more]
    rows = [generation_report.length_row(one) for one in generation_report.lengths(generation)]
    columns, note = generation_report.LENGTH_COLUMNS, generation_report.caption(generation)
    lengths = [Sheet("answers by length", rows, columns=columns, caption=note)] if rows else []
    return [Sheet(generation_report.title(result), verdict, caption="n = 1 run"), *lengths]
