"""This machine as a backend: the ranks are children of the process that asks for the run, or run in a container."""

import contextlib
import importlib.util
import itertools
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from bench.backends import containers, run_lock
from bench.backends.nodes import remote
from bench.backends.nodes.lead import Nodes
from bench.backends.nodes.processes import python_paths
from bench.backends.protocol import Job, JobState
from bench.contract import plan as plans
from bench.contract import transport
from bench.contract.data_files import FORMATS
from bench.contract.engine import NEMO, VERSION, Attention, HuggingFace, Strategy
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import PORTS, Config, Device
from bench.contract.training import Trains
from bench.errors import ConfigError, SubmitError
from bench.rules.check import CannotTellError, Check, Finding, Subject, Tier, broken

FIX = "make it as docs/nemo.md says, then export NEMO_PYTHON=…/bin/python, or choose engine=megatron"


def is_nemo(plan: Plan) -> bool:
    """Return whether NeMo trains."""
    return plan.config.nemo is not None


def environment(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the interpreter of the trials is missing, or has not the NeMo whose recipes are used."""
    assert subject.plan.config.nemo is not None
    python = subject.plan.config.nemo.python
    if python != "python" and not os.access(python, os.X_OK):
        yield broken("RUN-08", "there is no such interpreter", f"engine.nemo.python={python}", fix=FIX)
        return
    found = _here() if python == "python" else _beside(Path(python))
    if found != VERSION:
        what = f"{NEMO} is {found}, and {VERSION} has the recipes" if found else f"{NEMO} is not installed"
        where = f"engine.nemo.python={python}" + (f" ({sys.executable})" if python == "python" else "")
        yield broken("RUN-08", what, where, fix=FIX)
    else:
        yield f"{NEMO} {found} of {python}"


def _here() -> str | None:
    try:
        return metadata.version(NEMO)
    except metadata.PackageNotFoundError:
        return None


def _beside(python: Path) -> str | None:
    """Return the version that is installed in the environment of an interpreter; None if there is none.

    Raises:
        CannotTellError: the interpreter is of no environment whose packages lie where they usually do.
    """
    folders = list(python.parent.parent.glob("lib/python3*/site-packages"))
    if not folders:
        raise CannotTellError(f"{python} has no site-packages beside it")
    pattern = rf"{NEMO.replace('-', '[-_]')}-(.+)\.dist-info"
    names = (re.fullmatch(pattern, path.name) for folder in folders for path in folder.iterdir())
    return next((match[1] for match in names if match), None)


CHECK = Check("environment of NeMo", ("RUN-08",), environment, is_nemo)


DEVICES = "/dev"
INFINIBAND, INTERFACES = "/sys/class/infiniband", "/sys/class/net"
VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS = ("torch", "numpy", "psutil")
FLASH, FLASH_PIP = "flash_attn", "pip install flash-attn --no-build-isolation"
ENGINE = ("torch", "megatron.core", "numpy", "psutil")
"""What ranks import beside the standard library; the package's extra of this name brings them."""
TEXTS = ("tokenizers", "pyarrow")
"""What rows are made of texts with; the extra is `data`."""

LOAD = ("mlperf_loadgen", "aiohttp", "tokenizers", "psutil")
"""The same of ranks that load a server."""


def insists_on_port(plan: Plan) -> bool:
    """Return whether the run may use one port only."""
    return plan.config.cluster.master_port is not None


def port(subject: Subject) -> Iterator[Finding]:
    """Yield whether the port that the config insists on is taken."""
    wanted = subject.plan.config.cluster.master_port
    assert wanted is not None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port just left is free
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            what = f"port {wanted} cannot be used: {error.strerror}"
            fix = "choose another, or null to have a free one picked"
            yield broken("NCC-05", what, "cluster.master_port", fix=fix)


def engine(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the program that starts the container is missing on this machine."""
    name = subject.plan.config.container.runtime.name
    if (path := shutil.which(name)) is None:
        fix = f"install {name}, or choose another container"
        yield broken("HST-08", f"{name} is not installed on this machine", f"container={name}", fix=fix)
    else:
        yield path


def packages(subject: Subject) -> Iterator[Finding | str]:
    """Yield what the ranks of this machine could not import; they run in this very Python."""
    config, huggingface = subject.plan.config, subject.plan.config.huggingface
    is_of_engine = bool(config.task.training or config.task.generation)
    wanted = ENGINE if huggingface is None or not is_of_engine else (*RANKS, *huggingface_packages(config, huggingface))
    wanted = LOAD if config.task.serving else (*wanted, *_of_texts(subject.plan))
    if missing := [name for name in wanted if not _is_installed(name)]:
        what = f"{', '.join(missing)} cannot be imported"
        extra = "serve" if wanted is LOAD else "engine" if huggingface is None else "huggingface"
        extras = {"data" if name in TEXTS and wanted is not LOAD else extra: None for name in missing}
        fix = f"pip install 'runstop[{','.join(extras)}]'"
        if FLASH in missing:
            fix += f", and {FLASH_PIP}; or set engine.huggingface.attention=sdpa"
        yield broken("RUN-08", what, sys.executable, fix=fix)
    else:
        yield ", ".join(wanted)


def _of_texts(plan: Plan) -> Iterator[str]:
    """Yield what prompts or rows are made of texts with; rows that are there need nothing."""
    if plan.config.task.generation and plan.inputs.checkpoint is not None:
        yield TEXTS[0]
    if plan.config.data is None:
        return
    source, rows = plan.config.data.source, expanded(plan.inputs.rows)
    if source.reads_files and not (rows and Path(rows).exists()):
        yield "tokenizers"
        if FORMATS[source].suffixes == (".parquet",):
            yield "pyarrow"


def huggingface_packages(config: Config, huggingface: HuggingFace) -> Iterator[str]:
    """Yield what ranks of engine=huggingface import for a config."""
    yield from ("transformers", "accelerate")
    generation, training = config.task.generation, config.task.training
    if training is not None and training.trains is not Trains.all:
        yield "peft"
    if generation is not None and generation.nf4 or training is not None and training.trains is Trains.qlora:
        yield "bitsandbytes"
    if huggingface.strategy is Strategy.deepspeed:
        yield "deepspeed"
    if huggingface.attention is Attention.flash_attention_2:
        yield FLASH


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what the module is part of is not there
        return False


def is_cuda_here(plan: Plan) -> bool:
    """Return whether the ranks of a run on this machine want GPUs."""
    return plan.config.cluster.device is Device.cuda


def gpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this machine has a GPU for each rank.

    Source: NVIDIA's driver README, "Device nodes": one /dev/nvidiaN per GPU; in WSL /dev/dxg stands for all of them.
    """
    wanted = _gpus_here(subject.plan)
    if Path("/dev/dxg").exists():
        raise CannotTellError("Windows' driver does not say how many GPUs there are")
    names = (path.name for path in Path(DEVICES).iterdir())
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names)
    yield f"{count} GPU{'' if count == 1 else 's'}"
    if count < wanted:
        what = f"this machine has {count or 'no'} NVIDIA GPU{'' if count == 1 else 's'}, and {_wanting(subject.plan)}"
        few = f"cluster.ranks_per_node={count}" if count else "cluster.device=cpu"
        fix = f"set {few}; in a container, start it with its GPUs (docker run --gpus all)"
        yield broken("HW-03", what, "cluster.device=cuda", fix=fix)


def _gpus_here(plan: Plan) -> int:
    """Return how many GPUs the ranks of this machine want."""
    return plan.config.cluster.ranks_per_node * plans.gpus_per_rank(plan.config)


def _wanting(plan: Plan) -> str:
    """Return how many GPUs the ranks of this machine want, in words."""
    each, ranks = plans.gpus_per_rank(plan.config), plan.config.cluster.ranks_per_node
    return f"{ranks} ranks want one each" if each == 1 else f"one rank wants {each} of them"


def visible_gpus(plan: Plan) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; None where it is not set.

    Source: CUDA's programming guide, "CUDA environment variables": what comes after an invalid entry is not visible.
    """
    value = (os.environ | plan.environment).get(VISIBLE)
    if value is None:
        return None
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, value.split(","))))


def names_gpus(plan: Plan) -> bool:
    """Return whether the ranks want GPUs, and CUDA_VISIBLE_DEVICES says which."""
    return is_cuda_here(plan) and visible_gpus(plan) is not None


def named_gpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether CUDA_VISIBLE_DEVICES names a GPU for each rank."""
    wanted, named = _gpus_here(subject.plan), visible_gpus(subject.plan)
    assert named is not None
    yield ",".join(named) or "none"
    if len(set(named)) < wanted:
        what = f"{VISIBLE}={','.join(named)} shows {len(set(named))} of the GPUs, and {_wanting(subject.plan)}"
        few = f"cluster.ranks_per_node={len(set(named))}" if named else "cluster.device=cpu"
        yield broken("HW-03", what, VISIBLE, fix=f"name {wanted} different GPUs, unset it for all, or set {few}")


def asks_for_network(plan: Plan) -> bool:
    """Return whether the ranks want GPUs, and NCCL is told by which network to join them."""
    wanted = transport.asked(plan.environment)
    return is_cuda_here(plan) and (wanted.net == transport.IB or wanted.interface is not None)


def network(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this machine has the adapters or the interface that NCCL is told to use."""
    wanted = transport.asked(subject.plan.environment)
    ports, links = _names(INFINIBAND), _names(INTERFACES)
    yield ", ".join((*ports, *links))
    if wanted.net == transport.IB and not ports:
        what = f"{transport.NET}={wanted.net}, and this machine has no InfiniBand or RoCE adapter"
        yield broken("NCC-02", what, "cluster.environment", fix=f"leave {transport.NET} out")
    if wanted.interface is not None and not transport.selected(wanted.interface, links):
        what = f"{transport.INTERFACE}={wanted.interface}, and there are only {', '.join(links)}"
        yield broken("NCC-01", what, "cluster.environment", fix="name one of these")


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


CHECKS = (
    Check("container", ("PYX-04", "PYX-12", "HST-08", "CFG-06"), containers.checks),
    Check("engine of containers", ("HST-08",), engine, containers.is_ours),
    Check("packages of the ranks", ("RUN-08",), packages, lambda plan: not containers.is_ours(plan)),
    CHECK,
    Check("GPUs of this machine", ("HW-03",), gpus, is_cuda_here),
    Check("GPUs that CUDA_VISIBLE_DEVICES names", ("HW-03",), named_gpus, names_gpus),
    Check("network that NCCL is told to use", ("NCC-01", "NCC-02"), network, asks_for_network),
    Check("port", ("NCC-05",), port, insists_on_port),
)


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
        line = containers.line(plan, folder, remote.member_words(folder, 0, python="python"), name=name)
        with remote.opened(plan, folder, HERE, {name: ["sh", "-c", line]}) as nodes:
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
