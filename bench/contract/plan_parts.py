"""What the plans of several kinds of task are made of."""

from dataclasses import dataclass


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
