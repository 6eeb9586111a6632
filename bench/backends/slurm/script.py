"""Write the sbatch script of a plan: a header in the site's dialect, this run's settings, and what `job.sh` does. Pure.

Every value of the config reaches the script through one function for its place: `_comment`, `_directive`, `_word` (as
it stands), `_quoted` (with the site's variables) and `_name` (part of a variable's name); the plan is JSON in ASCII.

The script holds its plan, so that it alone is the whole run. What differs between users (paths, image) stands in it as
$DATADIR, $MODEL, $LOGDIR and $CONT; account, QOS and reservation only ever stand on sbatch's command line.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.backends import containers
from bench.contract import plan as plans
from bench.contract import plan_kinds, run_files
from bench.contract.cluster import GpuRequest, Slurm
from bench.contract.plan import Plan
from bench.contract.schema import ContainerFlags, Runtime
from bench.texts import steering

BODY = Path(__file__).with_name("job.sh")
TOGETHER = Path(__file__).with_name("together.sh")
SIGNAL_S = 120
"""How long before the time limit the script is told; Slurm may tell it up to a minute earlier."""
FILES = {
    "plan": run_files.PLAN,
    "script": run_files.SCRIPT,
    "status": run_files.STATUS,
    "owner": run_files.OWNER,
    "reserve": run_files.RESERVE,
    "interrupted": run_files.interrupted("*"),
    "rank_logs": run_files.RANK_LOGS,
    "output": run_files.output("*"),
    "caches": run_files.caches("*"),
    "job_output": run_files.JOB_OUTPUTS,
}
"""The files that the script itself writes into the run folder, by its variables, less _file; * stands for whose."""
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_BARE_FLAGS = {"mount-home": ("--no-container-mount-home", "0"), "writable": ("--container-writable", "1")}
"""Pyxis' flags without an argument: the flag, and its value in the environment."""


def script(plan: Plan) -> str:
    """Return the text that sbatch takes."""
    return "\n".join([*header(plan), "set -euo pipefail", "", *settings(plan), "", BODY.read_text(), *_plan(plan), ""])


def resources(plan: Plan) -> list[str]:
    """Return the lines of the header that say which nodes a run needs; runs with the same ones can share them."""
    slurm, w = plan.config.cluster.slurm or Slurm(), plan.world
    return [
        *_directive("partition", slurm.partition),
        *_directive("nodes", w.num_nodes),
        *_directive("ntasks-per-node", w.ranks_per_node),
        *_directive("cpus-per-task", slurm.cpus_per_rank),
        *_gpus(slurm, plans.gpus_per_node(plan)),
        *_directive("exclusive", slurm.exclusive),
        *_directive("mem", 0 if slurm.exclusive else None),
    ]


def together(plans: Sequence[Plan], runs: Sequence[str], *, name: str) -> str:
    """Return the script of one job that runs several scripts, one after another; `runs` are folders beside its own."""
    limit = sum(plan.walltime_min or 0 for plan in plans)
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# shellcheck disable=SC2317  # traps call a function",
            _comment(f"{name}: {len(runs)} runs, one after another on the same nodes"),
            *_directive("job-name", name),
            *resources(plans[0]),
            *_directive("time", limit),
            *_at_the_end(),
            f"runs=({' '.join(map(_word, runs))})",
            f"status_file={_word(run_files.STATUS)}",
            f"script_file={_word(run_files.SCRIPT)}",
            "",
            TOGETHER.read_text(),
        ]
    )


def header(plan: Plan) -> list[str]:
    """Return the lines that sbatch reads: each resource, once."""
    names = " ".join(f"{name}=…" for name in variables(plan))
    return [
        "#!/usr/bin/env bash",
        "# shellcheck disable=SC2016,SC2034,SC2317  # other shells expand it; arrays and functions are used by name",
        _comment(f"{plan.name}: {plan.config.task.summary}"),
        _comment(
            "Written by `python -m bench render`. "
            f"Start it: {names} sbatch [--account=…] FILE [FOLDER OF AN EARLIER RUN]"
        ),
        *_directive("job-name", plan.name),
        *resources(plan),
        *_directive("time", plan.walltime_min),
        *_directive("array", f"0-{len(plan.trials) - 1}" if plan.config.launch.array else None),
        *_at_the_end(),
    ]


def _at_the_end() -> list[str]:
    """Return how Slurm starts a job again, and tells it that its time is nearly up."""
    return [
        *_directive("requeue", True),
        *_directive("open-mode", "append"),
        *_directive("signal", f"B:USR1@{SIGNAL_S}"),
    ]


def settings(plan: Plan) -> list[str]:
    """Return what differs between scripts, as variables of the shell."""
    c, w = plan.config, plan.world
    launch, container = c.launch, c.container
    trials = "$SLURM_ARRAY_TASK_ID" if launch.array else " ".join(f"{trial.index:d}" for trial in plan.trials)
    in_container = container.runtime is Runtime.pyxis
    before = [command.name for command in plan.commands[: len(plan.commands) - len(plan.trials)]]
    return [
        *(f': "${{{name}:?is not set: export it, and submit again}}"' for name in variables(plan)),
        "",
        f"name={_word(plan.name)}",
        f"nodes={w.num_nodes:d}",
        f"ranks_per_node={w.ranks_per_node:d}",
        f'trials="{trials}"',
        f"trial_min=${{BENCH_WALLTIME:-{c.walltime or 0:d}}}",
        f"before_trials=({' '.join(map(_name, before))})",
        f"drop_command=({' '.join(map(_word, _words(c.cluster.drop_caches)))})",
        f"to_prepare=({' '.join(map(_quoted, _to_prepare(plan)))})",
        f"logs={_quoted(c.cluster.paths.logs or '.')}",
        f"python={'python' if in_container else '${BENCH_PYTHON:-python}'}",
        f"srun_options=({_srun_options(plan)})",
        f"rank_environment=({' '.join(_variables(rank_environment(plan)))})",
        f'site_names="{" ".join(sorted(variables(plan), key=len, reverse=True))}"',
        *_container(plan),
        *_commands(plan),
        *(f"{_name(name)}_file={_word(file)}" for name, file in FILES.items()),
    ]


def _words(command: str | None) -> list[str]:
    """Return a command's words; what is no command is one word, which preflight refuses (see argument_checks)."""
    try:
        return shlex.split(command or "")
    except ValueError:
        return [command or ""]


def variables(plan: Plan) -> list[str]:
    """Return the names of the environment variables that the plan leaves to the job's shell."""
    c, paths = plan.config.container, plan.config.cluster.paths
    inputs = plan.inputs
    texts = [paths.data if inputs.rows else None, paths.model if inputs.checkpoint else None, paths.logs]
    texts += [c.image, *c.mounts] if c.runtime is Runtime.pyxis else []
    return list(dict.fromkeys(name for text in texts for name in _VARIABLE.findall(text or "")))


def _comment(text: str) -> str:
    """Return one line that is a comment, whatever the text holds."""
    return "# " + "".join(" " if steering(letter) else letter for letter in text)


def _directive(key: str, value: str | int | bool | None) -> list[str]:
    """Return the #SBATCH line of one option, or no line for None and False."""
    if value is None or value is False:
        return []
    return [f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={_word(str(value))}"]


def _word(text: str) -> str:
    """Return one word of bash that is just the text."""
    assert not steering(text), "bench.planning.checks.texts refuses these"
    return f"'{text}'" if "," in text and shlex.quote(text) == text else shlex.quote(text)  # shellcheck wants these so


def _name(text: str) -> str:
    """Return a command's label, or a key, as a part of a variable's name."""
    name = run_files.label(text)
    assert name.isascii() and name.isidentifier(), name
    return name


def _variables(environment: Mapping[str, str]) -> Iterable[str]:
    """Yield NAME=value for each variable, as words of bash."""
    return (f"{_name(name)}={_word(value)}" for name, value in environment.items())


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
    """Return what is exported for every rank."""
    port, container = plan.config.cluster.master_port, plan.config.container
    flags = {f"PYXIS_CONTAINER_{name.replace('-', '_').upper()}": value for name, (_, value) in _BARE_FLAGS.items()}
    by_environment = container.runtime is Runtime.pyxis and container.flags is ContainerFlags.environment
    return plan.environment | ({"MASTER_PORT": str(port)} if port else {}) | (flags if by_environment else {})


def _to_prepare(plan: Plan) -> Iterable[str]:
    """Yield what the prepare command makes."""
    inputs = plan.inputs
    if inputs.rows_are_made and plan.trials:
        yield inputs.rows or ""
    if inputs.checkpoint_is_made and plan.trials:
        yield inputs.checkpoint or ""


def _commands(plan: Plan) -> Iterable[str]:
    """Yield the plan's commands: what every rank runs, by the label of each."""
    for command in plan.commands:
        words = ['"$python"' if n == 0 and w == "python" else _word(w) for n, w in enumerate(command.argv)]
        yield f"argv_{_name(command.name)}=({' '.join(words)})"


def _srun_options(plan: Plan) -> str:
    """Return what every srun repeats: none of it is srun's default, or comes from the header."""
    slurm = plan.config.cluster.slurm
    cpus = [f"--cpus-per-task={slurm.cpus_per_rank:d}"] if slurm and slurm.cpus_per_rank else []
    return " ".join(["--export=ALL", "--mpi=none", *cpus])


def _container(plan: Plan) -> list[str]:
    """Return srun's container flags as an array that every srun repeats: Pyxis remembers no mounts."""
    c = plan.config.container
    if c.runtime is not Runtime.pyxis:
        return ["container_flags() { container=() container_name=; }"]
    flags = [flag for flag, _ in _BARE_FLAGS.values()] if c.flags is ContainerFlags.arguments else []
    return [
        "container_flags() { # the name is this job's alone",
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
    """Yield what ranks see of the file system, at the paths it has outside."""
    yield from containers.of_files(plan)
    yield "$run:$run"
    yield from plan.config.container.mounts


def _plan(plan: Plan) -> list[str]:
    """Return the end of the script: the plan, then the call of its first function, so that bash has read all of it."""
    return ["the_plan() {", "  cat <<'PLAN'", plan_kinds.dumps(plan).rstrip(), "PLAN", "}", "", 'main "$@"']


def _quoted(text: str) -> str:
    """Return a word in double quotes in which only $NAME is the shell's."""
    assert not steering(text), "bench.planning.checks.texts refuses these"
    safe = re.sub(r'(["\\`]|\$(?![A-Za-z_]))', r"\\\1", text)
    return f'"{safe}"'


if __name__ == "__main__":
    raise SystemExit("a verb: python -m bench render")


def sbatch_arguments(plan: Plan, folder: Path) -> list[str]:
    """Return what only stands on sbatch's command line: whose job it is, where its output goes, and the user's own."""
    s = plan.config.cluster.slurm or Slurm()
    own = {"account": s.account, "qos": s.qos, "reservation": s.reservation}
    out = run_files.ELEMENT_OUTPUT if plan.config.launch.array else run_files.JOB_OUTPUT
    return [
        *(f"--{key}={value}" for key, value in own.items() if value),
        f"--output={str(folder).replace('%', '%%')}/{out}",
        *s.arguments,
    ]


def excluding(plan: Plan, nodes: Sequence[str]) -> str:
    """Return the override, as one would paste it, that leaves nodes out beside those that are left out already."""
    own = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    excluded = [word.partition("=")[2] for word in own if word.startswith("--exclude=")]
    words = [*(word for word in own if not word.startswith("--exclude=")), f"--exclude={','.join([*excluded, *nodes])}"]
    return shlex.quote(f"cluster.slurm.arguments={json.dumps(words)}")
