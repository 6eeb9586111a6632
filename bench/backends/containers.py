"""Ranks in an image where there is no Slurm: the line of shell that runs a command in it by docker or podman.

The process of a node runs in the container, and its ranks as its children: the host needs the engine only. Data, model
and results are mounted at the paths they have outside, as for Pyxis; what is only read is mounted read-only.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.contract import data_files
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.run_files import NODE_VARIABLE
from bench.contract.schema import DataSource, Device, Runtime
from bench.rules.check import Finding, Subject, broken

READ_ONLY = ":ro"


def of_files(plan: Plan) -> Iterator[str]:
    """Yield PATH:PATH for the folders that the run fills, and PATH:PATH:ro for what it only reads."""
    paths, data, inputs = plan.config.cluster.paths, plan.config.data, plan.inputs
    made = {paths.data} if inputs.rows_are_made else set()
    is_grammar = data is not None and data.source is DataSource.grammar
    made |= {paths.data, paths.model} if inputs.checkpoint_is_made or is_grammar else set()
    needs_model = inputs.checkpoint or (data is not None and data.needs_model_folder)
    needed = [paths.data if inputs.rows else None, paths.model if needs_model else None]
    needed += data_files.outside(data) if data is not None else []
    for path in dict.fromkeys(filter(None, needed)):
        yield f"{path}:{path}" if path in made else f"{path}:{path}{READ_ONLY}"


OURS = (Runtime.docker, Runtime.podman)
FLAGS = ("ro", "rw")
"""What may stand behind a mount; Pyxis takes more."""
_GPUS = {Runtime.docker: ["--gpus", "all"], Runtime.podman: ["--device", "nvidia.com/gpu=all"]}
"""Podman finds GPUs by the host's CDI specification (nvidia-ctk cdi generate), docker by NVIDIA's runtime hook."""
_ALWAYS = ["--rm", "--interactive", "--network=host", "--ipc=host", "--security-opt=label=disable"]
"""No SELinux label: it would hide the mounts. Source: NVIDIA's container toolkit, and podman-run(1)."""
_LIMITS = ["--ulimit=memlock=-1", "--ulimit=stack=67108864"]
"""Source: NVIDIA's PyTorch images say so when they start. Rootless podman cannot raise them, and keeps the user's."""
_AS_USER = {
    Runtime.docker: '--user="$(id -u):$(id -g)" --env=HOME=/tmp',
    Runtime.podman: '$([ "$(id -u)" = 0 ] || echo --userns=keep-id)',
}
"""Files in the run folder belong to who started the run, as outside."""
_INFINIBAND = "$([ ! -e /dev/infiniband ] || echo --device=/dev/infiniband)"


def is_ours(plan: Plan) -> bool:
    """Return whether the ranks run in a container that we start."""
    return plan.config.container.runtime in OURS


def line(plan: Plan, folder: Path, command: Sequence[str], *, name: str) -> str:
    """Return the line of shell that runs a command in the plan's image on the host that is called `name`."""
    container = plan.config.container
    engine = container.runtime
    return " ".join(
        [
            f"exec {engine.name} run",
            shlex.join([*_ALWAYS, *(_LIMITS if engine is Runtime.docker else [])]),
            _AS_USER[engine],
            _INFINIBAND,
            shlex.join(_GPUS[engine] if plan.config.cluster.device is Device.cuda else []),
            shlex.join(f"--mount={text}" for text in _mounts(plan, folder)),
            shlex.join([f"--workdir={folder}", "--env=PYTHONSAFEPATH=1", f"--env={NODE_VARIABLE}={name}"]),
            shlex.join([*(container.arguments or []), "--entrypoint=", expanded(container.image) or "", *command]),
        ]
    )


def _mounts(plan: Plan, folder: Path) -> Iterable[str]:
    """Yield the values of --mount, which never creates a folder that is missing on the host."""
    for mount in (*of_files(plan), f"{folder}:{folder}", *plan.config.container.mounts):
        source, target, flag = [*(expanded(mount) or mount).split(":"), "", ""][:3]
        is_read_only = flag == "ro"
        yield f"type=bind,src={source},dst={target or source}{',readonly' if is_read_only else ''}"


def checks(subject: Subject) -> Iterator[Finding]:
    """Yield what is wrong with the container of the plan, as far as it can be told without its host."""
    c = subject.plan.config.container
    if c.runtime is Runtime.none:
        return
    if c.runtime not in OURS:
        what = f"backend {subject.plan.config.cluster.backend.name} starts no container with {c.runtime.name}"
        yield broken("PYX-04", what, f"container={c.name}", fix="choose container=docker, podman or none")
    elif not expanded(c.image):
        yield broken("HST-08", "no image is named", "container.image", fix="set container.image, or export CONT=…")
    for mount in c.mounts if c.runtime in OURS else []:
        where, full = f"container.mounts: {mount}", expanded(mount)
        if full is None:
            yield broken("CFG-06", "a variable in it is not set", where, fix="export it, or write the path itself")
        elif why := _misformed(full):
            yield broken("PYX-12", why, where, fix="write SRC[:DST[:ro]] with absolute paths")


def _misformed(mount: str) -> str:
    """Return what is wrong with a mount, or nothing."""
    source, target, flag, *more = [*mount.split(":"), "", "", ""][:4] + mount.split(":")[4:]
    if "," in mount or '"' in mount:
        return "a path with a comma or a quotation mark cannot be mounted"
    if more and any(more) or not source.startswith("/") or not (target or source).startswith("/"):
        return f"{mount!r} is not SRC:DST:ro"
    return "" if flag in ("", *FLAGS) else f"{flag!r} is none of {', '.join(FLAGS)}"
