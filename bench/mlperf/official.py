"""Run MLPerf's own compliance checker, unchanged, on a log. Its verdict decides.

The checker is not safe for logs of unknown origin: it builds paths of rule files from values in the log and runs code
from those files. So this module compares the values with the existing files first. The checker's time grows with the
square of a record's length, so this module checks the length of the records first.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.contract import mllog
from bench.errors import ConfigError, LogError, MissingLogError
from bench.mlperf.log import Log

RULESETS = ("5.1.0", "6.1.0")
"""The rulesets for checking new logs."""

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
KNOWN_ORDER = (_BEFORE, *(ruleset for _, ruleset in _SINCE))
"""The oldest first."""
KNOWN = frozenset(KNOWN_ORDER)
_TOKEN = ":::MLLOG "
_MAX_SQUARES = 4e9
"""Sum over a log's records of their squared lengths, in characters: about 7 s for the official parsers, or one record
of 63,000 characters. The published logs that were examined have at most 1e8, and records of at most 474 characters."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of MLPerf's own checker on a log."""

    ruleset: str
    passed: bool | None
    """None if the log names no benchmark."""
    messages: tuple[str, ...]


def ruleset_of(time_ms: int) -> str:
    """Return the ruleset in force at run_start; 3.1.0 for all older runs."""
    since = ((datetime.fromisoformat(f"{day}T00:00Z").timestamp() * 1000, ruleset) for day, ruleset in reversed(_SINCE))
    return next((ruleset for start_ms, ruleset in since if start_ms <= time_ms), _BEFORE)


def rulesets_of(log: Log) -> Sequence[str]:
    """Return the rulesets for checking a log: that of engine.command.ruleset, or the newest ones."""
    record = log.single(mllog.PROGRAM)
    own = record.metadata.get(mllog.RULESET) if record else None
    return (own,) if own in KNOWN else RULESETS


def ruleset_of_runs(starts_ms: Iterable[int | None]) -> str:
    """Return the ruleset of the latest run_start; the newest ruleset if no run has a run_start."""
    known = [start_ms for start_ms in starts_ms if start_ms is not None]
    return ruleset_of(max(known)) if known else RULESETS[-1]


def require_ruleset(ruleset: str) -> None:
    """Raise ConfigError if the ruleset does not exist."""
    from mlperf_logging.compliance_checker import mlp_compliance

    if ruleset not in (known := sorted(mlp_compliance.rule_choices())):
        newest = next((one for one in reversed(known) if ruleset and one.startswith(ruleset)), None)
        offer = f"did you mean {newest}? " if newest else ""
        fix = f"{offer}choose one of the rulesets {', '.join(known)}"
        raise ConfigError(f"the ruleset {ruleset!r:.40} does not exist", where="ruleset", fix=fix)


def num_dropped(benchmark: str | None) -> int:
    """Return how many of the fastest and of the slowest runs do not count; as many runs may fail."""
    return 4 if benchmark == "unet3d" else 1


def num_runs_required(benchmark: str | None, ruleset: str) -> int | None:
    """Return how many runs a score needs; None for a benchmark that is not in the ruleset."""
    from mlperf_logging.rcp_checker import rcp_checker

    numbers: dict[str | None, int] = rcp_checker.submission_runs["training"]
    return numbers.get(benchmark) if benchmark in _rule_names(ruleset)[1] else None


def official_verdict(path: Path | str, *, ruleset: str) -> Verdict:
    """Run the compliance checker of MLPerf Training on a log; safe for a log of unknown origin.

    Raises:
        ConfigError: the ruleset does not exist.
        LogError: the file cannot be opened.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    require_ruleset(ruleset)
    try:
        if refusal := too_slow(path):
            return Verdict(ruleset, False, (refusal,))
        lines, errors = mlp_parser.parse_file(str(path), ruleset=ruleset)
    except OSError as error:
        kind = MissingLogError if isinstance(error, FileNotFoundError | NotADirectoryError) else LogError
        raise kind(
            f"the log cannot be read: {error.strerror}", where=str(path), fix="give the result_K.txt of a trial"
        ) from error
    except Exception as error:  # noqa: BLE001 - a malformed record stops the official parser
        return Verdict(ruleset, False, (f"the official parser cannot read this log: {error!r}",))
    if refusal := _refusal(lines, ruleset):
        return Verdict(ruleset, False, (refusal,))
    if not any(line.key == mllog.SUBMISSION_BENCHMARK for line in lines):
        return Verdict(ruleset, None, ("the log has no submission_benchmark, so no official rules apply",))
    return _check(lines, errors, ruleset)


def too_slow(path: Path | str) -> str | None:
    """Return why the official parsers would take minutes for a log; None if they do not.

    From each character of a record they search the rest of the line for a second token.

    Raises:
        OSError: the file cannot be opened.
    """
    squares, longest, where = 0, 0, 0
    with open(path, encoding="latin-1") as file:
        for number, line in enumerate(file, 1):
            length = len(line.rstrip("\n")) - line.rfind(_TOKEN) if _TOKEN in line else 0
            squares += length**2
            if length > longest:
                longest, where = length, number
            if squares > _MAX_SQUARES:
                return f"the official parser would need minutes for this log: line {where} has {longest:,} characters"
    return None


def _refusal(lines: list[Any], ruleset: str) -> str | None:
    """Return the value of the log for which the checker would open a file that is not a rule file of a benchmark."""
    divisions, benchmarks = _rule_names(ruleset)
    for line in lines:
        for key, names in ((mllog.SUBMISSION_DIVISION, divisions), (mllog.SUBMISSION_BENCHMARK, benchmarks)):
            if line.key == key and line.value["value"] not in names:
                return f"{key} is {line.value['value']!r:.80}, but ruleset {ruleset} only has {', '.join(names)}"
    return None


@cache
def _rule_names(ruleset: str) -> tuple[list[str], list[str]]:
    """Return the divisions and benchmarks that have a rule file, each named division_benchmark.yaml."""
    from mlperf_logging import compliance_checker

    folder = Path(compliance_checker.__file__).parent / f"training_{ruleset}"
    pairs = [file.stem.split("_", 1) for file in folder.glob("*_*.yaml")]
    divisions = {division for division, name in pairs if name == "common"}
    benchmarks = {name for _, name in pairs} - {"common"}  # as a benchmark, common would include itself without end
    return sorted(divisions), sorted(benchmarks)


def _check(lines: list[Any], errors: list[tuple[str, str]], ruleset: str) -> Verdict:
    """Run the checker on parsed records; the file is read only once, so it cannot change between two reads."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    for text, reason in errors:
        checker.put_message(f"parsing error: {reason}\n{text}")
    with contained(mlp_compliance, enqueued_configs=[], yaml=SimpleNamespace(load=_load, BaseLoader=None)):
        try:
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        except Exception as error:  # noqa: BLE001 - a value of an unexpected type stops the checker
            checker.put_message(f"the official checker stopped: {error!r}")
    messages = (*checker.not_overwritable, *checker.overwritable.values(), *checker.warnings.values())
    return Verdict(ruleset, not checker.has_messages(), messages)


def _load(file: Any, Loader: Any) -> Any:  # noqa: N803 - named by yaml
    """Replace yaml.load, which takes most of the checker's time, by a cache of the rule files."""
    return _rules(file.name)


@cache
def _rules(path: str) -> Any:
    import yaml

    with open(path) as file:
        return yaml.load(file, Loader=yaml.CBaseLoader)


@contextmanager
def contained(checker_module: Any, **replaced: Any) -> Iterator[None]:
    """Replace globals of a checker inside the block, and prevent it from configuring the root logger and printing."""
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
