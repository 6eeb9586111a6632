"""Tables for the terminal: what one result says, what a plan will do."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from bench import layout
from bench.benchmarks import BENCHMARKS
from bench.memory import Recomputed
from bench.parse import THROUGHPUT_ONLY, UNVERIFIED, PeakMemory, Result, Span, title
from bench.plan import is_random
from bench.reader import printable
from bench.referee import Verdict
from bench.schema import Recompute

if TYPE_CHECKING:
    from rich.table import Table

    from bench.judge import Finding
    from bench.plan import Plan
    from bench.preflight import Finding as PlanFinding


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows of text to show: a table on a terminal, plain lines in a pipe."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings; none for rows of name, value and an optional remark."""
    caption: str = ""


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

Row = tuple[str, str, str]
"""What, its value, and why it is so or missing."""


def show(sheet: Sheet, *, file: TextIO | None = None) -> None:
    """Print a sheet to stdout (or file). Text from logs cannot steer the terminal.

    In a pipe: title, then `name: value  remark` lines, or tab-separated columns below their headings; then the caption.
    """
    out = file or sys.stdout
    if out.isatty():
        from rich.console import Console

        Console(file=out).print(_table(sheet))
        return
    rows = [[printable(cell) for cell in row] for row in (*([sheet.columns] if sheet.columns else []), *sheet.rows)]
    lines = ["\t".join(row) if sheet.columns else f"{row[0]}: {'  '.join(filter(None, row[1:]))}" for row in rows]
    for line in (printable(sheet.title), *lines, *sheet.caption.splitlines()):
        print(line, file=out)


def _table(sheet: Sheet) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=sheet.title, caption=sheet.caption, title_justify="left", caption_justify="left")
    table.show_header = bool(sheet.columns)
    for column in sheet.columns:
        table.add_column(column, overflow="fold")
    if not sheet.columns:
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
    for row in sheet.rows:
        if sheet.columns:
            table.add_row(*(Text(printable(cell)) for cell in row))
        else:
            name, value, *why = (printable(cell) for cell in row)
            gap = "  " if value and any(why) else ""
            table.add_row(Text(name), Text.assemble((value, "bold" if why else ""), gap, ("".join(why), "dim")))
    return table


def verdict_sheet(result: Result, verdicts: Sequence[Verdict], *, more: Sequence[Row] = ()) -> Sheet:
    """Return what the trial is worth; a number that the log does not prove is blank, with the reason beside it."""
    rows = [_time_row(result), _valid_row(result)]
    rows += [] if result.throughput_only else [_samples_row(result), _loss_row(result), _target_row(result)]
    rows += [_official_row(verdict, result.division) for verdict in verdicts]
    rows += [*speed_rows(result), _evaluation_row(result), _init_row(result)]
    rows += [_trial_row(number, trial) for number, trial in enumerate(result.trials)] if result.trials[1:] else []
    return Sheet(title(result), [*rows, *more], caption=f"{UNVERIFIED} n = 1 run")


def speed_rows(result: Result) -> list[Row]:
    """Return how fast a trial trained, and what it took of its GPUs as far as the log says."""
    rows = [_step_row(result), _throughput_row(result)]
    rows += [] if result.tflop_per_sample is None else [_arithmetic_row(result)]
    rows += (
        [] if result.peak_memory_gib is None and not result.throughput_only else [memory_row(result.peak_memory_gib)]
    )
    return rows


def findings_sheet(findings: "Sequence[Finding]") -> Sheet:
    """Return where a log differs from that of a valid trial, worst first."""
    ordered = sorted(findings, key=lambda finding: finding.severity)
    rows = [(f.rule, f.severity, str(f.line or ""), f.message) for f in ordered]
    return Sheet("findings", rows, columns=("rule", "severity", "line", "what"))


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
    target = "no target" if c.task.target_eval_loss is None else f"until eval loss ≤ {c.task.target_eval_loss:g}"
    seeds = ", ".join(str(trial.seed) for trial in plan.trials)
    limit = (
        "no limit"
        if plan.walltime_min is None
        else f"{plan.walltime_min} min = 5 + {1 if c.launch.array else c.trials} x ({c.walltime} + 5)"
        + (", one array element each" if c.launch.array else "")
    )
    lora = "" if c.task.lora is None else f", LoRA rank {c.task.lora.rank} alpha {c.task.lora.alpha}"
    weights, data = (", random weights", "made up in memory") if is_random(c) else ("", c.data.name)
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
            f"{r.lr:g}, cosine to 0 at step {r.max_steps:,}; {c.precision.name}, recompute {_recompute(plan)}",
        ),
        ("evaluation", f"first at {e.first_step * b.global_batch_size:,} samples, then every {every}; {target}"),
        ("trials", f"{len(plan.trials)}, seeds {seeds}; {limit}"),
        ("memory per GPU", _estimate(plan)),
        ("step time", _step_estimate(plan)),
        ("division", f"{plan.submission.division}" + "".join(f"; {d}" for d in plan.submission.deviations)),
        ("steps", "; ".join(step.name for step in plan.steps)),
        ("files", ", ".join(plan.files)),
    ]


def _chosen(plan: "Plan") -> str:
    """Return which sizes the config left to the plan."""
    names = [name for name in layout.CHOSEN if getattr(plan.config.parallel, name) is None]
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


def _time_row(result: Result) -> Row:
    name = "run_start → run_stop (min)"
    if result.minutes is not None:
        return name, f"{result.minutes:.2f}", ""
    if result.throughput_only:
        return name, "", THROUGHPUT_ONLY
    clock = ("LOG-01", "LOG-02", "LOG-03", "LOG-04")
    return name, "", next((f.message for f in result.findings if f.rule in clock), "")


def _valid_row(result: Result) -> Row:
    errors = [finding for finding in result.findings if finding.severity == "error"]
    why = "; ".join(f"{e.rule}{f' line {e.line}' if e.line else ''}: {e.message}" for e in errors[:3])
    return "valid trial", "yes" if result.valid else "no", why + (f"; {len(errors) - 3} more" if errors[3:] else "")


def _samples_row(result: Result) -> Row:
    if result.samples_to_target is not None:
        return "samples to target", f"{result.samples_to_target:,}", ""
    why = "no evaluation that reaches the target says its samples"
    return "samples to target", "", why if _target(result) else "the log names no target"


def _target(result: Result) -> str | None:
    """Return what is to be reached; several goals are always those of a benchmark."""
    if result.target is not None:
        return f"{result.target:g}"
    known = BENCHMARKS.get(result.benchmark or "")
    return " and ".join(map(str, known.goals)) if known else None


def _loss_row(result: Result) -> Row:
    goal = _target(result)
    target = f"target {goal}" if goal else "no target"
    if result.eval_final is None:
        return "final evaluation", "", f"none in the log; {target}"
    return "final evaluation", f"{result.eval_final:.4f}", target


def _target_row(result: Result) -> Row:
    if _target(result) is None:
        return "target reached", "", "the log names no target"
    return "target reached", "yes" if result.converged else "no", ""


def _step_row(result: Result) -> Row:
    name, s = "step time (ms)", result.step_time_ms
    if s is None:
        return name, "", "the log does not time its steps"
    return name, f"{s.median:,.1f}", f"median; p10 {s.p10:,.1f}, p90 {s.p90:,.1f}, n = {s.count}"


def _throughput_row(result: Result) -> Row:
    name, rate = "training throughput", result.throughput_samples_s
    if rate is None:
        return name, "", "the log does not time its samples"
    if result.tokens_s_gpu is None:
        return (
            name,
            f"{rate:,.3f} samples/s",
            "no tokens/s/GPU: GPUs or sequence length are not logged",
        )
    return name, f"{rate:,.3f} samples/s", f"{result.tokens_s_gpu:,.0f} tokens/s/GPU on {result.num_gpus} GPUs"


def _arithmetic_row(result: Result) -> Row:
    name, work = "model arithmetic", f"{result.tflop_per_sample:,.4g} TFLOP a sample"
    if result.tflops_gpu is None:
        return name, "", f"{work}; no TFLOP/s: not measured on GPUs"
    share = "no MFU: the cluster names no peak rate" if result.mfu is None else f"MFU {100 * result.mfu:.1f} %"
    return name, f"{result.tflops_gpu:,.1f} TFLOP/s/GPU", f"{share}; {work}"


def memory_row(peak: PeakMemory | None) -> Row:
    """Return what the fullest GPU held at most, beside the plan's estimate."""
    name = "peak memory (GiB)"
    if peak is None:
        return name, "", "not measured on GPUs"
    reserved = "" if peak.reserved is None else f"{peak.reserved:,.1f} reserved"
    estimated = "" if peak.estimated is None else f"the plan estimated {peak.estimated:,.1f}"
    return name, f"{peak.allocated:,.1f}", "; ".join(filter(None, ("fullest GPU", reserved, estimated)))


def _evaluation_row(result: Result) -> Row:
    time = "" if result.eval_time_s is None else f"{result.eval_time_s:,.1f} s each"
    if result.throughput_only:
        return "evaluations", f"{len(result.evaluations)}", time
    at = [f"{e.value:.4f} at {e.samples:,}" for e in result.evaluations if e.samples is not None]
    shown = at if len(at) < 9 else [*at[:3], "…", *at[-3:]]
    return "evaluations", f"{len(result.evaluations)}", "; ".join(filter(None, (time, ", ".join(shown))))


def _init_row(result: Result) -> Row:
    if result.init_s is None:
        return "initialisation (s)", "", "no init_start and init_stop"
    return "initialisation (s)", f"{result.init_s:,.1f}", "before the clock"


def settings_row(result: Result) -> Row:
    """Return what the log says of how the run was set up."""
    seed = {} if result.seed is None else {"seed": result.seed}
    settings = ", ".join(f"{key} {value}" for key, value in (seed | result.hyperparameters).items())
    return "settings", "", settings


def _trial_row(number: int, trial: Span) -> Row:
    time = "not finished" if trial.minutes is None else f"{trial.minutes:.2f} min, {trial.status}"
    seed = "" if trial.seed is None else f", seed {trial.seed}"
    return f"trial {number} of the log", time, f"lines {trial.first_line} to {trial.last_line}{seed}"


def _official_row(verdict: Verdict, division: str | None) -> Row:
    name = f"official rules {verdict.ruleset}, {division or 'no division'}"
    first = verdict.messages[0].splitlines()[0] if verdict.messages else ""
    more = f" ({len(verdict.messages) - 1} more)" if verdict.messages[1:] else ""
    return name, {True: "passed", False: "failed", None: ""}[verdict.passed], first + more
