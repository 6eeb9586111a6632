"""The plan class of each kind of task, and reading and writing plan.json."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.contract import codec, old_plans, regular_files, run_files
from bench.contract.data import Data
from bench.contract.generation import GenerationMemory, GenerationRequest, TokenCost, WeightPrecision
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
from bench.contract.serving import Load, SampledLengths, ServingMemory
from bench.contract.task import Kind
from bench.contract.training import Recipe
from bench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(Plan):
    """The plan of a training run."""

    version: int
    name: str
    config: Config
    world: World
    batch: Batch
    evaluation: Evaluation
    max_steps: int
    """Maximum number of optimizer steps, from task.training.max_steps or epochs."""
    submission: Submission
    trials: list[Trial]
    recompute: Recomputed
    """Recomputation of every rank, by recipe.recompute or, for `fit`, by memory."""
    memory: Memory | None
    """None with engine=command: the memory of a program is unknown."""
    cost: Cost | None
    """None if the rates of the GPU are unknown, and with engine=command. With local SGD: of an inner step."""
    local_sgd: Prediction | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """None without local SGD."""
    deepspeed: dict[str, Any] | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """DeepSpeed's complete settings, without "auto". None with other engines and strategies."""
    cuda_graph: bool = False
    """Whether a CUDA graph launches the kernels of a micro-batch."""
    tflop_per_sample: float | None
    """Of the model, forward and backward; None for an unknown model. With a document mask and unknown lengths: an upper
    bound."""
    attention_share: float | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """With a document mask: attention operations relative to rows without. None: no mask, or lengths are unknown."""
    peak_tflops: float | None
    """Of one GPU in the precision of the layers; None if the cluster gives none."""
    walltime_min: int | None
    data_dir: str | None
    """Folder of the rows, which the prepare command creates or checks."""
    base_dir: str | None
    """Folder of the checkpoint from which training starts; None: random weights."""
    base: "TrainingPlan | None"
    """The plan that trains base_dir; None: the site provides it."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def estimated_memory_gib(self) -> tuple[float | None, float | None]:
        return (None, None) if self.memory is None else (self.memory.total_gib, self.memory.capacity_gib)

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
            rows_are_prepared=self.data.source.needs_preparation,
            checkpoint=self.base_dir,
            checkpoint_is_created=self.base is not None,
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
    """The plan of a kernels run, which measures kernels and links."""

    version: int
    name: str
    config: Config
    world: World
    """All ranks do the same; the tp of measured shapes is parallel.tp."""
    trials: list[Trial]
    points: list[Point]
    """The measurements, in order."""
    walltime_min: int | None
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.points,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan(Plan):
    """The plan of a generation run."""

    replicas_reduce = False

    version: int
    name: str
    config: Config
    world: World
    """dp replicas of tp consecutive ranks. ranks_per_node exceeds cluster.ranks_per_node if replicas share GPUs."""
    weights: WeightPrecision
    requests: list[GenerationRequest]
    memory: GenerationMemory
    cost: TokenCost | None
    """None if the GPU's memory bandwidth is unknown."""
    trials: list[Trial]
    walltime_min: int | None
    base_dir: str | None
    """Folder of the checkpoint and its tokenizer; None: random weights and random prompts."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def estimated_memory_gib(self) -> tuple[float | None, float | None]:
        return self.memory.total_gib, self.memory.capacity_gib

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.requests,)

    @property
    def inputs(self) -> Inputs:
        return Inputs(checkpoint=self.base_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan(Plan):
    """The plan of a serving run. Rank 0 starts the server and sends the loads; the other ranks exit at once."""

    version: int
    name: str
    config: Config
    world: World
    """tp is the server's, which uses the first tp GPUs of its node."""
    trials: list[Trial]
    loads: list[Load]
    """The loads, in order."""
    walltime_min: int | None
    base_dir: str | None
    """Folder of the model; None: the run creates it, or the server runs elsewhere."""
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]
    memory: ServingMemory | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """None for a server that runs elsewhere, and in plans of earlier versions."""
    lengths: SampledLengths | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """None: all requests have tokens_in and tokens_out tokens."""

    @property
    def estimated_memory_gib(self) -> tuple[float | None, float | None]:
        return (None, None) if self.memory is None else (self.memory.total_gib, self.memory.capacity_gib)

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.loads,) if self.lengths is None else (self.loads, self.lengths)

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
"""The plan class of each kind."""


def required(plan: Plan, kind: type[P]) -> P:
    """Return the plan as an instance of this class.

    Raises:
        ConfigError: its task is of another kind.
    """
    if isinstance(plan, kind):
        return plan
    raise not_of_kind(plan.config.task, next(name for name, plan_class in PLANS.items() if plan_class is kind))


def training_plan(plan: Plan) -> TrainingPlan | None:
    """Return the plan if it is a training plan, otherwise None."""
    return plan if isinstance(plan, TrainingPlan) else None


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """Return the learning rate of step `step` (from 1): linear warm-up, then cosine decay to lr_min_factor * lr."""
    recipe, done = plan.recipe, step - 1
    if done < recipe.lr_warmup_steps:
        return recipe.lr * (done + 1) / recipe.lr_warmup_steps
    progress = (done - recipe.lr_warmup_steps) / (plan.max_steps - recipe.lr_warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return recipe.lr * (recipe.lr_min_factor + (1 - recipe.lr_min_factor) * cosine)


def samples(plan: TrainingPlan, step: int) -> int:
    """Return the number of training rows after `step` steps."""
    return step * plan.batch.global_batch_size


def dumps(plan: Plan) -> str:
    """Return the plan as JSON text."""
    return json.dumps(codec.plain(plan), indent=1, allow_nan=False) + "\n"


_SCHEMA = "schema"
"""A field that `runstop plan --json` adds; it is not part of the plan."""


def loads(text: str, *, where: str = run_files.PLAN) -> Plan:
    """Parse a plan.json of this version or of an earlier one.

    Raises:
        ConfigError: not JSON, another version, or a missing, unknown or mistyped field.
    """
    try:
        raw = json.loads(text)
        raw.pop(_SCHEMA, None)
        raw = old_plans.upgraded(raw, to=PLAN_VERSION)
        return codec.typed(PLANS[Kind[raw["config"]["task"]["kind"]]], raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the plan cannot be read: {error!r}",
            where=where,
            fix="write the plan again with `runstop plan … --json`",
        ) from error


PLACES = (("config", "cluster", "paths"), ("config", "container", "image"), ("config", "container", "mounts"))
"""What is not part of a plan's identity, besides data_dir and base_dir: a resumed job may find the same data and image
at another place, and what is read there has checksums of its own."""


def identity(plan_json: str) -> str:
    """Return a SHA-256 of a plan's JSON, without the paths of its data, weights, logs and image.

    It does not depend on the version that reads it.

    Raises:
        ConfigError: it is not the JSON of a plan.
    """
    try:
        raw = json.loads(plan_json)
        raw.pop(_SCHEMA, None)
        for plan in (raw, raw.get("base") or {}):
            for key in ("data_dir", "base_dir"):
                plan.pop(key, None)
            for *parents, key in PLACES:
                block = plan
                for parent in parents:
                    block = block.get(parent) or {}
                block.pop(key, None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the plan cannot be read: {error!r}",
            where=run_files.PLAN,
            fix="write the plan again with `runstop plan … --json`",
        ) from error
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()


def load(path: Path) -> Plan:
    """Return the plan in a file."""
    return loads(text(path), where=str(path))


def text(path: Path) -> str:
    """Return the text of a plan's file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return regular_files.read_text(path, follows_links=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not a text file"
        raise ConfigError(
            f"the plan cannot be read: {reason}", where=str(path), fix="give the plan.json of a run folder"
        ) from error
