"""The plan of a run: everything that is decided before the run starts. Jobs read only this, as JSON."""

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
    """The submission fields of the log. The division is derived: any deviation from the rules makes it open."""

    benchmark: str | None
    """None without official rules, and for a run without a target."""
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
    """A command that every rank runs in the run folder. Every backend runs exactly this argv.

    If argv[0] is `python`, the backend replaces it with the interpreter of the ranks.
    """

    name: str
    argv: list[str]
    log: str | None
    """The file of its MLLOG lines, if it writes any."""
    limit_min: int | None
    """Time limit in minutes; None: no limit, as for `prepare`, which is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The layout of the ranks. num_ranks is dp * tp * pp * cp, times the number of local SGD groups."""

    num_nodes: int
    ranks_per_node: int
    num_ranks: int
    dp: int
    tp: int
    pp: int
    cp: int
    vpp: int
    sp: bool
    ep: int = field(default=1, metadata=OMIT_DEFAULT)
    """The number of dp * cp ranks over which the experts are split. The other ranks have copies."""
    groups: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """The number of local SGD groups. Each group of consecutive ranks has this layout. None without local SGD."""

    @property
    def sequence_tp(self) -> int:
        """Over how many TP ranks norms, residuals and dropout are split."""
        return self.tp if self.sp else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Estimated seconds of one optimizer step on the slowest pipeline stage, by kind of work."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    communication_s: float
    """The time of communication, including the wait for other ranks."""
    recompute_s: float
    """The time of recomputing activations, including the communication."""
    bubble_s: float
    """The time in which pipeline stages wait because the pipeline fills or drains."""
    host_s: float
    """The time in which the GPU waits for the host to launch kernels; 0 for layers whose kernels were not counted."""
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What every rank recomputes in the backward pass: whole layers (`full`), or the outputs of qkv or fc1 in some
    layers."""

    full: bool
    qkv_layers: int
    fc1_layers: int
    offloaded_layers: int = 0
    """Number of layers per rank whose activations are offloaded to host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The estimated memory of one GPU in the pipeline stage that needs the most memory. The capacity is None without a
    GPU."""

    base_weights_gib: float
    """The weights of the model without adapters. LoRA does not train these weights."""
    adapter_weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    workspace_gib: float
    total_gib: float
    capacity_gib: float | None
    fits: bool | None
    parameters: int
    """The number of parameters of the whole model and its adapters."""
    trainable_parameters: int
    rank_parameters: int
    rank_trainable_parameters: int


PLAN_VERSION = 5
NODE_FACTS, NODE_CHECK, PREPARE = "node facts", "node check", "prepare"
"""The names of commands that are not trials."""
NOT_A_SUBMISSION = "not a submission"
"""Suffix of org and platform in the log of a tiny or shortened task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The input folders of a run, as in its plan ($DATADIR is not expanded). None: no such input."""

    rows: str | None = None
    rows_are_prepared: bool = False
    """Whether the prepare command creates them."""
    checkpoint: str | None = None
    checkpoint_is_created: bool = False
    """Whether the prepare command trains it."""


class Plan:
    """The common fields of all plans. Each kind has a frozen dataclass in `bench.contract.plan_kinds`."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]  # for type checkers: dataclasses.replace takes every plan

    replicas_reduce: ClassVar[bool] = True
    """Whether replicas communicate over NCCL. If not, they may share a GPU, which NCCL does not support."""

    version: int
    name: str
    config: Config
    world: World
    trials: list[Trial]
    walltime_min: int | None
    """Time limit of the whole job."""
    environment: dict[str, str]
    """Environment variables of every rank: ours, then cluster.environment. Secrets are passed by name only."""
    commands: list[Command]
    """In order; the trials are last."""
    files: list[str]
    """Output files, relative to the run folder."""

    @property
    def kind(self) -> Kind:
        return self.config.task.kind

    @property
    def inputs(self) -> Inputs:
        return Inputs()

    @property
    def work(self) -> tuple[Any, ...]:
        """Fields that identify the measured work, in addition to the config and the split."""
        return ()

    @property
    def estimated_memory_gib(self) -> tuple[float | None, float | None]:
        """Estimated memory of the fullest GPU, and its capacity; None if the plan has no estimate, or no GPU."""
        return None, None

    @property
    def max_samples(self) -> int | None:
        """Maximum number of training samples of a trial; None for kinds that do not train."""
        return None

    @property
    def checkpoint_every_steps(self) -> int | None:
        """Steps between two saved training states of a trial; None: nothing is saved."""
        return None


def gpus_per_rank(config: Config) -> int:
    """Return the GPUs per rank: more than one only with strategy=balanced."""
    return config.huggingface.num_gpus if config.huggingface else 1


def gpus_per_node(plan: Plan) -> int:
    """Return the GPUs per node, assuming that ranks use GPUs."""
    return plan.config.cluster.ranks_per_node * gpus_per_rank(plan.config)


def nodes_of_job(plan: Plan) -> int:
    """Return the nodes of a job: those that a trial needs, and the spare ones."""
    return plan.world.num_nodes + plan.config.cluster.spare_nodes


def keeps_adapters(config: Config) -> bool:
    """Return whether a trial saves its trained adapters; adapters of random weights are useless."""
    training = config.training
    return training.lora is not None and training.starts_from is not StartsFrom.random


def trial_commands(plan: Plan) -> list[Command]:
    """Return the commands of the trials, in order."""
    return plan.commands[len(plan.commands) - len(plan.trials) :]


def within(plan: Plan, trial_min: int) -> Plan:
    """Return the plan with a time limit of `trial_min` minutes for each trial."""
    before = plan.commands[: len(plan.commands) - len(plan.trials)]
    return replace(plan, commands=[*before, *(replace(c, limit_min=trial_min) for c in trial_commands(plan))])


def trial(plan: Plan, index: int) -> Trial:
    """Return a trial by its index.

    Raises:
        ConfigError: the plan has no such trial.
    """
    if not 0 <= index < len(plan.trials):
        raise ConfigError(
            f"trial {index} does not exist",
            where="--trial",
            fix=f"set --trial to a number from 0 to {len(plan.trials) - 1}",
        )
    return plan.trials[index]


def command(plan: Plan, name: str) -> Command | None:
    """Return the command of this name; None if the plan has none."""
    return next((command for command in plan.commands if command.name == name), None)


def fingerprint(*parts: Any) -> str:
    """Return a hash of 12 hex digits of the parts, without their summaries and sources."""
    described = [codec.plain(part) for part in parts]
    for part in described:
        if isinstance(part, dict):
            part.pop("summary", None)
            part.pop("source", None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]


def on_nodes(plan: Plan, num_nodes: int) -> Plan:
    """Return the plan with another number of nodes, for commands that check nodes; its trials are unchanged."""
    world = replace(plan.world, num_nodes=num_nodes, num_ranks=num_nodes * plan.world.ranks_per_node)
    return replace(plan, world=world)
