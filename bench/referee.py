"""What MLPerf's own checker says of a log: it is the referee, run here as it is and never rewritten.

It is not made for strangers' logs: it builds the path of a rule file, whose code it runs, out of values from the log. So
those values are compared with the rule files that exist before the checker sees the log.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import mllog
from bench.errors import LogError

RULESETS = ("5.1.0", "6.1.0")


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None for a log that names no benchmark: MLPerf has no rules for it."""

    ruleset: str
    passed: bool | None
    messages: tuple[str, ...]


def official_verdict(path: Path | str, *, ruleset: str) -> Verdict:
    """Return what the compliance checker of MLPerf Training says of a log; safe for a log of unknown origin.

    Raises:
        LogError: the file cannot be opened.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    try:
        lines, errors = mlp_parser.parse_file(str(path), ruleset=ruleset)
    except OSError as error:
        raise LogError(
            f"the log cannot be read: {error.strerror}", where=str(path), fix="name the result_K.txt of a trial"
        ) from error
    except Exception as error:  # noqa: BLE001 - a record that is no object, or lacks a field, ends the official parser
        return Verdict(ruleset, False, (f"the official parser cannot read this log: {error!r}",))
    if refusal := _refusal(lines, ruleset):
        return Verdict(ruleset, False, (refusal,))
    if not any(line.key == mllog.SUBMISSION_BENCHMARK for line in lines):
        return Verdict(ruleset, None, ("the log names no submission_benchmark, so no official rules apply",))
    return _check(lines, errors, ruleset)


def _refusal(lines: list[Any], ruleset: str) -> str | None:
    """Return which value of the log would lead the checker to a file that is not one of its rule files for a benchmark."""
    divisions, benchmarks = _rule_names(ruleset)
    for line in lines:
        for key, names in ((mllog.SUBMISSION_DIVISION, divisions), (mllog.SUBMISSION_BENCHMARK, benchmarks)):
            if line.key == key and line.value["value"] not in names:
                return f"{key} is {line.value['value']!r:.80}; ruleset {ruleset} has {', '.join(names)}"
    return None


def _rule_names(ruleset: str) -> tuple[list[str], list[str]]:
    """Return the divisions and benchmarks that have a rule file, each named division_benchmark.yaml."""
    from mlperf_logging import compliance_checker

    folder = Path(compliance_checker.__file__).parent / f"training_{ruleset}"
    pairs = [file.stem.split("_", 1) for file in folder.glob("*_*.yaml")]
    divisions = {division for division, name in pairs if name == "common"}
    benchmarks = {name for _, name in pairs} - {"common"}  # as a benchmark, common would include itself for ever
    return sorted(divisions), sorted(benchmarks)


def _check(lines: list[Any], errors: list[tuple[str, str]], ruleset: str) -> Verdict:
    """Run the checker on records that are parsed already: the file is not read twice, so it cannot change in between."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    for text, reason in errors:
        checker.put_message(f"parsing error: {reason}\n{text}")
    with _contained(mlp_compliance):
        try:
            checker.check_loglines(lines, f"training_{ruleset}/common.yaml")
        except Exception as error:  # noqa: BLE001 - a value of an unforeseen type ends the checker
            checker.put_message(f"the official checker stopped: {error!r}")
    messages = (*checker.not_overwritable, *checker.overwritable.values(), *checker.warnings.values())
    return Verdict(ruleset, not checker.has_messages(), messages)


@contextmanager
def _contained(checker_module: Any) -> Iterator[None]:
    """Keep the checker's queue from leaking between logs, and its logging from configuring the root logger and printing."""
    silent = logging.getLogger(f"{__name__}.checker")
    silent.disabled = True
    original, checker_module.logging = checker_module.logging, silent
    checker_module.enqueued_configs.clear()
    try:
        yield
    finally:
        checker_module.logging = original
        checker_module.enqueued_configs.clear()
