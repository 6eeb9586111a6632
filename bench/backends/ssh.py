"""The ssh backend, for hosts without a scheduler: ssh starts a process on each host, whose children are the ranks.

The launching process drives the run, as on one machine: when it ends, or loses a host, all ranks end.
"""

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.backends import containers
from bench.backends.local import LocalBackend
from bench.backends.nodes import remote
from bench.backends.nodes.lead import Nodes
from bench.backends.nodes.processes import python_paths
from bench.contract import cluster
from bench.contract.cluster import Ssh
from bench.contract.plan import Plan
from bench.contract.run_files import NODE_VARIABLE
from bench.contract.schema import EngineName
from bench.contract.task import Kind
from bench.errors import ConfigError
from bench.rules import RULES
from bench.rules.check import Answer, CannotTellError, Check, Finding, Subject, Tier, broken

_OPTIONS = {"BatchMode": "yes", "StrictHostKeyChecking": "yes", "ConnectTimeout": "10"}
_ALIVE = {"ServerAliveInterval": "5", "ServerAliveCountMax": "3"}
"""A host without power or network is detected after 15 s."""
PROBE_TIMEOUT_S = 60
PROBE = "from bench.backends.nodes import member; member.probe()"
PACKAGES = {EngineName.megatron: ("megatron.core",), EngineName.huggingface: ("transformers",)}
"""What the ranks of an engine import."""
COMMAND_NOT_FOUND = 127


class SshBackend(LocalBackend):
    """As the local backend, with ranks on other hosts and checks of these hosts before the start."""

    tiers: tuple[Tier, ...] = ("laptop", "login")

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": LAPTOP, "login": LOGIN}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return Subject(plan, "", answers=_probe_hosts(plan) if tier == "login" else {})

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return dict(plan.environment)

    @contextmanager
    def nodes(self, plan: Plan, folder: Path) -> Iterator[Nodes]:
        """Yield the nodes that run a plan's commands: one process per host, or one container per host.

        Raises:
            ConfigError: the plan names no hosts.
        """
        if not has_hosts(plan):  # also with launch.force
            raise ConfigError(RULES["HST-13"].title, where="cluster.hosts", fix=RULES["HST-13"].fix, rule="HST-13")
        names = _names(plan)
        commands = {name: command(plan, folder, number, name) for number, name in enumerate(names)}
        with remote.opened(plan, folder, _address(names[0], plan), commands) as nodes:
            yield nodes


def command(plan: Plan, folder: Path, number: int, name: str) -> list[str]:
    """Return the command that starts a node's process on its host."""
    if containers.is_ours(plan):
        member = remote.member_command(folder, number, python="python")
        return on_host(plan, name, containers.line(plan, folder, member, name=name))
    member = remote.member_command(folder, number, python=_python(plan))
    variables = [f"{key}={value}" for key, value in (python_paths() | {NODE_VARIABLE: name}).items()]
    return on_host(plan, name, shlex.join(["exec", "env", *variables, *member]))


def on_host(plan: Plan, name: str, line: str) -> list[str]:
    """Return the command that runs a shell line on a host; on this machine without ssh."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return ["sh", "-c", line]
    return ["ssh", "-T", *_options(plan), "--", name, line]


def _options(plan: Plan) -> list[str]:
    """Return ssh's options: the cluster's first, since ssh uses the first value of each option."""
    ours = [part for key, value in (_OPTIONS | _ALIVE).items() for part in ("-o", f"{key}={value}")]
    return [*(plan.config.cluster.ssh or Ssh()).options, *ours]


def _names(plan: Plan) -> list[str]:
    return [cluster.parsed(text).name for text in plan.config.cluster.hosts or []]


def _python(plan: Plan) -> str:
    return (plan.config.cluster.ssh or Ssh()).python or sys.executable


def _address(name: str, plan: Plan) -> str:
    """Return the address that ssh resolves a host to; ranks on other hosts connect to rank 0 there."""
    answer = _run(["ssh", "-G", *_options(plan), "--", name])
    addresses = [line.partition(" ")[2] for line in answer.out.splitlines() if line.startswith("hostname ")]
    return addresses[0] if addresses else name.rpartition("@")[2]


def _probe_hosts(plan: Plan) -> dict[str, Future[Answer]]:
    """Probe all hosts at the same time: whether they can be reached and can start ranks."""
    container = plan.config.container
    paths = python_paths(plan.environment.get("PYTHONPATH", ""))
    variables = [f"{key}={value}" for key, value in paths.items()]
    line = shlex.join(["env", *variables, _python(plan), "-c", PROBE, *_packages(plan)])
    if containers.is_ours(plan):
        engine = container.runtime.name
        line = (
            f"command -v {engine} >/dev/null || {{ echo {engine}: command not found >&2; exit {COMMAND_NOT_FOUND}; }}"
        )
        line += f"; {engine} version >/dev/null"  # docker version also needs the daemon
    with ThreadPoolExecutor(max_workers=32) as pool:
        return {name: pool.submit(_run, on_host(plan, name, line)) for name in _names(plan)}


def _packages(plan: Plan) -> list[str]:
    """Return the packages that every rank imports; a server, and a framework with its own loop, have their own."""
    is_ours = plan.config.task.kind is not Kind.serve and plan.config.engine.name in PACKAGES
    of_engine = PACKAGES.get(plan.config.engine.name, ()) if plan.config.task.kind is not Kind.kernels else ()
    return ["psutil", *(("numpy", "torch", *of_engine) if is_ours else ())]


def _run(words: Sequence[str]) -> Answer:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        return Answer(COMMAND_NOT_FOUND, "", f"{error.filename}: command not found on this machine")
    except subprocess.TimeoutExpired:
        return Answer(1, "", f"no answer within {PROBE_TIMEOUT_S} s")
    return Answer(done.returncode, done.stdout, done.stderr)


def reached(subject: Subject) -> Iterator[Finding | str]:
    """Yield the hosts that cannot be reached or cannot start ranks.

    Raises:
        CannotTellError: the config names no hosts.
    """
    if not has_hosts(subject.plan):
        raise CannotTellError("cluster.hosts is not set")
    for name, future in subject.answers.items():
        answer = future.result()
        if answer.exit_code == 0:
            yield name
            yield from _loopback(subject.plan, name, answer.out.strip())
            continue
        reason, rule = remote.find_rule(answer.err, f"exit code {answer.exit_code}")
        what = f"the host {name} cannot start ranks: {reason}"
        yield broken(rule or "HST-07", what, "cluster.hosts", fix=RULES[rule or "HST-07"].fix)


def _loopback(plan: Plan, name: str, address: str) -> Iterator[Finding]:
    """Yield a warning if Gloo would use the loopback interface of a host, by the address of the host's own name."""
    if plan.world.num_nodes > 1 and address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in plan.environment:
        what = f"the host {name} resolves its own name to {address}, but other nodes cannot reach Gloo at this address"
        yield broken("NCC-08", what, "cluster.hosts", fix=RULES["NCC-08"].fix, severity="warning")


def groups(subject: Subject) -> Iterator[Finding]:
    """Yield the hosts whose GPU group size differs from the size of a model replica."""
    plan, world = subject.plan, subject.plan.world
    size = world.tp * world.pp * world.cp
    for host in map(cluster.parsed, plan.config.cluster.hosts or []):
        if host.group_size not in (None, size):
            what = f"{host.name} has groups of {host.group_size} GPUs, but a replica of the model needs {size} GPUs"
            fix = f"make parallel.tp x pp x cp equal to {host.group_size}, or remove the groups from cluster.hosts"
            yield broken("HST-11", what, "cluster.hosts", fix=fix)


def has_hosts(plan: Plan) -> bool:
    """Return whether the config names the hosts."""
    return plan.config.cluster.hosts is not None


def named(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the config names no hosts."""
    if not has_hosts(subject.plan):
        yield broken("HST-13", RULES["HST-13"].title, "cluster.hosts", fix=RULES["HST-13"].fix)
        return
    yield ", ".join(_names(subject.plan))


LAPTOP = (
    Check("names of the hosts", ("HST-13",), named),
    Check("container", ("PYX-04", "PYX-12", "HST-08", "CFG-06"), containers.checks),
    Check("groups of GPUs", ("HST-11",), groups),
)
LOGIN = (Check("hosts", ("HST-04", "HST-05", "HST-06", "HST-07", "HST-08", "NCC-08"), reached),)
