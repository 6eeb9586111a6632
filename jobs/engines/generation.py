"""The protocol of what generates: an engine's package exports `generator(plan, seed)` beside `build`.

The ranks of one replica (`plan.world.tp` consecutive ones) call every method together; replicas know nothing of each
other. `plan.config.task.generation` says how batches are made and tokens are drawn, `plan.weights` how weights lie in
memory. Requests carry token ids, and answers end at exactly the length asked for: no token ends one early.
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
    """One answer that is asked for."""

    prompt: tuple[int, ...]
    """Token ids."""
    length: int
    """How many new ones, exactly."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request. Times count from when its batch was handed in."""

    tokens: tuple[int, ...]
    """The new ones."""
    first_s: float
    """When the first of them was in host memory."""
    done_s: float
    """When all of them were."""


class Generator(Protocol):
    """The model on one rank, ready to answer."""

    def load(self, folder: Path) -> None:
        """Load a checkpoint in place of the random weights.

        Raises:
            ConfigError: the folder holds no checkpoint of this model.
        """

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Answer these requests untimed, so that nothing is compiled, captured or allocated later.

        They are the requests to come, with the same prompts. One call of `generate` follows for all of them, or, with
        order=one_by_one, one call for each. A generator may answer as few and as short ones as it needs for that.
        """

    def facts(self) -> Sequence[Fact]:
        """Return what the log must say of how this generator computes, as the warm-up has shown it."""

    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        """Return the answers, in the order of the requests, which are worked on side by side."""


class GeneratingModule(EngineModule, Protocol):
    """What the package of an engine that can generate exports besides."""

    def generator(self, plan: GenerationPlan, seed: int) -> Generator:
        """Return the generator with random weights drawn from the seed; the ranks have been started."""


def engine_of(plan: GenerationPlan) -> GeneratingModule:
    """Return the package of the plan's engine."""
    return cast(GeneratingModule, import_module(f"jobs.engines.{plan.config.engine.name.name}"))
