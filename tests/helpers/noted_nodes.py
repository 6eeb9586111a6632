"""Stub nodes of a run: ranks end at once as the test defines, and all calls are recorded."""

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.backends.nodes.interruption import NodeLostError
from bench.contract.plan import Command, Plan

Act = Callable[[], None]


@dataclass
class Noted:
    """Nodes whose ranks do, in an instant, what a test says by the name of their command, and end with its codes."""

    plan: Plan
    names: list[str]
    acts: dict[str, Act] = field(default_factory=dict)
    codes: dict[str, dict[int, int]] = field(default_factory=dict)
    """Exit codes so far; without any, all ranks have ended well."""
    started: list[str] = field(default_factory=list)
    required: list[str] = field(default_factory=list)
    """The paths that other nodes must have."""
    num_stopped: int = 0
    members: tuple[()] = ()
    lost: NodeLostError | None = None

    def start(self, command: Command, port: int, attempt: str | None = None) -> None:
        self.started.append(command.name)
        self.acts.get(command.name, lambda: None)()

    def exit_codes(self) -> dict[int, int]:
        if self.lost is not None:
            raise self.lost
        return self.codes.get(self.started[-1], dict.fromkeys(range(self.plan.world.num_ranks), 0))

    def stop(self) -> None:
        self.num_stopped += 1

    def query(self, question: str, *, check: Act, paths: list[str]) -> list[list[str]]:
        self.required += paths
        return []

    def drop_caches(self, words: list[str], *, check: Act) -> list[str]:
        return [f"{name}: {' '.join(words)}" for name in self.names]
