"""Containers without Pyxis: the shell command that runs a process in an image with docker, podman or Apptainer.

The process of a node runs in the container, with its ranks as children, so the host needs only the engine. On Slurm,
Apptainer runs each rank in a container of its own. Data, model and results are mounted at the same paths as outside, as
with Pyxis; inputs are mounted read-only.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.contract import data_files
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded, named_paths
from bench.contract.run_files import NODE_VARIABLE
from bench.contract.schema import DataSource, Device, GpuVendor, Runtime
from bench.rules.check import Finding, Subject, broken

READ_ONLY = ":ro"


def of_files(plan: Plan) -> Iterator[str]:
    """Yield PATH:PATH for folders that the run writes, and PATH:PATH:ro for its inputs."""
    paths, data, inputs = plan.config.cluster.paths, plan.config.data, plan.inputs
    writable = {paths.data} if inputs.rows_are_prepared else set()
    is_grammar = data is not None and data.source is DataSource.grammar
    writable |= {paths.data, paths.model} if inputs.checkpoint_is_created or is_grammar else set()
    needs_model = inputs.checkpoint or (data is not None and data.needs_model_folder)
    needed = [paths.data if inputs.rows else None, paths.model if needs_model else None]
    needed += data_files.outside(data) if data is not None else []
    for path in dict.fromkeys(filter(None, needed)):
        yield f"{path}:{path}" if path in writable else f"{path}:{path}{READ_ONLY}"


OURS = (Runtime.docker, Runtime.podman, Runtime.apptainer)
FLAGS = ("ro", "rw")
"""Flags of a mount; Pyxis accepts more."""
_GPUS = {Runtime.docker: ["--gpus", "all"], Runtime.podman: ["--device", "nvidia.com/gpu=all"]}
"""Podman needs the host's CDI specification (nvidia-ctk cdi generate), docker NVIDIA's runtime hook."""
_AMD_GPUS = {
    Runtime.docker: "--device=/dev/kfd --device=/dev/dri --security-opt=seccomp=unconfined "
    "$(stat -c --group-add=%g /dev/kfd /dev/dri/renderD* | sort -u)",
    Runtime.podman: "--device=/dev/kfd --device=/dev/dri --security-opt=seccomp=unconfined --group-add=keep-groups",
}
"""The groups own the devices on the host: the ranks do not run as root.

Source: ROCm, "Running ROCm Docker containers"; podman-run(1), keep-groups.
"""
_ALWAYS = ["--rm", "--interactive", "--network=host", "--ipc=host", "--security-opt=label=disable"]
"""No SELinux label: it would hide the mounts. Source: NVIDIA's container toolkit, and podman-run(1)."""
_LIMITS = ["--ulimit=memlock=-1", "--ulimit=stack=67108864"]
"""Source: NVIDIA's PyTorch images print these when they start. Rootless podman cannot raise limits."""
_AS_USER = {
    Runtime.docker: '--user="$(id -u):$(id -g)" --env=HOME=/tmp',
    Runtime.podman: '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)',
}
"""Files in the run folder belong to the user who started the run."""
_INFINIBAND = "$([ ! -e /dev/infiniband ] || echo --device=/dev/infiniband)"


def is_ours(plan: Plan) -> bool:
    """Return whether runstop starts the containers of the ranks itself: with docker, podman or Apptainer."""
    return plan.config.container.runtime in OURS


def line(plan: Plan, folder: Path, command: Sequence[str], *, name: str) -> str:
    """Return the shell command that runs `command` in the plan's image on the host `name`."""
    container = plan.config.container
    engine = container.runtime
    if engine is Runtime.apptainer:
        return _apptainer_line(plan, folder, command, name=name)
    return " ".join(
        [
            f"exec {engine.name} run",
            shlex.join([*_ALWAYS, *(_LIMITS if engine is Runtime.docker else [])]),
            _AS_USER[engine],
            _INFINIBAND,
            _gpus(plan, engine),
            shlex.join(f"--mount={text}" for text in _mounts(plan, folder)),
            shlex.join([f"--workdir={folder}", "--env=PYTHONSAFEPATH=1", f"--env={NODE_VARIABLE}={name}"]),
            shlex.join([*(container.arguments or []), "--entrypoint=", expanded(container.image) or "", *command]),
        ]
    )


def _apptainer_line(plan: Plan, folder: Path, command: Sequence[str], *, name: str) -> str:
    container = plan.config.container
    mounts = [*of_files(plan), f"{folder}:{folder}", *(expanded(mount) or mount for mount in container.mounts)]
    own = [f"--pwd={folder}", "--env=PYTHONSAFEPATH=1", f"--env={NODE_VARIABLE}={name}"]
    words = [*apptainer_options(plan), *(f"--bind={mount}" for mount in mounts), *own]
    return shlex.join(["exec", *words, *(container.arguments or []), expanded(container.image) or "", *command])


def apptainer_options(plan: Plan) -> list[str]:
    """Return the beginning of every command line of Apptainer: its GPUs, no home folder, and a writable overlay.

    Source: Apptainer 1.3, `apptainer exec --help`; --pwd is also the option of Singularity.
    """
    cluster = plan.config.cluster
    is_amd = cluster.gpu is not None and cluster.gpu.vendor is GpuVendor.amd
    gpus = [] if cluster.device is not Device.cuda else ["--rocm" if is_amd else "--nv"]
    return ["apptainer", "exec", *gpus, "--no-home", "--writable-tmpfs"]


def _gpus(plan: Plan, engine: Runtime) -> str:
    """Return the arguments that give the container the host's GPUs."""
    cluster = plan.config.cluster
    if cluster.device is not Device.cuda:
        return ""
    is_amd = cluster.gpu is not None and cluster.gpu.vendor is GpuVendor.amd
    return _AMD_GPUS[engine] if is_amd else shlex.join(_GPUS[engine])


def _mounts(plan: Plan, folder: Path) -> Iterable[str]:
    """Yield the values of --mount; unlike --volume it does not create missing folders on the host."""
    for mount in (*of_files(plan), f"{folder}:{folder}", *plan.config.container.mounts):
        source, target, flag = [*(expanded(mount) or mount).split(":"), "", ""][:3]
        is_read_only = flag == "ro"
        yield f"type=bind,src={source},dst={target or source}{',readonly' if is_read_only else ''}"


def checks(subject: Subject) -> Iterator[Finding]:
    """Yield what is wrong with the plan's container settings; the host is not queried."""
    c = subject.plan.config.container
    if c.runtime is Runtime.none:
        return
    if c.runtime not in OURS:
        backend = subject.plan.config.cluster.backend.name
        what = f"the backend {backend} does not support the container runtime {c.runtime.name}"
        yield broken("PYX-04", what, f"container={c.name}", fix="set container to docker, podman, apptainer or none")
    elif not c.image:  # CFG-06 reports a variable in it that is not set
        yield broken(
            "HST-08",
            "the container image is not set",
            "container.image",
            fix="set container.image, or run: export CONT=IMAGE",
        )
    elif c.runtime is Runtime.apptainer and (full := expanded(c.image)) and (why := no_sif(full)):
        yield broken("HST-08", why, "container.image", fix=SIF_FIX)
    yield from misformed_mounts(subject.plan)


SIF_FIX = "run once: apptainer pull FILE.sif docker://IMAGE; then export CONT=/path/to/FILE.sif"


def no_sif(image: str) -> str:
    """Return why an image is not one for Apptainer: every rank would download and convert it; empty if it is one."""
    return "" if image.startswith("/") else f"the Apptainer image is {image!r}, but must be the absolute path of a file"


def misformed_mounts(plan: Plan) -> Iterator[Finding]:
    """Yield the mounts that docker, podman and Apptainer do not accept."""
    c = plan.config.container
    if c.runtime is Runtime.apptainer:
        for variable, text in named_paths(plan.config).items():
            if variable != "CONT" and re.search("[,:]", expanded(text) or ""):
                what = f"{variable} contains a comma or a colon, which ends a path in Apptainer's option --bind"
                fix = f"set {variable} to a path without commas and colons"
                yield broken("PYX-12", what, expanded(text) or "", fix=fix)
    for mount in c.mounts if c.runtime in OURS else []:
        where, full = f"container.mounts: {mount}", expanded(mount)
        if full is None:
            yield broken(
                "CFG-06",
                "the mount contains an environment variable that is not set",
                where,
                fix="export this variable, or write the mount without a variable",
            )
        elif why := _misformed(full):
            yield broken("PYX-12", why, where, fix="write the mount as SRC[:DST[:ro]] with absolute paths")


def _misformed(mount: str) -> str:
    """Return what is wrong with a mount, or an empty text."""
    source, target, flag, *more = [*mount.split(":"), "", "", ""][:4] + mount.split(":")[4:]
    if "," in mount or '"' in mount:
        return f"the mount {mount!r} contains a comma or a quotation mark, which the container runtime cannot read"
    if more and any(more) or not source.startswith("/") or not (target or source).startswith("/"):
        return f"the mount {mount!r} does not have the form SRC[:DST[:ro]] with absolute paths"
    return (
        ""
        if flag in ("", *FLAGS)
        else f"the mount has the flag {flag!r}, but the only possible flags are {', '.join(FLAGS)}"
    )
