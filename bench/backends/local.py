"""The local backend: the ranks are children of the launching process, or run in a container on this machine."""

import contextlib
import importlib.util
import os
import random
import re
import shutil
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
from bench.contract.data import DataSource
from bench.contract.data_files import FORMATS
from bench.contract.engine import NEMO, VERSION
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.program import Program, placeholders
from bench.contract.schema import PORTS, Device, GpuVendor
from bench.errors import ConfigError, SubmitError
from bench.images.needed import FLASH, huggingface_modules
from bench.planning.gpu_detection import VISIBLE, visible_names
from bench.rules.check import CannotTellError, Check, Finding, Subject, Tier, broken
from bench.texts import counted

NEMO_FIX = "install NeMo as docs/nemo.md describes and export NEMO_PYTHON=…/bin/python; or set engine=megatron"


def is_nemo(plan: Plan) -> bool:
    """Return whether the engine is NeMo."""
    return plan.config.nemo is not None


def environment(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether NeMo's Python is missing, or its NeMo has another version than the recipes need."""
    assert subject.plan.config.nemo is not None
    python = subject.plan.config.nemo.python
    if python != "python" and not os.access(python, os.X_OK):
        what = f"{python} does not exist, or is not an executable file"
        yield broken("RUN-08", what, f"engine.nemo.python={python}", fix=NEMO_FIX)
        return
    version = _own_nemo_version() if python == "python" else _nemo_version_of(Path(python))
    if version != VERSION:
        what = (
            f"{NEMO} {version} is installed, but the recipes need {VERSION}" if version else f"{NEMO} is not installed"
        )
        where = f"engine.nemo.python={python}" + (f" ({sys.executable})" if python == "python" else "")
        yield broken("RUN-08", what, where, fix=NEMO_FIX)
    else:
        yield f"{NEMO} {version} of {python}"


def _own_nemo_version() -> str | None:
    try:
        return metadata.version(NEMO)
    except metadata.PackageNotFoundError:
        return None


def _nemo_version_of(python: Path) -> str | None:
    """Return the NeMo version in the environment of an interpreter; None if it is not installed.

    Raises:
        CannotTellError: the environment's site-packages folder was not found.
    """
    folders = list(python.parent.parent.glob("lib/python3*/site-packages"))
    if not folders:
        raise CannotTellError(f"the interpreter {python} has no site-packages folder")
    pattern = rf"{NEMO.replace('-', '[-_]')}-(.+)\.dist-info"
    names = (re.fullmatch(pattern, path.name) for folder in folders for path in folder.iterdir())
    return next((match[1] for match in names if match), None)


def runs_program(plan: Plan) -> bool:
    """Return whether the ranks run the user's program outside of a container."""
    return plan.config.program is not None and not containers.is_ours(plan)


def program(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the user's program, or a script among its words, does not exist on this machine."""
    settings = subject.plan.config.program
    assert settings is not None
    where, fix = (
        "engine.command.argv",
        "correct the path; a program starts in engine.command.folder if this key is set, otherwise in the run folder",
    )
    first, *arguments = settings.argv
    if first != "python" and not placeholders(first) and shutil.which(first, path=_search_path(settings)) is None:
        yield broken("RUN-08", f"the program {first} does not exist, or cannot be executed", where, fix=fix)
    else:
        yield first
    folder = settings.folder or "/"
    for argument in arguments:
        is_script = argument.endswith(SCRIPTS) and not placeholders(f"{folder}{argument}")
        if is_script and not Path(folder, argument).is_file():
            yield broken("RUN-08", f"the file {argument} does not exist on this machine", where, fix=fix)


def _search_path(settings: Program) -> str | None:
    """Return the folders in which the program is searched."""
    return settings.environment.get("PATH") or os.environ.get("PATH")


PROGRAM_CHECK = Check("the user's program", ("RUN-08",), program, runs_program)
SCRIPTS = (".py", ".sh")
"""The ends of words of argv that are files, which must exist."""
NEMO_CHECK = Check("NeMo environment", ("RUN-08",), environment, is_nemo)


DEVICES = "/dev"
KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"
INFINIBAND, INTERFACES = "/sys/class/infiniband", "/sys/class/net"
RANKS = ("torch", "numpy", "psutil")
RUNNER = ("psutil",)
"""What the runner of a user's program imports, which this process needs as well."""
FLASH_PIP = "pip install flash-attn --no-build-isolation"
ENGINE = ("torch", "megatron.core", "numpy", "psutil")
"""Packages that ranks import; installed by the extra `engine`."""
TEXTS = ("tokenizers", "pyarrow", "jinja2")
"""Packages that prepare rows from texts; installed by the extra `data`."""

LOAD = ("mlperf_loadgen", "aiohttp", "tokenizers", "psutil")
"""Packages of ranks that generate load on a server; installed by the extra `serve`."""


def has_fixed_port(plan: Plan) -> bool:
    """Return whether the config sets the port of rank 0."""
    return plan.config.cluster.master_port is not None


def port(subject: Subject) -> Iterator[Finding]:
    """Yield whether the configured port is in use."""
    configured = subject.plan.config.cluster.master_port
    assert configured is not None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: a port in TIME_WAIT is usable
        try:
            probe.bind(("127.0.0.1", configured))
        except OSError as error:
            what = f"cannot use port {configured}: {error.strerror}"
            fix = "set cluster.master_port to another port, or to null for any free port"
            yield broken("NCC-05", what, "cluster.master_port", fix=fix)


def engine(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether docker or podman is missing on this machine."""
    name = subject.plan.config.container.runtime.name
    if (path := shutil.which(name)) is None:
        fix = f"install {name}, or set container to another container runtime"
        yield broken("HST-08", f"{name} is not installed on this machine", f"container={name}", fix=fix)
    else:
        yield path


def packages(subject: Subject) -> Iterator[Finding | str]:
    """Yield the packages that ranks on this machine cannot import; they run in this process's Python."""
    config, huggingface = subject.plan.config, subject.plan.config.huggingface
    if config.program is not None:
        yield ", ".join(RUNNER)
        return
    extra = "engine"
    wanted: tuple[str, ...] = ENGINE
    if huggingface is not None and (config.task.training or config.task.generation):
        extra, wanted = "huggingface", (*RANKS, *huggingface_modules(config, huggingface))
    wanted = LOAD if config.task.serving else (*wanted, *_of_texts(subject.plan))
    server = _server_module(subject.plan)
    if server is not None and not _is_installed(server):
        install = "pip install 'transformers[serving]'" if server == "transformers" else f"install {server}"
        fix = f"{install}; or choose another server with server=NAME"
        what = f"cannot import {server}, which this run starts as its server"
        yield broken("RUN-08", what, sys.executable, fix=fix)
    if missing := [name for name in wanted if not _is_installed(name)]:
        what = f"cannot import {', '.join(missing)}"
        extra = "serve" if wanted is LOAD else extra
        extras = {"data" if name in TEXTS and wanted is not LOAD else extra: None for name in missing}
        fix = f"pip install 'runstop[{','.join(extras)}]'"
        if FLASH in missing:
            fix += f"; {FLASH_PIP}; or set engine.huggingface.attention=sdpa"
        yield broken("RUN-08", what, sys.executable, fix=fix)
    else:
        yield ", ".join(wanted)


def _server_module(plan: Plan) -> str | None:
    """Return the package of a server that this process's Python runs (`{python} -m PACKAGE.MODULE`); else None."""
    serving = plan.config.task.serving
    argv = serving.server.argv if serving is not None and serving.server.url is None else []
    return argv[2].partition(".")[0] if argv[:2] == ["{python}", "-m"] and len(argv) > 2 else None


def _of_texts(plan: Plan) -> Iterator[str]:
    """Yield the packages that tokenize prompts or prepare rows; existing rows need none."""
    if plan.config.task.generation and plan.inputs.checkpoint is not None:
        yield TEXTS[0]
    if plan.config.data is None:
        return
    data, rows = plan.config.data, expanded(plan.inputs.rows)
    if data.source.reads_files and not (rows and Path(rows).exists()):
        yield "tokenizers"
        yield from ["jinja2"] if data.source is DataSource.chat else []
        if FORMATS[data.source].suffixes == (".parquet",) or str(data.files).endswith(".parquet"):
            yield "pyarrow"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def needs_gpus(plan: Plan) -> bool:
    """Return whether the ranks need GPUs."""
    return plan.config.cluster.device is Device.cuda


def gpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this machine has a GPU for each rank.

    Source: NVIDIA's driver README, "Device nodes": one /dev/nvidiaN per GPU; in WSL /dev/dxg represents all of them.
    """
    if (count := _num_gpus(subject.plan)) is None:
        raise CannotTellError("in WSL the driver does not report the number of GPUs")
    yield counted(count, "GPU")
    if count < _required_gpus(subject.plan):
        vendor = "AMD" if _is_amd(subject.plan) else "NVIDIA"
        available_gpus = counted(count, f"{vendor} GPU") if count else f"no {vendor} GPUs"
        what = f"this machine has {available_gpus}, but {_requirement(subject.plan)}"
        fix = f"set {_smaller_request(subject.plan, count)}; "
        option = "--device=/dev/kfd --device=/dev/dri" if _is_amd(subject.plan) else "--gpus all"
        fix += f"if you work in a container, start the container with `docker run {option}`"
        yield broken("HW-03", what, "cluster.device=cuda", fix=fix)


def _is_amd(plan: Plan) -> bool:
    gpu = plan.config.cluster.gpu
    return gpu is not None and gpu.vendor is GpuVendor.amd


def _num_gpus(plan: Plan) -> int | None:
    """Return how many GPUs of the plan's vendor this machine has; None in WSL, whose driver does not report it."""
    if Path(DEVICES, "dxg").exists():
        return None
    return _amd_gpus() if _is_amd(plan) else _nvidia_gpus()


def _nvidia_gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path(DEVICES).iterdir())


def _amd_gpus() -> int:
    """Return the number of AMD GPUs: the nodes of the driver's topology that have a GPU; CPUs have gpu_id 0.

    Source: the kernel's drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
    """
    return sum(path.read_text().strip() != "0" for path in Path(KFD_NODES).glob("*/gpu_id"))


def _required_gpus(plan: Plan) -> int:
    """Return how many GPUs the ranks on this machine need."""
    return plan.config.cluster.ranks_per_node * plans.gpus_per_rank(plan.config)


def _requirement(plan: Plan) -> str:
    """Return how many GPUs the ranks on this machine need, as a sentence."""
    each, ranks = plans.gpus_per_rank(plan.config), plan.config.cluster.ranks_per_node
    if each != 1:
        return f"1 rank needs {each} GPUs"
    return "1 rank needs 1 GPU" if ranks == 1 else f"{ranks} ranks need {ranks} GPUs"


def _smaller_request(plan: Plan, count: int) -> str:
    """Return the setting with which the ranks need no more than `count` GPUs."""
    if not count:
        return "cluster.device=cpu"
    has_one_each = plans.gpus_per_rank(plan.config) == 1
    return f"cluster.ranks_per_node={count}" if has_one_each else f"engine.huggingface.num_gpus={count}"


def visible_gpus(plan: Plan) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; None if it is not set."""
    value = (os.environ | plan.environment).get(VISIBLE)
    return None if value is None else visible_names(value)


def names_gpus(plan: Plan) -> bool:
    """Return whether the ranks need GPUs and CUDA_VISIBLE_DEVICES is set."""
    return needs_gpus(plan) and visible_gpus(plan) is not None


def named_gpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether CUDA_VISIBLE_DEVICES names fewer GPUs than the ranks need, on a machine that has enough of them."""
    required, named = _required_gpus(subject.plan), visible_gpus(subject.plan)
    assert named is not None
    yield ",".join(named) or "none"
    present = _num_gpus(subject.plan)
    if present is not None and present < required:
        return  # `gpus` reports it
    if (count := len(set(named))) < required:
        what = f"{VISIBLE}={','.join(named)} makes {counted(count, 'GPU')} visible, but {_requirement(subject.plan)}"
        fix = f"list {required} different GPUs in {VISIBLE}, or set {_smaller_request(subject.plan, count)}"
        yield broken("HW-03", what, VISIBLE, fix=fix)


def selects_network(plan: Plan) -> bool:
    """Return whether the ranks need GPUs and the environment selects NCCL's network."""
    requested = transport.requested(plan.environment)
    return needs_gpus(plan) and (requested.net == transport.IB or requested.interface is not None)


def network(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this machine lacks the adapters or the interface selected for NCCL."""
    requested = transport.requested(subject.plan.environment)
    ports, links = _names(INFINIBAND), _names(INTERFACES)
    yield ", ".join((*ports, *links))
    if requested.net == transport.IB and not ports:
        what = f"{transport.NET}={requested.net} is set, but this machine has no InfiniBand or RoCE adapter"
        yield broken("NCC-02", what, "cluster.environment", fix=f"remove {transport.NET}")
    if requested.interface is not None and not transport.selected(requested.interface, links):
        what = f"{transport.INTERFACE}={requested.interface} matches no network interface of this machine"
        yield broken(
            "NCC-01", what, "cluster.environment", fix=f"set {transport.INTERFACE} to one of {', '.join(links)}"
        )


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


CHECKS = (
    Check("container", ("PYX-04", "PYX-12", "HST-08", "CFG-06"), containers.checks),
    Check("container engine", ("HST-08",), engine, containers.is_ours),
    Check("Python packages of the ranks", ("RUN-08",), packages, lambda plan: not containers.is_ours(plan)),
    NEMO_CHECK,
    PROGRAM_CHECK,
    Check("GPUs of this machine", ("HW-03",), gpus, needs_gpus),
    Check("GPUs in CUDA_VISIBLE_DEVICES", ("HW-03",), named_gpus, names_gpus),
    Check("network selected for NCCL", ("NCC-01", "NCC-02"), network, selects_network),
    Check("port", ("NCC-05",), port, has_fixed_port),
)


HERE = "127.0.0.1"


class LocalBackend:
    """Ranks are children of the launching process; it drives the commands, and the ranks end with it."""

    tiers: tuple[Tier, ...] = ("laptop",)
    files_tier: Tier = "laptop"

    def is_available(self) -> bool:
        return True

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return Subject(plan, "")

    def render(self, plan: Plan) -> str:
        raise ConfigError(
            "this cluster has no job script, because `runstop launch` starts the ranks directly, without a queue",
            where=f"cluster={plan.config.cluster.name}",
            fix="set a cluster with a queue, such as cluster=dgx1, or run `runstop plan --json` to print the plan",
        )

    def differences(self, rendered: str, plan_json: str) -> Iterator[str]:
        yield "local runs have no script"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        gpus = {VISIBLE: ",".join(visible_gpus(plan) or [])} if names_gpus(plan) else {}
        return plan.environment | gpus | python_paths()

    @contextlib.contextmanager
    def nodes(self, plan: Plan, folder: Path) -> Iterator[Nodes]:
        """Yield the node that runs a plan's commands: this machine, or a container on it."""
        if not containers.is_ours(plan):
            yield Nodes(plan, folder, HERE, own=self.rank_environment(plan))
            return
        name = socket.gethostname()
        line = containers.line(plan, folder, remote.member_command(folder, 0, python="python"), name=name)
        with remote.opened(plan, folder, HERE, {name: ["sh", "-c", line]}) as nodes:
            yield nodes

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return the states of runs; the id of a local run is its folder."""
        return {folder: _state(folder) for folder in ids}

    def is_of(self, job: str, folder: Path) -> bool:
        return Path(job) == folder

    def cancel(self, job: str) -> None:
        run_lock.stop_driver(Path(job))


def _state(folder: str) -> Job:
    if run_lock.driver(Path(folder)) is not None:
        return Job(id=folder, state=JobState.running, native_state="running")
    return Job(id=folder, state=JobState.failed, native_state="ended")


def master_port(plan: Plan) -> int:
    """Return the port of rank 0 for the next command: the cluster's, or a free one."""
    return plan.config.cluster.master_port or free_port()


def free_port() -> int:
    """Return a free port from PORTS, which other programs do not use for outgoing connections."""
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise SubmitError(
        f"no port from {PORTS.start} to {PORTS.stop - 1} is free",
        where="127.0.0.1",
        fix="set cluster.master_port to a free port",
    )
