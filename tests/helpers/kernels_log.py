"""Logs of kernels tasks as a trial writes them, with made-up times."""

from collections.abc import Callable, Collection
from pathlib import Path

from bench.contract import codec, mllog
from bench.contract.kernels import Point
from bench.contract.plan_kinds import KernelsPlan


def write(
    plan: KernelsPlan,
    path: Path,
    *,
    time_us: Callable[[Point], float] = lambda point: 100.0,
    without: Collection[str] = (),
    failed: Collection[str] = (),
    status: str = mllog.SUCCESS,
) -> Path:
    """Write the plan's first trial: see `fill`."""
    with mllog.Writer(path) as log:
        fill(plan, log, plan.trials[0].seed, time_us=time_us, without=without, failed=failed, status=status)
    return path


def fill(
    plan: KernelsPlan,
    log: mllog.Writer,
    seed: int,
    *,
    time_us: Callable[[Point], float] = lambda point: 100.0,
    without: Collection[str] = (),
    failed: Collection[str] = (),
    status: str = mllog.SUCCESS,
) -> None:
    """Write the records of a trial: each point took `time_us` on the slowest rank, p10 a tenth less, p90 a tenth more.

    Points named in `without` have no record, those in `failed` one that says so.
    """
    log.start(mllog.INIT_START)
    log.event(mllog.SUBMISSION_PLATFORM, "made up")
    log.event(mllog.SEED, seed)
    log.event(mllog.CONFIG_FILENAME, f"task/{plan.config.task.name}.yaml")
    names, kernels = [point.name for point in plan.points], plan.config.task.kernels
    assert kernels is not None
    log.event(mllog.KERNELS_REQUESTED, names, tolerance=kernels.tolerance)
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    for point in plan.points:
        about = codec.plain(point)
        name, time = about.pop("name"), time_us(point)
        if name in failed:
            log.event(mllog.KERNEL_FAILED, name, reason="rank 0: no such kernel")
        elif name not in without:
            times = {"median_us": time, "p10_us": 0.9 * time, "p90_us": 1.1 * time}
            log.event(mllog.KERNEL_MEASURED, name, **about, **times, n=50, rank=0, implementation="made up")
    log.finish(status)
