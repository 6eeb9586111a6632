"""The plan of a run that echoes words."""

from dataclasses import dataclass
from typing import Any

from bench.contract.plan import Command, Plan, Trial, World
from bench.contract.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoPlan(Plan):
    """A run that echoes words, worked out. It reads no rows and starts from no checkpoint."""

    version: int
    name: str
    config: Config
    world: World
    trials: list[Trial]
    words: list[str]
    """In this order, each as often as it is repeated."""
    walltime_min: int | None
    environment: dict[str, str]
    commands: list[Command]
    files: list[str]

    @property
    def work(self) -> tuple[Any, ...]:
        return (self.words,)
