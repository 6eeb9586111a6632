"""Whether a run that could be a submission is evaluated by the rules, and has a reference to be compared with."""

from collections.abc import Iterator

from bench.contract.plan import Plan, required_training
from bench.mlperf.benchmarks import BENCHMARKS
from bench.rules.check import Finding, Subject, broken


def apply(plan: Plan) -> bool:
    """Return whether the run could be a submission of a benchmark whose schedule is known."""
    known = BENCHMARKS.get(plan.config.task.benchmark or "")
    return plan.config.task.submittable and known is not None and known.schedule is not None


def schedule(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether evaluations do not stand where the benchmark's rules have them."""
    plan = required_training(subject.plan)
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

    gbs = required_training(subject.plan).batch.global_batch_size
    point = rcp_record(str(subject.plan.config.task.benchmark), gbs, RULESETS[-1])
    if point is None:
        what = f"no reference convergence point for a global batch size of {gbs} (ruleset {RULESETS[-1]})"
        yield broken("CFG-04", what, "recipe.global_batch_size", severity="warning")
    else:
        yield f"{point.mean:,.0f} samples on average"
