"""Start a run: check it, make its folder, and run it here or hand it to its queue."""

from pathlib import Path

from bench import backends, preflight
from bench.contract.plan import Plan
from bench.launch import run_local, run_queued
from bench.runs import folder as folders
from bench.watch import trackers


def run(plan: Plan, config_yaml: str, made: list[Path]) -> int:
    """Return 0 when every log proves that its trial did what the task asks; in a queue, when the job is queued.

    The run's folder is entered into `made`, whatever comes of it.

    Raises:
        BenchError: something would fail later, and nothing was started; or a rank failed, or the queue refuses the job.
    """
    trackers.require(plan.config.launch.trackers)
    findings = preflight.before_start(plan)
    if not plan.config.launch.force:
        preflight.require(findings)
    folder = folders.make(plan, config_yaml)
    made.append(folder)
    match backends.of(plan):
        case backends.Queue() as queue:
            return run_queued.run(queue, plan, folder, findings)
        case _:
            return run_local.run(plan, folder)
