"""Run MLPerf's own checkers, unchanged, on a copy of a whole submission.

Known defects of mlperf-logging 4.1.68, and the workarounds:

- The package checker always exits with 0 and the repository checker always reports failure. Their verdict is read from
  the last line that they print.
- Both log through the root logger and print. Their output is captured.
- They write and delete scaling.json in the tree. They run on a copy.
- One unreadable record stops them. That is a failure, with its reason.
- They build paths of rule files from values in a log and run their code. `require_safe` checks the values first.
"""

import io
import json
import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract.task import Division
from bench.errors import ConfigError
from bench.mlperf import official
from bench.mlperf.reader import printable
from bench.rules.finding import Finding, Severity, broken

DIVISIONS = tuple(one.value for one in Division)


@dataclass(frozen=True, slots=True)
class CheckerResult:
    """The verdict of one checker; its messages are its warnings and errors."""

    passed: bool
    messages: tuple[str, ...]
    transcript: tuple[str, ...]
    """Its complete output."""
    errors: tuple[str, ...] = ()
    """Those of its messages that are errors."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdicts of all checkers."""

    checks: Mapping[str, CheckerResult]
    scaling: Mapping[str, float]
    """The factors that the package checker wrote, by path of their scaling.json within the submission."""


def runs_required(benchmark: str | None, ruleset: str) -> int:
    """Return how many logs a submission of a benchmark needs.

    Raises:
        ConfigError: the ruleset does not exist, or does not have the benchmark.
    """
    from mlperf_logging import benchmark_meta

    official.require_ruleset(ruleset)
    allowed = benchmark_meta.get_allowed_benchmarks("training", ruleset)
    if benchmark not in allowed:
        raise ConfigError(
            f"submission_benchmark is {benchmark!r:.80}, which is not a benchmark of ruleset {ruleset}",
            where="the logs",
            fix=f"pack runs of the benchmarks {', '.join(sorted(allowed))}, or choose another --ruleset",
        )
    return int(benchmark_meta.get_result_file_counts("training")[benchmark])


def require_safe(log: Path, benchmark: str, ruleset: str) -> None:
    """Refuse a log in which the official parser reads a benchmark or division without a rule file.

    Raises:
        ConfigError: it does, the official parser cannot read the log, or would take too long.
    """
    from mlperf_logging.compliance_checker import mlp_parser

    if refusal := official.too_slow(log):
        raise ConfigError(refusal, where=str(log), fix="remove this run from the arguments")
    try:
        records = [(line.key, line.value["value"]) for line in mlp_parser.parse_file(str(log), ruleset=ruleset)[0]]
    except Exception as error:  # noqa: BLE001 - a record that is not an object, or has no such field, stops the official parser
        fix = "remove this run from the arguments: the official checkers cannot read its logs"
        raise ConfigError(
            f"the official parser cannot read this log: {error!r:.200}", where=str(log), fix=fix
        ) from error
    for key, names in ((mllog.SUBMISSION_BENCHMARK, (benchmark,)), (mllog.SUBMISSION_DIVISION, DIVISIONS)):
        for value in (value for logged, value in records if logged == key):
            if value not in names:
                fix = "remove this run from the arguments"
                raise ConfigError(
                    f"{key} is {value!r:.80}, but must be {' or '.join(names)} in this package",
                    where=str(log),
                    fix=fix,
                )


def check(submission: Path, *, ruleset: str) -> Checked:
    """Run the official checkers on a submission: a folder with the name of its organization."""
    from mlperf_logging.package_checker import package_checker
    from mlperf_logging.repo_checker import repo_checker
    from mlperf_logging.system_desc_checker import system_desc_checker

    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, submission.name)
        shutil.copytree(submission, copy, symlinks=True)
        systems = sorted((copy / "systems").glob("*.json"))
        checks = {
            "system_description": _run(
                lambda: [system_desc_checker.check_system_desc(str(path), "training", ruleset) for path in systems],
                passes=lambda lines: not any("checker failed" in line for line in lines),
                root=scratch,
            ),
            "package": _run(
                lambda: package_checker.check_training_package(
                    str(copy), "training", ruleset, False, False, False, False, False, None
                ),
                passes=lambda lines: any("FOUND NO ERRORS" in line for line in lines),
                root=scratch,
            ),
            "repository": _run(
                lambda: repo_checker.run_checks(str(copy)),
                passes=lambda lines: any("ALL CHECKS PASSED" in line for line in lines),
                root=scratch,
            ),
        }
        factors = {
            path: json.loads(path.read_bytes())["scaling_factor"] for path in copy.glob("results/*/*/scaling.json")
        }
        return Checked(checks, {str(path.relative_to(copy)): factor for path, factor in sorted(factors.items())})


def _run(checker: Callable[[], object], *, passes: Callable[[list[str]], bool], root: str) -> CheckerResult:
    """Run a checker; `root` is the folder of the copy, which is removed from its messages."""
    with _captured() as records:
        try:
            checker()
            stopped = False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a value of an unexpected type stops a checker
            records.append((logging.ERROR, f"the official checker stopped: {error!r}"))
            stopped = True
    output = [(level, text.replace(f"{root}/", "").strip()) for level, text in records]
    output = [(level, text) for level, text in output if text.strip("-")]
    transcript = [text for _, text in output]
    messages = {
        text: level for level, text in output if level >= logging.WARNING and not _is_expected(text, Path(root))
    }
    failures = tuple(text for text, level in messages.items() if level >= logging.ERROR)
    return CheckerResult(not stopped and passes(transcript), tuple(messages), tuple(transcript), failures)


def _is_expected(message: str, root: Path) -> bool:
    """Return whether a message only says that there are the power and the scaling of results, which belong there."""
    match = _UNKNOWN_FILES.match(message)
    if match is None:
        return False
    names = {path.name for path in (root / match["folder"]).glob("*")}
    return all(name in ("power", "scaling.json") or _RESULT.fullmatch(name) for name in names)


_UNKNOWN_FILES = re.compile(
    r"(Detected \d+ total files in directory|Unknown files in result directory:) (?P<folder>[^\s,]+)"
)
_RESULT = re.compile(r"result_\d+\.txt")
_SUMMARIES = ("Seed checker failed", "System description file checker failed")
"""Messages after those that say what failed."""
_SEVERAL = "Seed checker failed and found the following errors: "
_EXPLAINED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), fix)
    for pattern, fix in (
        (r"Result file (?P<where>\S+) logs (no )?seed", "run this trial again with another seed (set seed_base)"),
        (
            r"RCP Test Failed",
            "compare hyperparameters and data with those of the reference (`runstop score RUN`), or pack with "
            "--division open",
        ),
        (
            r"System description checker failed for (?P<where>.*?) : ",
            "correct these fields in <system>.json, and give the file with --describe",
        ),
        (r"Files with git-unfriendly name: (?P<where>.*)", "rename these files: no blanks, no dot at the beginning"),
        (r"Files > 50MB: (?P<where>.*)", "make these files smaller: trial logs without other output are below 50 MB"),
        (r"(?P<where>\S+) contains broken symbolic links", "replace the links by the files"),
        (
            r"Package does not contain power result for (?P<where>.*)",
            "record the power of every run, or pack without --power",
        ),
        (r"Bad naming of (node|sw) power files in directory (?P<where>[^,]+)", "pack again; do not rename its files"),
        (
            r"Inconsistent number of (nodes|sw) in directory (?P<where>.*)",
            "record the power of all nodes in every run, or pack without --power",
        ),
        (
            r"Run incomplete or did not converge",
            "run this trial again, or leave it: one such run of a benchmark counts as the slowest",
        ),
        (r"the official checker stopped", "pack with --force, and read checkers.txt in the package"),
    )
)


def findings(checked: Checked) -> Iterator[Finding]:
    """Yield what the checkers report, with its place and what to do; an error for what makes one fail."""
    for name, check in checked.checks.items():
        reported = [text for text in check.messages if text not in _SUMMARIES]
        for message in reported:
            is_error = not check.passed and (message in check.errors or not check.errors)
            for text in message.removeprefix(_SEVERAL).splitlines() if message.startswith(_SEVERAL) else [message]:
                yield _finding(name, text, "error" if is_error else "warning")
        if not check.passed and not reported:
            yield _finding(name, "it failed without a message", "error")


def _finding(checker: str, text: str, severity: Severity) -> Finding:
    matches = ((pattern.search(text), fix) for pattern, fix in _EXPLAINED)
    match, fix = next(
        ((match, fix) for match, fix in matches if match),
        (None, "correct this problem, and pack again; to check one log: runstop parse LOG --official RULESET"),
    )
    where = match.groupdict().get("where") if match else None
    return broken(
        "PCK-11",
        f"MLPerf's {checker.replace('_', ' ')} checker: {printable(' '.join(text.split()))}",
        printable(where or "the package"),
        fix=fix,
        severity=severity,
    )


@contextmanager
def _captured() -> Iterator[list[tuple[int, str]]]:
    """Capture the log records, warnings and prints of the checkers, away from the root logger and stdout."""
    records: list[tuple[int, str]] = []
    logger = logging.Logger("official checkers")  # not in the logging tree
    logger.addHandler(_Handler(records))
    modules = _modules()
    compliance, originals = modules[0], [module.logging for module in modules]
    for module in modules:
        module.logging = logger
    compliance.enqueued_configs.clear()  # state from a log that stopped the checker
    try:
        with warnings.catch_warnings(record=True) as warned, redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield records
    finally:
        compliance.enqueued_configs.clear()
        for module, original in zip(modules, originals, strict=True):
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
