"""The doctor: run the checks of each tier, and jobs on nodes, to find out whether a run can start here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench import backends, preflight
from bench.backends.protocol import Job, Queue
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.errors import BenchError, ConfigError
from bench.planning import commands
from bench.preflight import TIERS, Checked, Finding, Tier
from bench.rules import RULES
from bench.rules import finding as findings
from bench.runs import folder as folders
from bench.runs import run as runs
from bench.runs.folder import short

ON_NODES: dict[Tier, str] = {"canary": "one node, inside the container", "nodes": "all nodes, with speed measurements"}
STUCK = ("KUB-01", "KUB-10")
"""Rules of jobs that wait until the user corrects them: the image or something that the container needs is missing."""


def tier_for(plan: Plan, requested: Tier | None) -> Tier:
    """Return the requested tier; by default the highest tier that needs no job.

    Raises:
        ConfigError: this machine cannot run the requested tier.
    """
    backend, cluster = backends.for_plan(plan), plan.config.cluster
    has_site = "login" in backend.tiers
    if requested is None:
        return "login" if has_site and backend.is_available() else "laptop"
    if requested == "laptop" or (requested in backend.tiers and backend.is_available()):
        return requested
    if not has_site:
        raise ConfigError(
            f"--tier {requested} needs a cluster with a queue, but cluster={cluster.name} has no queue",
            where=f"--tier {requested}",
            fix="choose a cluster with a queue, or use --tier laptop",
        )
    raise ConfigError(
        f"--tier {requested} queries {cluster.backend.name}, but this machine cannot query {cluster.backend.name}",
        where=f"--tier {requested}",
        fix="run `runstop doctor` on the login node, or use --tier laptop",
    )


def examine(
    plan: Plan, tier: Tier, *, say: Callable[[str], None] = lambda line: None, words: Sequence[str] = ()
) -> Iterator[list[Checked]]:
    """Yield the outcomes of each tier up to the requested one; jobs are only started if no error was found before.

    words: the overrides and options of the command line, for the commands in fixes.

    Raises:
        SubmitError: a job that checks the nodes cannot be started.
    """
    done: list[Checked] = []
    for now in TIERS[: TIERS.index(tier) + 1]:
        if now not in ON_NODES:
            seen = preflight.tier(plan, now, words)
        elif errors(done) and not plan.config.launch.force:
            seen = [
                Checked(
                    ON_NODES[now],
                    (),
                    now,
                    unknown="not run, because the job of this check would fail with the errors above",
                )
            ]
        else:
            say(f"{now}: submitting a job without trials that checks {ON_NODES[now]}; it may wait in the queue")
            seen = [on_nodes(plan, now)]
        done += seen
        yield seen


def on_nodes(plan: Plan, tier: Tier) -> Checked:
    """Run a job without trials on one node, or on all nodes with speed measurements, and return its findings."""
    from bench.preflight import nodes

    num_nodes = 1 if tier == "canary" else plan.world.num_nodes
    folder, exit_code, stuck = _run_probe(commands.probe(plan, num_nodes=num_nodes, health=tier == "nodes"))
    facts = nodes.load(folder)
    judged = (
        nodes.judge(plan_kinds.load(folder / PLAN), facts) if facts.ranks else []
    )  # without facts, _failed reads the logs
    problems = [replace(finding, tier=tier) for finding in judged]
    seen = f"{', '.join(check.__name__.replace('_', ' ') for check in nodes.CHECKS)}; {short(folder)}"
    if slow := nodes.slow_nodes(facts):
        seen += f"; to exclude the slow nodes: {_queue(plan).exclude_nodes(plan, slow)}"
    if stuck is not None:
        what = f"the job cannot start: {stuck.native_state}: {stuck.reason}"
        problems.append(replace(preflight.broken(stuck.rule, what, str(folder)), tier=tier))
    elif (exit_code or not facts.ranks) and not findings.errors(problems):
        problems.append(_failed(folder, tier))
    return Checked(ON_NODES[tier], (), tier, tuple(problems), seen)


def _run_probe(probe: Plan) -> tuple[Path, int, Job | None]:
    """Run a plan without trials and wait for its end; return its folder, its exit code, and the job if it is stuck."""
    queue, folder = _queue(probe), folders.make(probe, "")
    job = queue.submit(probe, folder)
    try:
        for now in runs.wait(folder):
            if now.rule in STUCK:
                queue.cancel(job)
                return folder, 1, now
    except BaseException:  # the result is not needed any more
        with suppress(BenchError):
            queue.cancel(job)
        raise
    return folder, runs.exit_code(folder), None


def _queue(plan: Plan) -> Queue:
    """Return the backend of the plan as a queue."""
    queue = backends.for_plan(plan)
    assert isinstance(queue, Queue)  # tier_for refuses other backends
    return queue


def _failed(folder: Path, tier: Tier) -> Finding:
    """Diagnose a job that failed without an error in its facts."""
    from bench import diagnosis

    cause = diagnosis.explain([folder], ask=True)
    rule = RULES[cause.rule if cause.rule in RULES else "RUN-10"]
    failure = preflight.broken(rule.id, f"the job failed: {cause.evidence or cause.title}", str(folder), fix=cause.fix)
    return replace(failure, tier=tier)


def errors(checked: Sequence[Checked]) -> list[Finding]:
    """Return the findings that prevent a launch."""
    return findings.errors(preflight.findings(checked))


if __name__ == "__main__":
    raise SystemExit("run this as: runstop doctor")
