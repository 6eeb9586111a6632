"""Look for what would fail later, before it costs an hour in the queue: plan in, findings out, by rule and tier.

A laptop sees the plan and the script; a login node asks this site's Slurm and looks at data, checkpoint and image; a
canary job looks from one node, inside the container, and another one from all of them (`bench.preflight.doctor`).
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import backends
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan, required
from bench.contract.plan_paths import expanded
from bench.contract.schema import Runtime
from bench.errors import ConfigError
from bench.mlperf.benchmarks import BENCHMARKS
from bench.preflight import data, host, secrets
from bench.rules.check import TIERS, CannotTellError, Check, Checked, Finding, Severity, Subject, Tier, broken, run


def apply(plan: Plan) -> bool:
    """Return whether the run could be a submission of a benchmark whose schedule is known."""
    known = BENCHMARKS.get(plan.config.task.benchmark or "")
    return plan.config.task.submittable and known is not None and known.schedule is not None


def schedule(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether evaluations do not stand where the benchmark's rules have them."""
    plan = required(subject.plan, TrainingPlan)
    known = BENCHMARKS[str(plan.config.task.benchmark)]
    assert known.schedule is not None
    gbs = plan.batch.global_batch_size
    wanted = (known.schedule.first(gbs), known.schedule.interval(gbs))
    planned = (plan.evaluation.first_step * gbs, plan.evaluation.every_steps * gbs)
    if planned != wanted:
        what = "first at {:,} samples, then every {:,}; the rules say {:,} and {:,}".format(*planned, *wanted)
        where = "recipe.eval_every_samples, recipe.eval_skip"
        fix = f"set recipe.eval_every_samples={known.schedule.every} recipe.eval_skip=null"
        yield broken("CFG-03", what, where, fix=fix, severity="warning")
    yield "first at {:,} samples, then every {:,}".format(*planned)


def reference(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether no reference convergence point belongs to the global batch size."""
    from bench.mlperf.official import RULESETS
    from bench.mlperf.rcp import rcp_record

    gbs = required(subject.plan, TrainingPlan).batch.global_batch_size
    point = rcp_record(str(subject.plan.config.task.benchmark), gbs, RULESETS[-1])
    if point is None:
        what = f"no reference convergence point for a global batch size of {gbs} (ruleset {RULESETS[-1]})"
        yield broken("CFG-04", what, "recipe.global_batch_size", severity="warning")
    else:
        yield f"{point.mean:,.0f} samples on average"


def reads_model(plan: Plan) -> bool:
    """Return whether a server loads the site's model, or the client reads the tokenizer of one that runs elsewhere."""
    serving = plan.config.task.serving
    return serving is not None and bool(plan.inputs.checkpoint or serving.server.tokenizer)


def model(subject: Subject) -> Iterator[Finding | str]:
    """Yield what the model's folder lacks."""
    serving, base = subject.plan.config.task.serving, subject.plan.inputs.checkpoint
    own = serving.server.tokenizer if serving else None
    full = expanded(base or own)
    if full is None:
        raise CannotTellError("MODEL is not set")
    wanted = [(full, "config.json")] if base else []
    for folder, name in (*wanted, (expanded(own) or full, "tokenizer.json")):
        if not (Path(folder) / name).is_file():
            fix = "name a folder of Hugging Face's format by MODEL or task.serving.server.model, "
            fix += "or set model.weights=random"
            yield broken("CFG-06", f"there is no {name}", folder, fix=fix)
    yield full


def is_started_here(plan: Plan) -> bool:
    """Return whether a server is started on this machine, in no container."""
    serving = plan.config.task.serving
    if serving is None or plan.config.cluster.backend.is_elsewhere:
        return False
    is_ours = serving.server.url is None and not serving.server.argv[0].startswith("{")
    return is_ours and plan.config.container.runtime is Runtime.none


def program(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the program of the server is missing."""
    serving = subject.plan.config.task.serving
    assert serving is not None
    name = serving.server.argv[0]
    if (found := shutil.which(name)) is None:
        fix = f"install {serving.server.name.name}, name the path of {name}, or choose another server="
        yield broken("SRV-01", f"{name} is not on PATH", "task.serving.server.argv", fix=fix)
    else:
        yield found


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
    Check("evaluation schedule", ("CFG-03",), schedule, apply),
    Check("reference for the batch size", ("CFG-04",), reference, apply),
)
"""What the plan says, whatever runs it."""
FILES = (
    Check("data", ("CFG-06",), host.rows, host.takes_prepared_rows),
    Check("files of text", ("CFG-06", "CFG-08"), host.text, data.takes_text),
    Check("checkpoint", ("CFG-06",), host.checkpoint, host.takes_checkpoint),
    Check("tokenizer of the prompts", ("CFG-06",), data.prompts, data.takes_prompts),
    Check("model", ("CFG-06",), model, reads_model),
    Check("server", ("SRV-01",), program, is_started_here),
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
