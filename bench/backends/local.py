"""This machine as a backend: the ranks are children of the process that asks for the run, or run in a container."""

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.backends import containers, run_lock
from bench.backends.local_checks import CHECKS, VISIBLE, names_gpus, visible_gpus
from bench.backends.nodes import opened
from bench.backends.nodes.nodes import Nodes
from bench.backends.nodes.processes import python_paths
from bench.backends.protocol import Job, JobState
from bench.contract.plan import Plan
from bench.contract.schema import PORTS
from bench.errors import ConfigError, SubmitError
from bench.rules.check import Check, Subject, Tier

HERE = "127.0.0.1"


class LocalBackend:
    """Ranks are children of the process that asks for the run; it drives the commands, and they end with it."""

    tiers: tuple[Tier, ...] = ("laptop",)
    files_tier: Tier = "laptop"

    def is_here(self) -> bool:
        return True

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return Subject(plan, "")

    def render(self, plan: Plan) -> str:
        raise ConfigError(
            "a run on this machine, or on hosts, has no script: bench.launch starts its ranks itself",
            where=f"cluster={plan.config.cluster.name}",
            fix="choose a cluster with a queue, such as cluster=dgx1; `python -m bench plan --json` prints the plan",
        )

    def differences(self, rendered: str, plan_json: str) -> Iterator[str]:
        yield "a run on this machine has no script"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        gpus = {VISIBLE: ",".join(visible_gpus(plan) or [])} if names_gpus(plan) else {}
        return plan.environment | gpus | python_paths()

    @contextlib.contextmanager
    def nodes(self, plan: Plan, folder: Path) -> Iterator[Nodes]:
        """Yield the nodes that run a plan's commands: this machine, or a container on it."""
        if not containers.is_ours(plan):
            yield Nodes(plan, folder, HERE, own=self.rank_environment(plan))
            return
        name = socket.gethostname()
        line = containers.line(plan, folder, opened.member_words(folder, 0, python="python"), name=name)
        with opened.opened(plan, folder, HERE, {name: ["sh", "-c", line]}) as nodes:
            yield nodes

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return where runs stand; the id of a run on this machine is its folder."""
        return {folder: _state(folder) for folder in ids}

    def cancel(self, job: str) -> None:
        host, pid = run_lock.driver(Path(job)) or ("", 0)
        if host != socket.gethostname():
            what = f"the run is driven on {host}" if host else "no process drives the run"
            raise SubmitError(what, where=job, fix="end it on the machine where it was started")
        os.kill(pid, signal.SIGTERM)


def _state(folder: str) -> Job:
    if run_lock.driver(Path(folder)) is not None:
        return Job(id=folder, state=JobState.running, word="running")
    return Job(id=folder, state=JobState.failed, word="ended")


def master_port(plan: Plan) -> int:
    """Return where the ranks of the next command meet: the cluster's port, or a free one."""
    return plan.config.cluster.master_port or free_port()


def free_port() -> int:
    """Return a port that nobody listens on; of PORTS, or another program may have it before the ranks do."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise SubmitError(
        f"no port from {PORTS.start} to {PORTS.stop - 1} is free", where="127.0.0.1", fix="set cluster.master_port"
    )
