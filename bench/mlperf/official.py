"""Run MLPerf's own checkers, unchanged, on one log and on a set of logs: they are the referee.

The checkers are not safe for logs of unknown origin: they build paths of rule files from values in the log, and one of
them runs code from those files. So this module compares the values with the existing files first.
"""

import logging
import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from bench.contract import mllog
from bench.errors import ConfigError, LogError, MissingLogError

RULESETS = ("5.1.0", "6.1.0")
"""The rulesets that a new log is checked by."""

_SINCE = (
    ("2023-09-22", "4.0.0"),
    ("2024-06-01", "4.1.0"),
    ("2024-11-01", "5.0.0"),
    ("2025-06-01", "5.1.0"),
    ("2025-11-01", "6.0.0"),
    ("2026-06-01", "6.1.0"),
)
"""First day (UTC) of the runs for each ruleset's round. Rounds close in May and October; v4.0 took older runs too."""
_BEFORE = "3.1.0"

_REFERENCES = "pruned_rcps"
"""The points that the package checker uses: without those that converge slower than their neighbours suggest."""
_SAMPLES_COUNT = frozenset(
    (
        *("llama2_70b_lora", "flux1", "llama31_405b", "llama31_8b"),
        *("gpt_oss_20b", "deepseekv3_671b", "qwen35_397b_grpo", "dlrmv4"),
    )
)
"""Benchmarks whose convergence the RCP checker reads from samples_count, as it names them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None for a log that names no benchmark: MLPerf has no rules for it."""

    ruleset: str
    passed: bool | None
    messages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rcp:
    """A reference convergence point: how long the reference trains at one global batch size."""

    benchmark: str
    global_batch_size: int
    ruleset: str
    unit: str
    """The metadata of eval_accuracy that is counted: samples_count, epoch_num or step_num."""
    mean: float
    """Olympic mean of the reference runs."""
    stdev: float
    min_mean: float
    """A submission with a lower mean converges too fast to be accepted."""
    interpolated: bool
    """Between the points of two other batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RcpVerdict:
    """What the RCP checker says of a set of logs. `passed` is None where it has nothing to compare them with."""

    ruleset: str
    passed: bool | None
    message: str
    counts: tuple[float | None, ...] = ()
    """Of each log, in the reference's unit; None if the run did not converge. Empty if the checker stopped earlier."""
    mean: float | None = None
    """Olympic mean of the counts."""
    factor: float | None = None
    """The factor of the minutes, at least 1; None unless passed."""
    record: Rcp | None = None
    """What the counts are compared with; None also where a batch size is below that of all points."""


def ruleset_of(time_ms: int) -> str:
    """Return the ruleset that was in force when a run was made, by its run_start; 3.1.0 for all older ones."""
    since = ((datetime.fromisoformat(f"{day}T00:00Z").timestamp() * 1000, ruleset) for day, ruleset in reversed(_SINCE))
    return next((ruleset for start_ms, ruleset in since if start_ms <= time_ms), _BEFORE)


def ruleset_of_runs(starts_ms: Iterable[int | None]) -> str:
    """Return the ruleset of the last of several runs by their run_start; the newest one where none has any."""
    known = [start_ms for start_ms in starts_ms if start_ms is not None]
    return ruleset_of(max(known)) if known else RULESETS[-1]


def require_ruleset(ruleset: str) -> None:
    """Raise ConfigError unless there are rules of this name."""
    from mlperf_logging.compliance_checker import mlp_compliance

    if ruleset not in (known := sorted(mlp_compliance.rule_choices())):
        raise ConfigError(f"no ruleset {ruleset!r:.40}", where="the ruleset", fix=f"name one of {', '.join(known)}")


def num_dropped(benchmark: str | None) -> int:
    """Return how many of the fastest and of the slowest runs do not count; so many may also fail."""
    return 4 if benchmark == "unet3d" else 1


def num_runs_required(benchmark: str | None, ruleset: str) -> int | None:
    """Return how many runs a score takes; None for a benchmark that the ruleset does not have."""
    from mlperf_logging.rcp_checker import rcp_checker

    numbers: dict[str | None, int] = rcp_checker.submission_runs["training"]
    return numbers.get(benchmark) if benchmark in _rule_names(ruleset)[1] else None


def official_verdict(path: Path | str, *, ruleset: str) -> Verdict:
    """Return what the compliance checker of MLPerf Training says of a log; safe for a log of unknown origin.

    Raises:
        ConfigError: there is no such ruleset.
        LogError: the file cannot be opened.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    require_ruleset(ruleset)
    try:
        lines, errors = mlp_parser.parse_file(str(path), ruleset=ruleset)
    except OSError as error:
        kind = MissingLogError if isinstance(error, FileNotFoundError | NotADirectoryError) else LogError
        raise kind(
            f"the log cannot be read: {error.strerror}", where=str(path), fix="name the result_K.txt of a trial"
        ) from error
    except Exception as error:  # noqa: BLE001 - a malformed record stops the official parser
        return Verdict(ruleset, False, (f"the official parser cannot read this log: {error!r}",))
    if refusal := _refusal(lines, ruleset):
        return Verdict(ruleset, False, (refusal,))
    if not any(line.key == mllog.SUBMISSION_BENCHMARK for line in lines):
        return Verdict(ruleset, None, ("the log names no submission_benchmark, so no official rules apply",))
    return _check(lines, errors, ruleset)


def _refusal(lines: list[Any], ruleset: str) -> str | None:
    """Return which value of the log would make the checker open a file that is not a rule file of a benchmark."""
    divisions, benchmarks = _rule_names(ruleset)
    for line in lines:
        for key, names in ((mllog.SUBMISSION_DIVISION, divisions), (mllog.SUBMISSION_BENCHMARK, benchmarks)):
            if line.key == key and line.value["value"] not in names:
                return f"{key} is {line.value['value']!r:.80}; ruleset {ruleset} has {', '.join(names)}"
    return None


@cache
def _rule_names(ruleset: str) -> tuple[list[str], list[str]]:
    """Return the divisions and benchmarks that have a rule file, each named division_benchmark.yaml."""
    from mlperf_logging import compliance_checker

    folder = Path(compliance_checker.__file__).parent / f"training_{ruleset}"
    pairs = [file.stem.split("_", 1) for file in folder.glob("*_*.yaml")]
    divisions = {division for division, name in pairs if name == "common"}
    benchmarks = {name for _, name in pairs} - {"common"}  # as a benchmark, common would include itself for ever
    return sorted(divisions), sorted(benchmarks)


def _check(lines: list[Any], errors: list[tuple[str, str]], ruleset: str) -> Verdict:
    """Run the checker on parsed records; the file is read only once, so it cannot change between two reads."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    for text, reason in errors:
        checker.put_message(f"parsing error: {reason}\n{text}")
    with _contained(mlp_compliance, enqueued_configs=[], yaml=SimpleNamespace(load=_load, BaseLoader=None)):
        try:
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        except Exception as error:  # noqa: BLE001 - a value of an unforeseen type ends the checker
            checker.put_message(f"the official checker stopped: {error!r}")
    messages = (*checker.not_overwritable, *checker.overwritable.values(), *checker.warnings.values())
    return Verdict(ruleset, not checker.has_messages(), messages)


def _load(file: Any, Loader: Any) -> Any:  # noqa: N803 - named by yaml
    """Stand in for yaml.load, which takes most of the checker's time: it reads the same rule files for every log."""
    return _rules(file.name)


@cache
def _rules(path: str) -> Any:
    import yaml

    with open(path) as file:
        return yaml.load(file, Loader=yaml.BaseLoader)


def rcp_verdict(logs: Sequence[Path | str], *, benchmark: str | None, ruleset: str) -> RcpVerdict:
    """Return what the RCP checker says of the logs of one benchmark; safe for logs of unknown origin.

    It takes all logs as one submission and drops the runs that converged fastest and slowest. The mean that it accepts
    assumes the number of runs that the rules require, even if there are fewer.
    """
    require_ruleset(ruleset)
    if benchmark not in (known := _rcp_benchmarks(ruleset)):
        message = f"ruleset {ruleset} has no reference for this benchmark"
        return RcpVerdict(ruleset=ruleset, passed=None, message=message)
    if len(logs) <= 2 * num_dropped(benchmark):
        message = f"takes more than {2 * num_dropped(benchmark)} runs, to drop {num_dropped(benchmark)} at each end"
        return RcpVerdict(ruleset=ruleset, passed=None, message=message)
    try:
        return _compare(logs, known, ruleset)
    except Exception as error:  # noqa: BLE001 - a record that lacks a field, or a value of an unforeseen type, ends it
        return RcpVerdict(ruleset=ruleset, passed=False, message=f"the official RCP checker stopped: {error!r:.200}")


def _compare(logs: Sequence[Path | str], known: Sequence[str], ruleset: str) -> RcpVerdict:
    from mlperf_logging.rcp_checker import rcp_checker

    with tempfile.TemporaryDirectory() as scratch, _contained(rcp_checker):
        links = [Path(scratch, f"result_{number}.txt") for number in range(len(logs))]
        for link, log in zip(links, logs, strict=True):
            link.symlink_to(Path(log).absolute())
        gbs, found, benchmark = rcp_checker.get_submission_epochs(links, ruleset, False)
        if benchmark not in known:  # as the official reader finds it, which is not how ours does
            message = "the logs do not name one batch size and one benchmark that has a reference"
            return RcpVerdict(ruleset=ruleset, passed=False, message=message)
        # Without set_scaling it would look for the scaling.json that it then deletes in the root folder.
        passed, message, factor = rcp_checker.check_directory(
            scratch, "training", ruleset, False, False, rcp_pass=_REFERENCES, set_scaling=True
        )
    counts = tuple(float(count) if count < _NEVER else None for count in found or ())
    if len(logs) != (usual := rcp_checker.submission_runs["training"][benchmark]):
        message += f"; what it accepts is made for {usual} runs, and here are {len(logs)}"
    return RcpVerdict(
        ruleset=ruleset,
        passed=passed,
        message=message,
        counts=counts,
        mean=_olympic(counts, num_dropped(benchmark)),
        factor=float(factor) if passed else None,
        record=rcp_record(benchmark, gbs, ruleset),
    )


_NEVER = 1e9
"""What the RCP checker counts for a run that did not converge."""


def _olympic(counts: Sequence[float | None], dropped: int) -> float | None:
    """Return the mean of the counts between the dropped ones, of which those that are None are the slowest."""
    in_mean = sorted(math.inf if count is None else count for count in counts)[dropped:-dropped]
    return mean if in_mean and math.isfinite(mean := fmean(in_mean)) else None


@cache
def rcp_record(benchmark: str, global_batch_size: int, ruleset: str) -> Rcp | None:
    """Return the reference convergence point of a batch size, as the official checker has or interpolates it.

    None below the smallest and above the largest batch size that has one, and for a benchmark without any.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    if benchmark not in _rcp_benchmarks(ruleset):
        return None
    with tempfile.TemporaryDirectory() as scratch, _contained(rcp_checker):
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
        checker._eval_submission_record(record, reference, scratch)  # some benchmarks get their allowance only here
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


@contextmanager
def _contained(checker_module: Any, **replaced: Any) -> Iterator[None]:
    """Replace globals of a checker inside the block, and keep it from configuring the root logger and printing."""
    silent = logging.getLogger(f"{__name__}.checker")
    silent.disabled = True
    replaced["logging"] = silent
    originals = {name: getattr(checker_module, name) for name in replaced}
    vars(checker_module).update(replaced)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        vars(checker_module).update(originals)
