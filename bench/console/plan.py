"""Show a plan: what its run does, its estimated time and memory, and what would prevent it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bench.console import diagnosis
from bench.console.sheet import show
from bench.contract import families
from bench.contract.plan import Plan, Recomputed
from bench.contract.schema import Config
from bench.images import needed
from bench.planning import layouts, local_sgd, model_folder
from bench.planning.estimates import model_memory as needs
from bench.planning.estimates.parameters import parameters
from bench.planning.layouts import Layout
from bench.report import costs, kinds
from bench.report.tables import TextTable

if TYPE_CHECKING:
    from bench.contract.plan import Plan
    from bench.preflight import Finding
from bench.report.tables import time_limit, trials_row
from bench.report.training_plan import STEP_PARTS
from bench.texts import counted


def show_plan(plan: "Plan", findings: "Sequence[Finding]") -> None:
    """Print the plan as a table, and what would prevent the run."""
    show(TextTable(f"{plan.name}: {plan.config.task.summary}", rows(plan)))
    if findings:
        show(diagnosis.findings_sheet(findings, title="problems to fix before the run"))


def rows(plan: "Plan") -> list[tuple[str, str]]:
    """Return the rows of a plan: name and value."""
    own = kinds.report_of(plan.kind).plan_rows(plan)
    return [
        *own[:1],
        *_model_read(plan.config),
        *own[1:],
        *_detected(plan),
        *_nodes(plan),
        *_image(plan),
        *(row for row in (("trials", trials_row(plan)), ("time limit", time_limit(plan))) if row not in own),
        *_vboost(plan),
        ("commands", "; ".join(command.name for command in plan.commands)),
        ("files", ", ".join(plan.files)),
        *costs.plan_rows(plan),
    ]


def _model_read(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what was read from config.json, with model=hf."""
    m = config.model
    if not model_folder.is_read(m):
        return
    serving = config.task.serving
    folder = (serving.server.model if serving else None) or config.cluster.paths.model
    others = {
        "biases on q, k and v": m.qkv_bias,
        "norms on q and k": m.qk_norm,
        "tied embeddings": m.tied_embeddings,
        f"RoPE scaled by {m.rope_scaling_factor:g}": m.rope_scaling_factor != 1,
    }
    sizes = (
        f"{m.num_layers} layers, hidden {m.hidden_size:,}, MLP {m.ffn_hidden_size:,}",
        f"{m.num_attention_heads} heads of {m.head_size}, {m.num_query_groups} query groups",
        f"vocabulary {m.vocab_size:,}",
        *(name for name, has in others.items() if has),
    )
    family = m.family if m.described else families.of_model(m).name
    yield "read", f"{folder}/config.json: {family}, {parameters(m):,} parameters; {'; '.join(sizes)}"


def _vboost(plan: "Plan") -> list[tuple[str, str]]:
    """Return the row of the boost slider; none unless the cluster sets it."""
    slurm = plan.config.cluster.slurm
    if slurm is None or slurm.vboost is None:
        return []
    command = f"nvidia-smi boost-slider --vboost {slurm.vboost} on each node, which keeps it after the job"
    return [("boost slider", f"{command}; not run: this option was never used on a GPU")]


def _detected(plan: "Plan") -> list[tuple[str, str]]:
    """Return the row of the GPUs that were detected on this machine; none unless the config left the device open."""
    gpus = plan.config.cluster.detected_gpus
    return [] if gpus is None else [("GPUs detected", gpus)]


def _nodes(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield the nodes that are left out, each with the reason, and what happens to slow ones; nothing by default."""
    cluster = plan.config.cluster
    if cluster.avoided:
        yield "left out", "; ".join(f"{name}: {why}" for name, why in cluster.avoided.items())
    elif cluster.avoid is not None:
        yield "left out", f"no node: none was found bad within {cluster.avoid_within}"
    if plan.config.launch.replace_slow:
        spares = counted(cluster.spare_nodes, "spare node") if cluster.spare_nodes else "the job is requeued"
        yield "slow nodes", f"left out after the node check, and while training; {spares}"


def _image(plan: "Plan") -> Iterator[tuple[str, str]]:
    """Yield the image that has the packages of the ranks, if they run in one, and whether it was run."""
    if not needed.runs_in_image(plan):
        return
    gpu, wanted = plan.config.cluster.gpu, needed.needed(plan.config)
    not_run = "" if gpu is None or gpu.has_run else f"; not run on {gpu.name}"
    if plan.config.program is not None:
        yield "image", f"the program's own, with Python 3.11, psutil and msgspec for runstop's runner{not_run}"
    elif wanted is None:
        yield "image", f"none of containers/build.sh has this engine for this GPU{not_run}"
    else:
        packages = ", ".join(wanted.packages)
        yield "image", f"{wanted.name} (containers/build.sh {wanted.build}), or one with {packages}{not_run}"


WHY = """\
published: Run:ai 2024, "LLMs don't fit into a single GPU". 1 GB is 1e9 bytes. GPU counts are powers of two.
weights: the published table assumes 7, 13 and 70 billion parameters; the models have 6.74, 13.02 and 68.98 billion.
training: weights, gradients and Adam's two moments, 4 values per weight. The published table has 3.5 to 3.7 values per
  weight without an explanation. Activations, which grow with the batch, are counted in the second table only.
FP16: half of FP32 only if master weights and moments have 16 bits, too; mixed precision needs 18 bytes per weight.
INT8: would mean 8-bit gradients and moments, which lose small updates. In practice 8 and 4 bits are used for the
  operands of GEMMs with higher-precision states (FP8), and for frozen weights under adapters."""
PLANNED = (
    "states: weights, gradients, master weights and moments.\n"
    "GiB on one GPU: sequences of 4,096 tokens, micro-batch 1, all layers recomputed, with CUDA context.\n"
    "GPUs: the smallest number on which a layout fits, at most {most}; tp and pp split the model, dp shards only the "
    "optimizer states."
)


def sheets(configs: dict[str, Config]) -> list[TextTable]:
    """Return our arithmetic next to the published table, and what the engine needs; `configs` is by model name."""
    return [_published(configs), _planned(configs)]


def _published(configs: dict[str, Config]) -> TextTable:
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
    return TextTable("training memory by arithmetic", rows, columns, WHY)


def _planned(configs: dict[str, Config]) -> TextTable:
    of_gpus = (f"GPUs of {capacity} GB" for capacity in needs.CAPACITIES)
    columns = ("model", "trained weights", "states (GB)", "GiB on one GPU", *of_gpus)
    rows = []
    for model, config in configs.items():
        for way in needs.WAYS:
            planned = needs.planned(config, way)
            gpus = [str(count or f"more than {needs.MOST_GPUS}") for count in planned.num_gpus.values()]
            states = f"{needs.states_gb(config, way):.1f}"
            rows.append((model, way.name, states, f"{planned.one_gpu_gib:.1f}", *gpus))
    caption = PLANNED.format(most=needs.MOST_GPUS)
    return TextTable("training memory of this engine (estimates)", rows, columns, caption)


COLUMNS = ("dp", "tp", "pp", "cp", "sp", "recomputed layers", "GiB", "fits", "step (s)")
_SHORT = {
    "communication": "comm.",
    "recomputation": "recompute",
    "pipeline bubble": "bubble",
    "waiting for host": "host",
}
_PART_COLUMNS = tuple(f"{_SHORT.get(name, name)} (s)" for name in STEP_PARTS)


def sheet(plan: Plan) -> TextTable:
    """Return every possible layout of the plan's ranks, best first; sizes that the config sets are kept."""
    ranked = layouts.ranked(local_sgd.of_one_group(plan.config))
    rows = [_row(layout, plan.config.model.num_layers) for layout in ranked]
    fitting = sum(layout.memory.fits is not False for layout in ranked)
    caption = (
        f"{len(ranked)} possible layouts, {fitting} fit in GPU memory; fastest first. GiB per GPU, step time and its "
        "parts are estimates. Recomputed layers: whole layers, or only the qkv or fc1 outputs."
    )
    title = f"{plan.name}, {plan.config.precision.name}"
    return TextTable(title, rows, (*COLUMNS, *_PART_COLUMNS), caption, num_optional=len(_PART_COLUMNS))


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
    """Return which of a rank's layers are recomputed, in a few words."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers, "offloaded": recomputed.offloaded_layers}
    parts = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"all {num_layers}" if recomputed.full else f"{parts} of {num_layers}" if parts else "none"
