"""Run MLPerf's own RCP checker, unchanged, on a set of logs: does the set converge like the reference?

A reference convergence point (RCP) is how long the reference trains at one global batch size. Like the compliance
checker, the RCP checker builds paths of files from values in the logs, so this module compares them with the existing
files first.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from bench.mlperf.official import contained, num_dropped, require_ruleset, too_slow

_REFERENCES = "pruned_rcps"
"""The points that the package checker uses: without points that converge more slowly than their neighbours."""
_SAMPLES_COUNT = frozenset(
    (
        *("llama2_70b_lora", "flux1", "llama31_405b", "llama31_8b"),
        *("gpt_oss_20b", "deepseekv3_671b", "qwen35_397b_grpo", "dlrmv4"),
    )
)
"""Benchmarks whose convergence the RCP checker reads from samples_count, with its names."""
_NEVER = 1e9
"""The RCP checker's count for a run that did not converge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rcp:
    """A reference convergence point: how long the reference trains at one global batch size."""

    benchmark: str
    global_batch_size: int
    ruleset: str
    unit: str
    """What the point counts, as a metadata key of eval_accuracy: samples_count, epoch_num or step_num."""
    mean: float
    """Olympic mean of the reference runs."""
    stdev: float
    min_mean: float
    """A submission with a lower mean converges too fast and is rejected."""
    interpolated: bool
    """Whether the point is interpolated between the points of two other batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RcpVerdict:
    """The RCP checker's verdict on a set of logs. `passed` is None if there is no reference."""

    ruleset: str
    passed: bool | None
    message: str
    counts: tuple[float | None, ...] = ()
    """The count of each log, in the unit of the reference. None if the run did not converge. Empty if the checker
    stopped before it counted."""
    mean: float | None = None
    """Olympic mean of the counts."""
    factor: float | None = None
    """The time to train is multiplied by this factor, which is at least 1. None unless `passed` is true."""
    record: Rcp | None = None
    """The reference point. None if there is no reference, or if all reference points have a larger batch size."""


def rcp_verdict(logs: Sequence[Path | str], *, benchmark: str | None, ruleset: str) -> RcpVerdict:
    """Run the RCP checker on the logs of one benchmark; safe for logs of unknown origin.

    It takes all logs as one submission and drops the runs that converged fastest and slowest. Its lowest accepted mean
    assumes the number of runs that the rules require, even if there are fewer.
    """
    require_ruleset(ruleset)
    if benchmark not in (known := _rcp_benchmarks(ruleset)):
        message = f"ruleset {ruleset} has no reference convergence points for this benchmark"
        return RcpVerdict(ruleset=ruleset, passed=None, message=message)
    if len(logs) <= 2 * num_dropped(benchmark):
        message = (
            f"the RCP checker drops the {num_dropped(benchmark)} fastest and slowest runs, so it needs more than "
            f"{2 * num_dropped(benchmark)} runs"
        )
        return RcpVerdict(ruleset=ruleset, passed=None, message=message)
    try:
        if refusal := next(filter(None, map(too_slow, logs)), None):
            return RcpVerdict(ruleset=ruleset, passed=False, message=refusal)
        return _compare(logs, known, ruleset)
    except Exception as error:  # noqa: BLE001 - a record without a field, or a value of an unexpected type, stops it
        return RcpVerdict(ruleset=ruleset, passed=False, message=f"the official RCP checker stopped: {error!r:.200}")


def _compare(logs: Sequence[Path | str], known: Sequence[str], ruleset: str) -> RcpVerdict:
    from mlperf_logging.rcp_checker import rcp_checker

    with tempfile.TemporaryDirectory() as scratch, contained(rcp_checker):
        links = [Path(scratch, f"result_{number}.txt") for number in range(len(logs))]
        for link, log in zip(links, logs, strict=True):
            link.symlink_to(Path(log).absolute())
        gbs, epochs, benchmark = rcp_checker.get_submission_epochs(links, ruleset, False)
        if benchmark not in known:  # the official reader finds the benchmark differently from ours
            message = (
                "the logs have different batch sizes or benchmarks, or a benchmark without reference convergence points"
            )
            return RcpVerdict(ruleset=ruleset, passed=False, message=message)
        # Without set_scaling it would search for scaling.json in the root folder and delete it.
        passed, message, factor = rcp_checker.check_directory(
            scratch, "training", ruleset, False, False, rcp_pass=_REFERENCES, set_scaling=True
        )
    counts = tuple(float(count) if count < _NEVER else None for count in epochs or ())
    if len(logs) != (usual := rcp_checker.submission_runs["training"][benchmark]):
        message += f"; this limit is for {usual} runs, but there are {len(logs)} logs"
    return RcpVerdict(
        ruleset=ruleset,
        passed=passed,
        message=message,
        counts=counts,
        mean=_olympic(counts, num_dropped(benchmark)),
        factor=float(factor) if passed else None,
        record=rcp_record(benchmark, gbs, ruleset),
    )


def _olympic(counts: Sequence[float | None], dropped: int) -> float | None:
    """Return the mean of the counts without the dropped ones; None counts as the slowest."""
    in_mean = sorted(math.inf if count is None else count for count in counts)[dropped:-dropped]
    return mean if in_mean and math.isfinite(mean := fmean(in_mean)) else None


@cache
def rcp_record(benchmark: str, global_batch_size: int, ruleset: str) -> Rcp | None:
    """Return the reference convergence point of a batch size, from the official checker, which may interpolate it.

    None below the smallest and above the largest batch size with a point, and for a benchmark without points.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    if benchmark not in _rcp_benchmarks(ruleset):
        return None
    with tempfile.TemporaryDirectory() as scratch, contained(rcp_checker):
        checker = rcp_checker.RCP_Checker("training", ruleset, benchmark, False)
        point = checker._find_rcp(global_batch_size, _REFERENCES)
        neighbours = [
            find(global_batch_size, _REFERENCES) for find in (checker._find_top_min_rcp, checker._find_bottom_max_rcp)
        ]
        between = point is None and None not in neighbours
        record = checker._create_interp_rcp(global_batch_size, *neighbours)[1] if between else point
        if record is None:
            return None
        reference = [record["RCP Mean"]] * 9
        checker._eval_submission_record(record, reference, scratch)  # some benchmarks get their tolerance only here
    return Rcp(
        benchmark=benchmark,
        global_batch_size=global_batch_size,
        ruleset=ruleset,
        unit=_unit(benchmark, ruleset),
        mean=float(record["RCP Mean"]),
        stdev=float(record["RCP Stdev"]),
        min_mean=float(record["RCP Mean"] / record["Max Speedup"]),
        interpolated=between,
    )


def _unit(benchmark: str, ruleset: str) -> str:
    if benchmark == "stable_diffusion":
        return "step_num" if ruleset == "3.1.0" else "samples_count"
    return "samples_count" if benchmark in _SAMPLES_COUNT else "epoch_num"


@cache
def _rcp_benchmarks(ruleset: str) -> list[str]:
    """Return the benchmarks that have a file of reference points."""
    from mlperf_logging.rcp_checker import rcp_checker

    folder = Path(rcp_checker.__file__).parent / f"training_{ruleset}"
    names = (file.stem.removeprefix("rcps_") for file in folder.glob("rcps_*.json"))
    return [name for name in names if name in rcp_checker.submission_runs["training"]]
