"""Echo words, once per rank: `python -m jobs.tasks.echo PLAN --trial K`. Rank 0 writes the log; the others end."""

import time

from bench.contract import mllog
from bench.contract.echo_plan import EchoPlan
from jobs.ranks import program
from jobs.tasks import describe


def main() -> None:
    with program.begun("jobs.tasks.echo", __doc__, EchoPlan) as begun:
        if begun.who.rank == 0:
            run(begun)


def run(begun: program.Begun[EchoPlan]) -> None:
    """Describe the run, and echo each word between run_start and run_stop."""
    plan, log = begun.plan, begun.log
    log.start(mllog.INIT_START)
    cluster = plan.config.cluster
    described = {
        mllog.SUBMISSION_ORG: cluster.org,
        mllog.SUBMISSION_PLATFORM: cluster.platform,
        mllog.SEED: begun.trial.seed,
        mllog.CONFIG_FILENAME: f"task/{plan.config.task.name}.yaml",
        **describe.system(plan),
        "echo_words": plan.words,
    }
    for key, value in described.items():
        if value is not None:
            log.event(key, value)
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    echo = plan.config.task.echo
    assert echo is not None
    for text in (text for text in plan.words if text != echo.loses):
        began_s = time.monotonic()
        time.sleep(0.01)
        log.event("echo", text, seconds=time.monotonic() - began_s)
    log.finish(mllog.SUCCESS)


if __name__ == "__main__":
    main()
