"""The protocol of an engine that generates: its package exports `generator(plan, seed)` as well as `build`.

The ranks of one replica (`plan.world.tp` consecutive ranks) call every method together; replicas do not communicate.
`plan.config.task.generation` has the settings for batching and sampling, `plan.weights` the data type of the weights.
Requests carry token ids. An answer has exactly the requested length: no token ends it early.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from bench.contract.plan_kinds import GenerationPlan
from jobs.engines import EngineModule, Fact


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens to generate."""

    prompt: tuple[int, ...]
    """Token ids."""
    length: int
    """The exact number of new tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. Times are measured from the call of `generate`."""

    tokens: tuple[int, ...]
    """The new tokens."""
    first_s: float
    """When the first new token was in host memory."""
    done_s: float
    """When the last new token was in host memory."""


class Generator(Protocol):
    """The model on one rank, ready to generate."""

    def load(self, folder: Path) -> None:
        """Replace the random weights by a checkpoint.

        Raises:
            ConfigError: the folder holds no checkpoint of this model.
        """

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Answer these requests without timing, so that nothing is compiled, captured or allocated later.

        They are the requests that `generate` will get: all in one call, or, with order=one_by_one, one per call. A
        generator may answer only some of them, and only their first tokens, if that is enough.
        """

    def facts(self) -> Sequence[Fact]:
        """Return the log entries about how this generator computes, as observed during the warm-up."""

    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        """Return the answers in the order of the requests, which are processed concurrently."""


class GeneratingModule(EngineModule, Protocol):
    """What the package of an engine that can generate exports in addition."""

    def generator(self, plan: GenerationPlan, seed: int) -> Generator:
        """Return the generator with random weights of this seed; `start_ranks` has been called."""


def engine_of(plan: GenerationPlan) -> GeneratingModule:
    """Return the package of the plan's engine."""
    return cast(GeneratingModule, import_module(f"jobs.engines.{plan.config.engine.name.name}"))
