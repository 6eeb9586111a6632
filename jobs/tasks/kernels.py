"""Measure kernels and links, once per rank: `python -m jobs.tasks.kernels PLAN --trial K`. It writes the log."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import codec, mllog
from bench.contract.kernels import Kernels
from bench.contract.plan import Trial
from bench.contract.plan_kinds import KernelsPlan
from bench.errors import ConfigError
from jobs.ranks import process_group, program
from jobs.ranks.identity import Rank
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import SAVING, Alive, Watchdog, ignore_progress
from jobs.tasks import describe

if TYPE_CHECKING:
    from jobs.kernels.measure import PointResult


def main() -> None:
    with program.begun("jobs.tasks.kernels", __doc__, KernelsPlan) as begun:
        run(begun.plan, begun.trial, begun.who, begun.log, begun.folder, watchdog=begun.watchdog())


def run(
    plan: KernelsPlan, trial: Trial, who: Rank, log: mllog.Writer, folder: Path, *, watchdog: Watchdog | None = None
) -> None:
    """Join the ranks, log the measured system, and measure every point from run_start to run_stop."""
    kernels = required(plan)
    log.start(mllog.INIT_START)
    device = process_group.join(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    import torch

    from jobs.kernels import measure

    torch.manual_seed(trial.seed + who.rank)
    if who.rank == 0:  # it runs git
        describe_kernels(plan, trial, kernels, log)
    measure.all_gather(None)
    alive: Alive = ignore_progress
    timeout_s = float(measure.COLLECTIVE_TIMEOUT_S)
    if watchdog is not None:
        alive, timeout_s = watchdog.alive, watched(watchdog, plan, kernels, who)
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    for outcome in measure.measure_points(plan.points, kernels, device, alive=alive, timeout_s=timeout_s):
        write(outcome, log)
    alive(SAVING, len(plan.points), None)
    measure.all_gather(None)
    log.finish(mllog.SUCCESS)
    telemetry.log(log)
    process_group.shut_down()


def watched(watchdog: Watchdog, plan: KernelsPlan, kernels: Kernels, who: Rank) -> float:
    """Start the watchdog; return a time-out for collectives that is longer than its limit."""
    from jobs.kernels import measure

    watchdog.start(process_group.node_names(who))
    limit_s = watchdog.expect_points(measure.max_silence_s(plan.points, kernels, who.rank))
    process_group.outlast(limit_s)
    return process_group.SLOWER * limit_s


def required(plan: KernelsPlan) -> Kernels:
    """Return the kernel settings of the task.

    Raises:
        ConfigError: the plan has none.
    """
    if plan.config.task.kernels is None:
        raise ConfigError(
            "the plan has no block task.kernels", where="task.kernels", fix="use the plan of a task of kind kernels"
        )
    return plan.config.task.kernels


def describe_kernels(plan: KernelsPlan, trial: Trial, kernels: Kernels, log: mllog.Writer) -> None:
    """Log the measured system, its software and the requested points."""
    cluster = plan.config.cluster
    described = {
        mllog.SUBMISSION_ORG: cluster.org,
        mllog.SUBMISSION_PLATFORM: cluster.platform,
        mllog.SEED: trial.seed,
        mllog.CONFIG_FILENAME: f"task/{plan.config.task.name}.yaml",
        **describe.system(plan),
        "software": versions(),
    }
    for key, value in described.items():
        if value is not None:
            log.event(key, value)
    log.event(mllog.KERNELS_REQUESTED, [point.name for point in plan.points], tolerance=kernels.tolerance)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute the kernels."""
    import torch

    software: dict[str, str] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        software |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        software["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return software


def write(outcome: "PointResult", log: mllog.Writer) -> None:
    """Log the result of a point, or why it failed."""
    name = outcome.point.name
    if outcome.measured is None:
        log.event(mllog.KERNEL_FAILED, name, reason=outcome.reason)
        return
    metadata: dict[str, Any] = codec.plain(outcome.point)
    metadata.pop("name")
    log.event(mllog.KERNEL_MEASURED, name, **metadata, **outcome.measured)


if __name__ == "__main__":
    main()
