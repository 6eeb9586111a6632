"""The nodes of a run as one placement group, all of them at once and each another one, with one actor on each."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.contract import plan as plans
from bench.contract.cluster import Ray
from bench.contract.plan import Plan
from bench.contract.schema import PORTS, Device
from bench.errors import with_rule
from bench.rules.registry import RULES

PACKAGES = Path(__file__).parents[3]
LAST_LINES = 20
OUTPUT_POLL_S = 0.2
SET_BY_RAY = ("OMP_NUM_THREADS",)
"""What Ray sets for a worker where nobody has: as many threads as the actor has CPUs, and one without."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, as Ray knows it."""

    host: str
    address: str
    id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How the runner of a node ended."""

    exit_code: int
    last_lines: tuple[str, ...]


class Node:
    """An actor with some threads: `run` occupies one until its command has ended."""

    def __init__(self, kept: Sequence[str]) -> None:
        """`kept` names variables that the user passes on, whatever else sets them."""
        self._kept = frozenset(kept)
        self._keeper: subprocess.Popen[bytes] | None = None

    def where(self) -> Place:
        """Return where this actor is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), str(node))

    def free_port(self) -> int:
        """Return a port of this host that nobody listens on."""
        for port in random.sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError), socket.socket() as free:
                free.bind(("", port))
                return port
        raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")

    def sees(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return Path(path).exists()

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command under a keeper. What it prints goes on to Ray's logs."""
        last = deque[str](maxlen=LAST_LINES)
        with tempfile.NamedTemporaryFile(buffering=0) as output:  # a pipe would break with this actor
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "bench.backends.ray.keeper", sys.executable, *words],
                env=inherited(os.environ, self._kept) | {"PYTHONPATH": _python_path()} | dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with Path(output.name).open(errors="replace") as printed:
                for line in _lines(printed, self._keeper):
                    last.append(line.rstrip("\n"))
                    print(line, end="", flush=True)
        return Ended(self._keeper.wait(), tuple(last))

    def stop(self) -> None:
        """Tell the command to end: `run` returns once it has."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)


def _lines(printed: TextIO, process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Yield what a process writes into a file, until it has ended and all of that is read."""
    while True:
        has_ended = process.poll() is not None  # asked first: what was written last is then read too
        yield from printed
        if has_ended:
            return
        time.sleep(OUTPUT_POLL_S)


def inherited(environment: Mapping[str, str], kept: frozenset[str]) -> dict[str, str]:
    """Return what a runner gets of a Ray worker's environment: nothing that is Ray's own."""
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not (name.startswith("RAY_") or name in SET_BY_RAY)
    }


def _python_path() -> str:
    entries = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(PACKAGES), *entries]))


STARTS_S = 600.0
"""How long an actor may take to start: its runtime_env is unpacked first."""
READY_POLL_S = 1.0
SAYS_S = 10.0
"""After so long a job that waits for its nodes says what it waits for."""
THREADS = 4
"""Of an actor: one runs the runner, another one tells it to end."""


class LostError(Exception):
    """A node is gone, or cannot be had: rule and reason, as `why` reads them."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(with_rule(rule, what))
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that are taken."""

    placement: Any
    actors: list[Any]
    places: list[Place]

    @property
    def names(self) -> list[str]:
        """Host names; those of nodes on one host are told apart by Ray's ids."""
        counts = Counter(place.host for place in self.places)
        return [p.host if counts[p.host] == 1 else f"{p.host}-{p.id[:6]}" for p in self.places]


def bundle(plan: Plan) -> dict[str, float]:
    """Return what each node must have free."""
    cluster = plan.config.cluster
    ray = cluster.ray or Ray()
    gpus = {"GPU": float(plans.gpus_per_node(plan))} if cluster.device is Device.cuda else {}
    return {"CPU": float(ray.cpus_per_node)} | gpus | {name: float(count) for name, count in ray.resources.items()}


def take(plan: Plan, say: Callable[[str], None], *, check: Callable[[], None]) -> Group:
    """Return the nodes of a run, once all of them are free; `check` may raise while they are not.

    Raises:
        LostError: they are not free in time, or an actor does not start on one of them.
    """
    import ray
    from ray.util.placement_group import placement_group

    wanted = bundle(plan)
    placement = placement_group([wanted] * plan.world.num_nodes, strategy="STRICT_SPREAD")
    try:
        _wait(placement, plan, say, check)
        actors = [_actor(placement, number, plan) for number in range(plan.world.num_nodes)]
        asked, until_s = [actor.where.remote() for actor in actors], time.monotonic() + STARTS_S
        while ray.wait(asked, num_returns=len(asked), timeout=READY_POLL_S)[1] and time.monotonic() < until_s:
            check()
        try:
            places = ray.get(asked, timeout=READY_POLL_S)
        except ray.exceptions.RayError as error:
            raise explained(error, "a node's actor does not start") from error
    except BaseException:
        ray.util.remove_placement_group(placement)
        raise
    return Group(placement, actors, places)


def release(group: Group) -> None:
    """Give the nodes back; what still runs on them ends."""
    import ray

    for actor in group.actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group.placement)


def _actor(placement: Any, number: int, plan: Plan) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = bundle(plan)
    place = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=number)
    options = {
        "num_cpus": wanted.pop("CPU"),
        "num_gpus": wanted.pop("GPU", 0),
        "resources": wanted,
        "max_concurrency": THREADS,
        "max_restarts": 0,
        "scheduling_strategy": place,
    }
    kept = (plan.config.cluster.ray or Ray()).environment
    return ray.remote(Node).options(**options).remote(kept)


def _wait(placement: Any, plan: Plan, say: Callable[[str], None], check: Callable[[], None]) -> None:
    limit_s = 60.0 * (plan.config.cluster.ray or Ray()).placement_timeout_min
    started_s, is_said = time.monotonic(), False
    while not placement.wait(READY_POLL_S):
        check()
        waited_s = time.monotonic() - started_s
        words = f"{plan.world.num_nodes} nodes with {shown(bundle(plan))} each; {_there(plan)}"
        if waited_s > limit_s:
            raise LostError("RAY-03", f"waited {waited_s:.0f} s for {words}")
        if waited_s > SAYS_S and not is_said:
            is_said = True
            say(f"waits for {words}")


def _there(plan: Plan) -> str:
    """Return how many nodes the cluster has, and how many are large enough when they are free."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return f"{len(alive)} are there, {num_large(alive, bundle(plan))} of them so large"


def num_large(nodes: Sequence[dict[str, float]], wanted: dict[str, float]) -> int:
    """Return how many nodes have what a node of the run must have, whether or not it is free."""
    return sum(all(node.get(name, 0.0) >= count for name, count in wanted.items()) for node in nodes)


def shown(resources: dict[str, float]) -> str:
    """Return resources as one reads them: CPU: 2, GPU: 8."""
    return ", ".join(f"{name}: {count:g}" for name, count in resources.items())


def explained(error: Exception, what: str) -> LostError:
    """Return what an error of Ray's says, by the rule that it shows."""
    text = " ".join(str(error).split())
    raw, default = f"{type(error).__name__}: {text}".encode(), "RAY-04"
    signs = (sign for rule in ("RAY-05", "RAY-07", "RAY-04", "RAY-06") for sign in RULES[rule].signs)
    import re

    rule = next((sign.rule for sign in signs if re.search(sign.pattern, raw)), default)
    return LostError(rule, f"{what}: {text:.600}")
