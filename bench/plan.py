"""Work out what a run will do before anything is asked for: config in, Plan out, and Plan as JSON.

A rank process reads the plan and nothing else, so this module (and what it imports) needs the standard library only.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench import flops, layout, limits
from bench.cost import Cost
from bench.errors import ConfigError
from bench.memory import Memory, Recomputed
from bench.schema import Config, DataSource, Device, Recipe, Scheduler, Weights
from bench.world import World, num_microbatches

PLAN_VERSION = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1"}
"""Set for every rank; one thread each, since ranks share the cores."""
CUDA_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""And on GPUs: memory that one size of tensor gave back serves another."""
PREPARE_LOG = "prepare.txt"
NOT_A_SUBMISSION = "not a submission"
"""What org and platform say in the log of a tiny or shortened task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step; a sample is one row."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """When the model is evaluated; steps count from 1, after the optimizer's update."""

    every_steps: int
    first_step: int
    at_steps: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What the log says about itself. Closed is derived, never claimed: any deviation makes it open."""

    benchmark: str | None
    """None where there are no official rules, and for random weights."""
    shape_of: str | None
    """For random weights: the benchmark whose model, LoRA and rows have these sizes, so that speeds can be compared."""
    division: str
    org: str
    platform: str
    status: str
    deviations: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run_start → run_stop measurement."""

    index: int
    seed: int
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command that every rank runs."""

    name: str
    argv: list[str]
    log: str
    limit_min: int | None
    """None for no limit, as for preparing, which nobody times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, worked out. Paths in `files` are relative to the run folder."""

    version: int
    name: str
    config: Config
    world: World
    batch: Batch
    evaluation: Evaluation
    submission: Submission
    trials: list[Trial]
    recompute: Recomputed
    """Of every rank, as recipe.recompute says or, for `fit`, as memory allows."""
    memory: Memory
    cost: Cost | None
    """None where rates of the GPU are not known."""
    tflop_per_sample: float
    """Of the model, forward and backward."""
    peak_tflops: float | None
    """Of one GPU in the precision of the layers; None where the cluster names none."""
    walltime_min: int | None
    data_dir: str | None
    """Rows, made or checked by the prepare step."""
    base_dir: str | None
    """Checkpoint that training starts from; None starts from random numbers."""
    base: "Plan | None"
    """The run that makes base_dir; None: the site provides it."""
    environment: dict[str, str]
    """What is set for every rank: ours, then cluster.environment. Secrets are passed by name, by the site."""
    steps: list[Step]
    files: list[str]


def make(config: Config, base: Config | None = None) -> Plan:
    """Return the plan of a run; `base` is the config of the task that makes its base checkpoint.

    Raises:
        ConfigError: the request is impossible, naming what, where, the fix and the legal values.
    """
    config = throughput_only(config) if is_random(config) else config
    limits.check(config)
    chosen = layout.choose(config)
    evaluation = evaluations(config)
    base_plan = None if base is None else _make_base(base)
    limits.check_evaluation(config, every_steps=evaluation.every_steps, first_step=evaluation.first_step)
    limits.check_memory(config, chosen.memory)
    trials = [Trial(index=k, seed=config.seed_base + k, log=f"result_{k}.txt") for k in range(config.trials)]
    return Plan(
        version=PLAN_VERSION,
        name=f"{config.task.name}-{config.cluster.name}",
        config=config,
        world=chosen.world,
        batch=batches(config, chosen.world),
        evaluation=evaluation,
        submission=submission(config),
        trials=trials,
        recompute=chosen.recompute,
        memory=chosen.memory,
        cost=chosen.cost,
        tflop_per_sample=flops.tflop_per_sample(config.model, config.task.lora, seq_length=config.data.seq_length),
        peak_tflops=flops.peak_tflops(config),
        walltime_min=limits.walltime_min(config),
        data_dir=data_dir(config),
        base_dir=base_dir(config, base_plan),
        base=base_plan,
        environment=_environment(config),
        steps=steps(config, trials),
        files=files(config, trials),
    )


def _make_base(base: Config) -> "Plan":
    """Return the plan of the base task; what is refused there is not what the user asked for, so it says so."""
    try:
        return make(base)
    except ConfigError as error:
        name = base.task.name
        raise ConfigError(
            f"{error.what}, in {name}, which makes the base checkpoint",
            where=f"task={name}: {error.where}",
            fix=f"choose ranks that divide its global batch size {base.recipe.global_batch_size}",
        ) from error


def is_random(config: Config) -> bool:
    """Return whether random weights are trained on random rows, made up in memory: how fast, and no more."""
    return config.model.weights is Weights.random


def throughput_only(config: Config) -> Config:
    """Return the config of random weights without what they cannot have: a target, a submission, files to start from."""
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, target_eval_loss=None, submittable=False),
        cluster=dataclasses.replace(
            config.cluster, paths=dataclasses.replace(config.cluster.paths, data=None, model=None)
        ),
    )


def batches(config: Config, world: World) -> Batch:
    """Return the batch arithmetic: GBS = dp * micro batch * gradient accumulation."""
    r = config.recipe
    return Batch(
        global_batch_size=r.global_batch_size,
        micro_batch_size=r.micro_batch(world.dp),
        gradient_accumulation_steps=num_microbatches(config, world),
        tokens_per_step=r.global_batch_size * config.data.seq_length,
    )


def evaluations(config: Config) -> Evaluation:
    """Return the evaluation schedule: every CEIL(samples / GBS) steps, the first ones skipped.

    Random weights are evaluated after the last step in any case, so that every run times an evaluation.

    Source: MLPerf training rules, llama2_70b_lora: every 384 samples, skip FLOOR(0.125 * GBS + 2).
    """
    r = config.recipe
    every = math.ceil(r.eval_every_samples / r.global_batch_size)
    skip = r.eval_skip if r.eval_skip is not None else math.floor(0.125 * r.global_batch_size + 2)
    first = every * (skip + 1)
    at_steps = list(range(first, r.max_steps + 1, every))
    if is_random(config) and at_steps[-1:] != [r.max_steps]:
        at_steps.append(r.max_steps)
    return Evaluation(every_steps=every, first_step=at_steps[0] if at_steps else first, at_steps=at_steps)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of the update that ends step `step` (from 1): linear warm-up, then a cosine to 0."""
    done = step - 1
    if done < recipe.lr_warmup_steps:
        return recipe.lr * (done + 1) / recipe.lr_warmup_steps
    progress = (done - recipe.lr_warmup_steps) / (recipe.max_steps - recipe.lr_warmup_steps)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def samples(plan: Plan, step: int) -> int:
    """Return the rows trained on after `step` steps."""
    return step * plan.batch.global_batch_size


def submission(config: Config) -> Submission:
    """Return what the log will say about itself; what may not be submitted says so in org and platform."""
    task, cluster = config.task, config.cluster
    deviations, random = limits.deviations(config), is_random(config)
    what = f"{task.name}: {'random weights, ' if random else ''}{NOT_A_SUBMISSION}"
    mark = "" if task.submittable and config.model.name == "llama2_70b" else f" ({what})"
    return Submission(
        benchmark=None if random else task.benchmark,
        shape_of=task.benchmark if random and limits.has_benchmark_shape(config) else None,
        division="open" if deviations else "closed",
        org=cluster.org + mark,
        platform=cluster.platform + mark,
        status=cluster.status,
        deviations=deviations,
    )


def data_dir(config: Config) -> str | None:
    """Return where the rows lie; made rows get a folder of their own per recipe, so that none is ever mistaken."""
    root = config.cluster.paths.data
    if root is None or config.data.source is DataSource.prepared:
        return root
    return f"{root}/{config.data.name}-{fingerprint(config.data, config.model.vocab_size)}"


def base_dir(config: Config, base: Plan | None) -> str | None:
    """Return where the base checkpoint lies, or None for training from scratch."""
    root = config.cluster.paths.model
    if root is None or config.task.lora is None:
        return None
    if base is None:
        return root
    b = base.config
    return f"{root}/{b.task.name}-{fingerprint(b.model, b.data, b.recipe, b.seed_base, b.precision)}"


def steps(config: Config, trials: list[Trial]) -> list[Step]:
    """Return what is run, in order, each by every rank: the trials, and before them what prepares their files."""
    python = ["python", "-m"]
    prepare = Step(name="prepare", argv=[*python, "jobs.prepare", "plan.json"], log=PREPARE_LOG, limit_min=None)
    train = [*python, "jobs.train", "plan.json", "--trial"]
    limit = config.walltime
    return [
        *([] if is_random(config) else [prepare]),
        *(Step(name=f"trial {t.index}", argv=[*train, str(t.index)], log=t.log, limit_min=limit) for t in trials),
    ]


def trial_steps(plan: Plan) -> list[Step]:
    """Return the steps that are trials, in their order."""
    return plan.steps[len(plan.steps) - len(plan.trials) :]


def files(config: Config, trials: list[Trial]) -> list[str]:
    """Return what the run folder will hold."""
    made = [] if is_random(config) else ["loss_{}.png", *(["adapters_{}/"] if config.task.lora else [])]
    own = [(t.log, *(name.format(t.index) for name in made)) for t in trials]
    on_slurm = ["job.sbatch", "job.json", "slurm-*.out", "facts/", *(["health.json"] if config.cluster.health else [])]
    return [
        "config.yaml",
        "plan.json",
        *(on_slurm if config.cluster.scheduler is Scheduler.slurm else []),
        *([] if is_random(config) else [PREPARE_LOG]),
        *itertools.chain(*own),
        "rank_logs/",
        "ledger.json",
        "status.json",
    ]


def _environment(config: Config) -> dict[str, str]:
    of_device = CUDA_ENVIRONMENT if config.cluster.device is Device.cuda else {}
    return ENVIRONMENT | of_device | config.cluster.environment


def is_prepared(plan: Plan) -> bool:
    """Return whether a prepare step would find nothing to do, or there is none."""
    if is_random(plan.config):
        return True
    needed = [plan.data_dir] if plan.base is None else [plan.data_dir, plan.base_dir]
    return all(path is not None and Path(path).is_dir() for path in needed)


def expanded(text: str | None) -> str | None:
    """Return a path of the plan as this environment has it; None if a variable in it is not set.

    A Slurm cluster's paths are symbolic ($DATADIR, $MODEL, $LOGDIR, $CONT): the job's own shell fills them in, so that
    one script serves every user.
    """
    full = os.path.expandvars(text or "")
    return None if not full or "$" in full else full


def element(env: Mapping[str, str] = os.environ) -> str:
    """Return `_3` in element 3 of a Slurm job array, whose elements share one run folder; elsewhere nothing."""
    number = env.get("SLURM_ARRAY_TASK_ID")
    return f"_{number}" if number else ""


def fingerprint(*parts: Any) -> str:
    """Return 12 hex digits that differ whenever one of the parts does, their descriptions aside."""
    plain = [_plain(part) for part in parts]
    for part in plain:
        if isinstance(part, dict):
            part.pop("summary", None)
            part.pop("source", None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


def dumps(plan: Plan) -> str:
    """Return the plan as JSON text."""
    return json.dumps(_plain(plan), indent=1, allow_nan=False) + "\n"


def loads(text: str, *, where: str = "plan.json") -> Plan:
    """Return the plan that `dumps` wrote.

    Raises:
        ConfigError: not JSON, another version, or a missing, unknown or mistyped field.
    """
    try:
        raw = json.loads(text)
        if raw["version"] != PLAN_VERSION:
            raise ValueError(f"version {raw['version']}, and this is version {PLAN_VERSION}")
        plan = _typed(Plan, raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"not a plan that can be read: {error!r}",
            where=where,
            fix="write it again with `python -m bench plan … --json`",
        ) from error
    assert isinstance(plan, Plan)
    return plan


def load(path: Path) -> Plan:
    """Return the plan in a file."""
    try:
        return loads(path.read_text(), where=str(path))
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be read: {error.strerror}", where=str(path), fix="name the plan.json of a run folder"
        ) from error


def _plain(value: Any) -> Any:
    """Return dataclasses, enums and lists as what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    """Return JSON data as the type it was written from."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _typed(args[0], value)
    if origin is list:
        return [_typed(args[0], v) for v in value]
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if unknown := set(value) - set(hints):
            raise ValueError(f"unknown field {sorted(unknown)} of {kind}")
        return kind(**{name: _typed(hints[name], v) for name, v in value.items()})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value]
    if kind is float and isinstance(value, int):
        return float(value)
    if origin is None and kind in (int, str, bool, float) and type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} was expected")
    return value
