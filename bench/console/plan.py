"""Show a plan: what a run will do, and what would stop it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.contract.plan import Recomputed
from bench.contract.schema import DataSource, Recompute, StartsFrom
from bench.planning import layouts

if TYPE_CHECKING:
    from bench.contract.plan import Plan
    from bench.preflight import Finding as PlanFinding
from bench.console.sheet import Sheet, show

COST_PARTS = {
    "products": "gemm_s",
    "attention": "attention_s",
    "element-wise": "elementwise_s",
    "communication": "communication_s",
    "recompute": "recompute_s",
    "bubble": "bubble_s",
    "host": "host_s",
}
"""What a step's seconds go into, and the field of the plan's cost that has them."""


def show_plan(plan: "Plan", findings: "Sequence[PlanFinding]") -> None:
    """Print the plan as a table, and what would stop it."""
    show(Sheet(f"{plan.name}: {plan.config.task.summary}", _plan_rows(plan)))
    for finding in findings:
        print(f"{finding.rule}: {finding.what} ({finding.where}); {finding.fix}")


def _plan_rows(plan: "Plan") -> list[tuple[str, str]]:
    w, b, e, m, c = plan.world, plan.batch, plan.evaluation, plan.memory, plan.config
    r, every = c.recipe, e.every_steps * plan.batch.global_batch_size
    vpp, sp = (f", vpp {w.vpp}" if w.vpp > 1 else ""), (", sp" if w.sp else "")
    gpu = c.cluster.gpu.name if c.cluster.gpu else c.cluster.device.name
    target = (
        "no target"
        if c.task.training.target_eval_loss is None
        else f"until eval loss ≤ {c.task.training.target_eval_loss:g}"
    )
    seeds = ", ".join(str(trial.seed) for trial in plan.trials)
    limit = (
        "no limit"
        if plan.walltime_min is None
        else f"{plan.walltime_min} min = 5 + {1 if c.launch.array else c.trials} x ({c.walltime} + 5)"
        + (", one array element each" if c.launch.array else "")
    )
    lora = (
        ""
        if c.task.training.lora is None
        else f", LoRA rank {c.task.training.lora.rank} alpha {c.task.training.lora.alpha}"
    )
    weights = ", random weights" if c.task.training.starts_from is StartsFrom.random else ""
    data = "made up in memory" if c.data.source is DataSource.random else c.data.name
    return [
        ("model", f"{c.model.name}: {m.parameters:,} parameters, {m.trainable_parameters:,} trained{lora}{weights}"),
        ("data", f"{data}: {c.data.train_rows:,} + {c.data.eval_rows} rows of {c.data.seq_length} tokens"),
        (
            "ranks",
            f"{w.num_ranks} = dp {w.dp} x tp {w.tp} x pp {w.pp} x cp {w.cp}{vpp}{sp}{_chosen(plan)}; {w.num_nodes} x {w.ranks_per_node} {gpu}",
        ),
        (
            "batch",
            f"{b.global_batch_size} = dp {w.dp} x {b.micro_batch_size} x {b.gradient_accumulation_steps} accumulated; {b.tokens_per_step:,} tokens a step",
        ),
        (
            "learning rate",
            f"{r.lr:g}, cosine to 0 at step {plan.max_steps:,}; {c.precision.name}, recompute {_recompute(plan)}",
        ),
        ("evaluation", f"first at {e.first_step * b.global_batch_size:,} samples, then every {every}; {target}"),
        ("trials", f"{len(plan.trials)}, seeds {seeds}; {limit}"),
        ("memory per GPU", _estimate(plan)),
        ("step time", _step_estimate(plan)),
        ("division", f"{plan.submission.division}" + "".join(f"; {d}" for d in plan.submission.deviations)),
        ("commands", "; ".join(command.name for command in plan.commands)),
        ("files", ", ".join(plan.files)),
    ]


def _chosen(plan: "Plan") -> str:
    """Return which sizes the config left to the plan."""
    names = [name for name in layouts.CHOSEN if getattr(plan.config.parallel, name) is None]
    return f" ({', '.join(names)} chosen)" if names else ""


def _recompute(plan: "Plan") -> str:
    found = recompute_words(plan.recompute, plan.config.model.num_layers // plan.world.pp)
    return f"{found} (fit)" if plan.config.recipe.recompute is Recompute.fit else found


def recompute_words(recomputed: Recomputed, num_layers: int) -> str:
    """Return what a rank with so many layers recomputes."""
    counts = {"qkv": recomputed.qkv_layers, "fc1": recomputed.fc1_layers}
    parts = [f"{name} in {count} of {num_layers} layers" for name, count in counts.items() if count]
    return "full" if recomputed.full else ", ".join(parts) or "none"


def _step_estimate(plan: "Plan") -> str:
    if plan.cost is None:
        return "not estimated: no rates are known for this hardware and precision"
    seconds = {name: getattr(plan.cost, field) for name, field in COST_PARTS.items()}
    parts = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items() if value)
    return f"{plan.cost.step_s:.2f} s estimated: {parts}"


def _estimate(plan: "Plan") -> str:
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
