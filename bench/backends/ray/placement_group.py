"""Reserve the nodes of a run as one Ray placement group (STRICT_SPREAD), and start one actor on each node."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Variables that Ray sets for a worker by default: one thread per CPU of the actor, or one if it has none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A Ray node."""

    host: str
    address: str
    id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How the runner of a node ended."""

    exit_code: int
    last_lines: tuple[str, ...]


class Node:
    """The actor on a node. It has several threads; `run` occupies one until its command has ended."""

    def __init__(self, kept: Sequence[str]) -> None:
        """`kept` names the variables that the user passes to ranks, even if Ray sets them."""
        self._kept = frozenset(kept)
        self._supervisor: subprocess.Popen[bytes] | None = None

    def where(self) -> Place:
        """Return the node of this actor."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), str(node))

    def free_port(self) -> int:
        """Return a free port of this host."""
        for port in random.sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError), socket.socket() as free:
                free.bind(("", port))
                return port
        raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")

    def exists(self, path: str) -> bool:
        """Return whether a path exists on this node."""
        return Path(path).exists()

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command below a supervisor process and forward its output to Ray's logs."""
        last = deque[str](maxlen=LAST_LINES)
        with tempfile.NamedTemporaryFile(buffering=0) as output:  # a pipe would break when this actor ends
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "bench.backends.ray.supervisor", sys.executable, *words],
                env=inherited(os.environ, self._kept) | {"PYTHONPATH": _python_path()} | dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with Path(output.name).open(errors="replace") as printed:
                for line in _lines(printed, self._supervisor):
                    last.append(line.rstrip("\n"))
                    print(line, end="", flush=True)
        return Ended(self._supervisor.wait(), tuple(last))

    def stop(self) -> None:
        """Terminate the command; `run` returns once it has ended."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)


def _lines(printed: TextIO, process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Yield the lines that a process writes into a file, until it has ended and all lines are read."""
    while True:
        has_ended = process.poll() is not None  # before reading, so that the last lines are read too
        yield from printed
        if has_ended:
            return
        time.sleep(OUTPUT_POLL_S)


def inherited(environment: Mapping[str, str], kept: frozenset[str]) -> dict[str, str]:
    """Return a Ray worker's environment without Ray's own variables, except those in `kept`."""
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
REPORT_AFTER_S = 10.0
"""A job that waits for its nodes for this long prints what it waits for."""
THREADS = 4
"""Threads of an actor: one runs the runner, another one can stop it."""


class LostError(Exception):
    """A node is lost or not available; the message has the rule and the reason, as `runstop why` reads them."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(with_rule(rule, what))
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Group:
    """Reserved nodes."""

    placement: Any
    actors: list[Any]
    places: list[Place]
    reserved: tuple[Place, ...] = ()
    """All reserved nodes, if these are only a part of them."""

    def without(self, names: Iterable[str], num_nodes: int) -> "tuple[Group, list[str]]":
        """Return the first nodes that have none of these names, and the names of the others, which are spare."""
        left = [place for place, name in enumerate(self.names) if name not in set(names)]
        used, spare = left[:num_nodes], left[num_nodes:]
        actors, places = [self.actors[place] for place in used], [self.places[place] for place in used]
        return replace(self, actors=actors, places=places, reserved=tuple(self.places)), [self.names[n] for n in spare]

    @property
    def names(self) -> list[str]:
        """Host names; nodes on the same host are distinguished by Ray's node ids."""
        counts = Counter(place.host for place in self.reserved or self.places)
        return [p.host if counts[p.host] == 1 else f"{p.host}-{p.id[:6]}" for p in self.places]


def bundle(plan: Plan) -> dict[str, float]:
    """Return the resources that each node must have free."""
    cluster = plan.config.cluster
    ray = cluster.ray or Ray()
    gpus = {"GPU": float(plans.gpus_per_node(plan))} if cluster.device is Device.cuda else {}
    return {"CPU": float(ray.cpus_per_node)} | gpus | {name: float(count) for name, count in ray.resources.items()}


def reserve(plan: Plan, say: Callable[[str], None], *, check: Callable[[], None]) -> Group:
    """Wait until all nodes of a run and its spare ones are free, and reserve them; `check` is called meanwhile.

    Raises:
        LostError: they are not free in time, or an actor does not start on one of them.
    """
    import ray
    from ray.util.placement_group import placement_group

    bundles = [bundle(plan)] * plans.nodes_of_job(plan)
    selected = {} if (selector := _selector(plan)) is None else {"bundle_label_selector": [selector] * len(bundles)}
    placement = placement_group(bundles, strategy="STRICT_SPREAD", **selected)
    try:
        _wait(placement, plan, say, check)
        actors = [_actor(placement, number, plan) for number in range(len(bundles))]
        calls, until_s = [actor.where.remote() for actor in actors], time.monotonic() + STARTS_S
        while ray.wait(calls, num_returns=len(calls), timeout=READY_POLL_S)[1] and time.monotonic() < until_s:
            check()
        try:
            places = ray.get(calls, timeout=READY_POLL_S)
        except ray.exceptions.RayError as error:
            raise lost_error(error, "an actor does not start on its node") from error
    except BaseException:
        ray.util.remove_placement_group(placement)
        raise
    return Group(placement, actors, places)


def is_avoided(plan: Plan, names: Iterable[str | None]) -> bool:
    """Return whether cluster.avoid leaves out a Ray node that has one of these names: its host name or address."""
    return any(name in plan.config.cluster.avoided for name in names)


def _selector(plan: Plan) -> dict[str, str] | None:
    """Return the label selector of Ray nodes that are not left out by cluster.avoid; None if none is left out."""
    import ray

    nodes = ray.nodes() if plan.config.cluster.avoided else []
    avoided = [str(node["NodeID"]) for node in nodes if node["Alive"] and is_avoided(plan, _names(node))]
    return {"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else None


def _names(node: Mapping[str, Any]) -> list[str]:
    """Return the names of a Ray node: its host name, alone and as `Group.names` has it, and its address."""
    host = str(node.get("NodeManagerHostname"))
    return [host, f"{host}-{str(node['NodeID'])[:6]}", str(node.get("NodeManagerAddress"))]


def release(group: Group) -> None:
    """Release the nodes and kill their actors."""
    import ray

    for actor in group.actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group.placement)


def _actor(placement: Any, number: int, plan: Plan) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    required = bundle(plan)
    place = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=number)
    options = {
        "num_cpus": required.pop("CPU"),
        "num_gpus": required.pop("GPU", 0),
        "resources": required,
        "max_concurrency": THREADS,
        "max_restarts": 0,
        "scheduling_strategy": place,
    }
    kept = (plan.config.cluster.ray or Ray()).environment
    return ray.remote(Node).options(**options).remote(kept)


def _wait(placement: Any, plan: Plan, say: Callable[[str], None], check: Callable[[], None]) -> None:
    limit_s = 60.0 * (plan.config.cluster.ray or Ray()).placement_timeout_min
    started_s, is_reported = time.monotonic(), False
    while not placement.wait(READY_POLL_S):
        check()
        waited_s = time.monotonic() - started_s
        nodes = f"{plans.nodes_of_job(plan)} nodes with {shown(bundle(plan))} each; {_cluster_size(plan)}"
        if waited_s > limit_s:
            raise LostError("RAY-03", f"Ray did not reserve the nodes within {waited_s:.0f} s; the run needs {nodes}")
        if waited_s > REPORT_AFTER_S and not is_reported:
            is_reported = True
            say(f"waiting for {nodes}")


def _cluster_size(plan: Plan) -> str:
    """Return how many nodes the cluster has, and how many of them are large enough, free or busy."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    left_out = ", ".join(plan.config.cluster.avoided)
    size = f"the cluster has {len(alive)} nodes, {num_large(alive, bundle(plan))} of them large enough"
    return f"{size}; left out: {left_out}" if left_out else size


def num_large(nodes: Sequence[dict[str, float]], required: dict[str, float]) -> int:
    """Return how many nodes are large enough for the run, free or busy."""
    return sum(all(node.get(name, 0.0) >= count for name, count in required.items()) for node in nodes)


def shown(resources: dict[str, float]) -> str:
    """Return resources as text: CPU: 2, GPU: 8."""
    return ", ".join(f"{name}: {count:g}" for name, count in resources.items())


def lost_error(error: Exception, what: str) -> LostError:
    """Return a LostError for an error of Ray's, with the rule that its text matches."""
    text = " ".join(str(error).split())
    raw, default = f"{type(error).__name__}: {text}".encode(), "RAY-04"
    signs = (sign for rule in ("RAY-05", "RAY-07", "RAY-04", "RAY-06") for sign in RULES[rule].signs)
    import re

    rule = next((sign.rule for sign in signs if re.search(sign.pattern, raw)), default)
    return LostError(rule, f"{what}: {text:.600}")
