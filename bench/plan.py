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

from bench import limits
from bench.errors import ConfigError
from bench.memory import Memory, estimate
from bench.schema import Config, DataSource, Recipe, Scheduler

PLAN_VERSION = 1
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1"}
"""Set for every rank; one thread each, since ranks share the cores."""
PREPARE_LOG = "prepare.txt"
NOT_A_SUBMISSION = "not a submission"
"""What org and platform say in the log of a tiny or shortened task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How the ranks are split: num_ranks = dp * tp * pp * cp."""

    num_nodes: int
    ranks_per_node: int
    num_ranks: int
    dp: int
    tp: int
    pp: int
    cp: int
    vpp: int
    sp: bool


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
    memory: Memory
    walltime_min: int | None
    data_dir: str | None
    """Rows, made or checked by the prepare step."""
    base_dir: str | None
    """Checkpoint that training starts from; None starts from random weights."""
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
    limits.check(config)
    world = split(config)
    batch = batches(config, world)
    evaluation = evaluations(config)
    base_plan = None if base is None else _make_base(base)
    memory = estimate(config, dp=world.dp)
    limits.check_batch(config, dp=world.dp)
    limits.check_evaluation(config, every_steps=evaluation.every_steps, first_step=evaluation.first_step)
    limits.check_memory(config, memory)
    trials = [Trial(index=k, seed=config.seed_base + k, log=f"result_{k}.txt") for k in range(config.trials)]
    return Plan(
        version=PLAN_VERSION,
        name=f"{config.task.name}-{config.cluster.name}",
        config=config,
        world=world,
        batch=batch,
        evaluation=evaluation,
        submission=submission(config),
        trials=trials,
        memory=memory,
        walltime_min=limits.walltime_min(config),
        data_dir=data_dir(config),
        base_dir=base_dir(config, base_plan),
        base=base_plan,
        environment=ENVIRONMENT | config.cluster.environment,
        steps=steps(trials, config.walltime),
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


def split(config: Config) -> World:
    """Return how the cluster's ranks are split. Source: megatron-core 0.16.1, initialize_model_parallel."""
    p, num_ranks = config.parallel, config.cluster.num_nodes * config.cluster.ranks_per_node
    return World(
        num_nodes=config.cluster.num_nodes,
        ranks_per_node=config.cluster.ranks_per_node,
        num_ranks=num_ranks,
        dp=num_ranks // (p.tp * p.pp * p.cp),
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        vpp=p.vpp,
        sp=p.sp,
    )


def batches(config: Config, world: World) -> Batch:
    """Return the batch arithmetic: GBS = dp * micro batch * gradient accumulation."""
    r = config.recipe
    return Batch(
        global_batch_size=r.global_batch_size,
        micro_batch_size=r.micro_batch(world.dp),
        gradient_accumulation_steps=r.global_batch_size // (world.dp * r.micro_batch(world.dp)),
        tokens_per_step=r.global_batch_size * config.data.seq_length,
    )


def evaluations(config: Config) -> Evaluation:
    """Return the evaluation schedule: every CEIL(samples / GBS) steps, the first ones skipped.

    Source: MLPerf training rules, llama2_70b_lora: every 384 samples, skip FLOOR(0.125 * GBS + 2).
    """
    r = config.recipe
    every = math.ceil(r.eval_every_samples / r.global_batch_size)
    skip = r.eval_skip if r.eval_skip is not None else math.floor(0.125 * r.global_batch_size + 2)
    first = every * (skip + 1)
    return Evaluation(every_steps=every, first_step=first, at_steps=list(range(first, r.max_steps + 1, every)))


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
    deviations = limits.deviations(config)
    mark = "" if task.submittable and config.model.name == "llama2_70b" else f" ({task.name}: {NOT_A_SUBMISSION})"
    return Submission(
        benchmark=task.benchmark,
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


def steps(trials: list[Trial], trial_min: int | None) -> list[Step]:
    """Return what is run, in order, each by every rank."""
    python = ["python", "-m"]
    prepare = Step(name="prepare", argv=[*python, "jobs.prepare", "plan.json"], log=PREPARE_LOG, limit_min=None)
    train = [*python, "jobs.train", "plan.json", "--trial"]
    return [
        prepare,
        *(Step(name=f"trial {t.index}", argv=[*train, str(t.index)], log=t.log, limit_min=trial_min) for t in trials),
    ]


def files(config: Config, trials: list[Trial]) -> list[str]:
    """Return what the run folder will hold."""
    own = [(t.log, f"loss_{t.index}.png", *([f"adapters_{t.index}/"] if config.task.lora else [])) for t in trials]
    on_slurm = ["job.sbatch", "job.json", "slurm-*.out", "facts/", *(["health.json"] if config.cluster.health else [])]
    return [
        "config.yaml",
        "plan.json",
        *(on_slurm if config.cluster.scheduler is Scheduler.slurm else []),
        PREPARE_LOG,
        *itertools.chain(*own),
        "rank_logs/",
        "ledger.json",
        "status.json",
    ]


def is_prepared(plan: Plan) -> bool:
    """Return whether the prepare step would find nothing to do."""
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
