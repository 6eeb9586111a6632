"""What is measured: one task, with the block of its kind. `bench.contract.schema` puts it into a config."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT
from bench.contract.generation import Generation
from bench.contract.kernels import Kernels
from bench.contract.serving import Serving
from bench.contract.training import Training


class Kind(Enum):
    """What a task measures. The value is the key of the task's settings; the name chooses the program of the ranks."""

    train = "training"
    generate = "generation"
    serve = "serving"
    kernels = "kernels"


@dataclass(slots=True, kw_only=True)
class Task:
    """What is measured, and when it is done. A task has the block of its kind, and no other."""

    name: str
    summary: str
    kind: Kind
    benchmark: str | None
    """MLPerf's name, which decides the official rules; None where there are none."""
    submittable: bool
    """False for smoke runs and tiny models: org and platform in the log then say so."""
    training: Training | None = field(default=None, metadata=OMIT_DEFAULT)
    generation: Generation | None = field(default=None, metadata=OMIT_DEFAULT)
    serving: Serving | None = field(default=None, metadata=OMIT_DEFAULT)
    kernels: Kernels | None = field(default=None, metadata=OMIT_DEFAULT)
