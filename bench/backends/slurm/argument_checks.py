"""Check the user's sbatch arguments and container settings against the script that runstop renders."""

import re
import shlex
from collections.abc import Iterator

from bench.backends import containers
from bench.backends.slurm import client
from bench.contract.cluster import GpuRequest
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded, named_paths
from bench.contract.schema import Runtime
from bench.rules.check import Finding, Severity, Subject, broken

WHERE = "cluster.slurm.arguments"
LONG_NAMES = {
    "N": "nodes",
    "n": "ntasks",
    "a": "array",
    "c": "cpus-per-task",
    "G": "gpus",
    "o": "output",
    "e": "error",
    "i": "input",
    "D": "chdir",
    "W": "wait",
    "t": "time",
    "x": "exclude",
    "h": "help",
    "V": "version",
}
_SIZES = "remove the option, and set cluster.num_nodes and cluster.ranks_per_node, which the script uses"
_GPUS = "remove the option, and set cluster.slurm.gpu_request and cluster.slurm.gpu_type"
_OUTPUT = "remove the option: runstop writes the job's output to the run folder"
_NO_JOB = "remove the option: with this option sbatch does not submit the job of this run"
OURS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-socket", "ntasks-per-core"), _SIZES),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "ntasks-per-gpu"), _GPUS),
    **dict.fromkeys(("output", "error", "input"), _OUTPUT),
    **dict.fromkeys(("wrap", "test-only", "help", "usage", "version"), _NO_JOB),
    "array": "remove the option, and set launch.array=true for one array task per trial",
    "cpus-per-task": "remove the option, and set cluster.slurm.cpus_per_rank, which is also used by srun",
    "wait": "remove the option, and set launch.wait=true",
    "chdir": "remove the option: the job starts in its run folder",
}
"""Options of sbatch that the script or bench.backends.slurm.jobs already sets, and what to do instead."""
NO_VALUE = frozenset(
    (
        *("contiguous", "hold", "requeue", "no-requeue", "overcommit", "oversubscribe", "spread-job", "use-min-nodes"),
        *("exclusive", "nice", "verbose", "quiet", "reboot", "ignore-pbs", "H", "s", "O", "v", "Q", "k", "no-kill"),
    )
)
"""Options without a value, or with a value only after an equals sign."""
FLAGS_WITHOUT_VALUE = frozenset(
    (
        *("container-mount-home", "container-remap-root", "container-entrypoint", "container-entrypoint-log"),
        *("container-writable", "container-readonly", "no-container-mount-home", "no-container-remap-root"),
        "no-container-entrypoint",
    )
)
"""Flags of Pyxis. Source: its args.c, version 0.24."""
_SHELL_SYNTAX = re.compile(r"[;|&<>$`()*?\n]")


def contradictions(subject: Subject) -> Iterator[Finding]:
    """Yield the sbatch arguments that contradict the script."""
    slurm_config = subject.plan.config.cluster.slurm
    previous = ""
    for argument in slurm_config.arguments if slurm_config else []:
        name, has_value, value = option(argument)
        if not name:
            if not previous or previous in NO_VALUE:
                what, fix = (
                    f"{argument} does not begin with -, so sbatch would read this text as the file name of the script",
                    "write an option and its value as one list entry: --name=value",
                )
                yield broken("CFG-09", what, WHERE, fix=fix)
        elif re.search(r"\s", name):
            fix = f"write {'='.join(argument.split(maxsplit=1))}, or write the option and the value as two list entries"
            yield broken(
                "CFG-09",
                f"{argument!r} contains a space, so sbatch would read the whole text as the name of an option",
                WHERE,
                fix=fix,
            )
        elif "container" in name and name != "container":
            yield from _container_flag(name, has_value)
        elif reserved := _ours(argument, name):
            yield broken(
                "CFG-09", f"--{reserved} conflicts with an option that the script sets", WHERE, fix=OURS[reserved]
            )
        elif name == "export" and value.split(",")[0] != "ALL":
            what = f"with --export={value} the job does not get this shell's variables (PATH, DATADIR, LOGDIR, …)"
            yield broken("CFG-09", what, WHERE, fix="remove the option, or write --export=ALL,NAME=value")
        elif name == "open-mode" and value.startswith("t"):
            what = "--open-mode=truncate deletes the output of a job when the job is requeued"
            yield broken("CFG-09", what, WHERE, fix="remove the option: the script always appends to its output")
        previous = "" if has_value or not name else name


def _ours(argument: str, name: str) -> str:
    """Return the option of OURS that an argument sets, or an empty text; sbatch accepts abbreviated long names."""
    if name in OURS or not argument.startswith("--"):
        return name if name in OURS else ""
    return next((key for key in OURS if key.startswith(name)), "")


def run_folder(subject: Subject) -> Iterator[Finding]:
    """Yield whether the run folder's name contains a character that Slurm or the job would misread."""
    folder = subject.plan.config.launch.folder or ""
    if bad := re.search(r"[\"\\]", folder):
        fix = f"remove '{bad[0]}' from launch.folder, or remove launch.folder to get a new folder"
        yield broken(
            "CFG-06", f"the path of the run folder contains '{bad[0]}', which is not allowed", "launch.folder", fix=fix
        )


def option(argument: str) -> tuple[str, bool, str]:
    """Return an option's long name (empty if it is not an option), whether the argument has a value, and the value."""
    if argument.startswith("--") and len(argument) > 2:
        name, has_value, value = argument[2:].partition("=")
        return name, bool(has_value), value
    if argument.startswith("-") and len(argument) > 1:
        return LONG_NAMES.get(argument[1], argument[1]), len(argument) > 2, argument[2:].removeprefix("=")
    return "", False, argument


def walltime(subject: Subject) -> Iterator[Finding]:
    """Yield whether the requested time exceeds the cluster's limit."""
    slurm_config = subject.plan.config.cluster.slurm
    if slurm_config is None or slurm_config.max_walltime_min is None:
        return
    requested = time_limit_min(subject.plan)
    if requested is not None and requested > slurm_config.max_walltime_min:
        what = (
            f"the job requests {requested:g} min, but this cluster allows at most {slurm_config.max_walltime_min} min"
        )
        yield broken(
            "SLU-02",
            what,
            "walltime, trials, cluster.slurm.arguments",
            fix="lower walltime, trials or the --time option",
        )


def time_limit_min(plan: Plan) -> float | None:
    """Return the job's time limit: the one in the user's sbatch arguments, else the plan's."""
    words = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    limit: float | None = plan.walltime_min
    for number, argument in enumerate(words):
        name, has_value, value = option(argument)
        if name == "time":
            limit = client.minutes(value if has_value else "".join(words[number + 1 : number + 2]))
    return limit


def gpu_type(subject: Subject) -> Iterator[Finding]:
    """Yield whether a typed GPU request has no type."""
    slurm_config = subject.plan.config.cluster.slurm
    if slurm_config and slurm_config.gpu_request is GpuRequest.gres_typed and not slurm_config.gpu_type:
        fix = "set cluster.slurm.gpu_type to the GPU type that `scontrol show node | grep Gres` shows"
        yield broken(
            "SLU-01",
            "gpu_request=gres_typed needs a GPU type, but gpu_type is not set",
            "cluster.slurm.gpu_type",
            fix=fix,
        )


def drop_caches(subject: Subject) -> Iterator[Finding]:
    """Yield whether drop_caches is more than one program with arguments; it does not run in a shell."""
    command = subject.plan.config.cluster.drop_caches
    if command is None:
        return
    try:
        is_plain = bool(shlex.split(command)) and not _SHELL_SYNTAX.search(command)
    except ValueError:  # a quotation mark without its other half
        is_plain = False
    if not is_plain:
        what, fix = (
            f"drop_caches is {command!r}, but must be one program with arguments, because no shell runs this command",
            "put the command into a script on the nodes, and set cluster.drop_caches to the path of this script; "
            "or set cluster.drop_caches=null",
        )
        yield broken(
            "CFG-09",
            what,
            "cluster.drop_caches",
            fix=fix,
        )


def container(subject: Subject) -> Iterator[Finding]:
    """Yield whether the image is missing or its name is invalid."""
    from bench.images import reference

    c = subject.plan.config.container
    if c.runtime is Runtime.none:
        return
    if c.runtime not in (Runtime.pyxis, Runtime.apptainer):
        what = f"the backend slurm does not support the container runtime {c.runtime.name}"
        yield broken("PYX-04", what, f"container={c.name}", fix="set container to pyxis, apptainer or none")
    elif not c.image:
        fix = "set container.image, or run: export CONT=IMAGE"
        yield broken("PYX-04", "the container image is not set", "container.image", fix=fix)
    elif c.runtime is Runtime.apptainer:
        if (full := expanded(c.image)) and (why := containers.no_sif(full)):
            yield broken("HST-08", why, "container.image", fix=containers.SIF_FIX)
    elif (full := expanded(c.image)) and (spelling := reference.misspelled(full)):
        image = shlex.quote(spelling.corrected)
        fix = f"export CONT={image}" if c.image == "$CONT" else f"set container.image to {image} and quote this value"
        yield broken("PYX-06", spelling.what, "container.image", fix=fix)


def mounts(subject: Subject) -> Iterator[Finding]:
    """Yield the mounts that Pyxis would refuse or misread. Source: its args.c, version 0.24."""
    config = subject.plan.config
    if config.container.runtime is Runtime.apptainer:
        yield from containers.misformed_mounts(subject.plan)
    if config.container.runtime is not Runtime.pyxis:
        return
    for mount in config.container.mounts:
        where = f"container.mounts: {mount}"
        if mount.startswith("-"):
            yield _flag_as_mount(mount, where)
        elif (full := expanded(mount)) is None:
            yield broken(
                "CFG-06",
                "the mount contains an environment variable that is not set",
                where,
                fix="export this variable, or write the mount without a variable",
            )
        elif why := misformed(full):
            yield broken("PYX-12", why, where)
    for name, text in named_paths(config).items():
        full = expanded(text)
        if full and name != "CONT" and (bad := re.search(r"[,:\s]", full)):
            severity: Severity = "warning" if bad[0].isspace() else "error"
            pyxis = "Pyxis before version 0.24" if severity == "warning" else "Pyxis"
            what = f"{name} contains {bad[0]!r}, but {pyxis} cannot mount a path with this character"
            fix = f"set {name} to a path without {bad[0]!r}; this may be a symbolic link to the folder"
            yield broken("PYX-12", what, full, fix=fix, severity=severity)


def misformed(mount: str) -> str:
    """Return what is wrong with SRC[:DST[:FLAG+FLAG]], or an empty text."""
    if "," in mount:
        return "the mount contains a comma, which starts another mount: list mounts separately, and join flags with +"
    parts = mount.split(":")
    if len(parts) > 3 or "" in parts:
        return f"the mount has {'too many colons' if len(parts) > 3 else 'an empty part'}: write SRC[:DST[:FLAG+FLAG]]"
    if not parts[0].startswith(("/", "./", "../")) and parts[0] not in (".", "tmpfs", "umount"):
        return f"the source {parts[0]} of the mount does not begin with / or ./"
    if parts[1:] and not parts[1].startswith(("/", "./", "../")):
        return f"the target {parts[1]} of the mount does not begin with / or ./"
    return ""


def _container_flag(name: str, has_value: bool) -> Iterator[Finding]:
    if has_value and name in FLAGS_WITHOUT_VALUE:
        yield broken("PYX-05", f"--{name} has a value, but this option takes no value", WHERE)
    what = f"with --{name} the batch script itself would run in the container, which has no srun"
    yield broken(
        "PYX-10",
        what,
        WHERE,
        fix="remove the option; to run the ranks in a container, set container.image and container.mounts",
    )


def _flag_as_mount(mount: str, where: str) -> Finding:
    name = option(mount)[0].split(" ")[0]
    if name in FLAGS_WITHOUT_VALUE:
        return broken(
            "PYX-05",
            f"container.mounts contains --{name}, which is an option and not a mount",
            where,
            fix=f"remove --{name} from container.mounts",
        )
    return broken("PYX-12", f"{mount} is not a valid mount", where)
