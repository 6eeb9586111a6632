"""What this machine shows without asking anybody: the paths, room for results, the port."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from bench.contract import checkpoint as checkpoints
from bench.contract.plan import Plan
from bench.contract.plan_kinds import training_plan
from bench.contract.plan_paths import expanded, named_paths
from bench.contract.schema import DataSource, Runtime
from bench.contract.training import StartsFrom
from bench.preflight import data
from bench.rules.check import CannotTellError, Finding, Subject, broken
from bench.texts import quoted, steering

CONFIG_JSON = "config.json"
"""Stands in a Hugging Face folder."""
MIN_FREE_MIB = 200
"""For logs, adapters and figures of a small run."""
FLEETING = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Each machine has its own of these, whatever the site."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "overlay", "squashfs")
"""File systems that no other machine sees. A disk of the login node may be exported to the others; these are not."""


def paths(subject: Subject) -> Iterator[Finding]:
    """Yield the paths that nobody has set, or that do not begin at the root."""
    config = subject.plan.config
    for name, text in named_paths(config).items():
        full = expanded(text)
        if set_wrongly := _odd_variable(text or ""):
            yield set_wrongly
        elif full is None:
            unset = re.search(r"\$(\w+)", os.path.expandvars(text or ""))
            variable = unset[1] if unset else name
            fix = f"export {variable}=…"
            yield broken("CFG-06", f"{variable} is not set", f"cluster={config.cluster.name}", fix=fix)
        elif not full.startswith("/") and name != "CONT":
            yield broken("CFG-06", f"{name} is not a full path", full, fix="begin it with /: the job starts elsewhere")
        elif bad := _odd(full):
            yield broken("CFG-06", f"{name} holds {bad!r}", quoted(full), fix="move or link it to a path without")


def _odd_variable(text: str) -> Finding | None:
    """Return which variable in a path has a value that the job refuses; no shell ever reads it as a command."""
    for variable in re.findall(r"\$(\w+)", text):
        value = os.environ.get(variable, "")
        if bad := _odd(value):
            fix = f"export {variable} without it, or link what it names to a path without"
            return broken("CFG-06", f"{variable} holds {bad!r}", f"{variable}={quoted(value)}", fix=fix)
    return None


def _odd(value: str) -> str:
    """Return the first character that no path or image may hold (`check_site` in job.sh), or nothing."""
    return next((letter for letter in value if letter in '"\\$`' or steering(letter)), "")


def unused_container(subject: Subject) -> Iterator[Finding]:
    """Yield whether an image or mounts are named, and no container is started."""
    c = subject.plan.config.container
    if c.runtime is Runtime.none and (c.mounts or c.image):
        what = f"{'mounts' if c.mounts else 'an image'} without a container: the ranks run on the node itself"
        yield broken("PYX-04", what, "container", fix="choose container=pyxis", severity="warning")


def _set(text: str | None, name: str) -> Path:
    """Return a path of the plan as it is here.

    Raises:
        CannotTellError: a variable in it is not set.
    """
    if (full := expanded(text)) is None:
        raise CannotTellError(f"{name} is not set")
    return Path(full)


def takes_prepared_rows(plan: Plan) -> bool:
    """Return whether the site has to bring the rows."""
    return plan.config.data is not None and plan.config.data.source is DataSource.prepared


def rows(subject: Subject) -> Iterator[Finding | str]:
    """Yield in what the rows that a site should have prepared are missing, or other ones."""
    want, folder = subject.plan.config.training_data, _set(subject.plan.inputs.rows, "DATADIR")
    yield from data.prepared_rows(folder, want)
    yield from data.manifest(folder)
    yield str(folder)


def text(subject: Subject) -> Iterator[Finding | str]:
    """Yield what stands in the way of rows that are made from files."""
    root, rows = _set(subject.plan.config.cluster.paths.data, "DATADIR"), _set(subject.plan.inputs.rows, "DATADIR")
    yield from data.found(subject.plan, root=root, rows=rows)


def takes_checkpoint(plan: Plan) -> bool:
    """Return whether the site has to bring the checkpoint that is fine-tuned, or that generates."""
    task = plan.config.task
    if task.generation:
        return plan.inputs.checkpoint is not None
    return task.training is not None and task.training.starts_from is StartsFrom.checkpoint


def checkpoint(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the checkpoint that a site should have prepared is missing, or not whole."""
    folder, config = _set(subject.plan.inputs.checkpoint, "MODEL"), subject.plan.config
    if config.task.generation and config.huggingface and (folder / CONFIG_JSON).exists():
        yield str(folder)  # transformers' own: its generator reads it as it is
        return
    yield from data.checkpoint(folder, subject.plan.config)
    yield from data.manifest(checkpoints.located(folder, subject.plan.config))
    yield str(folder)


def outputs(subject: Subject) -> Iterator[Finding | str]:
    """Yield what stands in the way of writing the results."""
    launch = subject.plan.config.launch
    folder = Path(launch.folder) if launch.folder else None
    logs = folder or _set(subject.plan.config.cluster.paths.logs, "LOGDIR")
    for trial in subject.plan.trials:
        if folder and (folder / trial.log).exists():
            what = f"{trial.log} exists, and a second start never adds to it"
            fix = "leave launch.folder out for a new folder, or name another one"
            yield broken("CFG-05", what, str(folder / trial.log), fix=fix)
            return
    there = next(p for p in (logs, *logs.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield broken("CFG-08", "results cannot be written", str(there))
    elif (free := shutil.disk_usage(there).free // 2**20) < (need := MIN_FREE_MIB + _checkpoints_mib(subject.plan)):
        fix = "make room, set LOGDIR to a larger disk"
        fix += ", or set task.training.checkpoint_every_steps=null" if need > MIN_FREE_MIB else ""
        yield broken("CFG-08", f"{free:,} MiB free, and a run needs {need:,}", str(there), fix=fix)
    else:
        yield f"{free:,} MiB free in {there}"


def _checkpoints_mib(plan: Plan) -> int:
    """Return what the checkpoints of a trial take on disk; those of trials that ended are kept as well."""
    trained = training_plan(plan)
    if trained is None or trained.checkpoint_every_steps is None:
        return 0
    size = checkpoints.state_bytes(trained.memory.trainable_parameters, trained.recipe.moments)
    return (checkpoints.KEPT * len(plan.trials) + 1) * size // 2**20


def leaves_this_machine(plan: Plan) -> bool:
    """Return whether the ranks run on other machines than this one."""
    return plan.config.cluster.backend.is_elsewhere


def shared(subject: Subject) -> Iterator[Finding | str]:
    """Yield the paths that lie where compute nodes have something else, or nothing."""
    mounts, fleeting = Path("/proc/self/mountinfo").read_text(), dict[str, list[str]]()
    for name, text in named_paths(subject.plan.config).items():
        full = expanded(text)
        if full is None or not full.startswith("/"):
            continue
        real = os.path.realpath(full)
        kind = file_system(real, mounts)
        yield f"{name} {kind}"
        place = next((top for top in FLEETING if within(real, top)), f"a {kind}" if kind in IN_MEMORY else None)
        if place:
            fleeting.setdefault(place, []).append(name)
    for place, names in fleeting.items():
        what = f"{', '.join(names)} in {place}, which every machine has for itself"
        fix = "choose a file system that every node sees; on a single machine this is fine"
        yield broken("SLU-06", what, " ".join(names), fix=fix, severity="warning")


def file_system(path: str, mountinfo: str) -> str:
    """Return the type of the file system that a path lies on. Source: proc(5), /proc/PID/mountinfo."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        top = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
        if within(path, top) and len(top) >= len(best):
            best, kind = top, rest.split(" ")[0]
    return kind


def within(path: str, top: str) -> bool:
    """Return whether a path lies in a folder, or is it."""
    return PurePosixPath(path).is_relative_to(top)
