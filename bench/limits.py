"""Refuse what cannot run, and list where a run leaves the closed rules."""

import math
from collections.abc import Iterable

from bench.errors import ConfigError
from bench.memory import Memory
from bench.schema import Activation, Config, Device, Norm, Position, Scheduler

LORA_TARGETS = ("linear_qkv", "linear_proj")
LLAMA2_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "vocab_size": 32000,
    "norm": Norm.RMSNorm,
    "norm_epsilon": 1e-5,
    "activation": Activation.swiglu,
    "position": Position.rope,
    "rope_base": 10000,
    "rope_scaling_factor": 1.0,
    "bias": False,
    "tied_embeddings": False,
}
"""The benchmark's model. Source: Hugging Face meta-llama/Llama-2-70b-hf, config.json."""
MAX_TRIALS, MAX_STEPS = 1000, 10_000_000
"""More is a slip of the keyboard: a score takes 10 trials."""


def check(config: Config) -> None:
    """Raise ConfigError when the model, the split or the numbers contradict each other."""
    _check_positive(config)
    _check_heads(config)
    _check_tensor_parallel(config)
    _check_pipeline(config)
    _check_sequence(config)
    _check_world(config)
    _check_lora(config)
    _check_walltime(config)


def check_batch(config: Config, *, dp: int) -> None:
    """Raise ConfigError when the global batch cannot be dealt out to the data-parallel replicas."""
    r, p = config.recipe, config.parallel
    micro_batch_size = r.micro_batch(dp)
    per_step = dp * micro_batch_size
    if r.global_batch_size % per_step:
        legal = _divisors(r.global_batch_size)
        raise ConfigError(
            f"global batch size {r.global_batch_size} cannot be split over dp {dp} x micro batch {micro_batch_size}",
            where="recipe.global_batch_size, recipe.micro_batch_size",
            fix=f"make dp x micro batch one of {_listed(legal)}, or GBS a multiple of {per_step}",
        )
    accumulation = r.global_batch_size // per_step
    if p.vpp > 1 and accumulation % p.pp:
        raise ConfigError(
            f"the interleaved schedule needs micro-batches per step ({accumulation}) divisible by pp {p.pp}",
            where="parallel.vpp, recipe.micro_batch_size",
            fix=f"make GBS / (dp x micro batch) a multiple of {p.pp}, or set parallel.vpp=1",
        )


def check_evaluation(config: Config, *, every_steps: int, first_step: int) -> None:
    """Raise ConfigError when the schedule can never evaluate (rules CFG-02 and CFG-03)."""
    r, rows = config.recipe, config.data.train_rows
    if every_steps * r.global_batch_size > rows:
        raise ConfigError(
            f"an evaluation every {every_steps} steps is {every_steps * r.global_batch_size} samples, "
            f"longer than the data's {rows} rows",
            where="recipe.eval_every_samples, recipe.global_batch_size",
            fix=f"evaluate at least every {rows // r.global_batch_size * r.global_batch_size} samples",
        )
    if config.task.target_eval_loss is not None and first_step > r.max_steps:
        raise ConfigError(
            f"the first evaluation is at step {first_step}, after max_steps {r.max_steps}: the target cannot be reached",
            where="recipe.max_steps, recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set recipe.max_steps to at least {first_step}, or evaluate earlier",
        )


def check_memory(config: Config, memory: Memory) -> None:
    """Raise ConfigError when the estimate is above what the GPU has."""
    if memory.fits is not False:
        return
    gpu = config.cluster.gpu
    assert gpu is not None
    raise ConfigError(
        f"{memory.total_gib:.1f} GiB per GPU needed, and a {gpu.name} has {gpu.memory_gib:g}: weights "
        f"{memory.base_weights_gib + memory.adapter_weights_gib:.1f}, gradients {memory.gradients_gib:.1f}, "
        f"optimizer {memory.optimizer_gib:.1f}, activations {memory.activations_gib:.1f}, "
        f"workspace {memory.workspace_gib:.1f}",
        where="parallel.tp, parallel.pp, parallel.cp, recipe.recompute",
        fix="raise parallel.tp (weights), parallel.cp (activations), or set recipe.recompute=full",
    )


def deviations(config: Config) -> list[str]:
    """Return in what this run leaves the closed division's rules; empty only for the benchmark by the book.

    Source: MLPerf training rules, llama2_70b_lora: fixed model, rows, LoRA, AdamW, clipping, target and schedule.
    """
    if config.task.benchmark != "llama2_70b_lora" or not config.task.submittable:
        return [f"task {config.task.name} is not an MLPerf benchmark"]
    task, r, lora, m = config.task, config.recipe, config.task.lora, config.model
    found: list[tuple[str, object, object]] = [
        *((f"model.{key}", getattr(m, key), want) for key, want in LLAMA2_70B.items()),
        ("data", config.data.name, "gov_report"),
        ("data.source", config.data.source.name, "prepared"),
        ("data.answer_only", config.data.answer_only, True),
        ("data.seq_length", config.data.seq_length, 8192),
        ("data.train_rows", config.data.train_rows, 3901),
        ("data.eval_rows", config.data.eval_rows, 173),
        ("task.target_eval_loss", task.target_eval_loss, 0.925),
        ("task.lora.rank", lora and lora.rank, 16),
        ("task.lora.alpha", lora and lora.alpha, 32),
        ("task.lora.dropout", lora and lora.dropout, 0.1),
        ("task.lora.target_modules", lora and sorted(lora.target_modules), sorted(LORA_TARGETS)),
        ("recipe.weight_decay", r.weight_decay, 0.0001),
        ("recipe.clip_grad", r.clip_grad, 0.3),
        ("recipe.eval_every_samples", r.eval_every_samples, 384),
        ("recipe.eval_skip", r.eval_skip, None),
    ]
    return [f"{key} is {got}, the rules say {want}" for key, got, want in found if got != want]


def _check_positive(config: Config) -> None:
    r, p, c, d = config.recipe, config.parallel, config.cluster, config.data
    m = config.model
    counts = {
        "model.num_layers": m.num_layers,
        "model.hidden_size": m.hidden_size,
        "model.ffn_hidden_size": m.ffn_hidden_size,
        "model.num_attention_heads": m.num_attention_heads,
        "model.num_query_groups": m.num_query_groups,
        "model.vocab_size": m.vocab_size,
        "model.max_seq_length": m.max_seq_length,
        "model.rope_scaling_factor": m.rope_scaling_factor,
        "trials": config.trials,
        "parallel.tp": p.tp,
        "parallel.pp": p.pp,
        "parallel.cp": p.cp,
        "parallel.vpp": p.vpp,
        "cluster.num_nodes": c.num_nodes,
        "cluster.ranks_per_node": c.ranks_per_node,
        "recipe.global_batch_size": r.global_batch_size,
        "recipe.micro_batch_size": 1 if r.micro_batch_size is None else r.micro_batch_size,
        "recipe.max_steps": r.max_steps,
        "recipe.eval_every_samples": r.eval_every_samples,
        "recipe.log_every_steps": r.log_every_steps,
        "recipe.lr": r.lr,
        "recipe.clip_grad": r.clip_grad,
        "recipe.adam_eps": r.adam_eps,
        "task.target_eval_loss": 1 if config.task.target_eval_loss is None else config.task.target_eval_loss,
        "data.seq_length": d.seq_length,
        "data.train_rows": d.train_rows,
        "data.eval_rows": d.eval_rows,
    }
    for key, value in counts.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{value} is not above 0 and finite", where=key, fix=f"set {key} to a positive number")
    for key, value in {"recipe.adam_beta1": r.adam_beta1, "recipe.adam_beta2": r.adam_beta2}.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{value} is not in [0, 1)", where=key, fix=f"set {key} to 0 or more, below 1")
    for key, count, most in (("trials", config.trials, MAX_TRIALS), ("recipe.max_steps", r.max_steps, MAX_STEPS)):
        if count > most:
            raise ConfigError(f"{count} is above {most}", where=key, fix=f"set {key} to {most} or less")
    if (port := config.cluster.master_port) is not None and not 1 <= port <= 65535:
        raise ConfigError(f"{port} is no port", where="cluster.master_port", fix="use 1 to 65535, or null")
    for key, amount in {
        "recipe.lr_warmup_steps": r.lr_warmup_steps,
        "recipe.warmup_iterations": r.warmup_iterations,
        "recipe.eval_skip": r.eval_skip or 0,
        "recipe.weight_decay": r.weight_decay,
        "seed_base": config.seed_base,
    }.items():
        if not 0 <= amount < math.inf:
            raise ConfigError(f"{amount} is below 0 or not finite", where=key, fix=f"set {key} to 0 or more")
    if r.lr_warmup_steps >= r.max_steps:
        raise ConfigError(
            f"{r.lr_warmup_steps} warm-up steps leave nothing of max_steps {r.max_steps}",
            where="recipe.lr_warmup_steps",
            fix=f"warm up for fewer than {r.max_steps} steps",
        )


def _check_heads(config: Config) -> None:
    m = config.model
    if m.num_attention_heads % m.num_query_groups or m.hidden_size % m.num_attention_heads:
        raise ConfigError(
            f"{m.num_attention_heads} heads of hidden size {m.hidden_size} with {m.num_query_groups} query groups",
            where="model",
            fix="make the heads divide hidden_size, and the query groups divide the heads",
        )


def _check_tensor_parallel(config: Config) -> None:
    tp, m, per_node = config.parallel.tp, config.model, config.cluster.ranks_per_node
    unit = "GPUs" if config.cluster.device is Device.cuda else "ranks"

    def divides(tp: int) -> bool:
        return not any(n % tp for n in (m.num_attention_heads, m.num_query_groups, m.ffn_hidden_size, m.vocab_size))

    legal = [n for n in range(1, per_node + 1) if divides(n)]
    if not divides(tp):
        raise ConfigError(
            f"tp {tp} does not divide {m.num_attention_heads} heads, {m.num_query_groups} query groups, "
            f"ffn {m.ffn_hidden_size} and vocabulary {m.vocab_size} of {m.name}",
            where="parallel.tp",
            fix=f"use one of {_listed(legal)}",
        )
    if tp > per_node:
        raise ConfigError(
            f"tp {tp} is above the {per_node} {unit} of a node: tensor parallelism must stay inside one",
            where="parallel.tp, cluster.ranks_per_node",
            fix=f"use one of {_listed(legal)}",
        )


def _check_pipeline(config: Config) -> None:
    p, layers = config.parallel, config.model.num_layers
    if layers % (p.pp * p.vpp):
        legal = _divisors(layers)
        raise ConfigError(
            f"{layers} layers cannot be split evenly over pp {p.pp} x vpp {p.vpp}",
            where="parallel.pp, parallel.vpp",
            fix=f"make pp x vpp one of {_listed(legal)}",
        )
    if p.vpp > 1 and p.pp == 1:
        raise ConfigError(
            f"vpp {p.vpp} without a pipeline (pp 1)",
            where="parallel.vpp",
            fix="set parallel.pp to 2 or more, or parallel.vpp=1",
        )


def _check_sequence(config: Config) -> None:
    p, s, m = config.parallel, config.data.seq_length, config.model
    if s > m.max_seq_length and m.position is Position.learned:
        raise ConfigError(
            f"rows of {s} tokens, and {m.name} has learned positions for {m.max_seq_length}",
            where="data.seq_length, model.max_seq_length",
            fix=f"set data.seq_length to {m.max_seq_length} or less",
        )
    if p.cp > 1 and s % (2 * p.cp):
        raise ConfigError(
            f"sequence length {s} cannot be cut into the 2 x cp = {2 * p.cp} chunks of context parallelism",
            where="parallel.cp, data.seq_length",
            fix=f"make the sequence length a multiple of {2 * p.cp}",
        )
    if p.sp and (p.tp == 1 or s % (p.tp * p.cp)):
        raise ConfigError(
            f"sequence parallelism needs tp above 1 and tp x cp to divide {s}; tp is {p.tp}, cp {p.cp}",
            where="parallel.sp",
            fix="set parallel.sp=false, or raise parallel.tp",
        )


def _check_world(config: Config) -> None:
    p, c = config.parallel, config.cluster
    num_ranks, per_replica = c.num_nodes * c.ranks_per_node, p.tp * p.pp * p.cp
    if num_ranks % per_replica:
        raise ConfigError(
            f"{num_ranks} ranks cannot be split into replicas of tp {p.tp} x pp {p.pp} x cp {p.cp} = {per_replica}",
            where="parallel.tp, parallel.pp, parallel.cp",
            fix=f"make tp x pp x cp one of {_listed(_divisors(num_ranks))}, or set cluster.ranks_per_node={per_replica}",
        )
    if c.scheduler is Scheduler.local and c.num_nodes != 1:
        raise ConfigError(
            f"{c.num_nodes} nodes without a scheduler",
            where="cluster.num_nodes",
            fix="set cluster.num_nodes=1, or choose a Slurm cluster",
        )
    if c.device is Device.cuda and c.gpu is None and c.scheduler is not Scheduler.local:
        raise ConfigError("the GPU type is not said", where="cluster.gpu", fix="name it, its memory and peak rates")


def _check_lora(config: Config) -> None:
    lora = config.task.lora
    if lora is None and config.task.base is not None:
        raise ConfigError(
            f"{config.task.name} fine-tunes what {config.task.base} trains, and without LoRA this version does not",
            where="task.lora",
            fix="leave task.lora as it is, or choose a task that trains from scratch",
        )
    if lora is None:
        return
    if unknown := sorted(set(lora.target_modules) - set(LORA_TARGETS)):
        raise ConfigError(
            f"no adapter can be put on {_listed(unknown)}",
            where="task.lora.target_modules",
            fix=f"choose from {_listed(LORA_TARGETS)}",
        )
    if not lora.target_modules or lora.rank < 1 or not 0 <= lora.dropout < 1:
        raise ConfigError(
            f"LoRA of rank {lora.rank}, dropout {lora.dropout}, on {lora.target_modules} trains nothing",
            where="task.lora",
            fix="use rank 1 or more, dropout in [0, 1) and at least one target module",
        )


def _check_walltime(config: Config) -> None:
    if config.walltime is not None and config.walltime < 1:
        raise ConfigError(f"{config.walltime} minutes", where="walltime", fix="set walltime to 1 or more, or null")
    if config.cluster.scheduler is Scheduler.slurm and config.walltime is None:
        raise ConfigError(
            "Slurm needs a time limit, and walltime (minutes per trial) is null",
            where="walltime",
            fix="set walltime to the minutes one trial may take",
        )
    limit = config.cluster.slurm.max_walltime_min if config.cluster.slurm else None
    job = walltime_min(config)
    if limit is not None and job is not None and job > limit:
        raise ConfigError(
            f"the job would take {job} min, and this cluster allows {limit}",
            where="walltime, trials",
            fix=f"lower walltime or trials until 5 + trials x (walltime + 5) is at most {limit}, or set launch.array=true",
        )


def walltime_min(config: Config) -> int | None:
    """Return the minutes of a job: 5, and for each of its trials its own and 5 more; None without a limit.

    Source: WALLTIME in the config_*.sh of NVIDIA's MLPerf training submissions.
    """
    if config.walltime is None:
        return None
    return job_min(1 if config.launch.array else config.trials, config.walltime)


def job_min(trials: int, trial_min: int) -> int:
    """Return the minutes of a job of so many trials."""
    return 5 + trials * (trial_min + 5)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
