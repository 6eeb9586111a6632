"""Pack finished runs as an MLPerf Training submission, and have MLPerf's own checkers look at it.

Files are copied byte for byte. What nobody recorded stays empty and is listed for a person to fill in. The folder
appears when it is complete, or not at all.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import masking as known_secrets
from bench.contract import run_files
from bench.contract.atomic_files import appearing
from bench.errors import BenchError, ConfigError
from bench.mlperf import official
from bench.mlperf.package import checkers, manual, system
from bench.mlperf.package.checkers import Checked
from bench.mlperf.package.entry import (
    Entry,
    Run,
    division_of,
    entry_findings,
    grouped,
    read_run,
    require_name,
    run_findings,
)
from bench.mlperf.reader import printable
from bench.mlperf.result import UNVERIFIED
from bench.rules.finding import Finding, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to pack, and as whose submission."""

    runs: tuple[Path, ...]
    folder: Path
    org: str
    system: str | None = None
    """None: as the logs name their platform."""
    ruleset: str | None = None
    """None: the one that was in force when the last of the runs was made."""
    division: str | None = None
    """None: as the logs say."""
    descriptions: tuple[Path, ...] = ()
    """Each named <system>.json and filled in by a person; what they say comes before what the runs recorded."""
    force: bool = False
    """Pack even what could not be submitted; the package then says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What was written, what was found, and what is left to do."""

    request: Request
    ruleset: str
    division: str
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    """The errors among them were overridden by force."""
    checked: Checked
    todo: Mapping[str, Sequence[str]]
    """What a person must fill in, by file of the submission."""

    @property
    def passed(self) -> bool:
        """Whether every official checker passes, and nothing had to be forced."""
        return all(check.passed for check in self.checked.checks.values()) and not errors(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return what strict JSON holds of it."""
        folder = self.request.folder
        checks = self.checked.checks.items()
        return {
            "path": str(folder),
            "org": self.request.org,
            "ruleset": self.ruleset,
            "division": self.division,
            "systems": sorted({entry.system for entry in self.entries}),
            "benchmarks": sorted({entry.benchmark for entry in self.entries}),
            "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
            "scaling_factors": dict(self.checked.scaling),
            "todo": [f"{file}: {field}" for file, fields in self.todo.items() for field in fields],
            "checkers": {name: {"passed": check.passed, "messages": list(check.messages)} for name, check in checks},
            "findings": [asdict(finding) for finding in self.findings],
            "passed": self.passed,
            "note": UNVERIFIED,
        }


def pack(request: Request) -> Package:
    """Write a package and return what became of it.

    Raises:
        ConfigError: it cannot be made, or could not be submitted and nobody forced it; nothing was written.
        LogError: a log cannot be read; nothing was written.
        BenchError: the disk is full, or the like; nothing is left.
    """
    _require_free(request)
    require_name(request.org, what="--org", fix="choose one as MLPerf's result repositories have it")
    runs = [read_run(run) for run in request.runs]
    ruleset = request.ruleset or official.ruleset_of_runs(r.run_start_ms for run in runs for r in run.results)
    entries, findings = _examined(runs, request, ruleset)
    division = division_of(entries, wanted=request.division)
    descriptions = _descriptions(entries, request, division)
    for run in runs:
        _require_no_secret(run)
    with _appearing(request.folder) as part:
        submission = part / request.org
        _write_submission(submission, entries, descriptions, forced=errors(findings))
        checked = checkers.check(submission, ruleset=ruleset)
        for file, factor in checked.scaling.items():
            (submission / file).write_text(json.dumps({"scaling_factor": factor}))
        todo = _todo(entries, descriptions)
        (part / "TODO.md").write_text(manual.todo(todo, checked, forced=errors(findings)))
        (part / "checkers.txt").write_text(manual.transcript(checked, ruleset=ruleset))
    return Package(
        request=request,
        ruleset=ruleset,
        division=division,
        entries=tuple(entries),
        findings=tuple(findings),
        checked=checked,
        todo=todo,
    )


def _require_free(request: Request) -> None:
    """Refuse a folder that holds something, or that lies in one of the runs, which are never changed."""
    folder, fix = request.folder, "name a new folder with -o"
    if folder.is_symlink() or (folder.exists() and not _is_empty(folder)):
        raise ConfigError("this exists, and a package is never added to what is there", where=str(folder), fix=fix)
    if any(folder.resolve().is_relative_to(run.resolve()) for run in request.runs):
        raise ConfigError("a package cannot lie in a run's folder", where=str(folder), fix=fix)
    if len({run.resolve() for run in request.runs}) < len(request.runs):
        raise ConfigError("a run is named twice", where=", ".join(map(str, request.runs)), fix="name each run once")


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:  # no folder, or not ours to look into
        return False


def _examined(runs: Sequence[Run], request: Request, ruleset: str) -> tuple[list[Entry], list[Finding]]:
    """Return the entries that the runs make, and the findings; errors among them stop here unless they are forced."""
    findings = list(run_findings(runs))
    _require_submittable(findings, request)
    required = {run.benchmark: checkers.runs_required(run.benchmark, ruleset) for run in runs}
    entries = grouped(runs, system=request.system)
    for entry in entries:
        findings += entry_findings(entry, required=required[entry.benchmark], org=request.org)
        for result in entry.results:
            checkers.require_safe(Path(result.file), entry.benchmark, ruleset)
    _require_submittable(findings, request)
    return entries, findings


def _require_submittable(findings: Sequence[Finding], request: Request) -> None:
    """Raise ConfigError if findings speak against submitting the runs, and nobody forced it."""
    if (found := errors(findings)) and not request.force:
        raise ConfigError(
            "\n  ".join(printable(f.titled) for f in found),
            where=", ".join(map(str, request.runs)),
            fix="choose other runs, or --force a package that is marked as not for submission",
        )


def _descriptions(entries: Sequence[Entry], request: Request, division: str) -> dict[str, dict[str, str]]:
    """Return each system's description."""
    by_hand = {path.stem: system.read(path) for path in request.descriptions}
    names = {entry.system for entry in entries}
    if strange := by_hand.keys() - names:
        what = f"descriptions of {', '.join(sorted(strange))}, and the systems are {', '.join(sorted(names))}"
        raise ConfigError(what, where="--describe", fix="name each file <system>.json")
    found = {}
    for name in sorted(names):
        runs = [run for entry in entries if entry.system == name for run in entry.runs]
        recorded = (system.describe(run.results[0], run.plan) for run in runs)
        fixed = {"submitter": request.org, "division": division}
        found[name] = system.merged(fixed, by_hand.get(name, {}), *recorded, {"system_name": name})
    return found


def _require_no_secret(run: Run) -> None:
    """Refuse to publish what looks like a key."""
    for path in (*(Path(result.file) for result in run.results), *_settings(run)):
        text = path.read_text(errors="replace")
        for secret in known_secrets.found(text):
            number = text.count("\n", 0, secret.start) + 1
            what = f"this line holds what looks like a secret: {secret.what} ({secret.hint(text)})"
            fix = "revoke it if it is one; what is packed is published, so make the run again without it"
            raise ConfigError(what, where=f"{path}:{number}", fix=fix, rule="CFG-07")


def _settings(run: Run) -> list[Path]:
    return [path for name in (run_files.CONFIG, run_files.PLAN) if (path := run.folder / name).is_file()]


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder that takes the name only when the block is done, and is removed if it fails."""
    folder = folder.absolute()
    part = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
    try:
        with appearing(folder, part=part):
            yield part
    except OSError as error:
        fix = "make room, or name another folder with -o"
        raise BenchError(f"cannot write the package: {error.strerror or error}", where=str(folder), fix=fix) from error


def _write_submission(
    folder: Path, entries: Sequence[Entry], descriptions: Mapping[str, Mapping[str, str]], *, forced: Sequence[Finding]
) -> None:
    """Write results/, systems/ and benchmarks/."""
    (folder / "systems").mkdir(parents=True)
    for name, description in descriptions.items():
        (folder / "systems" / f"{name}.json").write_text(json.dumps(description, indent=2) + "\n")
    for entry in entries:
        results = folder / "results" / entry.system / entry.benchmark
        results.mkdir(parents=True)
        for number, result in enumerate(entry.results):
            shutil.copyfile(result.file, results / f"result_{number}.txt")
        implementation = folder / manual.folder(entry)
        implementation.mkdir(parents=True)
        (implementation / "README.md").write_text(manual.readme(entry, forced))
        (implementation / manual.metadata_name(entry)).write_text(json.dumps(manual.metadata(entry), indent=2) + "\n")
        for number, run in enumerate(entry.runs):
            for path in _settings(run):
                (implementation / f"run_{number}").mkdir(exist_ok=True)
                shutil.copyfile(path, implementation / f"run_{number}" / path.name)


def _todo(entries: Sequence[Entry], descriptions: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return what a person must fill in, by file."""
    todo = {f"systems/{name}.json": system.missing(description) for name, description in descriptions.items()}
    for entry in entries:
        todo |= manual.missing(entry)
    return {file: fields for file, fields in todo.items() if fields}
