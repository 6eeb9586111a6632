"""The plan: everything worked out before anything runs. As JSON it is the only thing that a job reads."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bench.contract import codec
from bench.contract.codec import OMIT_DEFAULT
from bench.contract.schema import Config
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
    groups: int | None = field(default=None, metadata=OMIT_DEFAULT)
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


PLAN_VERSION = 4
NODE_FACTS, NODE_CHECK, PREPARE = "node facts", "node check", "prepare"
"""The names of commands that are not trials."""
NOT_A_SUBMISSION = "not a submission"
"""What org and platform say in the log of a tiny or shortened task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The folders that a run reads, as its plan names them: symbolic or not. None: it reads none."""

    rows: str | None = None
    rows_are_made: bool = False
    """Whether the prepare command makes them."""
    checkpoint: str | None = None
    checkpoint_is_made: bool = False
    """Whether the prepare command trains it."""


class Plan:
    """What the plans of all kinds have. Each is a frozen dataclass in `bench.contract.plan_kinds`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]  # for type checkers: dataclasses.replace takes every plan

    replicas_reduce: ClassVar[bool] = True
    """Whether the replicas reduce over all ranks. Those that do not may share a GPU, which NCCL refuses."""

    version: int
    name: str
    config: Config
    world: World
    trials: list[Trial]
    walltime_min: int | None
    """Of the whole job."""
    environment: dict[str, str]
    """What is set for every rank: ours, then cluster.environment. Secrets are passed by name, by the site."""
    commands: list[Command]
    """In their order; the trials come last."""
    files: list[str]
    """What the run writes, relative to its folder."""

    @property
    def kind(self) -> Kind:
        return self.config.task.kind

    @property
    def inputs(self) -> Inputs:
        """The folders that it reads."""
        return Inputs()

    @property
    def work(self) -> tuple[Any, ...]:
        """What differs between plans that measure different work, besides their config and their split."""
        return ()

    @property
    def max_samples(self) -> int | None:
        """How many samples a trial trains on at most; None for the kinds that train nothing."""
        return None

    @property
    def checkpoint_every_steps(self) -> int | None:
        """After how many steps a trial saves its training state; None: it saves none."""
        return None


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


def fingerprint(*parts: Any) -> str:
    """Return 12 hex digits that differ whenever one of the parts does, their descriptions aside."""
    described = [codec.plain(part) for part in parts]
    for part in described:
        if isinstance(part, dict):
            part.pop("summary", None)
            part.pop("source", None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
