"""Show the plan of a training task."""

import shlex
from collections.abc import Iterator

from bench.contract import transport
from bench.contract.engine import Strategy
from bench.contract.layers import Layer, differs_from_llama, has_head_kernels, layer_of
from bench.contract.local_sgd import Average, Compress, Prediction
from bench.contract.plan import Recomputed
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import Adapter, Per
from bench.contract.schema import Config, DataSource, Device, EngineName, Precision
from bench.contract.training import Recompute, StartsFrom
from bench.planning import layouts, projection
from bench.planning.estimates import memory_traffic, transports
from bench.planning.estimates.parameters import active_parameters
from bench.planning.local_sgd import exchange_gbs
from bench.report import described_models
from bench.report.tables import (
    memory_label,
    nodes_text,
    time_limit,
    trials_row,
)

STEP_PARTS = {
    "GEMMs": "gemm_s",
    "attention": "attention_s",
    "element-wise": "elementwise_s",
    "communication": "communication_s",
    "recomputation": "recompute_s",
    "pipeline bubble": "bubble_s",
    "waiting for host": "host_s",
}
"""The parts of a step's time, and their fields in the plan's cost."""


def plan_rows(plan: TrainingPlan) -> list[tuple[str, str]]:
    return [
        ("model", _model(plan)),
        *described_models.rows(plan.config.model),
        ("data", _data(plan)),
        *_document_mask(plan),
        *_engine(plan),
        *_experts(plan),
        *([] if plan.config.program else _layers(plan.config)),
        ("ranks", _ranks(plan)),
        ("batch", _batch(plan)),
        ("learning rate", _learning_rate(plan)),
        ("precision", f"{plan.config.precision.name}, recompute {_recompute(plan)}"),
        ("evaluation", _evaluation(plan)),
        ("trials", trials_row(plan)),
        ("time limit", time_limit(plan)),
        (memory_label(plan.config), _memory(plan)),
        *_transport(plan),
        ("step time", _step_time(plan)),
        *_local_sgd(plan),
        ("training time", _training_time(plan)),
        ("division", f"{plan.submission.division}" + "".join(f"; {d}" for d in plan.submission.deviations)),
    ]


def _learning_rate(plan: TrainingPlan) -> str:
    lr, program = f"{plan.config.training_recipe.lr:g}", plan.config.program
    if program is not None:
        return f"{lr}, passed to the program" if program.uses("lr") else "the program's choice"
    recipe, steps = plan.config.training_recipe, plan.config.training_recipe.lr_warmup_steps
    warm_up = f"warm-up of {steps:,} steps, " if steps and recipe.lr_min_factor else ""
    return f"{lr}, {warm_up}cosine to {recipe.lr * recipe.lr_min_factor:g} at step {plan.max_steps:,}"


def _model(plan: TrainingPlan) -> str:
    c, m = plan.config, plan.memory
    lora = "" if c.training.lora is None else f" (LoRA rank {c.training.lora.rank}, alpha {c.training.lora.alpha})"
    weights = ", random weights" if c.training.starts_from is StartsFrom.random else ""
    if m is None:
        return f"{c.model.name}{lora}{weights}" if c.model.is_known else "unknown: the program's own"
    active = f" ({active_parameters(c.model):,} per token)" if c.model.experts else ""
    return f"{c.model.name}: {m.parameters:,} parameters{active}, {m.trainable_parameters:,} trainable{lora}{weights}"


def _experts(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield the experts of a layer, the layer that computes them, and the load-balancing loss."""
    experts, config = plan.config.model.experts, plan.config
    if experts is None:
        return
    count = f"{experts.num_experts} per layer, {experts.experts_per_token} per token"
    if config.huggingface is not None:
        yield "experts", count
        return
    is_split = config.cluster.device is Device.cuda and plan.world.ep > 1
    dispatcher = "all-to-all" if is_split else "all-gather"
    held = f", {experts.num_experts // plan.world.ep} on each rank" if plan.world.ep > 1 else ""
    frozen = "; experts and router are frozen" if config.training.lora else ""
    loss = f"coefficient {experts.aux_loss_coef:g}" if experts.aux_loss_coef else "none"
    how = f"megatron-core's MoE layer, {dispatcher} dispatcher{frozen}; load-balancing loss: {loss}"
    yield "experts", f"{count}{held}; {how}"


def _data(plan: TrainingPlan) -> str:
    data = plan.config.training_data
    if data.source is DataSource.program:
        counts = {
            "training rows": data.train_rows,
            "evaluation rows": data.eval_rows,
            "tokens per row": data.seq_length,
        }
        known = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        return f"the program's own{f': {known}' if known else ''}"
    name = "random rows, generated in memory" if data.source is DataSource.random else data.name
    rows = (
        f"{data.num_train_rows:,} training rows, {data.eval_rows:,} evaluation rows, {data.seq_length:,} tokens per row"
    )
    return f"{name}: {rows}"


def _document_mask(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield how much attention the document mask leaves; plans without a mask have no such row."""
    data, share = plan.config.training_data, plan.attention_share
    if not data.document_mask:
        return
    source = "data.lengths" if data.source is DataSource.random else "the lengths of the prepared documents"
    left = (
        "document lengths are unknown until the rows are prepared: FLOPs are an upper bound"
        if share is None
        else f"{100 * share:.3g} % of the attention operations of rows without a mask (by {source}); the step time is "
        "estimated as without a mask"
    )
    waits = plan.config.huggingface is None and plan.cost is not None and plan.cost.host_s > 0
    graph = "; no CUDA graph, because the documents differ between micro-batches" if waits else ""
    yield "document mask", f"each token attends only to its own document; {left}{graph}"


def _engine(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield the settings of engine=huggingface and of a program; other engines have no such row."""
    if (program := plan.config.program) is not None:
        times = {Per.rank: "each rank", Per.node: "each node", Per.job: "node 0"}[program.per]
        yield "engine", f"command, started on {times}: {shlex.join(program.argv)}"
        if program.note is not None:
            yield "program", program.note
        where = "the output" if program.file is None or program.adapter is Adapter.hf_trainer else program.file
        mark = "what only the program says is marked in the log"
        yield "read by", f"adapter {program.adapter.name}, from {where}; {mark}"
    hf = plan.config.huggingface
    if hf is None:
        return
    bf16 = f", BF16 as {hf.bf16_mode.name}" if plan.config.precision is Precision.bf16 else ""
    stage = f" stage {hf.zero_stage}" if hf.strategy is Strategy.deepspeed else ""
    moved = [name for name in ("optimizer", "parameters", "activations") if getattr(hf, f"offload_{name}")]
    offload = f", {' and '.join(moved)} offloaded" if moved else ""
    compiled = ", compiled" if hf.compile else ""
    how = f"{hf.strategy.name}{stage}, {hf.attention.name} attention{bf16}{offload}{compiled}"
    yield "engine", f"huggingface: {how}"


def _layers(config: Config) -> Iterator[tuple[str, str]]:
    """Yield which layers run and what they cost, if they are not runstop's own with all their kernels."""
    is_own, is_whole = layer_of(config) is not Layer.megatron, has_head_kernels(config.model)
    if config.model.experts is not None:  # `_experts` describes their layer
        return
    if config.engine.name is not EngineName.megatron or config.precision is Precision.fp32 or (is_own and is_whole):
        return
    more = f"{100 * (memory_traffic.relative_to_fused(config) - 1):.0f} % more bytes in element-wise kernels (estimate)"
    if is_own:
        yield "layers", f"runstop's own, but heads of {config.model.head_size} are left to plain torch: {more}"
    else:
        why = ", ".join(f"{key} is {value}" for key, value in differs_from_llama(config.model).items())
        yield "layers", f"megatron-core's own, because {why}: {more}; no FP8, no 4 bits, no offloading"


def _ranks(plan: TrainingPlan) -> str:
    w = plan.world
    vpp, sp = (f", vpp {w.vpp}" if w.vpp > 1 else ""), (", sp" if w.sp else "")
    nodes = nodes_text(plan.config, num_nodes=w.num_nodes, ranks_per_node=w.ranks_per_node)
    groups = "" if w.groups is None else f"{w.groups} groups of "
    vpp += f", ep {w.ep}" if w.ep > 1 else ""
    return f"{w.num_ranks} = {groups}dp {w.dp} x tp {w.tp} x pp {w.pp} x cp {w.cp}{vpp}{sp}{_chosen(plan)}; {nodes}"


def _chosen(plan: TrainingPlan) -> str:
    """Return which sizes the plan chose because the config leaves them null."""
    if plan.config.program is not None:
        return ""
    names = [name for name in layouts.CHOSEN if getattr(plan.config.parallel, name) is None]
    return f" ({', '.join(names)} automatic)" if names else ""


def _batch(plan: TrainingPlan) -> str:
    b = plan.batch
    is_chosen = plan.config.training_recipe.micro_batch_size is None and plan.config.cluster.device is Device.cuda
    micro = f"micro-batch {b.micro_batch_size}{' (automatic)' if is_chosen else ''}"
    groups = "" if plan.world.groups is None else f"{plan.world.groups} groups x "
    sizes = f"{groups}dp {plan.world.dp} x {micro} x gradient accumulation {b.gradient_accumulation_steps}"
    if plan.config.program is not None:
        sizes = f"{b.global_batch_size} rows per step; how it is split is the program's choice"
        return sizes + (f"; {b.tokens_per_step:,} tokens per step" if b.tokens_per_step else "")
    return f"{b.global_batch_size} = {sizes}; {b.tokens_per_step:,} tokens per step"


def _evaluation(plan: TrainingPlan) -> str:
    e, gbs, target = plan.evaluation, plan.batch.global_batch_size, plan.config.training.target_eval_loss
    until = "no target" if target is None else f"target: evaluation loss of at most {target:g}"
    if plan.config.program is not None:
        return f"when the program evaluates; {until}"
    return f"first after {e.first_step * gbs:,} samples, then every {e.every_steps * gbs:,}; {until}"


def _recompute(plan: TrainingPlan) -> str:
    if plan.config.program is not None:
        return "by the program"
    text = recompute_text(plan.recompute, plan.config.model.num_layers // plan.world.pp)
    return f"{text} (automatic, to fit memory)" if plan.config.training_recipe.recompute is Recompute.fit else text


def recompute_text(recomputed: Recomputed, num_layers: int) -> str:
    """Return what a rank with `num_layers` layers recomputes."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers}
    parts = [f"{name} {count}/{num_layers}" for name, count in counts.items() if count]
    parts[:1] = [f"selective: {parts[0]}"] if parts else []
    if count := recomputed.offloaded_layers:
        parts.append(f"none; activations of {count} of {num_layers} layers offloaded to host memory")
    return f"all {num_layers} layers" if recomputed.full else ", ".join(parts) or "none"


def _transport(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield the links between GPUs whose transport the environment sets."""
    cluster = plan.config.cluster
    if not transport.has_settings(cluster.environment):
        return
    rates = cluster.gpu.rates if cluster.gpu else None
    within = transports.within_node(plan.config, rates) if rates and plan.world.ranks_per_node > 1 else None
    between = transports.between_nodes(plan.config) if plan.world.num_nodes > 1 else None
    links = {"within a node": within, "between nodes": between}
    texts = []
    for where, link in links.items():
        if link is not None and link.transport is not None:
            rates_text = f"at most {link.gbs:.3g} GB/s per GPU, {1e6 * link.latency_s:g} us per message"
            texts.append(f"{where} {link.transport.summary}, {rates_text}")
    if texts:
        yield "transport", "; ".join(texts)


def _step_time(plan: TrainingPlan) -> str:
    if plan.config.program is not None:
        return "not estimated: runstop does not know the program"
    if plan.cost is None and plan.config.huggingface is not None:
        return "not estimated: no time model for engine=huggingface"
    if plan.cost is None and plan.config.model.experts is not None:
        return "not estimated: no rates were measured for a mixture of experts"
    if plan.cost is None:
        return "not estimated: no measured rates for this hardware, its links and precision"
    seconds = {name: getattr(plan.cost, field) for name, field in STEP_PARTS.items()}
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    return f"{plan.cost.step_s:.2f} s (estimate): {parts}; measured errors: docs/prediction.md"


def _local_sgd(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield the groups, the estimated efficiency of local SGD, and the break-even H."""
    estimate, local_sgd = plan.local_sgd, plan.config.training_recipe.averaging
    if estimate is None or local_sgd is None:
        return
    outer = "" if local_sgd.average is Average.parameters else f" (rate {local_sgd.outer_lr:g}, "
    outer += outer and f"momentum {local_sgd.outer_momentum:g})"
    crosses = "FP32" if local_sgd.compress is Compress.none else local_sgd.compress.name.upper()
    how = f"{plan.world.groups}, averaged every {local_sgd.every_steps} steps by {local_sgd.average.name}{outer}"
    hidden = f", overlapped with {local_sgd.overlap_steps} steps" if local_sgd.overlap_steps else ""
    sent = f"each rank sends {_bytes(estimate.rank_bytes)} in {crosses} per averaging"
    yield "local SGD groups", f"{how}; {estimate.num_averagings} times in total; {sent}"
    if estimate.exchange_s is None or estimate.step_s is None or estimate.efficiency is None:
        missing = "cluster.network_gbs" if estimate.exchange_s is None else "a step time (recipe.local_sgd.step_time_s)"
        yield "local SGD efficiency", f"not estimated: {missing} is not set"
        return
    network = f"{exchange_gbs(plan.config):.3g} GB/s per rank"
    yield (
        "local SGD efficiency",
        (
            f"{100 * estimate.efficiency:.1f} % (estimate): inner step {estimate.step_s:.3g} s, weight averaging "
            f"{estimate.exchange_s:.3g} s at {network}{hidden}"
        ),
    )
    yield "break-even H", "; ".join(_break_even(plan, estimate, local_sgd.interval))


def _break_even(plan: TrainingPlan, estimate: Prediction, every: int) -> Iterator[str]:
    """Yield the break-even H with one group and with synchronous training; X marks one that the run's H is below."""
    one = estimate.break_even_one_group
    if one is not None:
        yield f"faster than one group alone above H = {one:.3g}{' (X: this H is too small)' if every <= one else ''}"
    if estimate.synchronous_step_s is None:
        yield "no estimate for synchronous training"
        return
    synchronous = f"than synchronous training ({estimate.synchronous_step_s:.3g} s per step)"
    even = estimate.break_even_synchronous
    if even is None:
        yield f"never faster {synchronous} (X)"
    else:
        yield f"faster {synchronous} above H = {even:.3g}{' (X: this H is too small)' if every <= even else ''}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _training_time(plan: TrainingPlan) -> str:
    """Return the training time projected from the estimated step time, and the time of an evaluation."""
    projected = projection.training_time(plan)
    if projected is None:
        return "not estimated: no step time estimate"
    runs = projected.num_published_runs
    why = "the maximum" if runs is None else f"mean of {runs:,} published runs"
    timed = f"{projected.steps:,} steps ({why}) of {projected.step_s:.2f} s"
    each = f", which take about {_seconds(projected.evaluation_s)} each" if plan.evaluation.at_steps else ""
    return f"{projected.minutes:.1f} min (projection): {timed}; without evaluations{each}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _memory(plan: TrainingPlan) -> str:
    m = plan.memory
    if m is None:
        return "not estimated: runstop does not know the memory of a program"
    unit, scale = ("GiB", 1) if m.total_gib >= 1 else ("MiB", 1024)
    parts = ", ".join(
        f"{name} {gib * scale:.2g}" if gib * scale < 10 else f"{name} {gib * scale:.1f}"
        for name, gib in (
            ("weights", m.base_weights_gib),
            ("adapters", m.adapter_weights_gib),
            ("gradients", m.gradients_gib),
            ("optimizer", m.optimizer_gib),
            ("activations", m.activations_gib),
            ("workspace", m.workspace_gib),
        )
    )
    if m.capacity_gib is None:
        return f"{m.total_gib * scale:.1f} {unit} (estimate): {parts}"
    verdict = "fits" if m.fits else "does not fit"
    return f"{m.total_gib:.1f} of {m.capacity_gib:g} GiB (estimate), {verdict}: {parts}"
