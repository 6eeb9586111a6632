"""Will this run start here? One sheet per tier: what was checked, what is broken, what to do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import backends, preflight
from bench.backends.protocol import Job, Queue
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.errors import BenchError, ConfigError
from bench.planning import commands
from bench.preflight import TIERS, Checked, Finding, Tier
from bench.rules import RULES
from bench.runs import folder as folders
from bench.runs import run as runs
from bench.runs.folder import short

ON_NODES: dict[Tier, str] = {"canary": "one node, where the ranks run", "nodes": "all nodes, measuring their speed"}
STUCK = ("KUB-01", "KUB-10")
"""Rules behind which a job waits until somebody corrects it: an image that is not there, what a container needs."""


def tier_for(plan: Plan, asked: Tier | None) -> Tier:
    """Return how far to look: as asked, else as far as this machine can tell by itself.

    Raises:
        ConfigError: there is nobody to ask.
    """
    backend, cluster = backends.of(plan), plan.config.cluster
    has_site = "login" in backend.tiers
    if asked is None:
        return "login" if has_site and backend.is_here() else "laptop"
    if asked == "laptop" or (asked in backend.tiers and backend.is_here()):
        return asked
    what = (
        f"this machine cannot ask {cluster.backend.name}" if has_site else f"cluster={cluster.name} has no queue to ask"
    )
    fix = "run it on the login node" if has_site else "choose a cluster with a queue"
    raise ConfigError(f"{what}, and tier {asked} needs it", where=f"--tier {asked}", fix=f"{fix}, or --tier laptop")


def examine(plan: Plan, tier: Tier, *, say: Callable[[str], None] = lambda line: None) -> Iterator[list[Checked]]:
    """Yield what comes of each tier's checks, up to the one asked for; jobs are only started where all is well so far.

    Raises:
        SubmitError: a job that should look at the nodes cannot be started.
    """
    done: list[Checked] = []
    for now in TIERS[: TIERS.index(tier) + 1]:
        if now not in ON_NODES:
            seen = preflight.tier(plan, now)
        elif errors(done) and not plan.config.launch.force:
            seen = [Checked(ON_NODES[now], (), now, unknown="what is broken above would stop its job")]
        else:
            say(f"{now}: a job without trials looks from {ON_NODES[now]}; this waits for the queue")
            seen = [on_nodes(plan, now)]
        done += seen
        yield seen


def on_nodes(plan: Plan, tier: Tier) -> Checked:
    """Return what a job without trials finds on one node, or on all of them with their speed."""
    from bench.preflight import nodes

    num_nodes = 1 if tier == "canary" else plan.world.num_nodes
    folder, exit_code, stuck = _probed(commands.probe(plan, num_nodes=num_nodes, health=tier == "nodes"))
    facts = nodes.load(folder)
    judged = nodes.judge(plan_kinds.load(folder / PLAN), facts) if facts.ranks else []  # else its logs say more
    found = [replace(finding, tier=tier) for finding in judged]
    seen = f"{', '.join(check.__name__.replace('_', ' ') for check in nodes.CHECKS)}; {short(folder)}"
    if slow := nodes.slow_nodes(facts):
        seen += f"; without the slow ones: {_queue(plan).without(plan, slow)}"
    if stuck is not None:
        what = f"the job cannot start, {stuck.word}: {stuck.reason}"
        found.append(replace(preflight.broken(stuck.rule, what, str(folder)), tier=tier))
    elif (exit_code or not facts.ranks) and not any(finding.severity == "error" for finding in found):
        found.append(_failed(folder, tier))
    return Checked(ON_NODES[tier], (), tier, tuple(found), seen)


def _probed(looking: Plan) -> tuple[Path, int, Job | None]:
    """Run a plan without trials and wait for its end; return its folder and exit code, and a job that cannot start."""
    queue, folder = _queue(looking), folders.make(looking, "")
    job = queue.submit(looking, folder)
    try:
        for now in runs.wait(folder):
            if now.rule in STUCK:
                queue.cancel(job)
                return folder, 1, now
    except BaseException:  # nobody waits for it any more
        with suppress(BenchError):
            queue.cancel(job)
        raise
    return folder, runs.exit_code(folder), None


def _queue(plan: Plan) -> Queue:
    """Return the queue that takes the jobs which look at nodes."""
    queue = backends.of(plan)
    assert isinstance(queue, Queue)  # or tier_for has refused
    return queue


def _failed(folder: Path, tier: Tier) -> Finding:
    """Return why a job failed that found nothing wrong."""
    from bench import diagnosis

    said = diagnosis.explain([folder], ask=True)
    rule = RULES[said.rule if said.rule in RULES else "RUN-10"]
    found = preflight.broken(rule.id, f"the job failed: {said.evidence or said.title}", str(folder), fix=said.fix)
    return replace(found, tier=tier)


def errors(checked: Sequence[Checked]) -> list[Finding]:
    """Return what stops a launch."""
    return [f for f in preflight.findings(checked) if f.severity == "error"]


def to_json(plan: Plan, tiers: Sequence[Sequence[Checked]]) -> dict[str, Any]:
    """Return everything as one object."""
    every = [one for checked in tiers for one in checked]
    return {
        "plan": plan.name,
        "tier": every[-1].tier,
        "fine": not errors(every),
        "findings": [asdict(finding) for finding in preflight.findings(every)],
        "checks": [{**asdict(one), "findings": len(one.findings)} for one in every],
    }


if __name__ == "__main__":
    raise SystemExit("a verb: python -m bench doctor")
