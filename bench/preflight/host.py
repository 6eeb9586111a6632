"""Checks that only read this machine's files and variables: paths, data, checkpoint, disk space, shared folders."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from bench.backends import containers
from bench.contract import checkpoint as checkpoints
from bench.contract.plan import Plan
from bench.contract.plan_kinds import training_plan
from bench.contract.plan_paths import expanded, named_paths
from bench.contract.schema import BackendName, DataSource, Runtime
from bench.contract.training import StartsFrom
from bench.preflight import data
from bench.rules.check import CannotTellError, Finding, Subject, broken
from bench.texts import control_character, quoted

MIN_FREE_MIB = 200
"""Disk space for logs, adapters and figures of a small run."""
MACHINE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that every machine has locally."""
LOCAL_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs", "overlay", "squashfs")
"""File systems that other machines cannot mount; other disks of a login node may be exported."""


_MEANING = {
    "DATADIR": "FOLDER, where data sets are",
    "MODEL": "FOLDER, where the weights of the model are",
    "LOGDIR": "FOLDER, where runs are written",
    "CONT": "IMAGE, the container image of the ranks",
}
"""By environment variable of conf/cluster: what to write after export."""


def paths(subject: Subject) -> Iterator[Finding]:
    """Yield paths that are not set, not absolute, or contain invalid characters."""
    config = subject.plan.config
    for name, text in named_paths(config).items():
        full = expanded(text)
        if invalid := _invalid_variable(text or ""):
            yield invalid
        elif full is None:
            unset = re.search(r"\$(\w+)", os.path.expandvars(text or ""))
            variable = unset[1] if unset else name
            fix = f"export {variable}={_MEANING.get(variable, '…')}"
            where = f"container={config.container.name}" if name == "CONT" else f"cluster={config.cluster.name}"
            yield broken("CFG-06", f"{variable} is not set", where, fix=fix)
        elif not full.startswith("/") and name != "CONT":
            yield broken(
                "CFG-06",
                f"{name} must be an absolute path, because the job starts in another folder",
                full,
                fix=f"set {name} to an absolute path",
            )
        elif character := _invalid_character(full):
            yield broken(
                "CFG-06",
                f"{name} contains the character {character!r}, which is not allowed",
                quoted(full),
                fix=f"set {name} to a path without this character; this can be a symbolic link to the current path",
            )


def _invalid_variable(text: str) -> Finding | None:
    """Return a finding for a variable in a path whose value has an invalid character, which the job would refuse."""
    for variable in re.findall(r"\$(\w+)", text):
        value = os.environ.get(variable, "")
        if character := _invalid_character(value):
            return broken(
                "CFG-06",
                f"{variable} contains the character {character!r}, which is not allowed",
                f"{variable}={quoted(value)}",
                fix=f"set {variable} to a path without this character; this can be a symbolic link to the current path",
            )
    return None


def _invalid_character(value: str) -> str:
    """Return the first character that is not allowed in paths and images (`check_site_variables` in job.sh), or ""."""
    return next((letter for letter in value if letter in '"\\$`' or control_character(letter)), "")


def unused_container(subject: Subject) -> Iterator[Finding]:
    """Yield a warning if an image or mounts are set, but no container runtime."""
    c = subject.plan.config.container
    if c.runtime is Runtime.none and (c.mounts or c.image):
        key = "container.mounts" if c.mounts else "container.image"
        is_slurm = subject.plan.config.cluster.backend is BackendName.slurm
        runtimes = "pyxis" if is_slurm else "docker, podman or apptainer"
        yield broken(
            "PYX-04",
            f"{key} is set, but has no effect, because no container runtime is set",
            "container",
            fix=f"set container={runtimes}, or remove {key}",
            severity="warning",
        )


def unmounted_program(subject: Subject) -> Iterator[Finding]:
    """Yield a warning for each file of the user's program that no mount puts into the container.

    `bench.planning.compose` makes words of argv that are files here absolute. The image may have such a file as well.
    """
    config = subject.plan.config
    assert config.program is not None
    mounts = [*containers.of_files(subject.plan), *config.container.mounts]
    targets = [(expanded(mount) or mount).split(":") for mount in mounts]
    folders = [parts[1] if parts[1:] and parts[1] else parts[0] for parts in targets]
    folders += [path for path in (expanded(config.cluster.paths.logs), config.launch.folder) if path]
    for argument in config.program.argv:
        path = Path(argument)
        if path.is_absolute() and path.is_file() and not any(path.is_relative_to(folder) for folder in folders):
            yield broken(
                "RUN-08",
                f"no mount puts the file {argument} into the container; without this file the program cannot start",
                "engine.command.argv",
                fix=f"add {path.parent}:{path.parent}:ro to container.mounts",
                severity="warning",
            )


def _local_path(text: str | None, name: str) -> Path:
    """Return a path of the plan with this machine's variables expanded.

    Raises:
        CannotTellError: a variable in it is not set.
    """
    if (full := expanded(text)) is None:
        raise CannotTellError(f"{name} is not set")
    return Path(full)


def takes_prepared_rows(plan: Plan) -> bool:
    """Return whether the site must provide prepared rows."""
    return plan.config.data is not None and plan.config.data.source is DataSource.prepared


def rows(subject: Subject) -> Iterator[Finding | str]:
    """Yield problems with the prepared rows that the site must provide."""
    folder = _local_path(subject.plan.inputs.rows, "DATADIR")
    yield from data.prepared_rows(folder, subject.plan.config.training_data)
    yield from data.manifest(folder)
    yield str(folder)


def takes_megatron_files(plan: Plan) -> bool:
    """Return whether the ranks read rows from files of Megatron-LM."""
    return plan.config.data is not None and plan.config.data.source is DataSource.megatron


def megatron(subject: Subject) -> Iterator[Finding | str]:
    """Yield problems with the files of Megatron-LM that the site must provide."""
    planned = subject.plan.config.training_data
    folder = _local_path(subject.plan.inputs.rows, "DATADIR")
    yield from data.megatron_files_in(folder, planned)
    yield f"{folder / str(planned.files)}.bin"


def text(subject: Subject) -> Iterator[Finding | str]:
    """Yield problems with the text files from which rows are prepared."""
    root = _local_path(subject.plan.config.cluster.paths.data, "DATADIR")
    yield from data.text_files(subject.plan, root=root, rows=_local_path(subject.plan.inputs.rows, "DATADIR"))


def takes_checkpoint(plan: Plan) -> bool:
    """Return whether the site must provide the checkpoint that is fine-tuned or that generates."""
    task = plan.config.task
    if task.generation:
        return plan.inputs.checkpoint is not None
    return task.training is not None and task.training.starts_from is StartsFrom.checkpoint


def checkpoint(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the checkpoint that the site must provide is missing or incomplete."""
    folder = _local_path(subject.plan.inputs.checkpoint, "MODEL")
    yield from data.checkpoint(folder, subject.plan.config, subject.words)
    yield from data.manifest(checkpoints.located(folder, subject.plan.config))
    yield str(folder)


def prepares_here(plan: Plan) -> bool:
    """Return whether the run prepares rows or trains a base, and keeps them for later runs."""
    trained = training_plan(plan)
    if trained is None:
        return False
    own = trained.data_dir is not None and trained.data.source is DataSource.grammar
    return own or trained.base is not None or data.has_sample(plan)


def earlier(subject: Subject) -> Iterator[Finding | str]:
    """Yield changes of the rows and of the base that earlier runs prepared: files that differ from their manifest."""
    trained = training_plan(subject.plan)
    assert trained is not None
    of_rows = [plan for plan in (trained, trained.base) if plan is not None and plan.data.source.needs_preparation]
    folders = [*(plan.data_dir for plan in of_rows), trained.base_dir if trained.base is not None else None]
    for path in dict.fromkeys(expanded(folder) for folder in folders):
        if path is None or not Path(path).is_dir():
            continue
        fix = f"delete this folder, so that the next run prepares it again: rm -r {shlex.quote(path)}"
        yield from data.manifest(Path(path), fix=fix)
        yield path


def outputs(subject: Subject) -> Iterator[Finding | str]:
    """Yield problems with writing the results: an existing log, no permission, too little disk space."""
    launch = subject.plan.config.launch
    folder = Path(launch.folder) if launch.folder else None
    logs = folder or _local_path(subject.plan.config.cluster.paths.logs, "LOGDIR")
    for trial in subject.plan.trials:
        if folder and (folder / trial.log).exists():
            yield broken(
                "CFG-05",
                f"the log {trial.log} already exists, and runstop never changes an existing log",
                str(folder / trial.log),
                fix="remove launch.folder to get a new folder, or set launch.folder to another folder",
            )
            return
    existing = next(p for p in (logs, *logs.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield broken(
            "CFG-08",
            "the results need a folder, but this path is a file",
            str(existing),
            fix="set launch.folder or LOGDIR to a folder",
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield broken("CFG-08", "this user has no permission to write results into this folder", str(existing))
    elif (free := shutil.disk_usage(existing).free // 2**20) < (need := MIN_FREE_MIB + _checkpoints_mib(subject.plan)):
        named = "LOGDIR" if subject.plan.config.launch.folder is None else "launch.folder"
        fix = f"free disk space, or set {named} to a larger disk"
        fix += ", or set task.training.checkpoint_every_steps=null" if need > MIN_FREE_MIB else ""
        yield broken(
            "CFG-08",
            f"only {free:,} MiB of disk space are free, but the run needs {need:,} MiB",
            str(existing),
            fix=fix,
        )
    else:
        yield f"{free:,} MiB free in {existing}"


def _checkpoints_mib(plan: Plan) -> int:
    """Return the disk space for the checkpoints of all trials; finished trials keep theirs."""
    trained = training_plan(plan)
    if trained is None or trained.memory is None or trained.checkpoint_every_steps is None:
        return 0
    size = checkpoints.state_bytes(trained.memory.trainable_parameters, trained.recipe.moments)
    return (checkpoints.NUM_KEPT * len(plan.trials) + 1) * size // 2**20


def leaves_this_machine(plan: Plan) -> bool:
    """Return whether the ranks run on other machines."""
    return plan.config.cluster.backend.is_elsewhere


def shared(subject: Subject) -> Iterator[Finding | str]:
    """Yield paths in folders that compute nodes do not share with this machine."""
    mounts, unshared = Path("/proc/self/mountinfo").read_text(), dict[str, list[str]]()
    for name, text in named_paths(subject.plan.config).items():
        full = expanded(text)
        if full is None or not full.startswith("/"):
            continue
        real = os.path.realpath(full)
        kind = file_system(real, mounts)
        yield f"{name} {kind}"
        local = kind in LOCAL_FILE_SYSTEMS
        place = next((top for top in MACHINE_FOLDERS if within(real, top)), f"a {kind}" if local else None)
        if place:
            unshared.setdefault(place, []).append(name)
    for place, names in unshared.items():
        yield broken(
            "SLU-06",
            f"other nodes cannot read {', '.join(names)}, because {place} is local to this machine",
            " ".join(names),
            fix=f"set {', '.join(names)} to a folder on a shared file system that every node mounts; if the run uses "
            "only this machine, ignore this warning",
            severity="warning",
        )


def file_system(path: str, mountinfo: str) -> str:
    """Return the type of a path's file system. Source: proc(5), /proc/PID/mountinfo."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        top = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
        if within(path, top) and len(top) >= len(best):
            best, kind = top, rest.split(" ")[0]
    return kind


def within(path: str, top: str) -> bool:
    """Return whether a path is a folder or is below it."""
    return PurePosixPath(path).is_relative_to(top)
