"""One attempt of a run on nodes that are taken: a runner on each, until the lead's ends or a node is lost."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.backends.nodes.channel import TOKEN
from bench.backends.nodes.ending import START_AGAIN
from bench.backends.ray.group import Group, LostError, explained
from bench.backends.ray.node import Ended
from bench.contract.run_files import NODE_VARIABLE, PLAN, STATUS

POLL_S = 1.0
ANSWER_S = 60.0
OTHERS_S = 120.0
"""How long the lead may take to notice that another node is lost and to write it down, and the others to end too."""


@dataclass(slots=True)
class Runners:
    """The runners of all nodes, by their calls that have not returned."""

    group: Group
    calls: dict[Any, int]
    ended: dict[int, Ended] = field(default_factory=dict)
    lost: dict[int, LostError] = field(default_factory=dict)

    def look(self, wait_s: float = POLL_S) -> None:
        """Take in which of them have ended, and how, after at most so long."""
        import ray

        done, _ = ray.wait(list(self.calls), timeout=wait_s) if self.calls else ([], [])
        for call in done:
            number = self.calls.pop(call)
            try:
                self.ended[number] = ray.get(call)
            except ray.exceptions.RayError as error:
                self.lost[number] = explained(error, f"node {number} ({self.group.names[number]}) is lost")

    def wait(self, within_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end of all of them, or for something else."""
        until_s = time.monotonic() + within_s
        while self.calls and not until() and time.monotonic() < until_s:
            self.look()

    def stop(self) -> None:
        """Tell all that run to end, and wait until they have."""
        for number in self.calls.values():
            self.group.actors[number].stop.remote()
        self.wait(OTHERS_S)


class Driver(Protocol):
    """Who runs attempts: the job."""

    run: Path

    def say(self, text: str) -> None: ...
    def check(self) -> None: ...


def run(group: Group, words: Sequence[str], driver: Driver) -> int:
    """Return the exit code of the lead's runner; START_AGAIN is one.

    Raises:
        LostError: the run cannot go on on these nodes.
        Stopped: the job was told to end, and all runners have ended.
    """
    folder, say = driver.run, driver.say
    runners = started(group, words, folder)
    try:
        while not (runners.lost or runners.ended):
            driver.check()
            runners.look()
        runners.wait(OTHERS_S, until=lambda: 0 in runners.ended or 0 in runners.lost)
        runners.wait(OTHERS_S if 0 in runners.ended else 0)
    finally:
        runners.stop()
    if runners.lost and not (0 in runners.ended and runners.ended[0].exit_code == 0):
        raise next(iter(runners.lost.values()))
    if 0 not in runners.ended:
        raise LostError("RAY-04", f"node 0 ({group.names[0]}) does not end, though others have")
    if not (folder / STATUS).exists() and runners.ended[0].exit_code != START_AGAIN:
        tell(runners, say)
    return runners.ended[0].exit_code


def tell(runners: Runners, say: Callable[[str], None]) -> None:
    """Say what runners printed last, where they could not write how the run ended."""
    for number, ended in sorted(runners.ended.items()):
        say(f"node {number} ({runners.group.names[number]}): exit code {ended.exit_code}")
        for line in ended.last_lines:
            say(line)


def started(group: Group, words: Sequence[str], folder: Path) -> Runners:
    """Start a runner on every node.

    Raises:
        LostError: the first node does not see the run folder, or does not answer.
    """
    import ray

    lead = group.actors[0]
    try:
        port, sees = ray.get([lead.free_port.remote(), lead.sees.remote(str(folder / PLAN))], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise explained(error, f"node 0 ({group.names[0]}) is lost") from error
    if not sees and "--plan" not in words:
        raise LostError("RAY-09", f"node 0 ({group.names[0]}) does not see {folder / PLAN}")
    token, address = secrets.token_hex(32), f"{group.places[0].address}:{port}"
    calls = {}
    for number, (actor, name) in enumerate(zip(group.actors, group.names, strict=True)):
        own = ["-m", "bench.runner", str(folder), "--node", str(number), "--lead", address, *words]
        calls[actor.run.remote(own, {TOKEN: token, NODE_VARIABLE: name})] = number
    return Runners(group, calls)
