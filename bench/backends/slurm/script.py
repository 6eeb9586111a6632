"""Render the sbatch script of a plan: #SBATCH lines for this site, the settings of this run, and job.sh.

Every config value is escaped by one function for its place in the script: `_comment`, `_directive`, `_shell_word`
(literal), `_quoted` ($NAME is expanded) and `_name` (part of a variable's name). The plan is JSON in ASCII.

The script is self-contained: it includes the plan. Paths and images that differ between users are variables: $DATADIR,
$MODEL, $LOGDIR and $CONT. Account, QOS and reservation are never in the script, only on sbatch's command line.
Rendering has no side effects.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from bench.backends import containers
from bench.backends.slurm.argument_checks import option
from bench.contract import plan as plans
from bench.contract import plan_kinds, run_files
from bench.contract.cluster import GpuRequest, Slurm
from bench.contract.plan import Plan
from bench.contract.program import Per
from bench.contract.schema import PORTS, ContainerFlags, Runtime
from bench.texts import control_character

VBOOST = "vboost"
"""The name, among what runs before the trials, of setting the boost slider."""
BODY = Path(__file__).with_name("job.sh")
ARRAY_JOB = Path(__file__).with_name("array_job.sh")
SHARED_JOB = Path(__file__).with_name("shared_job.sh")
SIGNAL_S = 120
"""How long before the time limit the script gets SIGUSR1; Slurm may send it up to a minute earlier."""
FILES = {
    "plan": run_files.PLAN,
    "script": run_files.SCRIPT,
    "status": run_files.STATUS,
    "owner": run_files.OWNER,
    "reserve": run_files.DISK_RESERVE,
    "interrupted": run_files.interrupted("*"),
    "used_nodes": run_files.USED_NODES,
    "slow_node": run_files.SLOW_NODE,
    "rank_logs": run_files.RANK_LOGS,
    "output": run_files.output("*"),
    "caches": run_files.caches("*"),
    "job_output": run_files.JOB_OUTPUTS,
}
"""The files of the run folder that the script itself uses, by their shell variables without _file."""
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_BARE_FLAGS = {"mount-home": ("--no-container-mount-home", "0"), "writable": ("--container-writable", "1")}
"""Pyxis flags without an argument: the flag, and the value of its environment variable."""


def script(plan: Plan) -> str:
    """Return the text that sbatch takes."""
    body = [BODY.read_text(), *_vboost(plan)]
    return "\n".join([*header(plan), "set -euo pipefail", "", *settings(plan), "", *body, *_plan(plan), ""])


def resources(plan: Plan) -> list[str]:
    """Return the #SBATCH lines of the nodes that a run needs; runs with the same lines can share one job."""
    slurm, w = plan.config.cluster.slurm or Slurm(), plan.world
    return [
        *_directive("partition", slurm.partition),
        *_directive("nodes", plans.nodes_of_job(plan)),
        *_directive("ntasks-per-node", w.ranks_per_node),
        *_directive("cpus-per-task", slurm.cpus_per_rank),
        *_gpus(slurm, plans.gpus_per_node(plan)),
        *_directive("exclusive", slurm.exclusive),
        *_directive("mem", 0 if slurm.exclusive else None),
        *_directive("no-kill", bool(plan.config.cluster.spare_nodes)),
        *_directive("exclude", ",".join(plan.config.cluster.avoided) or None),
    ]


def shared_job(plans: Sequence[Plan], runs: Sequence[str], *, name: str) -> str:
    """Return the script of one job that runs several runs one after another; `runs` are folders next to its own."""
    limit = sum(plan.walltime_min or 0 for plan in plans)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# shellcheck disable=SC2317  # traps call a function",
            _comment(f"{name}: {len(runs)} runs, one after another on the same nodes"),
            *_directive("job-name", name),
            *resources(plans[0]),
            *_directive("time", limit),
            *_requeue_and_signal(),
            f"runs=({' '.join(map(_shell_word, runs))})",
            f"status_file={_shell_word(run_files.STATUS)}",
            f"script_file={_shell_word(run_files.SCRIPT)}",
            "",
            SHARED_JOB.read_text(),
        ]
    )


MAX_ARRAY_TASKS = 1000
"""Slurm's MaxArraySize is 1001 unless a site changes it."""
MAX_SCRIPT_BYTES = 3 * 2**20
"""Slurm's max_script_size is 4 MiB unless a site changes it."""


def arrays(plans: Sequence[Plan]) -> list[list[int]]:
    """Return the positions of the plans, grouped into arrays: each needs one header for all of its tasks.

    A plan whose trials are an array already (`launch.array`) is a group of its own, and no array of runs.
    """
    groups: dict[object, list[list[int]]] = {}
    sizes: dict[object, int] = {}
    for position, plan in enumerate(plans):
        own = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
        key = position if plan.config.launch.array else (*resources(plan), plan.walltime_min, *_accounting(plan), *own)
        size = len(script(plan)) - len(BODY.read_text())
        mine = groups.setdefault(key, [])
        sizes[key] = sizes.get(key, 0) + size
        if not mine or len(mine[-1]) == MAX_ARRAY_TASKS or sizes[key] > MAX_SCRIPT_BYTES:
            mine.append([])
            sizes[key] = size
        mine[-1].append(position)
    return sorted(array for of_key in groups.values() for array in of_key)


def array_job(plans: Sequence[Plan], runs: Sequence[str], *, name: str) -> str:
    """Return the script of an array with one task for each plan; `runs` are folders next to the array's own.

    It holds every plan's own script: what comes before and after the part that all scripts have in common, and that
    part once. A task puts its own together, byte for byte as `script` returns it, and runs it.
    """
    common = f"{BODY.read_text()}\n"
    lines = [
        "#!/usr/bin/env bash",
        "# shellcheck disable=SC2317  # functions are called by names that are put together",
        _comment(f"{name}: an array of {len(runs)} runs, one for each task"),
        *_directive("job-name", name),
        *resources(plans[0]),
        *_directive("time", plans[0].walltime_min),
        *_directive("array", f"0-{len(runs) - 1}"),
        *_requeue_and_signal(),
        f"runs=({' '.join(map(_shell_word, runs))})",
        f"script_file={_shell_word(run_files.SCRIPT)}",
        *_function("common", common),
    ]
    for task, plan in enumerate(plans):
        before, part, after = script(plan).partition(common)
        assert part, "the common part begins each script's second half"
        lines += [*_function(f"before_{task}", before), *_function(f"after_{task}", after)]
    return "\n".join([*lines, "", ARRAY_JOB.read_text()])


def _function(name: str, text: str) -> list[str]:
    """Return a shell function that prints a text, which ends with a line break."""
    assert text.endswith("\n") and "\nEND_OF_PART\n" not in text
    return [f"{name}() {{", "  cat <<'END_OF_PART'", f"{text}END_OF_PART", "}"]


def header(plan: Plan) -> list[str]:
    """Return the top of the script, which sbatch reads: each resource once."""
    names = " ".join(f"{name}=…" for name in variables(plan))
    return [
        "#!/usr/bin/env bash",
        "# shellcheck disable=SC2016,SC2034,SC2317  # other shells expand it; arrays and functions are used by name",
        _comment(f"{plan.name}: {plan.config.task.summary}"),
        _comment(
            f"Written by `runstop render`. Start it: {names} sbatch [--account=…] FILE [FOLDER OF AN EARLIER RUN]"
        ),
        *_directive("job-name", plan.name),
        *resources(plan),
        *_directive("time", plan.walltime_min),
        *_directive("array", f"0-{len(plan.trials) - 1}" if plan.config.launch.array else None),
        *_requeue_and_signal(),
    ]


def _requeue_and_signal() -> list[str]:
    """Return the #SBATCH lines for requeueing and for the signal before the time limit."""
    return [
        *_directive("requeue", True),
        *_directive("open-mode", "append"),
        *_directive("signal", f"B:USR1@{SIGNAL_S}"),
    ]


def settings(plan: Plan) -> list[str]:
    """Return the settings of this run as shell variables."""
    c, w = plan.config, plan.world
    launch, container = c.launch, c.container
    trials = "$SLURM_ARRAY_TASK_ID" if launch.array else " ".join(f"{trial.index:d}" for trial in plan.trials)
    in_container = container.runtime is not Runtime.none
    before = [VBOOST] if c.cluster.slurm and c.cluster.slurm.vboost is not None else []
    before += [command.name for command in plan.commands[: len(plan.commands) - len(plan.trials)]]
    return [
        *(f': "${{{name}:?is not set: export it and submit again}}"' for name in variables(plan)),
        "",
        f"name={_shell_word(plan.name)}",
        f"nodes={plans.nodes_of_job(plan):d}",
        f"nodes_of_trial={f'{w.num_nodes:d}' if launch.replace_slow else ''}",
        f"max_starts={launch.attempts:d}",
        f"ranks_per_node={w.ranks_per_node:d}",
        f'trials="{trials}"',
        f"trial_min=${{RUNSTOP_WALLTIME:-${{BENCH_WALLTIME:-{c.walltime or 0:d}}}}}",
        f"before_trials=({' '.join(map(_name, before))})",
        f"drop_command=({' '.join(map(_shell_word, _words(c.cluster.drop_caches)))})",
        f"to_prepare=({' '.join(map(_quoted, _to_prepare(plan)))})",
        f"logs={_quoted(c.cluster.paths.logs or '.')}",
        f"python={'python' if in_container else '${RUNSTOP_PYTHON:-${BENCH_PYTHON:-python}}'}",
        f"srun_options=({_srun_options(plan)})",
        f"rank_environment=({' '.join(_variables(rank_environment(plan)))})",
        f"port_in_use={_shell_word(run_files.PORT_IN_USE)}",
        f"port_tries={run_files.PORT_TRIES:d}",
        f"first_port={PORTS.start:d}",
        f"num_ports={len(PORTS):d}",
        f'site_names="{" ".join(sorted(variables(plan), key=len, reverse=True))}"',
        *_container(plan),
        *_commands(plan),
        *(f"{_name(name)}_file={_shell_word(file)}" for name, file in FILES.items()),
    ]


def _words(command: str | None) -> list[str]:
    """Split a command; a text that shlex cannot split stays one word, which preflight refuses (see argument_checks)."""
    try:
        return shlex.split(command or "")
    except ValueError:
        return [command or ""]


def variables(plan: Plan) -> list[str]:
    """Return the environment variables that the script expands: those of paths, image and mounts."""
    c, paths = plan.config.container, plan.config.cluster.paths
    inputs = plan.inputs
    texts = [paths.data if inputs.rows else None, paths.model if inputs.checkpoint else None, paths.logs]
    texts += [c.image, *c.mounts] if c.runtime is not Runtime.none else []
    return list(dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text or "")))


def _comment(text: str) -> str:
    """Return a comment of one line; control characters become spaces."""
    return "# " + "".join(" " if control_character(letter) else letter for letter in text)


def _directive(key: str, value: str | int | bool | None) -> list[str]:
    """Return the #SBATCH line of an option; no line for None and False."""
    if value is None or value is False:
        return []
    return [f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={_shell_word(str(value))}"]


def _shell_word(text: str) -> str:
    """Quote a text as one literal bash word."""
    assert not control_character(text), "bench.planning.checks.texts refuses these"
    is_plain = shlex.quote(text) == text
    return f"'{text}'" if is_plain and "," in text else shlex.quote(text)  # shellcheck requires quotes around commas


def _name(text: str) -> str:
    """Return a command name or key as part of a shell variable's name."""
    name = run_files.label(text)
    assert name.isascii() and name.isidentifier(), name
    return name


def _variables(environment: Mapping[str, str]) -> Iterable[str]:
    """Yield NAME=value for each variable, as bash words."""
    return (f"{_name(name)}={_shell_word(value)}" for name, value in environment.items())


def _gpus(slurm: Slurm, count: int) -> list[str]:
    match slurm.gpu_request:
        case GpuRequest.gpus_per_node:
            return _directive("gpus-per-node", count)
        case GpuRequest.gres:
            return _directive("gres", f"gpu:{count}")
        case GpuRequest.gres_typed:
            return _directive("gres", f"gpu:{slurm.gpu_type}:{count}")
        case GpuRequest.none:
            return []


def rank_environment(plan: Plan) -> dict[str, str]:
    """Return the environment variables that are exported for every rank."""
    port, container = plan.config.cluster.master_port, plan.config.container
    flags = {f"PYXIS_CONTAINER_{name.replace('-', '_').upper()}": value for name, (_, value) in _BARE_FLAGS.items()}
    by_environment = container.runtime is Runtime.pyxis and container.flags is ContainerFlags.environment
    return plan.environment | ({"MASTER_PORT": str(port)} if port else {}) | (flags if by_environment else {})


def _to_prepare(plan: Plan) -> Iterable[str]:
    """Yield the files that the prepare command creates."""
    inputs = plan.inputs
    if inputs.rows_are_prepared and plan.trials:
        yield inputs.rows or ""
    if inputs.checkpoint_is_created and plan.trials:
        yield inputs.checkpoint or ""


def _commands(plan: Plan) -> Iterable[str]:
    """Yield one argv array per command of the plan."""
    for command in plan.commands:
        words = ['"$python"' if n == 0 and w == "python" else _shell_word(w) for n, w in enumerate(command.argv)]
        yield f"argv_{_name(command.name)}=({' '.join(words)})"


def _srun_options(plan: Plan) -> str:
    """Return the options of every srun: they are not defaults, and srun does not take them from the #SBATCH lines."""
    slurm = plan.config.cluster.slurm
    cpus = [f"--cpus-per-task={slurm.cpus_per_rank:d}"] if slurm and slurm.cpus_per_rank else []
    program = plan.config.program  # other ranks end at once: a site's WaitTime must not end the program then
    wait = ["--wait=0"] if program is not None and program.per is not Per.rank else []
    mpi = _shell_word(f"--mpi={slurm.mpi if slurm else 'none'}")
    return " ".join(["--export=ALL", mpi, *cpus, *wait])


def _container(plan: Plan) -> list[str]:
    """Return the function that sets srun's container flags; every srun repeats them, since Pyxis keeps no mounts.

    With Apptainer, srun starts `in_image` with the program as its argument.
    """
    c = plan.config.container
    if c.runtime is Runtime.apptainer:
        return [
            "container_flags() {",
            "  container=() container_name=",
            "  in_image=(",
            f"    {' '.join(containers.apptainer_options(plan))}",
            *(f"    --bind={_quoted(mount)}" for mount in _mounts(plan)),
            '    --pwd="$run"',
            *(f"    {_shell_word(argument)}" for argument in c.arguments or []),
            f"    {_quoted(c.image or '')}",
            "  )",
            "}",
        ]
    if c.runtime is not Runtime.pyxis:
        return ["container_flags() { container=() in_image=() container_name=; }"]
    flags = [flag for flag, _ in _BARE_FLAGS.values()] if c.flags is ContainerFlags.arguments else []
    return [
        "container_flags() { # the container name is unique to this start of this job",
        "  in_image=()",
        '  container_name="runstop-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "  container=(",
        f"    --container-image={_quoted(c.image or '')}",
        '    --container-name="$container_name"',
        f"    --container-mounts={_quoted(','.join(_mounts(plan)))}",
        '    --container-workdir="$run"',
        f"    --container-env={_quoted(','.join(map(_name, rank_environment(plan))))}",
        *(f"    {flag}" for flag in flags),
        "  )",
        "}",
    ]


def _mounts(plan: Plan) -> Iterable[str]:
    """Yield the container mounts; paths are the same inside and outside."""
    yield from containers.of_files(plan)
    yield "$run:$run"
    yield from plan.config.container.mounts


def _vboost(plan: Plan) -> list[str]:
    """Return what lets `before_trial` of job.sh set the boost slider of a node's GPUs; nothing unless it is configured.

    It runs outside of the container, since the driver takes the setting only from root.
    """
    value = plan.config.cluster.slurm.vboost if plan.config.cluster.slurm else None
    if value is None:
        return []
    return [
        'eval "plan_command() $(declare -f before_trial | tail -n +2)"',
        "before_trial() { # LABEL",
        f"  if [[ $1 == {VBOOST} ]]; then",
        f'    require "setting the boost slider" on_each_node sudo -n nvidia-smi boost-slider --vboost {value:d}',
        "  else",
        '    plan_command "$@"',
        "  fi",
        "}",
        "",
    ]


def _plan(plan: Plan) -> list[str]:
    """Return the end of the script: the plan, then the call of main, so that bash has read the whole file by then."""
    return ["print_plan() {", "  cat <<'PLAN'", plan_kinds.dumps(plan).rstrip(), "PLAN", "}", "", 'main "$@"']


def _quoted(text: str) -> str:
    """Quote a text so that bash expands only its $NAME."""
    assert not control_character(text), "bench.planning.checks.texts refuses these"
    safe = re.sub(r'(["\\`]|\$(?![A-Za-z_]))', r"\\\1", text)
    return f'"{safe}"'


def sbatch_arguments(plan: Plan, folder: Path, *, is_array: bool = False) -> list[str]:
    """Return sbatch's command-line options: account, QOS, reservation, output file and the user's arguments."""
    out = run_files.ARRAY_OUTPUT if is_array or plan.config.launch.array else run_files.JOB_OUTPUT
    return [
        *_accounting(plan),
        f"--output={str(folder).replace('%', '%%')}/{out}",
        *_own_arguments(plan),
    ]


def _own_arguments(plan: Plan) -> list[str]:
    """Return the user's arguments; sbatch would take their --exclude instead of the script's, so it gets both."""
    own = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    avoided = plan.config.cluster.avoided
    pairs = pairwise(["", *own])
    return [",".join([one, *avoided]) if avoided and _excludes(last, one) else one for last, one in pairs]


def _excludes(previous: str, argument: str) -> bool:
    """Return whether one of sbatch's arguments has the nodes of --exclude, with the option or after it."""
    name, has_value, _ = option(argument)
    return name == "exclude" and has_value if name else option(previous)[:2] == ("exclude", False)


def _accounting(plan: Plan) -> list[str]:
    s = plan.config.cluster.slurm or Slurm()
    accounting = {"account": s.account, "qos": s.qos, "reservation": s.reservation}
    return [f"--{key}={value}" for key, value in accounting.items() if value]


def excluding(plan: Plan, nodes: Sequence[str]) -> str:
    """Return the override, quoted for a shell, that excludes these nodes in addition to those excluded already."""
    own = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    excluded = [argument.partition("=")[2] for argument in own if argument.startswith("--exclude=")]
    kept = [argument for argument in own if not argument.startswith("--exclude=")]
    words = [*kept, f"--exclude={','.join([*excluded, *nodes])}"]
    return shlex.quote(f"cluster.slurm.arguments={json.dumps(words)}")
