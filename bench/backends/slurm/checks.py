"""Check a plan against this site's Slurm: partition, GPUs, account, and sbatch --test-only of the script."""

import getpass
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from bench.backends import containers
from bench.backends.slurm import client
from bench.backends.slurm.argument_checks import FLAGS_WITHOUT_VALUE, time_limit_min
from bench.contract import plan as plans
from bench.contract.cluster import GpuRequest, Slurm
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import ContainerFlags, Device, Runtime
from bench.errors import ConfigError, SubmitError
from bench.planning.avoided_nodes import too_few
from bench.rules.check import Answer, CannotTellError, Finding, Severity, Subject, broken
from bench.texts import counted

TIMEOUT_S = 15.0
GROUP_FIELDS = "%P|%a|%l|%D|%G|%c|%m|%t|%s"
"""sinfo's format: partition, up or not, time limit, nodes, GRES, CPUs, memory (MiB), state, nodes per job."""
NODES, NODE_FIELDS = "sinfo of nodes", "%N|%P"
"""The query of the nodes, if some are left out, and its format: name, partition."""
IS_OUT = re.compile(r"down|drain|drng|fail|inval|unk|.*\*$")
"""States of nodes that accept no job; * marks a node that does not respond."""
_GPU = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)")
_NO_CONFIGURATION = re.compile(r"[Cc]ould not establish a configuration source|[Uu]nable to process config")
"""What every command of Slurm prints on a machine that has the commands, but no slurm.conf."""
_UNREACHABLE = re.compile(
    rf"[Uu]nable to contact|Communication|[Tt]imed out|[Zz]ero [Bb]ytes|{_NO_CONFIGURATION.pattern}"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Identical nodes of a partition."""

    partition: str
    is_default: bool
    is_up: str
    limit_min: float | None
    num_nodes: int
    gpus: tuple[tuple[str, int], ...]
    """GPU type, empty if the site names none, and how many of it a node has."""
    cpus: int
    memory_gib: float
    is_out: bool
    min_nodes: int


REFUSALS: tuple[tuple[str, str, str | None], ...] = (
    (
        r"[Ii]nvalid account|[Ii]nvalid qos|accounting/QOS",
        "cluster.slurm.account, cluster.slurm.qos",
        "`sacctmgr show assoc user=$USER` lists your accounts and QOS",
    ),
    (r"[Pp]artition", "cluster.slurm.partition", "`sinfo` lists the partitions that accept jobs"),
    (
        r"time limit",
        "walltime, trials",
        "lower walltime or trials, or set cluster.slurm.partition to a partition with a higher time limit",
    ),
    (r"Node count", "cluster.num_nodes", "`scontrol show partition` shows how many nodes a job may request"),
    (r"GRES|generic resource", "cluster.slurm.gpu_request, cluster.slurm.gpu_type", None),
    (r"reservation", "cluster.slurm.reservation", "`scontrol show reservation` lists the reservations"),
    (
        r"unrecognized option|[Ii]nvalid option",
        "cluster.slurm.arguments",
        "`sbatch --help` lists this version's options",
    ),
    (r"feature|[Nn]ode name", "cluster.slurm.arguments", "`scontrol show node` shows names and features"),
    (
        r"node configuration|processors",
        "cluster.num_nodes, cluster.ranks_per_node, cluster.slurm",
        "compare nodes, ranks and cluster.slurm (gpu_type, cpus_per_rank, arguments) with `scontrol show node`",
    ),
)
"""Messages of a refusing sbatch: pattern, config keys that cause it, fix. Source: Slurm 22.05, slurm_errno.c."""
BY_HAND = (
    "compare the job with `scontrol show partition` and `sacctmgr show assoc user=$USER`, until `sbatch --test-only "
    "FILE` accepts the script; `runstop render` prints the script"
)
"""The fix if no row of REFUSALS has the message."""
GPU_REFUSAL = r"GRES|generic resource"
WAITS = r"nodes? (?:are |is )?(?:busy|not available)|Required node not available|Nodes required for job are"
"""sbatch --test-only prints these for jobs that it would queue."""


def answer_to(subject: Subject, name: str) -> Answer:
    """Return the answer of a Slurm command.

    Raises:
        CannotTellError: there was no answer.
    """
    try:
        answer = subject.answers[name].result()
    except SubmitError as error:
        raise CannotTellError(error.what) from error
    if answer.exit_code and _UNREACHABLE.search(answer.err):
        raise CannotTellError(f"{name}: {last_line(answer.err)}")
    return answer


def last_line(text: str) -> str:
    """Return the last line of a message, without the program's name and "error:"."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")]
    return re.sub(r"^(?:\w+: )?(?:(?:error|fatal): |allocation failure: )*", "", lines[-1]) if lines else "no answer"


def run_queries(plan: Plan, script: str, arguments: Sequence[str], *, probes: Sequence[Sequence[str]]) -> Subject:
    """Run all of Slurm's query commands at the same time, each once; return the subject with their answers."""
    user = getpass.getuser()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, ThreadPoolExecutor() as pool:
        file = Path(scratch, "job.sbatch")
        file.write_text(script)
        queries = {
            "sinfo": ["sinfo", "--noheader", "--all", f"--format={GROUP_FIELDS}"],
            "sacctmgr": ["sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}"],
            "sbatch": ["sbatch", "--test-only", *arguments, str(file)],
            "srun": ["srun", "--help"],
            "sacct": ["sacct", "--allocations", "--noheader", "--jobs=1", "--format=JobID"],
        }
        queries["sacctmgr"].append("format=Account,QOS")
        if plan.config.cluster.avoided:
            queries[NODES] = ["sinfo", "--noheader", "--all", "--Node", f"--format={NODE_FIELDS}"]
        queries |= {" ".join(probe): list(probe) for probe in probes}
        answers = {name: pool.submit(client.run, argv, timeout_s=TIMEOUT_S) for name, argv in queries.items()}
    return Subject(plan, script, tuple(arguments), answers)


def groups(subject: Subject) -> list[Group]:
    """Return the nodes of the job's partition, or of all partitions if Slurm does not know it."""
    everything = [_group(line) for line in answer_to(subject, "sinfo").out.splitlines() if line.count("|") >= 8]
    if not everything:
        raise CannotTellError("sinfo lists no nodes")
    wanted = (_slurm(subject).partition or "").split(",")
    return [g for g in everything if g.partition in wanted or (wanted == [""] and g.is_default)] or everything


def configured(subject: Subject) -> Iterator[Finding]:
    """Yield whether Slurm's commands find no configuration; without it no other question to Slurm has an answer."""
    try:
        answer = subject.answers["sinfo"].result()
    except SubmitError:  # the checks that need its answer say so
        return
    if answer.exit_code and _NO_CONFIGURATION.search(answer.err):
        what = f"Slurm's commands find no configuration on this machine ({last_line(answer.err)})"
        yield broken("SLU-11", what, "sinfo")


def partition(subject: Subject) -> Iterator[Finding | str]:
    """Yield why the partition cannot run the job."""
    available, requested = groups(subject), _slurm(subject).partition
    names = sorted({group.partition for group in available})
    if requested is not None and not set(names) <= set(requested.split(",")):
        what, fix = f"partition {requested} does not exist", f"set cluster.slurm.partition to one of {', '.join(names)}"
        yield broken("SLU-02", what, "cluster.slurm.partition", fix=fix)
        return
    if requested is None and not any(group.is_default for group in available):
        fix = f"set cluster.slurm.partition to one of {', '.join(names)}"
        yield broken("SLU-02", "Slurm has no default partition", "cluster.slurm.partition", fix=fix)
        return
    yield from _size(subject, available, ",".join(names))
    limits = [group.limit_min for group in available]
    minutes, most = time_limit_min(subject.plan), None if None in limits else max(filter(None, limits), default=None)
    if minutes is not None and most is not None and minutes > most:
        what = f"the job requests {minutes:g} min, but partition {','.join(names)} allows at most {most:g} min"
        fix = (
            f"lower walltime or trials until 5 + trials x (walltime + 5) is at most {most:g} minutes; or set "
            "launch.array=true to run each trial as a separate task"
        )
        yield broken("SLU-02", what, "walltime, trials", fix=fix)
    if not any(group.is_up == "up" for group in available):
        what = f"partition {','.join(names)} is in state {available[0].is_up}, in which no job starts"
        severity: Severity = (
            "warning" if available[0].is_up == "down" else "error"
        )  # a partition that is down still queues jobs
        yield broken(
            "SLU-02",
            what,
            "cluster.slurm.partition",
            fix="wait until `sinfo` shows the partition as up, or set cluster.slurm.partition to another partition",
            severity=severity,
        )


def _size(subject: Subject, available: Sequence[Group], name: str) -> Iterator[Finding | str]:
    requested = plans.nodes_of_job(subject.plan)
    total = sum(group.num_nodes for group in available)
    up = sum(group.num_nodes for group in available if not group.is_out)
    yield f"{name}: {up} of {total} nodes up"
    if requested > total:
        fix = f"set cluster.num_nodes to {_at_most(total)}"
        what = f"the job requests {requested} nodes, but partition {name} has {total}"
        yield broken("SLU-02", what, "cluster.num_nodes", fix=fix)
    elif requested > up:
        what = (
            f"the job requests {requested} nodes and would wait: only {up} of {total} nodes in partition {name} are up"
        )
        fix = "wait, or lower cluster.num_nodes; `sinfo -R` shows why nodes are down"
        yield broken("SLU-09", what, "cluster.num_nodes", fix=fix, severity="warning")
    if requested < (least := min(group.min_nodes for group in available)):
        fix = (
            f"set cluster.num_nodes to {least} or more, or set cluster.slurm.partition to a partition for smaller jobs"
        )
        what = f"the job requests {requested} nodes, but partition {name} requires at least {least}"
        yield broken("SLU-02", what, "cluster.num_nodes", fix=fix)


def leaves_nodes_out(plan: Plan) -> bool:
    """Return whether cluster.avoid leaves out nodes."""
    return bool(plan.config.cluster.avoided)


def left_out(subject: Subject) -> Iterator[Finding | str]:
    """Yield the nodes to leave out that Slurm does not know, which sbatch would refuse; or that too few are left."""
    avoided, num_nodes = subject.plan.config.cluster.avoided, plans.nodes_of_job(subject.plan)
    listed = [line.strip().split("|") for line in answer_to(subject, NODES).out.splitlines() if line.count("|") == 1]
    if not listed:
        raise CannotTellError("sinfo lists no nodes")
    if unknown := sorted(set(avoided) - {name for name, _ in listed}):
        kept = ",".join(name for name in avoided if name not in unknown)
        what = f"Slurm has no node {', '.join(unknown)}, so sbatch refuses the job"
        known_nodes = f"[{kept}]" if kept else "null"
        yield broken("SLU-02", what, "cluster.avoid", fix=f"set cluster.avoid={known_nodes}")
        return
    wanted = {group.partition for group in groups(subject)}
    left = {name for name, partition in listed if partition.rstrip("*") in wanted} - set(avoided)
    yield f"{', '.join(avoided)}; {counted(len(left), 'node')} left"
    if len(left) < num_nodes:
        error = too_few(len(left), num_nodes, avoided, where="cluster.num_nodes")
        yield broken("SLU-02", error.what, error.where, fix=error.fix)


def gpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield how to request GPUs if the plan's request does not match the nodes."""
    config, available = _slurm(subject), groups(subject)
    plan = subject.plan
    need = plans.gpus_per_node(plan)
    cuda = plan.config.cluster.device is Device.cuda
    where, is_typed = "cluster.slurm.gpu_request", config.gpu_request is GpuRequest.gres_typed
    counts: dict[str, int] = {}
    for kind, count in (pair for group in available for pair in group.gpus):
        counts[kind] = max(count, counts.get(kind, 0))
    kinds = sorted(filter(None, counts))
    suitable = [kind for kind in kinds if counts[kind] >= need] or kinds
    most = max((count for kind, count in counts.items() if not is_typed or kind == config.gpu_type), default=0)
    names = (f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in sorted(counts.items()))
    node_gpus = ", ".join(names) or "no GPUs"
    yield f"nodes have {node_gpus}"
    if config.gpu_request is GpuRequest.none:
        if cuda and counts:
            what = (
                f"the job requests no GPUs, but the nodes have {node_gpus}; if Slurm restricts devices, the ranks see "
                "no GPU"
            )
            yield broken("SLU-01", what, where, fix=f"set {where}={_usual(kinds, suitable)}", severity="warning")
        return
    if not counts:
        what = "the job requests GPUs, but Slurm lists no GPUs on the nodes of the partition"
        yield broken(
            "SLU-01",
            what,
            where,
            fix="set cluster.slurm.partition to a partition with GPUs; or, if this partition has GPUs that Slurm does "
            f"not manage, set {where}=none",
        )
    elif is_typed and config.gpu_type not in kinds:
        what = f"the job requests GPUs of type {config.gpu_type}, but the nodes have {node_gpus}"
        types = f"{'one of ' * (len(suitable) > 1)}{', '.join(suitable)}"
        fix = f"set cluster.slurm.gpu_type to {types}" if kinds else f"set {where}=gres"
        yield broken("SLU-01", what, "cluster.slurm.gpu_type", fix=fix)
    elif need > most:
        fix = f"set cluster.ranks_per_node={most}"
        what = f"the job requests {need} GPUs per node, but the nodes have {node_gpus}"
        yield broken("SLU-02", what, "cluster.ranks_per_node", fix=fix)
    elif len(kinds) > 1 and not is_typed:
        what = f"the nodes have different types of GPUs ({node_gpus}), but the job requests no GPU type"
        fix = f"set {where}=gres_typed cluster.slurm.gpu_type={suitable[0]}"
        yield broken("SLU-01", what, where, fix=fix, severity="warning")


def cpus(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the ranks of a node need more CPUs than it has."""
    each, ranks = _slurm(subject).cpus_per_rank or 1, subject.plan.world.ranks_per_node
    biggest = max(groups(subject), key=lambda group: group.cpus)
    most = biggest.cpus
    yield f"{most} CPUs and {biggest.memory_gib:,.0f} GiB per node"
    if each * ranks > most:
        need = f"{ranks} ranks with {counted(each, 'CPU')} each need {each * ranks} CPUs"
        what = f"{f'1 rank needs {each} CPUs' if ranks == 1 else need}, but a node has at most {most}"
        where, fix = "cluster.slurm.cpus_per_rank", f"set cluster.slurm.cpus_per_rank to {_at_most(most // ranks)}"
        if most < ranks:
            where, fix = "cluster.ranks_per_node", f"set cluster.ranks_per_node to {_at_most(most)}"
            fix += " and cluster.slurm.cpus_per_rank to 1" if each > 1 else ""
        yield broken("SLU-02", what, where, fix=fix)


def accounts(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether account or QOS is not one of this user's; an error only if sbatch refuses it."""
    config, answer = _slurm(subject), answer_to(subject, "sacctmgr")
    rows = [line.split("|") for line in answer.out.splitlines() if line.count("|") == 1]
    if answer.exit_code or not rows:
        failure = f"sacctmgr failed: {last_line(answer.err)}"
        raise CannotTellError(failure if answer.exit_code else "sacctmgr lists no account of this user")
    known = {"account": {row[0] for row in rows}, "qos": {qos for row in rows for qos in row[1].split(",") if qos}}
    yield f"accounts {', '.join(sorted(known['account']))}"
    refused = re.search(REFUSALS[0][0], refusal(subject))
    for key, names in known.items():
        value = getattr(config, key)
        if value is not None and value not in names and names:
            what = f"this user has no access to the {key} {value}"
            fix = f"set cluster.slurm.{key} to one of {', '.join(sorted(names))}"
            yield broken("SLU-02", what, f"cluster.slurm.{key}", fix=fix, severity="error" if refused else "warning")


def accepted(subject: Subject) -> Iterator[Finding | str]:
    """Yield why sbatch would refuse the script: the findings that explain it, else sbatch's message."""
    message = refusal(subject)
    if not message:
        start = re.search(r"\bJob \d+ (to start .*)", answer_to(subject, "sbatch").err)
        yield start[1] if start else "accepted"
    elif re.search(WAITS, message):
        yield broken(
            "SLU-09",
            message,
            "sbatch --test-only",
            fix="no action is needed: the job would wait in the queue until nodes are free",
            severity="warning",
        )
    elif known := _explained(subject, message):
        yield message
        yield from known
    else:
        rows = ((where, fix) for sign, where, fix in REFUSALS if re.search(sign, message))
        where, fix = next(rows, ("sbatch --test-only", BY_HAND))
        yield broken(
            "SLU-01" if re.search(GPU_REFUSAL, message) else "SLU-02",
            f"sbatch refuses the job: {message}",
            where,
            fix=fix,
        )


def refusal(subject: Subject) -> str:
    """Return all messages of sbatch --test-only if it refuses the script, else an empty text."""
    answer = answer_to(subject, "sbatch")
    if answer.exit_code == 0:
        return ""
    lines = [last_line(line) for line in answer.err.splitlines() if line.strip() and not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(lines)) or f"exit code {answer.exit_code}"


def accounting(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether Slurm has no accounting, which keeps how jobs ended."""
    if shutil.which("sacct") is None:
        yield broken("SLU-04", "sacct is not installed", "PATH", severity="warning")
    elif (answer := answer_to(subject, "sacct")).exit_code:
        yield broken("SLU-04", f"sacct failed: {last_line(answer.err)}", "sacct", severity="warning")


def _explained(subject: Subject, message: str) -> list[Finding]:
    """Return the findings of the other checks that explain sbatch's message."""
    results: list[Finding | str] = []
    for check in (partition, gpus, cpus, accounts):
        try:
            results += check(subject)
        except CannotTellError:
            continue
    known = [item for item in results if isinstance(item, Finding)]
    drained = [item for item in known if item.rule == "SLU-09"] if "node configuration" in message else []
    return [item for item in known if item.severity == "error"] or drained  # sbatch ignores drained nodes


def _group(line: str) -> Group:
    name, is_up, limit, nodes, gres, cpus, memory, state, size = line.split("|")[:9]
    seconds = client.seconds(limit)
    return Group(
        partition=name.rstrip("*"),
        is_default=name.endswith("*"),
        is_up=is_up,
        limit_min=None if seconds is None else seconds / 60,
        num_nodes=int(nodes),
        gpus=tuple((kind, int(count)) for kind, count in _GPU.findall(re.sub(r"\([^)]*\)", "", gres))),
        cpus=int(cpus.rstrip("+")),
        memory_gib=int(memory.rstrip("+")) / 1024,
        is_out=bool(IS_OUT.match(state)),
        min_nodes=int(size.split("-")[0]) if size.split("-")[0].isdecimal() else 1,
    )


def _slurm(subject: Subject) -> Slurm:
    return subject.plan.config.cluster.slurm or Slurm()


def _at_most(number: int) -> str:
    return "1" if number == 1 else f"{number} or less"


def _usual(kinds: Sequence[str], suitable: Sequence[str]) -> str:
    return f"gres_typed cluster.slurm.gpu_type={suitable[0]}" if len(kinds) > 1 else "gpus_per_node"


_ABORTED = (-6, 134)
"""Exit codes of a program that abort() ended."""
_FLAG = re.compile(r"--((?:no-)?container-[a-z-]+)(?![a-z=-])")


def probe(plan: Plan, script: str) -> list[str]:
    """Return an srun command that tests whether this Slurm accepts the script's flags without a value, if it has any.

    It has the job's own options and starts nothing.
    """
    if not has_bare_flags(plan):
        return []
    flags = [f"--{name}" for name in dict.fromkeys(_FLAG.findall(script)) if name in FLAGS_WITHOUT_VALUE]
    s = plan.config.cluster.slurm or Slurm()
    request = {"partition": s.partition, "account": s.account, "qos": s.qos, "reservation": s.reservation}
    options = [f"--{key}={value}" for key, value in request.items() if value]
    return ["srun", "--test-only", "--nodes=1", "--ntasks=1", "--time=1", *options, *flags, "true"]


def in_container(plan: Plan) -> bool:
    """Return whether the ranks run in an image."""
    return plan.config.container.runtime is Runtime.pyxis


def has_bare_flags(plan: Plan) -> bool:
    """Return whether srun gets container flags that take no value."""
    return in_container(plan) and plan.config.container.flags is ContainerFlags.arguments


def in_apptainer(plan: Plan) -> bool:
    """Return whether each rank runs in an Apptainer container."""
    return plan.config.container.runtime is Runtime.apptainer


def sif(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the Apptainer image is missing, or Apptainer is not on this machine, as perhaps on the nodes."""
    image = expanded(subject.plan.config.container.image)
    if image is not None and not Path(image).exists():
        yield broken("ENR-07", "the image file does not exist", image, fix=containers.SIF_FIX)
    if shutil.which("apptainer") is None:
        what = "apptainer is not installed on this machine, and may be missing on the nodes"
        fix = (
            "run `runstop doctor --tier canary` to test a node; if the nodes have only Singularity, create a symbolic "
            "link `apptainer` that points to `singularity`"
        )
        yield broken("HST-08", what, "container=apptainer", fix=fix, severity="warning")


def is_file(plan: Plan) -> bool:
    """Return whether the image is a file."""
    return in_container(plan) and (expanded(plan.config.container.image) or "").startswith(("/", "."))


def is_in_registry(plan: Plan) -> bool:
    """Return whether the image is fetched from a registry, or a daemon, when the job starts."""
    return in_container(plan) and expanded(plan.config.container.image) is not None and not is_file(plan)


def plugin(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether srun lacks the container flags of Pyxis.

    Raises:
        CannotTellError: srun fails, and not because of Pyxis.
    """
    answer = answer_to(subject, "srun")
    if answer.exit_code and not re.search("container-|pyxis|spank", answer.err):
        raise CannotTellError(f"srun: {last_line(answer.err)}")
    if "--container-image" not in answer.out:
        yield broken("PYX-02", "srun on this machine has no option --container-image", "srun --help")


def flags(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether this Slurm aborts on flags without a value. This depends on its build, not on its version."""
    words = probe(subject.plan, subject.script)
    answer = answer_to(subject, " ".join(words))
    if answer.exit_code in _ABORTED or "Assertion" in answer.err:
        fix = "set container.flags=environment, which needs Pyxis 0.21 or later"
        what = f"srun aborts on container options without a value: {last_line(answer.err)}"
        yield broken("PYX-01", what, " ".join(words), fix=fix)
    elif "unrecognized option" in answer.err:
        raise CannotTellError(f"srun: {last_line(answer.err)}")


def file(subject: Subject) -> Iterator[Finding | str]:
    """Yield what is wrong with the image file; the whole file is read if it has changed since the last check."""
    from bench.images import needed, store

    image = expanded(subject.plan.config.container.image)
    assert image is not None
    if not Path(image).is_file():
        fix = "create the image with `runstop image import`, or set CONT to the path of an existing image"
        yield broken("ENR-07", "the image file does not exist", image, fix=fix)
        return
    if (record := store.recorded(Path(image))) is not None and record.marker is not None:
        yield from needed.of_marker(subject.plan.config, record.marker, image)
    try:
        yield from (replace(fault, where=image) for fault in store.faults_since_change(Path(image)))
    except OSError as error:
        yield broken("ENR-07", f"the image file cannot be read: {error.strerror}", image)


def credentials(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether Enroot has no credentials for the registry of the image."""
    from bench.images import import_checks, reference

    image = expanded(subject.plan.config.container.image)
    assert image is not None
    try:
        warnings = import_checks.warnings(reference.read(image), Path("/"))
    except ConfigError as error:  # another check reports invalid names
        raise CannotTellError(error.what) from error
    yield from (replace(warning, where=image) for warning in warnings if warning.rule == "ENR-01")
