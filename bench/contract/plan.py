"""The plan: everything worked out before anything runs, as data and as JSON. It is the only thing that a job reads."""

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from bench.contract import codec, old_plans, run_files
from bench.contract.codec import LEFT_OUT_IF_NONE
from bench.contract.generation import Asked, GenerationMemory, TokenCost, WeightPrecision
from bench.contract.kernels import Point
from bench.contract.local_sgd import Prediction
from bench.contract.schema import Config, not_of_kind
from bench.contract.serving import Load
from bench.contract.task import Kind
from bench.contract.training import StartsFrom
from bench.errors import ConfigError


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
class Command:
    """What every rank runs, in the run folder. It is the only authority on that: every backend runs this argv.

    A first word `python` stands for the interpreter that the backend runs ranks with.
    """

    name: str
    argv: list[str]
    log: str | None
    """The MLLOG lines that it writes, where it writes any."""
    limit_min: int | None
    """None for no limit, as for preparing, which nobody times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How the ranks are split: num_ranks = dp * tp * pp * cp, and times groups where groups train apart."""

    num_nodes: int
    ranks_per_node: int
    num_ranks: int
    dp: int
    tp: int
    pp: int
    cp: int
    vpp: int
    sp: bool
    groups: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """How many groups of consecutive ranks train apart, each split in this way; None: all ranks train together."""

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
    offloaded_layers: int = 0
    """How many layers of a rank keep what they save for the backward pass in the host's memory."""


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


PLAN_VERSION = 3
NODE_FACTS, NODE_CHECK, PREPARE = "node facts", "node check", "prepare"
"""The names of commands that are not trials."""
NOT_A_SUBMISSION = "not a submission"
"""What org and platform say in the log of a tiny or shortened task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
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
    apart: Prediction | None = field(default=None, metadata=codec.LEFT_OUT_IF_NONE)
    """None where all ranks train together."""
    deepspeed: dict[str, Any] | None = field(default=None, metadata=codec.LEFT_OUT_IF_NONE)
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
    """What is set for every rank: ours, then cluster.environment. Secrets are passed by name, by the site."""
    commands: list[Command]
    """In their order; the trials come last."""
    files: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsPlan:
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
    """What is set for every rank: ours, then cluster.environment."""
    commands: list[Command]
    """In their order; the trials come last."""
    files: list[str]
    data_dir: ClassVar[None] = None
    base_dir: ClassVar[None] = None
    base: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """A run that generates, worked out. It reads no rows."""

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
    """What is set for every rank: ours, then cluster.environment."""
    commands: list[Command]
    """In their order; the trials come last."""
    files: list[str]
    data_dir: ClassVar[None] = None
    base: ClassVar[None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
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
    """What is set for every rank: ours, then cluster.environment."""
    commands: list[Command]
    """In their order; the trials come last."""
    files: list[str]
    data_dir: ClassVar[None] = None
    base: ClassVar[None] = None


Plan = TrainingPlan | GenerationPlan | ServingPlan | KernelsPlan
"""The plan of a run, by the kind of its task."""


def required_training(plan: Plan) -> TrainingPlan:
    """Return the plan as that of a run that trains.

    Raises:
        ConfigError: its task is of another kind.
    """
    if isinstance(plan, TrainingPlan):
        return plan
    raise not_of_kind(plan.config.task, Kind.train)


def required_generation(plan: Plan) -> GenerationPlan:
    """Return the plan as that of a run that generates; raises like `required_training`."""
    if isinstance(plan, GenerationPlan):
        return plan
    raise not_of_kind(plan.config.task, Kind.generate)


def required_serving(plan: Plan) -> ServingPlan:
    """Return the plan as that of a run that loads a server; raises like `required_training`."""
    if isinstance(plan, ServingPlan):
        return plan
    raise not_of_kind(plan.config.task, Kind.serve)


def required_kernels(plan: Plan) -> KernelsPlan:
    """Return the plan as that of a run that measures kernels; raises like `required_training`."""
    if isinstance(plan, KernelsPlan):
        return plan
    raise not_of_kind(plan.config.task, Kind.kernels)


def learning_rate(plan: TrainingPlan, step: int) -> float:
    """Return the learning rate of the update that ends step `step` (from 1): linear warm-up, then a cosine to 0."""
    recipe, done = plan.config.recipe, step - 1
    if done < recipe.lr_warmup_steps:
        return recipe.lr * (done + 1) / recipe.lr_warmup_steps
    progress = (done - recipe.lr_warmup_steps) / (plan.max_steps - recipe.lr_warmup_steps)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def gpus_per_rank(config: Config) -> int:
    """Return how many GPUs one rank computes on: several only where one process lays a model over those of a node."""
    return config.huggingface.num_gpus if config.huggingface else 1


def gpus_per_node(plan: Plan) -> int:
    """Return how many GPUs of a node the ranks compute on, as far as they compute on GPUs."""
    return plan.config.cluster.ranks_per_node * gpus_per_rank(plan.config)


def keeps_adapters(config: Config) -> bool:
    """Return whether a trial keeps the adapters that it trained; on random weights they are worth nothing."""
    training = config.training
    return training.lora is not None and training.starts_from is not StartsFrom.random


def samples(plan: TrainingPlan, step: int) -> int:
    """Return the rows trained on after `step` steps."""
    return step * plan.batch.global_batch_size


def trial_commands(plan: Plan) -> list[Command]:
    """Return the commands that are trials, in their order."""
    return plan.commands[len(plan.commands) - len(plan.trials) :]


def within(plan: Plan, trial_min: int) -> Plan:
    """Return the plan with another time limit for each of its trials, in minutes."""
    before = plan.commands[: len(plan.commands) - len(plan.trials)]
    return replace(plan, commands=[*before, *(replace(c, limit_min=trial_min) for c in trial_commands(plan))])


def trial(plan: Plan, index: int) -> Trial:
    """Return a trial by its number.

    Raises:
        ConfigError: the plan has no such trial.
    """
    if not 0 <= index < len(plan.trials):
        raise ConfigError(f"no trial {index}", where="--trial", fix=f"the plan has trials 0 to {len(plan.trials) - 1}")
    return plan.trials[index]


def command(plan: Plan, name: str) -> Command | None:
    """Return the command of this name; None if the plan has none."""
    return next((command for command in plan.commands if command.name == name), None)


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
        if "asked" in raw:
            return codec.typed(GenerationPlan, raw)
        if "loads" in raw:
            return codec.typed(ServingPlan, raw)
        return codec.typed(KernelsPlan, raw) if "points" in raw else codec.typed(TrainingPlan, raw)
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


def fingerprint(*parts: Any) -> str:
    """Return 12 hex digits that differ whenever one of the parts does, their descriptions aside."""
    described = [codec.plain(part) for part in parts]
    for part in described:
        if isinstance(part, dict):
            part.pop("summary", None)
            part.pop("source", None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
