"""The plan of each kind of task, and its JSON: the kind of its task says which one a plan.json is."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.contract import codec, old_plans, run_files
from bench.contract.data import Data
from bench.contract.generation import Asked, GenerationMemory, TokenCost, WeightPrecision
from bench.contract.kernels import Point
from bench.contract.local_sgd import Prediction
from bench.contract.plan import (
    PLAN_VERSION,
    Batch,
    Command,
    Cost,
    Evaluation,
    Inputs,
    Memory,
    Plan,
    Recomputed,
    Submission,
    Trial,
    World,
)
from bench.contract.schema import Config, not_of_kind
from bench.contract.serving import Load
from bench.contract.task import Kind
from bench.contract.training import Recipe
from bench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Plan):
    """A run that trains, worked out. Paths in `files` are relative to the run folder."""

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
    """None where rates of the GPU are not known. Of groups that train apart: of an inner step."""
    apart: Prediction | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """None where all ranks train together."""
    deepspeed: dict[str, Any] | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """What DeepSpeed is given, complete: nothing in it is "auto". None with other engines and strategies."""
    cuda_graph: bool = False
    """Whether one CUDA graph launches the kernels of a micro-batch, captured once, instead of the host."""
    tflop_per_sample: float
    """Of the model, forward and backward."""
    peak_tflops: float | None
    """Of one GPU in the precision of the layers; None where the cluster names none."""
    walltime_min: int | None
    data_dir: str | None
    """Rows, made or checked by the prepare command."""
    base_dir: str | None
    """Checkpoint that training starts from; None starts from random numbers."""
    base: "TrainingPlan | None"
    """The run that makes base_dir; None: the site provides it."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def recipe(self) -> Recipe:
        return self.config.training_recipe

    @property
    def data(self) -> Data:
        return self.config.training_data

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            rows=self.data_dir,
            rows_are_made=self.data.source.is_made,
            checkpoint=self.base_dir,
            checkpoint_is_made=self.base is not None,
        )

    @property
    def work(self) -> tuple[Any, ...]:
        return self.batch, self.max_steps

    @property
    def max_samples(self) -> int:
        return samples(self, self.max_steps)

    @property
    def checkpoint_every_steps(self) -> int | None:
        return self.config.training.checkpoint_every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsPlan(Plan):
    """A run that measures kernels and links, worked out. It reads no rows and starts from no checkpoint."""

    version: int
    name: str
    config: Config
    world: World
    """All ranks are equal: tp of the shapes that are measured is parallel.tp."""
    trials: list[Trial]
    points: list[Point]
    """What is measured, in this order."""
    walltime_min: int | None
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.points,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan(Plan):
    """A run that generates, worked out. It reads no rows."""

    replicas_reduce = False

    version: int
    name: str
    config: Config
    world: World
    """A replica is tp consecutive ranks, and dp counts them. ranks_per_node is above cluster.ranks_per_node where
    replicas share GPUs."""
    weights: WeightPrecision
    asked: list[Asked]
    """Every answer that is asked for."""
    memory: GenerationMemory
    cost: TokenCost | None
    """None where the GPU's memory bandwidth is not known."""
    trials: list[Trial]
    walltime_min: int | None
    base_dir: str | None
    """The checkpoint, with its tokenizer; None: random weights and random prompts."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.asked,)

    @property
    def inputs(self) -> Inputs:
        return Inputs(checkpoint=self.base_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan(Plan):
    """A run that loads a server, worked out. Rank 0 starts the server and loads it; the other ranks end at once."""

    version: int
    name: str
    config: Config
    world: World
    """tp is the server's; it takes the first tp GPUs of its node."""
    trials: list[Trial]
    loads: list[Load]
    """In this order."""
    walltime_min: int | None
    base_dir: str | None
    """The model's folder; None: it is made on the spot, or the server runs elsewhere."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.loads,)

    @property
    def inputs(self) -> Inputs:
        return Inputs(checkpoint=self.base_dir)


P = TypeVar("P", bound=Plan)
PLANS: dict[Kind, type[Plan]] = {
    Kind.train: TrainingPlan,
    Kind.generate: GenerationPlan,
    Kind.serve: ServingPlan,
    Kind.kernels: KernelsPlan,
}
"""The class of each kind's plans."""


def required(plan: Plan, of: type[P]) -> P:
    """Return the plan as one of this class.

    Raises:
        ConfigError: its task is of another kind.
    """
    if isinstance(plan, of):
        return plan
    raise not_of_kind(plan.config.task, next(kind for kind, each in PLANS.items() if each is of))


def training_plan(plan: Plan) -> TrainingPlan | None:
    """Return the plan as that of a run that trains; None for the other kinds."""
    return plan if isinstance(plan, TrainingPlan) else None


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """Return the learning rate of the update that ends step `step` (from 1): linear warm-up, then a cosine to 0."""
    recipe, done = plan.recipe, step - 1
    if done < recipe.lr_warmup_steps:
        return recipe.lr * (done + 1) / recipe.lr_warmup_steps
    progress = (done - recipe.lr_warmup_steps) / (plan.max_steps - recipe.lr_warmup_steps)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def samples(plan: TrainingPlan, step: int) -> int:
    """Return the rows trained on after `step` steps."""
    return step * plan.batch.global_batch_size


def dumps(plan: Plan) -> str:
    """Return the plan as JSON text."""
    return json.dumps(codec.plain(plan), indent=1, allow_nan=False) + "\n"


def loads(text: str, *, where: str = run_files.PLAN) -> Plan:
    """Return the plan that `dumps` wrote, or that an earlier version did.

    Raises:
        ConfigError: not JSON, another version, or a missing, unknown or mistyped field.
    """
    try:
        raw = old_plans.upgraded(json.loads(text), to=PLAN_VERSION)
        return codec.typed(PLANS[Kind[raw["config"]["task"]["kind"]]], raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"not a plan that can be read: {error!r}",
            where=where,
            fix="write it again with `python -m bench plan … --json`",
        ) from error


def load(path: Path) -> Plan:
    """Return the plan in a file."""
    try:
        return loads(path.read_text(), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"the plan cannot be read: {reason}", where=str(path), fix="name the plan.json of a run folder"
        ) from error
