"""Look for what would fail later, before it costs an hour in the queue: plan in, findings out, by rule and tier.

A laptop sees the plan and the script; a login node asks this site's Slurm and looks at data, checkpoint and image; a canary
job looks from one node, inside the container, and another one from all of them (`bench.preflight.doctor`).
"""

from collections.abc import Iterable
from pathlib import Path

from bench.backends.slurm import argument_checks, client, pyxis_checks, site_checks
from bench.contract.plan import Plan, expanded
from bench.contract.schema import Scheduler
from bench.errors import ConfigError
from bench.preflight import host, schedule, secrets
from bench.rules.check import TIERS, Check, Checked, Finding, Severity, Subject, Tier, broken, run

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
    Check("paths are set", ("CFG-06",), host.paths),
    Check("image and container", ("PYX-04", "PYX-06"), argument_checks.container),
    Check("mounts", ("PYX-05", "PYX-12", "CFG-06"), argument_checks.mounts),
    Check("no secrets", ("CFG-07",), secrets.secrets),
    Check("evaluation schedule", ("CFG-03",), schedule.schedule, schedule.apply),
    Check("reference for the batch size", ("CFG-04",), schedule.reference, schedule.apply),
)
SLURM_STATIC = (
    Check("arguments for sbatch", ("CFG-09", "PYX-05", "PYX-10"), argument_checks.contradictions),
    Check("time limit", ("SLU-02",), argument_checks.walltime),
    Check("GPU type", ("SLU-01",), argument_checks.gpu_type),
)
HERE = (
    Check("data", ("CFG-06",), host.rows, host.takes_prepared_rows),
    Check("checkpoint", ("CFG-06",), host.checkpoint, host.takes_checkpoint),
    Check("room for results", ("CFG-05", "CFG-08"), host.outputs),
)
LOCAL = (
    Check("packages of the ranks", ("RUN-08",), host.packages),
    Check("port", ("NCC-05",), host.network, host.insists_on_port),
)
SITE = (
    Check("partition", ("SLU-02", "SLU-09"), site_checks.partition),
    Check("GPUs", ("SLU-01", "SLU-02"), site_checks.gpus),
    Check("CPUs", ("SLU-02",), site_checks.cpus),
    Check("account and QOS", ("SLU-02",), site_checks.accounts),
    Check("sbatch --test-only", ("SLU-01", "SLU-02"), site_checks.accepted),
    Check("Pyxis", ("PYX-02",), pyxis_checks.plugin, pyxis_checks.in_container),
    Check("container flags", ("PYX-01",), pyxis_checks.flags, pyxis_checks.has_bare_flags),
    Check("accounting", ("SLU-04",), site_checks.accounting),
    Check("folders that nodes see", ("SLU-06",), host.shared),
    Check("image file", ("ENR-07", "ENR-08", "ENR-11"), pyxis_checks.file, pyxis_checks.is_file),
    Check("registry credentials", ("ENR-01",), pyxis_checks.credentials, pyxis_checks.is_in_registry),
)


def inspect(plan: Plan) -> list[Finding]:
    """Return every rule that is broken as far as this machine alone can tell: no process is started."""
    return findings(laptop(plan))


def before_submission(plan: Plan) -> list[Finding]:
    """Return what `inspect` finds and, on a login node, what the site has against the job."""
    return findings([*laptop(plan), *(login(plan) if client.is_here() else [])])


def findings(checked: Iterable[Checked]) -> list[Finding]:
    """Return all findings, each once, errors first."""
    return sorted(dict.fromkeys(f for one in checked for f in one.findings), key=lambda f: f.severity)


def require(found: Iterable[Finding]) -> None:
    """Raise ConfigError on the first error; warnings stop nothing."""
    for f in found:
        if f.severity == "error":
            raise ConfigError(f.what, where=f.where, fix=f.fix, rule=f.rule)


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
    subject = site_checks.ask_all(plan, script, words, probes=[p for p in (pyxis_checks.probe(plan, script),) if p])
    return run((*SITE, *HERE), subject, tier="login")


def _written(plan: Plan) -> tuple[str, list[str]]:
    """Return the script, and the arguments that sbatch gets beside it."""
    from bench.backends.slurm import arguments, script

    folder = Path(plan.config.launch.folder or expanded(plan.config.cluster.paths.logs) or "/")
    return script.script(plan), arguments.sbatch_arguments(plan, folder)
