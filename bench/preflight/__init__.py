"""Look for what would fail later, before it costs an hour in the queue: plan in, findings out, by rule and tier.

A laptop sees the plan and the script; a login node asks this site's Slurm and looks at data, checkpoint and image; a
canary job looks from one node, inside the container, and another one from all of them (`bench.preflight.doctor`).
"""

from collections.abc import Iterable

from bench import backends
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.preflight import host, schedule, secrets, serving, text_files
from bench.rules.check import TIERS, Check, Checked, Finding, Severity, Tier, broken, run

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
    Check("no secrets", ("CFG-07",), secrets.secrets),
    Check("evaluation schedule", ("CFG-03",), schedule.schedule, schedule.apply),
    Check("reference for the batch size", ("CFG-04",), schedule.reference, schedule.apply),
)
"""What the plan says, whatever runs it."""
FILES = (
    Check("data", ("CFG-06",), host.rows, host.takes_prepared_rows),
    Check("files of text", ("CFG-06", "CFG-08"), host.text, text_files.takes_text),
    Check("checkpoint", ("CFG-06",), host.checkpoint, host.takes_checkpoint),
    Check("tokenizer of the prompts", ("CFG-06",), text_files.prompts, text_files.takes_prompts),
    Check("model", ("CFG-06",), serving.model, serving.reads_model),
    Check("server", ("SRV-01",), serving.program, serving.is_started_here),
    Check("room for results", ("CFG-05", "CFG-08"), host.outputs),
    Check("folders that nodes see", ("SLU-06",), host.shared, host.leaves_this_machine),
)
"""Of the machine on which the run's files lie."""


def inspect(plan: Plan) -> list[Finding]:
    """Return every rule that is broken as far as this machine alone can tell: no process is started."""
    return findings(tier(plan, "laptop"))


def before_start(plan: Plan) -> list[Finding]:
    """Return what `inspect` finds and, where the site can be asked, what it has against the job."""
    backend = backends.of(plan)
    tiers: tuple[Tier, ...] = ("laptop", "login") if "login" in backend.tiers and backend.is_here() else ("laptop",)
    return findings(checked for name in tiers for checked in tier(plan, name))


def findings(checked: Iterable[Checked]) -> list[Finding]:
    """Return all findings, each once, errors first."""
    return sorted(dict.fromkeys(f for one in checked for f in one.findings), key=lambda f: f.severity)


def require(found: Iterable[Finding]) -> None:
    """Raise ConfigError on the first error; warnings stop nothing."""
    for f in found:
        if f.severity == "error":
            raise ConfigError(f.what, where=f.where, fix=f.fix, rule=f.rule)


def require_no_secret(plan: Plan) -> None:
    """Raise ConfigError if a secret stands in a plan, its script or the arguments: for what is printed to be kept."""
    require(item for item in secrets.secrets(backends.of(plan).subject(plan, "laptop")))


def tier(plan: Plan, name: Tier) -> list[Checked]:
    """Return what comes of one tier's checks: laptop (plan and script) or login (this site, asked all at once)."""
    backend = backends.of(plan)
    general = STATIC if name == "laptop" else ()
    files = FILES if name == backend.files_tier else ()
    return run((*general, *backend.checks(plan).get(name, ()), *files), backend.subject(plan, name), tier=name)
