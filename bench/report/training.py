"""Show training tasks: plans, results of trials, and sets of trials."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import report
from bench.contract import run_files, transport
from bench.contract.engine import Strategy
from bench.contract.layers import Layer, differs_from_llama, has_head_kernels, layer_of
from bench.contract.local_sgd import Average, Compress, Prediction
from bench.contract.modules import ModuleTimes
from bench.contract.plan import Recomputed
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import Adapter, Per
from bench.contract.schema import Config, DataSource, Device, EngineName, Precision
from bench.contract.training import Recompute, StartsFrom
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.official import Verdict
from bench.mlperf.result import NO_TARGET, UNVERIFIED, Result, Span
from bench.mlperf.titles import title
from bench.planning import layouts, projection
from bench.planning.estimates import memory_traffic, transports
from bench.planning.estimates.parameters import active_parameters
from bench.report import costs, described_models, figures, sets
from bench.report.compare import claim
from bench.report.kinds import KindReport, ShownTrial
from bench.report.sets import TrialSet
from bench.report.tables import (
    TRAINING_ONLY,
    Row,
    TextTable,
    findings_table,
    local_sgd_rows,
    memory_label,
    memory_row,
    minutes_text,
    telemetry_rows,
    time_limit,
    trials_row,
    value_text,
)
from bench.report.throughput import RATIO, compared
from bench.results import modules
from bench.results.training import TrainingResult


def verdict_table(result: Result, verdicts: Sequence[Verdict], *, more: Sequence[Row] = ()) -> TextTable:
    """Return the verdict and measurements of a trial; a number that the log does not have is blank with its reason."""
    rows = [_time_row(result), _valid_row(result)]
    rows += [] if not result.has_target else [_samples_row(result), _loss_row(result), _target_row(result)]
    rows += _untargeted_losses(result)
    rows += _program_rows(result)
    rows += [_official_row(verdict, result.division) for verdict in verdicts]
    rows += [*speed_rows(result), _evaluation_row(result), _init_row(result)]
    rows += costs.result_rows(TrainingResult(result=result).measurements)
    rows += [_trial_row(number, trial) for number, trial in enumerate(result.trials)] if result.trials[1:] else []
    return TextTable(title(result), [*rows, *more], caption=f"{UNVERIFIED} n = 1 run")


def speed_rows(result: Result) -> list[Row]:
    """Return speed, memory and GPU telemetry of a trial, as far as the log has them."""
    rows = [_step_row(result), *_total_rows(result), _throughput_row(result), *_real_tokens_row(result)]
    rows += [] if result.tflop_per_sample is None else [_arithmetic_row(result)]
    rows += [] if result.peak_memory_gib is None and result.has_target else [memory_row(result.peak_memory_gib)]
    return [*rows, *local_sgd_rows(result), *telemetry_rows(result.telemetry)]


def _time_row(result: Result) -> Row:
    name = "run_start → run_stop (min)"
    if result.minutes is not None:
        return name, f"{result.minutes:.2f}", "" if result.has_target else NO_TARGET
    timing_rules = ("LOG-01", "LOG-02", "LOG-03", "LOG-04", "LOG-21")
    return name, "", next((f.what for f in result.findings if f.rule in timing_rules), "")


def _valid_row(result: Result) -> Row:
    errors = [finding for finding in result.findings if finding.severity == "error"]
    why = "; ".join(f"{e.rule}{f' line {e.line}' if e.line else ''}: {e.what}" for e in errors[:3])
    return "valid trial", "yes" if result.valid else "no", why + (f"; {len(errors) - 3} more" if errors[3:] else "")


def _samples_row(result: Result) -> Row:
    if result.samples_to_target is not None:
        return "samples to target", f"{result.samples_to_target:,}", ""
    why = "no evaluation that reaches the target logs its samples"
    return "samples to target", "", why if _target(result) else "no target in the log"


def _target(result: Result) -> str | None:
    """Return the target of the evaluation; several targets are those of a benchmark."""
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
        return "target reached", "", "no target in the log"
    return "target reached", "yes" if result.converged else "no", ""


def _step_row(result: Result) -> Row:
    name, s = "median step time (ms)", result.step_time_ms
    if s is None:
        return name, "", "no step times in the log"
    return name, f"{s.median:,.1f}", f"p10 {s.p10:,.1f}, p90 {s.p90:,.1f}, n = {s.count}"


def _total_rows(result: Result) -> list[Row]:
    """Return the time of all steps and of an epoch, if the log has them."""
    rows, epochs = [], result.epoch_times_s
    if result.steps_time_s is not None:
        name = f"time of {len(result.step_times_ms):,} steps (s)"
        rows.append((name, f"{result.steps_time_s:,.1f}", TRAINING_ONLY))
    if epochs:
        each = f"mean of {len(epochs)} epochs ({', '.join(f'{time_s:,.1f}' for time_s in epochs[:_MAX_EPOCHS])}"
        more = ", …); " if epochs[_MAX_EPOCHS:] else "); "
        remark = each + more if epochs[1:] else ""
        rows.append(("time per epoch (s)", f"{fmean(epochs):,.1f}", remark + TRAINING_ONLY))
    return rows


_MAX_EPOCHS = 10


def _real_tokens_row(result: Result) -> list[Row]:
    """Return the throughput without padding tokens, if there is padding."""
    share = result.real_token_share
    if share is None or share >= 1:
        return []
    rate = "" if result.real_tokens_s_gpu is None else f"{result.real_tokens_s_gpu:,.0f} tokens/s/GPU"
    return [("without padding", rate, f"{100 * share:.1f} % of all tokens are not padding")]


def _untargeted_losses(result: Result) -> list[Row]:
    """Return the losses at the end of a run; losses on random data are left out."""
    rows = []
    if result.train_loss is not None:
        rows.append(("last training loss", f"{result.train_loss:.4f}", ""))
    if not result.has_target and not result.has_random_rows and result.eval_final is not None:
        rows.append(("final evaluation", f"{result.eval_final:.4f}", "no target"))
    return rows


def _program_rows(result: Result) -> list[Row]:
    """Return which numbers are the word of a user's program, and where its times contradict the runner's clock."""
    names = {"LOG-24": "by the program", "LOG-25": "contradiction"}
    return [(names[finding.rule], finding.titled, "") for finding in result.findings if finding.rule in names]


def _throughput_row(result: Result) -> Row:
    name, rate = "training throughput", result.throughput_samples_s
    if rate is None:
        return name, "", "no sample times in the log"
    if result.tokens_s_gpu is None:
        missing = "sequence length" if result.num_gpus else "GPU count"
        why = "" if result.num_gpus else result.gpu_count_conflict
        return name, f"{rate:,.3f} samples/s", f"no tokens/s/GPU: {why or f'{missing} not in the log'}"
    return name, f"{rate:,.3f} samples/s", f"{result.tokens_s_gpu:,.0f} tokens/s/GPU on {result.num_gpus} GPUs"


def _arithmetic_row(result: Result) -> Row:
    name, work = "model FLOPs", f"{result.tflop_per_sample:,.4g} TFLOP per sample"
    if result.tflops_gpu is None:
        why = "no sample times" if result.num_gpus else "not measured on GPUs"
        return name, "", f"{work}; no TFLOP/s: {why}"
    share = (
        "no MFU: the cluster has no peak rate of its GPUs"
        if result.mfu is None
        else f"MFU {100 * result.mfu:.1f} % {result.mfu_counts}"
    )
    return name, f"{result.tflops_gpu:,.1f} TFLOP/s/GPU", f"{share}; {work}"


def _evaluation_row(result: Result) -> Row:
    time = "" if result.eval_time_s is None else f"{result.eval_time_s:,.1f} s each"
    if not result.has_target:
        return "evaluations", f"{len(result.evaluations)}", time
    at = [f"{e.value:.4f} at {e.samples:,} samples" for e in result.evaluations if e.samples is not None]
    half = _MAX_EVALUATIONS // 2
    left_out = len(at) - 2 * half
    shown = at if len(at) <= _MAX_EVALUATIONS else [*at[:half], f"{left_out} more", *at[-half:]]
    return "evaluations", f"{len(result.evaluations)}", "; ".join(filter(None, (time, ", ".join(shown))))


_MAX_EVALUATIONS = 40
"""A log may have thousands of evaluations; the ones in between are counted, not listed."""


def _init_row(result: Result) -> Row:
    if result.init_s is None:
        return "initialisation (s)", "", "no init_start and init_stop"
    return "initialisation (s)", f"{result.init_s:,.1f}", "not timed"


def settings_row(result: Result) -> Row:
    """Return the settings in the log."""
    seed = {} if result.seed is None else {"seed": result.seed}
    settings = ", ".join(f"{key} {value}" for key, value in (seed | result.hyperparameters).items())
    return "settings", "", settings


def _trial_row(number: int, trial: Span) -> Row:
    time = "not finished" if trial.minutes is None else f"{trial.minutes:.2f} min, {trial.status}"
    seed = "" if trial.seed is None else f", seed {trial.seed}"
    return f"trial {number} of the log", time, f"lines {trial.first_line} to {trial.last_line}{seed}"


def _official_row(verdict: Verdict, division: str | None) -> Row:
    name = f"MLPerf checker {verdict.ruleset}, {division or 'no'} division"
    first = verdict.messages[0].splitlines()[0] if verdict.messages else ""
    more = f" ({len(verdict.messages) - 1} more)" if verdict.messages[1:] else ""
    return name, {True: "passed", False: "failed", None: ""}[verdict.passed], first + more


def modules_table(result: Result, times: ModuleTimes) -> TextTable:
    """Return the profile in a trial's log, one row per part."""
    title = f"step time breakdown: {result.file}"
    caption = "\n".join(modules.notes(result, times))
    return TextTable(title, modules.lines(times), columns=modules.columns(times), caption=caption, num_optional=2)


def throughput_tables(trials: TrialSet) -> list[TextTable]:
    """Return the throughput of a set, and its comparison with published systems."""
    speed = compared(trials)
    caption = f"{trials.hardware or 'hardware not logged'}, n = {speed.measured.num_runs}"
    own = TextTable(f"{trials.name}: throughput", speed.rows, caption=caption)
    if speed.no_peers:
        return [own, TextTable("published systems", [("not compared", "", speed.no_peers)])]
    rates = ("samples/s", "tokens/s/GPU", "TFLOP/s/GPU")
    columns = ("system", "batch", "mean step time (ms)", *rates, "official minutes", "ratio")
    cells = [
        (
            line.name,
            str(line.global_batch_size),
            f"{line.step_time_ms:,.0f}",
            f"{line.samples_s:.3f}",
            f"{line.tokens_s_gpu:,.0f}",
            value_text(line.tflops_gpu, "{:,.0f}"),
            value_text(line.official_minutes, "{:.2f}"),
            f"{line.ratio:.3f}",
        )
        for line in speed.lines
    ]
    title = f"published systems with {speed.measured.num_gpus} GPUs"
    return [own, TextTable(title, cells, columns=columns, caption=RATIO)]


def sets_table(sets: Sequence[TrialSet], written: Path | None) -> TextTable:
    """Return one row per set, with the path of the page as the title."""
    rows = []
    for trials in sets:
        claimed = claim(trials)
        minutes = "" if claimed.minutes is None else minutes_text(claimed.minutes)
        why = f"; no score: {claimed.why_no_score}" if claimed.why_no_score else ""
        runs = f"{claimed.num_valid} of {len(trials.results)}"
        rows.append((trials.name, trials.hardware or "not logged", runs, minutes, claimed.what + why))
    columns = ("set", "hardware", "valid runs", "minutes", "based on")
    return TextTable(str(written or "results (to write a page: -o FOLDER)"), rows, columns=columns, caption=UNVERIFIED)


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
    return f"{lr}, cosine to 0 at step {plan.max_steps:,}"


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
    w, cluster = plan.world, plan.config.cluster
    vpp, sp = (f", vpp {w.vpp}" if w.vpp > 1 else ""), (", sp" if w.sp else "")
    device = cluster.gpu.name if cluster.gpu else cluster.device.name
    nodes = f"{w.num_nodes} node{'s' if w.num_nodes > 1 else ''} with {w.ranks_per_node} x {device}"
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
    return f"{plan.cost.step_s:.2f} s (estimate): {parts}"


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
    network = f"{plan.config.cluster.network_gbs:g} GB/s per rank"
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
    """Return the training time projected from the estimated step time, without evaluations (their time is unknown)."""
    projected = projection.training_time(plan)
    if projected is None:
        return "not estimated: no step time estimate"
    runs = projected.num_published_runs
    why = "the maximum" if runs is None else f"mean of {runs:,} published runs"
    timed = f"{projected.steps:,} steps ({why}) of {projected.step_s:.2f} s"
    return f"{projected.minutes:.1f} min (projection): {timed}; without evaluations"


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


@dataclass(frozen=True, slots=True)
class SetsReport:
    """Sets of trials compared with each other, with their scores or their throughput."""

    sets: Sequence[TrialSet]

    @property
    def valid(self) -> bool:
        return all(claim(trials).num_valid for trials in self.sets)

    def tables(self, page: Path | None) -> Iterator[TextTable]:
        yield sets_table(self.sets, page)
        for trials in self.sets:
            yield from () if trials.has_target else throughput_tables(trials)
        for result in (result for trials in self.sets for result in trials.results):
            if result.module_times is not None:
                yield modules_table(result, result.module_times)

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return report.trial_rows(self.sets)

    def csv_text(self) -> str:
        return report.csv(self.sets)

    def write(self, out: Path, *, title: str | None) -> Path:
        return report.write(self.sets, out, title=title)


class TrainingReport(KindReport[TrainingPlan, TrainingResult]):
    """Shows training tasks."""

    work = "train"

    def plan_rows(self, plan: TrainingPlan) -> list[tuple[str, str]]:
        return plan_rows(plan)

    def tables(self, trial: ShownTrial[TrainingResult], *, more: Sequence[Row] = ()) -> list[TextTable]:
        return [verdict_table(trial.judged.result, trial.judged.verdicts, more=more)]

    def detail_tables(self, trial: ShownTrial[TrainingResult]) -> list[TextTable]:
        result = trial.judged.result
        modules_of_step = [] if result.module_times is None else [modules_table(result, result.module_times)]
        return [*modules_of_step, *([findings_table(result.findings)] if result.findings else [])]

    def parse_rows(self, trial: ShownTrial[TrainingResult]) -> list[Row]:
        return [settings_row(trial.judged.result), ("log", trial.name, "")]

    def json_fields(self, result: TrainingResult) -> dict[str, Any]:
        return result.result.to_json()

    def files(self, folder: Path, trial: int, result: TrainingResult) -> list[Row]:
        """Draw the loss, except for random data."""
        if result.result.has_random_rows:
            return []
        path = folder / run_files.loss_figure(trial)
        figures.loss_figure(result.result, path)
        return [("figure", str(path), "")]

    def load(self, paths: Sequence[Path], *, num_gpus: int | None) -> SetsReport:
        return SetsReport(sets.load(paths, num_gpus=num_gpus))

    def next_step(self, plan: TrainingPlan, folder: str) -> str:
        if not plan.config.training.has_target:
            return f"to compare with published systems: runstop report {folder}"
        return f"to see the score of all trials: runstop score {folder}" if plan.trials[1:] else ""


REPORT = TrainingReport()
