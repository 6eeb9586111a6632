"""Look for what would fail later, before it costs an hour in the queue: plan in, findings out, by rule and tier.

A laptop sees the plan and the script; a login node asks this site's Slurm and looks at data, checkpoint and image; a canary
job looks from one node, inside the container, and another one from all of them (`bench.doctor`).
"""

from collections.abc import Iterable
from pathlib import Path

from bench import slurm
from bench.errors import ConfigError
from bench.plan import Plan, expanded
from bench.preflight import arguments, here, image, rules, secrets, site
from bench.preflight.check import TIERS, Check, Checked, Finding, Severity, Subject, Tier, broken, run
from bench.schema import Scheduler

__all__ = (
    "TIERS",
    "Checked",
    "Finding",
    "Severity",
    "Tier",
    "before_submission",
    "broken",
    "findings",
    "inspect",
    "laptop",
    "login",
    "require",
)

STATIC = (
    Check("paths are set", ("CFG-06",), here.paths),
    Check("image and container", ("PYX-04", "PYX-06"), arguments.container),
    Check("mounts", ("PYX-05", "PYX-12", "CFG-06"), arguments.mounts),
    Check("no secrets", ("CFG-07",), secrets.secrets),
    Check("evaluation schedule", ("CFG-03",), rules.schedule, rules.apply),
    Check("reference for the batch size", ("CFG-04",), rules.reference, rules.apply),
)
SLURM_STATIC = (
    Check("arguments for sbatch", ("CFG-09", "PYX-05", "PYX-10"), arguments.contradictions),
    Check("time limit", ("SLU-02",), arguments.walltime),
    Check("GPU type", ("SLU-01",), arguments.gpu_type),
)
HERE = (
    Check("data", ("CFG-06",), here.rows, here.takes_prepared_rows),
    Check("checkpoint", ("CFG-06",), here.checkpoint, here.takes_checkpoint),
    Check("room for results", ("CFG-05", "CFG-08"), here.outputs),
)
LOCAL = (Check("port", ("NCC-05",), here.network, here.insists_on_port),)
SITE = (
    Check("partition", ("SLU-02", "SLU-09"), site.partition),
    Check("GPUs", ("SLU-01", "SLU-02"), site.gpus),
    Check("CPUs", ("SLU-02",), site.cpus),
    Check("account and QOS", ("SLU-02",), site.accounts),
    Check("sbatch --test-only", ("SLU-01", "SLU-02"), site.accepted),
    Check("Pyxis", ("PYX-02",), image.plugin, image.in_container),
    Check("container flags", ("PYX-01",), image.flags, image.has_bare_flags),
    Check("accounting", ("SLU-04",), site.accounting),
    Check("folders that nodes see", ("SLU-06",), here.shared),
    Check("image file", ("ENR-07", "ENR-08", "ENR-11"), image.file, image.is_file),
    Check("registry credentials", ("ENR-01",), image.credentials, image.is_in_registry),
)


def inspect(plan: Plan) -> list[Finding]:
    """Return every rule that is broken as far as this machine alone can tell: no process is started."""
    return findings(laptop(plan))


def before_submission(plan: Plan) -> list[Finding]:
    """Return what `inspect` finds and, on a login node, what the site has against the job."""
    return findings([*laptop(plan), *(login(plan) if slurm.is_here() else [])])


def findings(checked: Iterable[Checked]) -> list[Finding]:
    """Return all findings, each once, errors first."""
    return sorted(dict.fromkeys(f for one in checked for f in one.findings), key=lambda f: f.severity)


def require(found: Iterable[Finding]) -> None:
    """Raise ConfigError on the first error; warnings stop nothing."""
    for f in found:
        if f.severity == "error":
            raise ConfigError(f"{f.rule}: {f.what}", where=f.where, fix=f.fix)


def laptop(plan: Plan) -> list[Checked]:
    """Return what plan and script say; for a run on this machine, also what it holds."""
    is_local = plan.config.cluster.scheduler is Scheduler.local
    checks = (*STATIC, *HERE, *LOCAL) if is_local else (*STATIC, *SLURM_STATIC)
    script, words = ("", []) if is_local else _written(plan)
    subject = Subject(plan, script, tuple(words))
    return run(checks, subject, tier="laptop")


def login(plan: Plan) -> list[Checked]:
    """Return what this site says; its Slurm is asked everything at once."""
    script, words = _written(plan)
    subject = site.ask_all(plan, script, words, probes=[p for p in (image.probe(plan, script),) if p])
    return run((*SITE, *HERE), subject, tier="login")


def _written(plan: Plan) -> tuple[str, list[str]]:
    """Return the script, and the arguments that sbatch gets beside it."""
    from bench import render, submit

    folder = Path(plan.config.launch.folder or expanded(plan.config.cluster.paths.logs) or "/")
    return render.script(plan), submit.sbatch_arguments(plan, folder)
