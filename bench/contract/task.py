"""The task settings: what is measured, with one block per kind."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.contract.generation import Generation
from bench.contract.kernels import Kernels
from bench.contract.serving import Serving
from bench.contract.training import Training


class Division(Enum):
    """MLPerf's divisions: closed has fixed hyperparameters."""

    closed = "closed"
    open = "open"


class Kind(Enum):
    """The kinds of tasks. The value is the key of the block in the task; the name is the program in jobs/tasks."""

    train = "training"
    generate = "generation"
    serve = "serving"
    kernels = "kernels"


@dataclass(slots=True, kw_only=True)
class Task:
    """What is measured. Only the block of the task's kind is set."""

    name: str
    summary: str
    kind: Kind
    benchmark: str | None
    """MLPerf's name of the benchmark, which selects the official rules; None: no official rules."""
    submittable: bool
    """False for smoke tests and tiny models; org and platform in the log then show it."""
    division: Division | None = field(default=None, metadata=OMIT_DEFAULT)
    """closed: preflight refuses every difference from the rules of the closed division. open: the log says open. None:
    the log says closed if there is no difference."""
    training: Training | None = field(default=None, metadata=OMIT_DEFAULT)
    generation: Generation | None = field(default=None, metadata=OMIT_DEFAULT)
    serving: Serving | None = field(default=None, metadata=OMIT_DEFAULT)
    kernels: Kernels | None = field(default=None, metadata=OMIT_DEFAULT)
