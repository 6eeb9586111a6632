"""The plan: everything worked out before anything runs, as data and as JSON. It is the only thing that a job reads."""

import dataclasses
import hashlib
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

from bench.contract.schema import Config, DataSource, StartsFrom
from bench.errors import ConfigError


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

    @property
    def sequence_tp(self) -> int:
        """Over how many TP ranks norms, residuals and dropout are split."""
        return self.tp if self.sp else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one optimizer step on the slowest pipeline stage, and what they go into."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    communication_s: float
    """With what ranks wait in it for each other."""
    recompute_s: float
    """All of what is computed again, its communication included."""
    bubble_s: float
    """A pipeline filling and draining."""
    host_s: float
    """What the GPU waits for the host, where that needs longer to launch kernels than they run. Counted in FP8 only."""
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What the backward pass of every rank recomputes: whole layers, or the outputs of qkv or fc1 in some layers."""

    full: bool
    qkv_layers: int
    fc1_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU of the fullest pipeline stage needs and has; None where there is no GPU."""

    base_weights_gib: float
    """The model itself, which LoRA freezes."""
    adapter_weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None
    parameters: int
    """Of the whole model with its adapters, each counted once."""
    trainable_parameters: int
    rank_parameters: int
    rank_trainable_parameters: int


PLAN_VERSION = 2
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
    """None where there are no official rules, and for a run without a target."""
    shape_of: str | None
    """Without a target: the benchmark whose model, LoRA and rows have these sizes, so that speeds can be compared."""
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
    max_steps: int
    """Optimizer steps at most: what the task says, or what its epochs come to."""
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


def learning_rate(plan: Plan, step: int) -> float:
    """Return the learning rate of the update that ends step `step` (from 1): linear warm-up, then a cosine to 0."""
    recipe, done = plan.config.recipe, step - 1
    if done < recipe.lr_warmup_steps:
        return recipe.lr * (done + 1) / recipe.lr_warmup_steps
    progress = (done - recipe.lr_warmup_steps) / (plan.max_steps - recipe.lr_warmup_steps)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def keeps_adapters(config: Config) -> bool:
    """Return whether a trial keeps the adapters that it trained; on random weights they are worth nothing."""
    training = config.task.training
    return training.lora is not None and training.starts_from is not StartsFrom.random


def samples(plan: Plan, step: int) -> int:
    """Return the rows trained on after `step` steps."""
    return step * plan.batch.global_batch_size


def trial_steps(plan: Plan) -> list[Step]:
    """Return the steps that are trials, in their order."""
    return plan.steps[len(plan.steps) - len(plan.trials) :]


def is_prepared(plan: Plan) -> bool:
    """Return whether a prepare step would find nothing to do, or there is none."""
    rows = plan.data_dir if plan.config.data.source is DataSource.grammar else None
    made = [rows, None if plan.base is None else plan.base_dir]
    return all(Path(path).is_dir() for path in made if path is not None)


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


def dumps(plan: Plan) -> str:
    """Return the plan as JSON text."""
    return json.dumps(plain(plan), indent=1, allow_nan=False) + "\n"


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


def fingerprint(*parts: Any) -> str:
    """Return 12 hex digits that differ whenever one of the parts does, their descriptions aside."""
    described = [plain(part) for part in parts]
    for part in described:
        if isinstance(part, dict):
            part.pop("summary", None)
            part.pop("source", None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """Return dataclasses, enums and lists as what JSON holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return [plain(v) for v in value]
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
