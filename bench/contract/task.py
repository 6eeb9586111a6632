"""What is measured: the task, its model and its recipe; `bench.contract.schema` puts them into a config."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import LEFT_OUT_IF_NONE
from bench.contract.generation import Generation
from bench.contract.kernels import Kernels
from bench.contract.serving import Serving
from bench.contract.training import Training


class Kind(Enum):
    """What a task measures; it decides which program the ranks run."""

    train = "train"
    generate = "generate"
    serve = "serve"
    kernels = "kernels"

    @property
    def block(self) -> str:
        """Return the key of what a task of this kind says of itself; it has no other kind's."""
        blocks = {Kind.train: "training", Kind.generate: "generation", Kind.serve: "serving", Kind.kernels: "kernels"}
        return blocks[self]


@dataclass(slots=True, kw_only=True)
class Task:
    """What is measured, and when it is done."""

    name: str
    summary: str
    kind: Kind
    benchmark: str | None
    """MLPerf's name, which decides the official rules; None where there are none."""
    submittable: bool
    """False for smoke runs and tiny models: org and platform in the log then say so."""
    training: Training | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    generation: Generation | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    serving: Serving | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    kernels: Kernels | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """A task has the block of its kind, and no other."""
