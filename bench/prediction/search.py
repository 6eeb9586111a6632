"""Enumerate the layouts of a training run on a number of GPUs, and rank them by their predicted step."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from bench.contract.model import Model
from bench.planning.estimates.parameters import linear_weights, linears
from bench.planning.parallelism import divisors
from bench.prediction import step
from bench.prediction.step import Layout, Terms, Work

MOST_PIPELINE, MOST_CONTEXT, MOST_CHUNKS = 64, 8, 8
"""Largest pp, cp and vpp that are tried. No larger cp or vpp is in the published rows."""
MICRO_BATCHES = (1, 2, 4)
RESERVED_GIB = 6.0
"""Of a GPU, for CUDA, NCCL and fragmentation. Assumed."""
STATE_BYTES = 12
"""Per parameter, split over the replicas: FP32 weight and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Sizes that a user has set; None: any."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A layout, its memory and its step."""

    layout: Layout
    memory_gib: float
    terms: Terms


def rank(work: Work, layouts: Iterable[Layout], *, memory_gib: float) -> list[Ranked]:
    """Return the layouts that fit, fastest first."""
    ranked = []
    for layout in layouts:
        needed = memory(work, layout)
        if needed <= memory_gib:
            ranked.append(Ranked(layout=layout, memory_gib=needed, terms=step.predict(work, layout)))
    return sorted(ranked, key=lambda one: one.terms.step_s)


def layouts(
    model: Model, *, num_gpus: int, largest_tp: int, global_batch_size: int, seq_length: int, fixed: Fixed | None = None
) -> Iterator[Layout]:
    """Yield the layouts of Megatron-core: sizes that divide the model, the row, the batch and the GPUs."""
    fixed = fixed or Fixed()
    sizes = divisors(num_gpus)
    tps = [n for n in sizes if n <= largest_tp and model.num_query_groups % n == 0]
    cps = [n for n in sizes if n <= MOST_CONTEXT and seq_length % (2 * n) == 0]
    pps = [n for n in sizes if n <= MOST_PIPELINE]
    for tp in _allowed(tps, fixed.tp):
        for cp in _allowed(cps, fixed.cp):
            for pp in _allowed(pps, fixed.pp):
                if num_gpus % (tp * cp * pp):
                    continue
                dp = num_gpus // (tp * cp * pp)
                eps = _allowed(_expert_splits(model, dp * cp), fixed.ep)
                for size, ep in product(_allowed(list(MICRO_BATCHES), fixed.micro_batch_size), eps):
                    if global_batch_size % (dp * size):
                        continue
                    split = Layout(
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        dp=dp,
                        ep=ep,
                        micro_batch_size=size,
                        global_batch_size=global_batch_size,
                        seq_length=seq_length,
                    )
                    yield from _schedules(model, fixed, split)


def _expert_splits(model: Model, num_ranks: int) -> list[int]:
    """Return the numbers of ranks over which the experts of a layer can be split."""
    return [n for n in divisors(model.experts.num_experts) if num_ranks % n == 0] if model.experts else [1]


def _schedules(model: Model, fixed: Fixed, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with every number of chunks that divides its layers; balance the ends if only this divides."""
    if layout.pp == 1:
        yield layout
        return
    plain, balanced = model.num_layers % layout.pp == 0, (model.num_layers + 2) % layout.pp == 0
    if not plain and not balanced:
        return
    per_stage = (model.num_layers + (0 if plain else 2)) // layout.pp
    for vpp in _allowed([n for n in range(1, MOST_CHUNKS + 1) if per_stage % n == 0], fixed.vpp):
        if vpp == 1 or layout.num_microbatches % layout.pp == 0:
            yield replace(layout, vpp=vpp, balances_ends=not plain)


def memory(work: Work, layout: Layout) -> float:
    """Return the GiB of the first pipeline stage, which holds the most activations.

    Activations per token and layer of Transformer Engine in FP8: inputs of both norms in BF16; inputs of the linears in
    FP8; q, k, v and the output of attention in BF16; fc1's output in BF16. Interleaving keeps more micro-batches.

    Source: Korthikanti et al., 2022, arXiv 2205.05198, sections 4 and 5 (counted anew for FP8 and SwiGLU).
    """
    model = work.model
    num_layers = -(-model.num_layers // layout.pp)
    held = (num_layers * step.held_weights(model, layout) + model.hidden_size * model.vocab_size) / layout.tp
    is_lora = work.adapter_weights > 0
    weight_bytes = 1 if work.is_fp8 and is_lora else 2
    states = held * (weight_bytes + (0 if is_lora else work.stack.gradient_bytes))
    every = (num_layers * linear_weights(model) + model.hidden_size * model.vocab_size) / layout.tp
    states += 0.0 if is_lora else STATE_BYTES * every / (layout.dp * layout.cp)
    q, kv, fc1 = model.q_size, model.kv_size, linears(model)["linear_fc1"].num_out
    rows = model.experts.experts_per_token if model.experts else 1
    stored = 1 if work.is_fp8 else 2
    per_token = model.hidden_size * (4 + 2 * stored) + 2 * (2 * q + 2 * kv) + stored * q + 2 * rows * fc1
    per_token += stored * rows * linears(model)["linear_fc2"].num_in
    in_flight = layout.pp + (layout.pp - 1) / layout.vpp if layout.vpp > 1 else layout.pp
    in_flight = min(in_flight, layout.num_microbatches)
    activations = 2 * model.hidden_size * num_layers if layout.recompute else per_token * num_layers
    return (states + activations * in_flight * layout.tokens / layout.tp) / 2**30 + RESERVED_GIB


def _allowed(sizes: list[int], fixed: int | None) -> list[int]:
    return sizes if fixed is None else [fixed]
