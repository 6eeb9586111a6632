"""Show a plan: what a run will do, how long that would take, and what would stop it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bench.console import diagnosis, generation, kernels, serving
from bench.console.sheet import Sheet, show
from bench.contract.engine import Strategy
from bench.contract.local_sgd import Average, Compress, Prediction
from bench.contract.plan import GenerationPlan, Plan, Recomputed, ServingPlan, TrainingPlan
from bench.contract.schema import Config, DataSource, Device, Precision
from bench.contract.training import Recompute, StartsFrom
from bench.mlperf import published
from bench.planning import layouts, local_sgd
from bench.planning.estimates import model_memory as needs
from bench.planning.estimates.parameters import parameters
from bench.planning.layouts import Layout

if TYPE_CHECKING:
    from bench.contract.plan import KernelsPlan, Plan
    from bench.preflight import Finding


STEP_PARTS = {
    "GEMMs": "gemm_s",
    "attention": "attention_s",
    "element-wise": "elementwise_s",
    "communication": "communication_s",
    "recomputation": "recompute_s",
    "pipeline bubble": "bubble_s",
    "waiting for host": "host_s",
}
"""What a step's seconds go into, and the field of the plan's cost that has them."""


def show_plan(plan: "Plan", findings: "Sequence[Finding]") -> None:
    """Print the plan as a table, and what would stop it."""
    show(Sheet(f"{plan.name}: {plan.config.task.summary}", rows(plan)))
    if findings:
        show(diagnosis.findings_sheet(findings, title="before this can run"))


def rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return what the plan says, by name."""
    if isinstance(plan, TrainingPlan):
        own = _training_rows(plan)
    else:
        own = [*_rows_of_kind(plan), ("trials", trials_row(plan)), ("time limit", time_limit(plan))]
    return [
        *own,
        ("commands", "; ".join(command.name for command in plan.commands)),
        ("files", ", ".join(plan.files)),
    ]


def _rows_of_kind(plan: "GenerationPlan | ServingPlan | KernelsPlan") -> list[tuple[str, str]]:
    if isinstance(plan, ServingPlan):
        return serving.plan_rows(plan)
    return generation.plan_rows(plan) if isinstance(plan, GenerationPlan) else kernels.plan_rows(plan)


def _training_rows(plan: TrainingPlan) -> list[tuple[str, str]]:
    return [
        ("model", _model(plan)),
        ("data", _data(plan)),
        *_engine(plan),
        ("ranks", _ranks(plan)),
        ("batch", _batch(plan)),
        ("learning rate", f"{plan.config.recipe.lr:g}, cosine to 0 at step {plan.max_steps:,}"),
        ("precision", f"{plan.config.precision.name}, recompute {_recompute(plan)}"),
        ("evaluation", _evaluation(plan)),
        ("trials", trials_row(plan)),
        ("time limit", time_limit(plan)),
        ("memory per GPU", _memory(plan)),
        ("step time", _step_time(plan)),
        *_apart(plan),
        ("training time", _training_time(plan)),
        ("division", f"{plan.submission.division}" + "".join(f"; {d}" for d in plan.submission.deviations)),
    ]


def _model(plan: TrainingPlan) -> str:
    c, m = plan.config, plan.memory
    lora = "" if c.training.lora is None else f" (LoRA rank {c.training.lora.rank}, alpha {c.training.lora.alpha})"
    weights = ", random weights" if c.training.starts_from is StartsFrom.random else ""
    return f"{c.model.name}: {m.parameters:,} parameters, {m.trainable_parameters:,} of them trained{lora}{weights}"


def _data(plan: TrainingPlan) -> str:
    data = plan.config.data
    name = "random rows, made up in memory" if data.source is DataSource.random else data.name
    return (
        f"{name}: {data.train_rows:,} rows to train on, {data.eval_rows:,} to evaluate, {data.seq_length:,} tokens each"
    )


def _engine(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield how engine=huggingface computes; of the others the plan's other rows say it."""
    peer = plan.config.huggingface
    if peer is None:
        return
    bf16 = f", BF16 as {peer.bf16_mode.name}" if plan.config.precision is Precision.bf16 else ""
    stage = f" of stage {peer.zero_stage}" if peer.strategy is Strategy.deepspeed else ""
    moved = [name for name in ("optimizer", "parameters", "activations") if getattr(peer, f"offload_{name}")]
    offload = f", {' and '.join(moved)} offloaded" if moved else ""
    compiled = ", compiled" if peer.compile else ""
    how = f"{peer.strategy.name}{stage}, {peer.attention.name} attention{bf16}{offload}{compiled}"
    yield "engine", f"huggingface: {how}"


def _ranks(plan: TrainingPlan) -> str:
    w, cluster = plan.world, plan.config.cluster
    vpp, sp = (f", vpp {w.vpp}" if w.vpp > 1 else ""), (", sp" if w.sp else "")
    device = cluster.gpu.name if cluster.gpu else cluster.device.name
    nodes = f"{w.num_nodes} node{'s' if w.num_nodes > 1 else ''} with {w.ranks_per_node} x {device}"
    groups = "" if w.groups is None else f"{w.groups} groups of "
    return f"{w.num_ranks} = {groups}dp {w.dp} x tp {w.tp} x pp {w.pp} x cp {w.cp}{vpp}{sp}{_chosen(plan)}; {nodes}"


def _chosen(plan: TrainingPlan) -> str:
    """Return which sizes the config left to the plan."""
    names = [name for name in layouts.CHOSEN if getattr(plan.config.parallel, name) is None]
    return f" ({', '.join(names)} chosen)" if names else ""


def _batch(plan: TrainingPlan) -> str:
    b = plan.batch
    is_chosen = plan.config.recipe.micro_batch_size is None and plan.config.cluster.device is Device.cuda
    micro = f"micro-batch {b.micro_batch_size}{' (chosen)' if is_chosen else ''}"
    groups = "" if plan.world.groups is None else f"{plan.world.groups} groups x "
    sizes = f"{groups}dp {plan.world.dp} x {micro} x gradient accumulation {b.gradient_accumulation_steps}"
    return f"{b.global_batch_size} = {sizes}; {b.tokens_per_step:,} tokens a step"


def _evaluation(plan: TrainingPlan) -> str:
    e, gbs, target = plan.evaluation, plan.batch.global_batch_size, plan.config.training.target_eval_loss
    until = "no target" if target is None else f"until the evaluation loss is at most {target:g}"
    return f"first after {e.first_step * gbs:,} samples, then every {e.every_steps * gbs:,}; {until}"


def trials_row(plan: "Plan") -> str:
    seeds = ", ".join(str(trial.seed) for trial in plan.trials)
    return f"{len(plan.trials)}, with seed{'s' if len(plan.trials) > 1 else ''} {seeds}"


def time_limit(plan: "Plan") -> str:
    """Return the job's time limit, and what it is made of."""
    c, total = plan.config, plan.walltime_min
    if total is None or c.walltime is None:
        return "none"
    if c.launch.array:
        return f"{total} min for each trial, which is an array element of its own"
    each = f"{c.trials} trial{'s' if c.trials > 1 else ''} of {c.walltime} min"
    return f"{total} min: {each}, and {total - c.trials * c.walltime} min to start, check and judge them"


def _recompute(plan: TrainingPlan) -> str:
    found = recompute_words(plan.recompute, plan.config.model.num_layers // plan.world.pp)
    return f"{found} (as much as memory needs)" if plan.config.recipe.recompute is Recompute.fit else found


def recompute_words(recomputed: Recomputed, num_layers: int) -> str:
    """Return what a rank with so many layers recomputes."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers}
    parts = [f"{name} in {count} of {num_layers} layers" for name, count in counts.items() if count]
    if count := recomputed.offloaded_layers:
        parts.append(f"none; activations of {count} of {num_layers} layers in the host's memory")
    return f"all {num_layers} layers" if recomputed.full else ", ".join(parts) or "none"


def _step_time(plan: TrainingPlan) -> str:
    if plan.cost is None and plan.config.huggingface is not None:
        return "not estimated: there is no model of the time of engine=huggingface"
    if plan.cost is None:
        return "not estimated: no rates are known for this hardware and precision"
    seconds = {name: getattr(plan.cost, field) for name, field in STEP_PARTS.items()}
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    return f"{plan.cost.step_s:.2f} s estimated: {parts}"


def _apart(plan: TrainingPlan) -> Iterator[tuple[str, str]]:
    """Yield how groups train apart, what merging them costs, and from which H on it is worth it."""
    found, local_sgd = plan.apart, plan.config.recipe.local_sgd
    if found is None or local_sgd is None:
        return
    outer = "" if local_sgd.average is Average.parameters else f" (rate {local_sgd.outer_lr:g}, "
    outer += outer and f"momentum {local_sgd.outer_momentum:g})"
    crosses = "FP32" if local_sgd.compress is Compress.none else local_sgd.compress.name.upper()
    how = f"{plan.world.groups}, merged every {local_sgd.every_steps} steps by {local_sgd.average.name}{outer}"
    hidden = f", hidden by {local_sgd.overlap_steps} steps" if local_sgd.overlap_steps else ""
    yield "groups apart", f"{how}; {found.num_merges} merges, each rank sends {_bytes(found.rank_bytes)} in {crosses}"
    if found.exchange_s is None or found.step_s is None or found.efficiency is None:
        missing = "cluster.network_gbs" if found.exchange_s is None else "a step time (recipe.local_sgd.step_time_s)"
        yield "efficiency apart", f"not estimated: {missing} is not known"
        return
    network = f"{plan.config.cluster.network_gbs:g} GB/s a rank"
    yield (
        "efficiency apart",
        (
            f"{100 * found.efficiency:.1f} % estimated: inner steps of {found.step_s:.3g} s, a merge of "
            f"{found.exchange_s:.3g} s at {network}{hidden}"
        ),
    )
    yield "worth it", "; ".join(_worth(plan, found, local_sgd.every_steps))


def _worth(plan: TrainingPlan, found: Prediction, every: int) -> Iterator[str]:
    """Yield the break-even with one group and with synchronous training; X marks one that this H does not reach."""
    one = found.even_with_one_group
    if one is not None:
        yield f"faster than one group alone above H = {one:.3g}{' (X: not with this H)' if every <= one else ''}"
    if found.synchronous_step_s is None:
        yield "synchronous training is not estimated"
        return
    synchronous = f"than synchronous training ({found.synchronous_step_s:.3g} s a step)"
    even = found.even_with_synchronous
    if even is None:
        yield f"never faster {synchronous} (X)"
    else:
        yield f"{synchronous} above H = {even:.3g}{' (X: not with this H)' if every <= even else ''}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _training_time(plan: TrainingPlan) -> str:
    """Return the minutes that the estimated step time projects to, without evaluations: of these no time is known."""
    of_step = plan.cost.step_s if plan.cost else None
    step_s = plan.apart.mean_step_s if plan.apart else of_step
    if step_s is None:
        return "not projected: there is no step time"
    steps, gbs, benchmark = plan.max_steps, plan.batch.global_batch_size, plan.submission.benchmark
    why = "at most all of its steps"
    known = published.samples_to_target(benchmark, gbs) if benchmark and plan.config.task.submittable else None
    if known is not None:
        steps, why = round(known.mean_samples / gbs), f"mean of {known.num_runs:,} published runs"
    timed = f"{steps:,} steps ({why}) of {step_s:.2f} s"
    return f"{steps * step_s / 60:.1f} min projected: {timed}; evaluations not counted"


def _memory(plan: TrainingPlan) -> str:
    m = plan.memory
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
        return f"{m.total_gib * scale:.1f} {unit} estimated: {parts}"
    verdict = "fits" if m.fits else "does not fit"
    return f"{m.total_gib:.1f} of {m.capacity_gib:g} GiB estimated, {verdict}: {parts}"


WHY = """\
published: Run:ai 2024, "LLMs don't fit into a single GPU"; GB are 1e9 bytes, and numbers of GPUs are powers of two
weights differ because the table takes 7, 13 and 70 billion parameters, and the models have 6.74, 13.02 and 68.98
training: here a weight, its gradient and Adam's two moments, one number each; the table has 3.5 to 3.7 numbers a weight
  and does not say of what. Neither counts activations, which grow with the batch; the second table does
FP16: half of FP32 only if master weights and moments had 16 bits, too; mixed precision takes 18 bytes a weight, not 8
INT8: it would mean gradients and moments of 8 bits, which lose the small steps of training. What 8 and 4 bits are used
  for is the operands of GEMMs beside larger states (FP8), and frozen weights under adapters"""
PLANNED = (
    "states: weights, gradients, master weights and moments; GiB on one GPU: with rows of 4,096 tokens, one a "
    "micro-batch, all layers recomputed, and CUDA's own memory\nGPUs: the fewest on which a split fits, of {most} at "
    "most; tp and pp split the model, dp shards only the optimizer's states"
)


def sheets(configs: dict[str, Config]) -> list[Sheet]:
    """Return the published table beside our arithmetic, and what the engine needs; configs are by the model's name."""
    return [_published(configs), _planned(configs)]


def _published(configs: dict[str, Config]) -> Sheet:
    columns = (
        *("model", "precision", "weights (GB)", "published weights", "training (GB)", "published training"),
        *("GPUs of 40 GB", "published GPUs", "GPUs of 80 GB", "GPUs of 141 GB"),
    )
    rows = []
    for (model, precision), printed in needs.PUBLISHED.items():
        counted = needs.counted(parameters(configs[model].model), precision)
        gpus = [str(count) for count in counted.num_gpus.values()]
        rows.append(
            (
                *(model, precision, f"{counted.weights_gb:.1f}", f"{printed.weights_gb:g}"),
                *(f"{counted.training_gb:.0f}", f"{printed.training_gb:g}"),
                *(gpus[0], str(printed.num_gpus), *gpus[1:]),
            )
        )
    return Sheet("memory of training, by arithmetic", rows, columns, WHY)


def _planned(configs: dict[str, Config]) -> Sheet:
    of_gpus = (f"GPUs of {capacity} GB" for capacity in needs.CAPACITIES)
    columns = ("model", "what is trained", "states (GB)", "GiB on one GPU", *of_gpus)
    rows = []
    for model, config in configs.items():
        for way in needs.WAYS:
            planned = needs.planned(config, way)
            gpus = [str(count or f"over {needs.MOST_GPUS}") for count in planned.num_gpus.values()]
            states = f"{needs.states_gb(config, way):.1f}"
            rows.append((model, way.name, states, f"{planned.one_gpu_gib:.1f}", *gpus))
    caption = PLANNED.format(most=needs.MOST_GPUS)
    return Sheet("memory of training, as this engine does it (estimates)", rows, columns, caption)


COLUMNS = ("dp", "tp", "pp", "cp", "sp", "recomputed layers", "GiB", "fits", "step (s)")
_SHORT = {
    "communication": "comm.",
    "recomputation": "recompute",
    "pipeline bubble": "bubble",
    "waiting for host": "host",
}
_PART_COLUMNS = tuple(f"{_SHORT.get(name, name)} (s)" for name in STEP_PARTS)


def sheet(plan: Plan) -> Sheet:
    """Return every legal layout of the plan's ranks as a table, best first; sizes that the config gives are kept."""
    ranked = layouts.ranked(local_sgd.of_one_group(plan.config))
    rows = [_row(layout, plan.config.model.num_layers) for layout in ranked]
    fitting = sum(layout.memory.fits is not False for layout in ranked)
    caption = (
        f"{len(ranked)} legal layouts, {fitting} that fit, the fastest first. GiB of a GPU's memory, the time of a "
        "step and its parts are estimates; a layer is recomputed as a whole, or only its output of qkv or fc1"
    )
    title = f"{plan.name}, {plan.config.precision.name}"
    return Sheet(title, rows, (*COLUMNS, *_PART_COLUMNS), caption, num_optional=len(_PART_COLUMNS))


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """Return the layouts as objects of strict JSON, best first."""
    return [dataclasses.asdict(layout) for layout in layouts.ranked(local_sgd.of_one_group(plan.config))]


def _row(layout: Layout, num_layers: int) -> tuple[str, ...]:
    w, cost = layout.world, layout.cost
    seconds = [cost.step_s, *(getattr(cost, field) for field in STEP_PARTS.values())] if cost else []
    return (
        *(str(size) for size in (w.dp, w.tp, w.pp, w.cp)),
        "on" if w.sp else "off",
        _recomputed(layout.recompute, num_layers // w.pp),
        f"{layout.memory.total_gib:.1f}",
        {True: "yes", False: "no", None: ""}[layout.memory.fits],
        *(f"{value:.2f}" for value in seconds),
        *[""] * (len(STEP_PARTS) + 1 - len(seconds)),
    )


def _recomputed(recomputed: Recomputed, num_layers: int) -> str:
    """Return which of a rank's layers are recomputed, short enough for a column."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers, "offloaded": recomputed.offloaded_layers}
    parts = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"all {num_layers}" if recomputed.full else f"{parts} of {num_layers}" if parts else "none"
