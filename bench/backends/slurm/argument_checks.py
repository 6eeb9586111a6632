"""Whether what the user adds to sbatch and to the container fits the script that we write."""

import re
import shlex
from collections.abc import Iterator

from bench.backends.slurm import client
from bench.contract.cluster import GpuRequest
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded, named_paths
from bench.contract.schema import Runtime
from bench.rules.check import Finding, Severity, Subject, broken

WHERE = "cluster.slurm.arguments"
SHORT = {
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
    "h": "help",
    "V": "version",
}
_SIZES = "the script's header says how many: set cluster.num_nodes and cluster.ranks_per_node"
_GPUS = "set cluster.slurm.gpu_request and cluster.slurm.gpu_type"
_OUTPUT = "leave it out: the job's output belongs into its run folder"
_NO_JOB = "leave it out: with it no job is made, or another one"
OURS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "ntasks-per-socket", "ntasks-per-core"), _SIZES),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "ntasks-per-gpu"), _GPUS),
    **dict.fromkeys(("output", "error", "input"), _OUTPUT),
    **dict.fromkeys(("wrap", "test-only", "help", "usage", "version"), _NO_JOB),
    "array": "set launch.array=true for one element per trial",
    "cpus-per-task": "set cluster.slurm.cpus_per_rank, which srun is told too",
    "wait": "set launch.wait=true",
    "chdir": "leave it out: the job starts in its run folder",
}
"""Options of sbatch that the script or bench.backends.slurm.jobs has set, and what to do instead."""
NO_VALUE = frozenset(
    (
        *("contiguous", "hold", "requeue", "no-requeue", "overcommit", "oversubscribe", "spread-job", "use-min-nodes"),
        *("exclusive", "nice", "verbose", "quiet", "reboot", "ignore-pbs", "H", "s", "O", "v", "Q", "k", "no-kill"),
    )
)
"""Options that take no value, or only one behind an equals sign."""
FLAGS_WITHOUT_VALUE = frozenset(
    (
        *("container-mount-home", "container-remap-root", "container-entrypoint", "container-entrypoint-log"),
        *("container-writable", "container-readonly", "no-container-mount-home", "no-container-remap-root"),
        "no-container-entrypoint",
    )
)
"""Of Pyxis. Source: its args.c, version 0.24."""
_SHELL_SYNTAX = re.compile(r"[;|&<>$`()*?\n]")


def contradictions(subject: Subject) -> Iterator[Finding]:
    """Yield the arguments for sbatch that take back what the script says."""
    slurm_config = subject.plan.config.cluster.slurm
    words = slurm_config.arguments if slurm_config else []
    previous = ""
    for word in words:
        name, has_value, value = option(word)
        if not name:
            if not previous or previous in NO_VALUE:
                what, fix = f"sbatch would take {word} for the script", "write options as --name=value, one an entry"
                yield broken("CFG-09", what, WHERE, fix=fix)
        elif re.search(r"\s", name):
            fix = f"write {'='.join(word.split(maxsplit=1))}, or two entries"
            yield broken("CFG-09", f"{word!r} is one word to sbatch, and no option", WHERE, fix=fix)
        elif "container" in name and name != "container":
            yield from _container_flag(name, has_value)
        elif ours := _ours(word, name):
            yield broken("CFG-09", f"--{ours} contradicts the script", WHERE, fix=OURS[ours])
        elif name == "export" and value.split(",")[0] != "ALL":
            what = f"with --export={value} the job does not get this environment: no PATH, DATADIR or LOGDIR"
            yield broken("CFG-09", what, WHERE, fix="leave it out, or write --export=ALL,NAME=value")
        elif name == "open-mode" and value.startswith("t"):
            what = "with --open-mode=truncate a requeued job loses its output so far"
            yield broken("CFG-09", what, WHERE, fix="leave it out: the script appends")
        previous = "" if has_value or not name else name


def _ours(word: str, name: str) -> str:
    """Return which option of OURS a word sets, or nothing; sbatch takes the beginning of a long name for all of it."""
    if name in OURS or not word.startswith("--"):
        return name if name in OURS else ""
    return next((key for key in OURS if key.startswith(name)), "")


def run_folder(subject: Subject) -> Iterator[Finding]:
    """Yield whether the name of the run folder holds what Slurm or the job would misread; the job refuses it, too."""
    folder = subject.plan.config.launch.folder or ""
    if bad := re.search(r"[\"\\]", folder):
        fix = "choose another name, or leave launch.folder out"
        yield broken("CFG-06", f"the run folder's name holds {bad[0]!r}", "launch.folder", fix=fix)


def option(word: str) -> tuple[str, bool, str]:
    """Return an option's long name (nothing for what is none), whether its value is in the same word, and the value."""
    if word.startswith("--") and len(word) > 2:
        name, has_value, value = word[2:].partition("=")
        return name, bool(has_value), value
    if word.startswith("-") and len(word) > 1:
        return SHORT.get(word[1], word[1]), len(word) > 2, word[2:].removeprefix("=")
    return "", False, word


def walltime(subject: Subject) -> Iterator[Finding]:
    """Yield whether the time that is asked for is above the cluster's."""
    slurm_config = subject.plan.config.cluster.slurm
    if slurm_config is None or slurm_config.max_walltime_min is None:
        return
    asked = asked_minutes(subject.plan)
    if asked is not None and asked > slurm_config.max_walltime_min:
        what = f"{asked:g} min are asked for, and this cluster allows {slurm_config.max_walltime_min}"
        yield broken("SLU-02", what, "walltime, trials, cluster.slurm.arguments", fix="ask for less")


def asked_minutes(plan: Plan) -> float | None:
    """Return the job's time limit: what the user adds to sbatch, else the plan's."""
    words = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    asked: float | None = plan.walltime_min
    for number, word in enumerate(words):
        name, has_value, value = option(word)
        if name == "time":
            asked = client.minutes(value if has_value else "".join(words[number + 1 : number + 2]))
    return asked


def gpu_type(subject: Subject) -> Iterator[Finding]:
    """Yield whether a typed request for GPUs lacks its type."""
    slurm_config = subject.plan.config.cluster.slurm
    if slurm_config and slurm_config.gpu_request is GpuRequest.gres_typed and not slurm_config.gpu_type:
        fix = "set cluster.slurm.gpu_type to what `scontrol show node | grep Gres` shows"
        yield broken("SLU-01", "the type of GPU is not said", "cluster.slurm.gpu_type", fix=fix)


def drop_caches(subject: Subject) -> Iterator[Finding]:
    """Yield whether the command that drops caches is more than one program and its arguments: no shell reads it."""
    command = subject.plan.config.cluster.drop_caches
    if command is None:
        return
    try:
        is_plain = bool(shlex.split(command)) and not _SHELL_SYNTAX.search(command)
    except ValueError:  # a quotation mark without its other half
        is_plain = False
    if not is_plain:
        what, fix = f"{command!r} is not one program and its arguments, and no shell reads it", "put it into a script"
        yield broken("CFG-09", what, "cluster.drop_caches", fix=f"{fix} on the nodes, or set cluster.drop_caches=null")


def container(subject: Subject) -> Iterator[Finding]:
    """Yield whether the image is missing or misspelt."""
    from bench.images import reference

    c = subject.plan.config.container
    if c.runtime is Runtime.none:
        return
    if c.runtime is not Runtime.pyxis:
        what = f"backend slurm starts no container with {c.runtime.name}"
        yield broken("PYX-04", what, f"container={c.name}", fix="choose container=pyxis or none")
    elif not c.image:
        fix = "set container.image, or export CONT=…"
        yield broken("PYX-04", "no image is named", "container.image", fix=fix)
    elif (full := expanded(c.image)) and (spelling := reference.misspelled(full)):
        word = shlex.quote(spelling.corrected)
        fix = f"export CONT={word}" if c.image == "$CONT" else f"set container.image to {word}, in quotes"
        yield broken("PYX-06", spelling.what, "container.image", fix=fix)


def mounts(subject: Subject) -> Iterator[Finding]:
    """Yield the mounts that Pyxis would refuse or read otherwise. Source: its args.c, version 0.24."""
    config = subject.plan.config
    if config.container.runtime is Runtime.none:
        return
    for mount in config.container.mounts:
        where = f"container.mounts: {mount}"
        if mount.startswith("-"):
            yield _flag_as_mount(mount, where)
        elif (full := expanded(mount)) is None:
            yield broken("CFG-06", "a variable in it is not set", where, fix="export it, or write the path itself")
        elif why := misformed(full):
            yield broken("PYX-12", why, where)
    for name, text in named_paths(config).items():
        full = expanded(text)
        if full and name != "CONT" and (bad := re.search(r"[,:\s]", full)):
            severity: Severity = "warning" if bad[0].isspace() else "error"
            what = f"{name} holds {bad[0]!r}, and such a path cannot be mounted"
            what += " before Pyxis 0.24" if severity == "warning" else ""
            yield broken("PYX-12", what, full, fix="move or link it to a path without", severity=severity)


def misformed(mount: str) -> str:
    """Return what is wrong with SRC[:DST[:FLAG+FLAG]], or nothing."""
    if "," in mount:
        return "a comma begins another mount: join flags with +, and write one mount an entry"
    parts = mount.split(":")
    if len(parts) > 3 or "" in parts:
        return f"{'too many colons' if len(parts) > 3 else 'an empty part'}: SRC[:DST[:FLAG+FLAG]]"
    if not parts[0].startswith(("/", "./", "../")) and parts[0] not in (".", "tmpfs", "umount"):
        return f"the source {parts[0]} does not begin with / or ./"
    if parts[1:] and not parts[1].startswith(("/", "./", "../")):
        return f"the target {parts[1]} does not begin with /"
    return ""


def _container_flag(name: str, has_value: bool) -> Iterator[Finding]:
    if has_value and name in FLAGS_WITHOUT_VALUE:
        yield broken("PYX-05", f"--{name} takes no value", WHERE)
    what = f"with --{name} the batch script itself would run in the container, where there is no srun"
    yield broken("PYX-10", what, WHERE, fix="leave it out: container.image and container.mounts are srun's")


def _flag_as_mount(word: str, where: str) -> Finding:
    name = option(word)[0].split(" ")[0]
    if name in FLAGS_WITHOUT_VALUE:
        return broken("PYX-05", f"--{name} is no mount, and takes no value", where, fix="leave it out of the mounts")
    return broken("PYX-12", f"{word} is no mount", where)
