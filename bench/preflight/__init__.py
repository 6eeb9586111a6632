"""Check a plan before it waits in the queue: plan in, findings out, by rule and tier.

Tier laptop checks the plan and the script. Tier login queries the site's scheduler and checks data, checkpoint and
image. Tiers canary and nodes run a job on one node or on all nodes, inside the container (`bench.preflight.doctor`).
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench import backends
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan, required
from bench.contract.plan_paths import expanded
from bench.contract.schema import Device, ProfileKind, Runtime
from bench.contract.task import Division
from bench.errors import ConfigError, joined
from bench.images import needed
from bench.mlperf.benchmarks import BENCHMARKS
from bench.planning import projection
from bench.planning.commands import job_min
from bench.preflight import data, host, resources, secrets
from bench.rules.check import TIERS, CannotTellError, Check, Checked, Finding, Severity, Subject, Tier, broken, run
from bench.rules.finding import errors


def apply(plan: Plan) -> bool:
    """Return whether the run could be an MLPerf submission of a benchmark with a known evaluation schedule."""
    known = BENCHMARKS.get(plan.config.task.benchmark or "")
    return plan.config.task.submittable and known is not None and known.schedule is not None


def schedule(subject: Subject) -> Iterator[Finding | str]:
    """Yield a warning if the evaluation schedule differs from the benchmark's rules."""
    plan = required(subject.plan, TrainingPlan)
    known = BENCHMARKS[str(plan.config.task.benchmark)]
    assert known.schedule is not None
    gbs = plan.batch.global_batch_size
    required_first, required_interval = known.schedule.first(gbs), known.schedule.interval(gbs)
    first, interval = plan.evaluation.first_step * gbs, plan.evaluation.every_steps * gbs
    if (first, interval) != (required_first, required_interval):
        yield broken(
            "CFG-03",
            f"the first evaluation is after {first:,} samples, with an interval of {interval:,} samples, but the rules "
            f"require {required_first:,} samples and an interval of {required_interval:,} samples",
            "recipe.eval_every_samples, recipe.eval_skip",
            fix=f"set recipe.eval_every_samples={known.schedule.every} recipe.eval_skip=null",
            severity="warning",
        )
    yield f"first at {first:,} samples, then every {interval:,}"


def is_for_closed_division(plan: Plan) -> bool:
    """Return whether a run is meant for the closed division."""
    return isinstance(plan, TrainingPlan) and plan.config.task.division is Division.closed


def closed_division(subject: Subject) -> Iterator[Finding | str]:
    """Yield every difference from the rules of the closed division."""
    for deviation in required(subject.plan, TrainingPlan).submission.deviations:
        key, is_, _ = deviation.partition(" is ")
        yield broken("CFG-14", deviation, key if is_ and " " not in key else "task")
    yield str(subject.plan.config.task.benchmark)


def reference(subject: Subject) -> Iterator[Finding | str]:
    """Yield a warning if MLPerf has no reference convergence point for the global batch size."""
    from bench.mlperf.official import RULESETS
    from bench.mlperf.rcp import rcp_record

    gbs = required(subject.plan, TrainingPlan).batch.global_batch_size
    point = rcp_record(str(subject.plan.config.task.benchmark), gbs, RULESETS[-1])
    if point is None:
        yield broken(
            "CFG-04",
            f"MLPerf ruleset {RULESETS[-1]} has no reference convergence point for a global batch size of {gbs}",
            "recipe.global_batch_size",
            severity="warning",
        )
    else:
        yield f"{point.mean:,.0f} samples on average"


def is_projected(plan: Plan) -> bool:
    """Return whether the trials have a time limit and a projected time.

    The maximum number of steps of a task with a target is no projection: the run ends at the target.
    """
    if not isinstance(plan, TrainingPlan) or plan.config.walltime is None:
        return False
    projected = projection.training_time(plan)
    return projected is not None and not (plan.config.training.has_target and projected.num_published_runs is None)


def walltime(subject: Subject) -> Iterator[Finding | str]:
    """Yield a warning if the estimated time of a trial is longer than its walltime."""
    plan = required(subject.plan, TrainingPlan)
    projected, limit = projection.training_time(plan), plan.config.walltime
    assert projected is not None and limit is not None
    if projected.minutes > limit:
        yield broken(
            "CFG-13",
            f"a trial takes an estimated {projected.minutes:.1f} min, but walltime is {limit} min",
            "walltime",
            fix=_longer(plan, projected.walltime_min),
            severity="warning",
        )
    yield f"{projected.minutes:.1f} of {limit} min"


def _longer(plan: Plan, minutes: int) -> str:
    """Return the fix for a walltime that is too short: the longer one, if the cluster allows jobs of this length."""
    config, slurm = plan.config, plan.config.cluster.slurm
    job = job_min(1 if config.launch.array else config.trials, minutes)
    longest = slurm.max_walltime_min if slurm else None
    if longest is not None and job > longest:
        return (
            f"lower task.training.max_steps, because walltime={minutes} needs a job of {job} min, and this cluster "
            f"allows only {longest} min"
        )
    return f"set walltime={minutes} or more (this includes 10 % for evaluations), or lower task.training.max_steps"


def image(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the image is one of runstop's for another engine, by its name."""
    config = subject.plan.config
    kubernetes = config.cluster.kubernetes
    where = "container.image" if kubernetes is None else "cluster.kubernetes.image"
    if (name := expanded(config.container.image if kubernetes is None else kubernetes.image)) is not None:
        yield from needed.of_name(config, name, where)
    if (wanted := needed.needed(config)) is not None:
        yield f"needs {wanted.name}: containers/build.sh {wanted.build}"


def is_on_other_gpu(plan: Plan) -> bool:
    """Return whether the plan is for a GPU on which runstop was not run."""
    cluster = plan.config.cluster
    return cluster.device is Device.cuda and cluster.gpu is not None and not cluster.gpu.has_run


def other_gpu(subject: Subject) -> Iterator[Finding]:
    """Yield a warning that this plan's kernels, image and telemetry were not run on such a GPU."""
    gpu = subject.plan.config.cluster.gpu
    assert gpu is not None
    yield broken(
        "HW-07",
        f"runstop's kernels, image and telemetry were never tested on the GPU {gpu.name}",
        "cluster.gpu",
        severity="warning",
    )


def runs_program_in_image(plan: Plan) -> bool:
    """Return whether the ranks run the user's program in a container."""
    return plan.config.program is not None and plan.config.container.runtime is not Runtime.none


def reads_model(plan: Plan) -> bool:
    """Return whether a server of ours loads the model, or the client needs the tokenizer of an external server."""
    serving = plan.config.task.serving
    return serving is not None and bool(plan.inputs.checkpoint or serving.server.tokenizer)


def model(subject: Subject) -> Iterator[Finding | str]:
    """Yield the files that are missing in the model's folder."""
    serving, base = subject.plan.config.task.serving, subject.plan.inputs.checkpoint
    own = serving.server.tokenizer if serving else None
    full = expanded(base or own)
    if full is None:
        raise CannotTellError("MODEL is not set")
    configs = [(full, "config.json")] if base else []
    for folder, name in (*configs, (expanded(own) or full, "tokenizer.json")):
        if not (Path(folder) / name).is_file():
            fix = "set MODEL or task.serving.server.model to a folder in Hugging Face format, "
            fix += "or set model.weights=random"
            fix += data.or_download(data.model_command(Path(folder), subject.plan.config.model))
            yield broken("CFG-06", f"the folder has no {name}", folder, fix=fix)
    yield full


def is_started_here(plan: Plan) -> bool:
    """Return whether this machine starts the server, without a container."""
    serving = plan.config.task.serving
    if serving is None or plan.config.cluster.backend.is_elsewhere:
        return False
    is_ours = serving.server.url is None and not serving.server.argv[0].startswith("{")
    return is_ours and plan.config.container.runtime is Runtime.none


def is_under_nsys(plan: Plan) -> bool:
    """Return whether Nsight Systems records ranks on this machine, outside of a container."""
    launch, is_here = plan.config.launch, not plan.config.cluster.backend.is_elsewhere
    return launch.profile is ProfileKind.nsys and is_here and plan.config.container.runtime is Runtime.none


def profiler(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if nsys is not on PATH."""
    if (path := shutil.which("nsys")) is None:
        yield broken(
            "RUN-08",
            "nsys is not on PATH",
            "launch.profile=nsys",
            fix="install Nsight Systems, or set launch.profile=none",
        )
    else:
        yield path


def program(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the server's program is not on PATH."""
    serving = subject.plan.config.task.serving
    assert serving is not None
    program_name = serving.server.argv[0]
    if (path := shutil.which(program_name)) is None:
        yield broken(
            "SRV-01",
            f"{program_name} is not on PATH",
            "task.serving.server.argv",
            fix=f"install {serving.server.name.name}, write the full path of {program_name}, or set server= to another "
            "server",
        )
    else:
        yield path


__all__ = (
    "TIERS",
    "Checked",
    "Finding",
    "Severity",
    "Tier",
    "before_start",
    "broken",
    "findings",
    "inspect",
    "require",
    "require_no_secret",
    "tier",
)

STATIC = (
    Check("paths are set", ("CFG-06",), host.paths),
    Check("container", ("PYX-04",), host.unused_container),
    Check("files of the program in the container", ("RUN-08",), host.unmounted_program, runs_program_in_image),
    Check("no secrets", ("CFG-07",), secrets.secrets),
    Check("closed division", ("CFG-14",), closed_division, is_for_closed_division),
    Check("evaluation schedule", ("CFG-03",), schedule, apply),
    Check("reference convergence point", ("CFG-04",), reference, apply),
    Check("walltime", ("CFG-13",), walltime, is_projected),
    Check("image of the engine", ("RUN-08",), image, needed.runs_in_image),
    Check("Nsight Systems", ("RUN-08",), profiler, is_under_nsys),
    Check("kind of GPU", ("HW-07",), other_gpu, is_on_other_gpu),
    Check("memory of the GPU", ("HW-08",), resources.gpu_memory, resources.needs_known_gpu),
    Check("memory of this machine", ("RUN-03",), resources.memory, resources.estimates_host_memory),
    Check("CPU cores", ("HW-09",), resources.cores, resources.runs_on_this_cpu),
    Check("GPU of the config", ("HW-03",), resources.unused_gpu, resources.has_unused_gpu),
)
"""Checks of the plan alone, for every backend."""
FILES = (
    Check("data", ("CFG-06",), host.rows, host.takes_prepared_rows),
    Check("files of Megatron-LM", ("CFG-06",), host.megatron, host.takes_megatron_files),
    Check("text files", ("CFG-06", "CFG-08"), host.text, data.takes_text),
    Check("checkpoint", ("CFG-06",), host.checkpoint, host.takes_checkpoint),
    Check("tokenizer of the prompts", ("CFG-06",), data.prompts, data.takes_prompts),
    Check("model", ("CFG-06",), model, reads_model),
    Check("server", ("SRV-01",), program, is_started_here),
    Check("data that earlier runs prepared", ("CFG-06",), host.earlier, host.prepares_here),
    Check("disk space for results", ("CFG-05", "CFG-08"), host.outputs),
    Check("shared folders", ("SLU-06",), host.shared, host.leaves_this_machine),
)
"""Checks on the machine that has the run's files."""


def inspect(plan: Plan, words: Sequence[str] = ()) -> list[Finding]:
    """Return the findings of tier laptop, which starts no process and queries no scheduler.

    words: the overrides and options of the command line, for the commands in fixes.
    """
    return findings(tier(plan, "laptop", words))


def before_start(plan: Plan, words: Sequence[str] = ()) -> list[Finding]:
    """Return the findings of tier laptop and, if this machine can query the site's scheduler, of tier login."""
    backend = backends.for_plan(plan)
    tiers: tuple[Tier, ...] = (
        ("laptop", "login") if "login" in backend.tiers and backend.is_available() else ("laptop",)
    )
    return findings(checked for name in tiers for checked in tier(plan, name, words))


def findings(checked: Iterable[Checked]) -> list[Finding]:
    """Return all findings without duplicates, errors first."""
    return sorted(dict.fromkeys(f for one in checked for f in one.findings), key=lambda f: f.severity)


def require(problems: Iterable[Finding], others: Sequence[ConfigError] = ()) -> None:
    """Raise one ConfigError for all errors; warnings are ignored. others: errors that no check has found."""
    failed = [ConfigError(f.what, where=f.where, fix=f.fix, rule=f.rule) for f in errors(problems)]
    if failed := [*failed, *others]:
        raise joined(failed)


def would_refuse(plan: Plan, problems: Iterable[Finding]) -> bool:
    """Return whether a launch refuses the plan for these findings."""
    return not plan.config.launch.force and bool(errors(problems))


def require_no_secret(plan: Plan) -> None:
    """Raise ConfigError if a plan, its script or its arguments contain a secret; called before they are printed."""
    require(item for item in secrets.secrets(backends.for_plan(plan).subject(plan, "laptop")))


def require_valid_manifest(plan: Plan) -> None:
    """Raise ConfigError for what an API server refuses in a plan's manifest, unless launch.force is set."""
    backend = backends.for_plan(plan)
    checks = [one for one in backend.checks(plan).get("laptop", ()) if {"KUB-15", "KUB-16"} & {*one.rules}]
    if checks and not plan.config.launch.force:
        require(findings(run(checks, backend.subject(plan, "laptop"), tier="laptop")))


def tier(plan: Plan, name: Tier, words: Sequence[str] = ()) -> list[Checked]:
    """Run the checks of tier laptop (plan and script) or login (queries to the site's scheduler, and files)."""
    backend = backends.for_plan(plan)
    general = STATIC if name == "laptop" else ()
    files = FILES if name == backend.files_tier else ()
    subject = replace(backend.subject(plan, name), words=tuple(words))
    return run((*general, *backend.checks(plan).get(name, ()), *files), subject, tier=name)
