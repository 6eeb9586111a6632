"""What MLPerf's checkers say of a whole submission: they are run as they are, on a copy, and never rewritten.

Known defects of mlperf-logging 4.1.68, and what is done about each:

- The package checker exits with 0 and the repository checker reports failure, whatever they found. Both are judged by
  the last line that they print.
- Both log through the root logger and print. Their output is captured.
- They write and delete scaling.json in the tree. They are given a copy.
- One unreadable record stops them. That is a failure, with its reason.
- Values of a log become paths of rule files, whose code they run. `require_safe` checks the values first.
"""

import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.errors import ConfigError
from bench.mlperf import official

DIVISIONS = ("closed", "open")


@dataclass(frozen=True, slots=True)
class CheckerResult:
    """What one checker found; its messages are its warnings and errors."""

    passed: bool
    messages: tuple[str, ...]
    transcript: tuple[str, ...]
    """All that it said."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What all of them found."""

    checks: Mapping[str, CheckerResult]
    scaling: Mapping[str, float]
    """The factors that the package checker wrote, by path of their scaling.json within the submission."""


def runs_required(benchmark: str | None, ruleset: str) -> int:
    """Return how many logs a submission of a benchmark holds.

    Raises:
        ConfigError: there is no such ruleset, or the benchmark is none of its own.
    """
    from mlperf_logging import benchmark_meta

    official.require_ruleset(ruleset)
    allowed = benchmark_meta.get_allowed_benchmarks("training", ruleset)
    if benchmark not in allowed:
        raise ConfigError(
            f"submission_benchmark is {benchmark!r:.80}, which ruleset {ruleset} does not have",
            where="the logs",
            fix=f"pack one of {', '.join(sorted(allowed))}, or choose another --ruleset",
        )
    return int(benchmark_meta.get_result_file_counts("training")[benchmark])


def require_safe(log: Path, benchmark: str, ruleset: str) -> None:
    """Refuse a log in which the official parser finds another benchmark or division than those that have rule files.

    Raises:
        ConfigError: it does, or the official parser cannot read it, or not in any time.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    if refusal := official.too_slow(log):
        raise ConfigError(refusal, where=str(log), fix="leave this run out")
    try:
        records = [(line.key, line.value["value"]) for line in mlp_parser.parse_file(str(log), ruleset=ruleset)[0]]
    except Exception as error:  # noqa: BLE001 - a record that is no object, or lacks a field, ends the official parser
        fix = "leave this run out: the official checkers would stop at it"
        raise ConfigError(
            f"the official parser cannot read this log: {error!r:.200}", where=str(log), fix=fix
        ) from error
    for key, names in ((mllog.SUBMISSION_BENCHMARK, (benchmark,)), (mllog.SUBMISSION_DIVISION, DIVISIONS)):
        for value in (value for said, value in records if said == key):
            if value not in names:
                fix = f"leave this run out: a log says {' or '.join(names)} here"
                raise ConfigError(f"{key} is {value!r:.80}", where=str(log), fix=fix)


def check(submission: Path, *, ruleset: str) -> Checked:
    """Return what the official checkers find in a submission, the folder that is named after its organization."""
    from mlperf_logging.package_checker import package_checker
    from mlperf_logging.repo_checker import repo_checker
    from mlperf_logging.system_desc_checker import system_desc_checker

    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, submission.name)
        shutil.copytree(submission, copy)
        systems = sorted((copy / "systems").glob("*.json"))
        checks = {
            "system_description": _run(
                lambda: [system_desc_checker.check_system_desc(str(path), "training", ruleset) for path in systems],
                passes=lambda said: not any("checker failed" in line for line in said),
                root=scratch,
            ),
            "package": _run(
                lambda: package_checker.check_training_package(
                    str(copy), "training", ruleset, False, False, False, False, False, None
                ),
                passes=lambda said: any("FOUND NO ERRORS" in line for line in said),
                root=scratch,
            ),
            "repository": _run(
                lambda: repo_checker.run_checks(str(copy)),
                passes=lambda said: any("ALL CHECKS PASSED" in line for line in said),
                root=scratch,
            ),
        }
        factors = {
            path: json.loads(path.read_bytes())["scaling_factor"] for path in copy.glob("results/*/*/scaling.json")
        }
        return Checked(checks, {str(path.relative_to(copy)): factor for path, factor in sorted(factors.items())})


def _run(checker: Callable[[], object], *, passes: Callable[[list[str]], bool], root: str) -> CheckerResult:
    """Run a checker; `root` is the copy's folder, which no message needs to name."""
    with _captured() as records:
        try:
            checker()
            stopped = False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a value of an unforeseen type ends a checker
            records.append((logging.ERROR, f"the official checker stopped: {error!r}"))
            stopped = True
    said = [(level, text.replace(f"{root}/", "").strip()) for level, text in records]
    said = [(level, text) for level, text in said if text.strip("-")]
    transcript = [text for _, text in said]
    messages = tuple(dict.fromkeys(text for level, text in said if level >= logging.WARNING))
    return CheckerResult(not stopped and passes(transcript), messages, tuple(transcript))


@contextmanager
def _captured() -> Iterator[list[tuple[int, str]]]:
    """Yield the list of what the checkers log, warn of and print; nothing of it reaches the root logger or stdout."""
    records: list[tuple[int, str]] = []
    logger = logging.Logger("official checkers")  # no part of the logging tree, and gone afterwards
    logger.addHandler(_Handler(records))
    modules = _modules()
    compliance, kept = modules[0], [module.logging for module in modules]
    for module in modules:
        module.logging = logger
    compliance.enqueued_configs.clear()  # what a log that ended the checker left behind
    try:
        with warnings.catch_warnings(record=True) as warned, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield records
    finally:
        compliance.enqueued_configs.clear()
        for module, original in zip(modules, kept, strict=True):
            module.logging = original
    records += [(logging.WARNING, str(warning.message)) for warning in warned]


class _Handler(logging.Handler):
    def __init__(self, records: list[tuple[int, str]]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, record.getMessage()))


def _modules() -> list[Any]:
    """Return the checkers' modules that log, the compliance checker first."""
    from mlperf_logging.compliance_checker import mlp_compliance
    from mlperf_logging.package_checker import package_checker, power_checker, seed_checker
    from mlperf_logging.rcp_checker import rcp_checker
    from mlperf_logging.repo_checker import repo_checker
    from mlperf_logging.system_desc_checker import system_desc_checker

    return [
        *(mlp_compliance, package_checker, power_checker, seed_checker),
        *(rcp_checker, repo_checker, system_desc_checker),
    ]
