"""Pack finished runs as an MLPerf Training submission, and check it with MLPerf's own checkers.

Files are copied byte for byte. Values that were not recorded stay empty and are listed in TODO.md. All of MLPerf's
checkers run before the folder gets its name; what they refuse is not written, unless forced. The folder is created
atomically: it is complete, or it does not exist.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import masking as known_secrets
from bench.contract import regular_files, run_files
from bench.contract.atomic_files import atomic_folder
from bench.errors import BenchError, ConfigError
from bench.mlperf import official
from bench.mlperf.package import checkers, manual, power, system
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
from bench.mlperf.package.power import PowerRequest
from bench.mlperf.reader import printable
from bench.mlperf.system_fields import COUNTS
from bench.rules.finding import Finding, broken, errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The runs to pack, and the options of the submission."""

    runs: tuple[Path, ...]
    folder: Path
    org: str
    system: str | None = None
    """None: the platform in the logs."""
    ruleset: str | None = None
    """None: the ruleset in force at the latest run."""
    division: str | None = None
    """None: the division in the logs."""
    descriptions: tuple[Path, ...] = ()
    """Files <system>.json, completed by the user; their values take precedence over recorded ones."""
    power: PowerRequest | None = None
    """None: the package has no power."""
    force: bool = False
    """Pack runs that cannot be submitted; the package is then marked as not for submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The written package, its problems, and the values that are still missing."""

    request: Request
    ruleset: str
    division: str
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    """Errors among them were overridden by --force."""
    checked: Checked
    todo: Mapping[str, Sequence[str]]
    """The values that the user must fill in, by file of the submission."""
    energy_j: Mapping[str, float]
    """MLPerf's energy of an entry in joules, unscaled, by its folder in the submission; only with power."""

    @property
    def passed(self) -> bool:
        """Whether every official checker passes without --force."""
        return all(check.passed for check in self.checked.checks.values()) and not errors(self.findings)


def pack(request: Request) -> Package:
    """Write a package and check it.

    Raises:
        ConfigError: the runs cannot be packed, or cannot be submitted and `force` is not set; nothing was written.
        LogError: a log cannot be read; nothing was written.
        BenchError: writing failed, for example because the disk is full; partial files were removed.
    """
    _require_free(request)
    require_name(request.org, what="--org", fix="use the spelling of MLPerf's result repositories")
    if request.power:
        power.require_valid(request.power)
    runs = [read_run(run) for run in request.runs]
    ruleset = request.ruleset or official.ruleset_of_runs(r.run_start_ms for run in runs for r in run.results)
    entries, findings = _checked_entries(runs, request, ruleset)
    division = division_of(entries, requested=request.division)
    descriptions = _descriptions(entries, request, division)
    findings += [*_description_findings(descriptions), *_node_findings(entries, request)]
    measured, problems = power.measure(entries, request.power) if request.power else ([], [])
    findings += problems
    _require_submittable(findings, request)
    for run in runs:
        _require_no_secret(run)
    with _package_folder(request.folder) as part:
        submission = part / request.org
        _write_submission(submission, entries, descriptions, forced=errors(findings))
        energy_j = power.write(submission, measured, request.power) if request.power else {}
        checked = checkers.check(submission, ruleset=ruleset)
        findings += checkers.findings(checked)
        _require_submittable(findings, request)
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
        energy_j=energy_j,
    )


def _require_free(request: Request) -> None:
    """Refuse a folder that is not empty, or that is inside a run folder: run folders are never changed."""
    folder, fix = request.folder, "choose a new folder with -o"
    if folder.is_symlink() or (folder.exists() and not _is_empty(folder)):
        raise ConfigError("the folder exists and is not empty", where=str(folder), fix=fix)
    if any(folder.resolve().is_relative_to(run.resolve()) for run in request.runs):
        raise ConfigError("the package folder cannot be inside a run folder", where=str(folder), fix=fix)
    if len({run.resolve() for run in request.runs}) < len(request.runs):
        raise ConfigError("a run is listed twice", where=", ".join(map(str, request.runs)), fix="list every run once")


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:  # not a folder, or not readable
        return False


def _checked_entries(runs: Sequence[Run], request: Request, ruleset: str) -> tuple[list[Entry], list[Finding]]:
    """Return the entries of the runs and the findings; raise ConfigError for errors unless `force` is set."""
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
    """Raise ConfigError for findings that are errors, unless `force` is set."""
    if (problems := errors(findings)) and not request.force:
        listed = problems[:_MOST_SHOWN]
        lines = [f"{printable(f.titled)}\n    where: {printable(f.where)}\n    fix:   {f.fix}" for f in listed]
        lines += [f"and {len(problems) - len(listed)} more"] if problems[_MOST_SHOWN:] else []
        raise ConfigError(
            "the runs cannot be packed:\n  " + "\n  ".join(lines),
            where=", ".join(map(str, request.runs)),
            fix="correct these problems, or use --force, which marks the package as not for submission",
        )


_MOST_SHOWN = 20


def _descriptions(entries: Sequence[Entry], request: Request, division: str) -> dict[str, dict[str, str]]:
    """Return each system's description."""
    by_hand = {path.stem: system.read(path) for path in request.descriptions}
    names = {entry.system for entry in entries}
    if strange := by_hand.keys() - names:
        files, systems = ", ".join(f"{name}.json" for name in sorted(strange)), ", ".join(sorted(names))
        what = f"the runs use only these systems: {systems}; the file {files} describes another system"
        fix = "rename the file to <system>.json, where <system> is the name of one of these systems"
        raise ConfigError(what, where="--describe", fix=fix)
    descriptions = {}
    for name in sorted(names):
        runs = [run for entry in entries if entry.system == name for run in entry.runs]
        recorded = (system.describe(run.results[0], run.plan, system.machines(run.folder)) for run in runs)
        fixed = {"submitter": request.org, "division": division}
        descriptions[name] = system.merged(fixed, by_hand.get(name, {}), *recorded, {"system_name": name})
    return descriptions


def _description_findings(descriptions: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    for name, description in descriptions.items():
        if fields := system.missing(description):
            example = json.dumps({fields[0]: "…"} | ({fields[-1]: "…"} if fields[1:] else {}), ensure_ascii=False)
            fix = (
                f"set them in cluster.system_description before the run; or write them to a file {name}.json, such as "
                f"{example}, and add --describe {name}.json"
            )
            what = f"systems/{name}.json does not have: {', '.join(fields)}"
            yield broken("PCK-10", what, f"systems/{name}.json", fix=fix)
        for field in COUNTS:
            if (value := description[field]) and not value.isdecimal():
                what = f"systems/{name}.json: {field} is {value!r:.80}, which is not a whole number"
                yield broken("PCK-10", what, f"systems/{name}.json")


def _node_findings(entries: Sequence[Entry], request: Request) -> Iterator[Finding]:
    """Yield the fields in which the nodes of a system differ, unless the user has described them."""
    described = {path.stem: system.read(path).keys() for path in request.descriptions}
    for name in sorted({entry.system for entry in entries}):
        runs = [run for entry in entries if entry.system == name for run in entry.runs]
        by_hand = {*described.get(name, ()), *(field for run in runs for field in _set_in_config(run))}
        differing = system.differences(rank for run in runs for rank in system.machines(run.folder))
        for field, known in differing.items():
            if field not in by_hand:
                shown = "; ".join(f"{value} ({_shortened(nodes)})" for value, nodes in known.items())
                what = f"systems/{name}.json describes only some of the nodes: {field} is {shown}"
                yield broken("PCK-12", what, f"systems/{name}.json")


def _set_in_config(run: Run) -> Mapping[str, str]:
    return {} if run.plan is None else run.plan.config.cluster.system_description


def _shortened(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 3} more" if nodes[3:] else ""
    return ", ".join(nodes[:3]) + more


def _require_no_secret(run: Run) -> None:
    """Refuse to publish a line that looks like a secret."""
    for path in (*(Path(result.file) for result in run.results), *_settings(run)):
        text = regular_files.read_text(path, errors="replace", follows_links=True)
        for secret in known_secrets.secrets_in(text):
            number = text.count("\n", 0, secret.start) + 1
            what = f"this line seems to contain a secret: {secret.what} ({secret.hint(text)})"
            fix = (
                "if this is a secret, revoke the secret, and repeat the run without the secret: packages are published"
            )
            raise ConfigError(what, where=f"{path}:{number}", fix=fix, rule="CFG-07")


def _settings(run: Run) -> list[Path]:
    return [path for name in (run_files.CONFIG, run_files.PLAN) if (path := run.folder / name).is_file()]


@contextmanager
def _package_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets its final name at the end of the block, and is removed on an error."""
    folder = folder.absolute()
    part = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
    try:
        with atomic_folder(folder, part=part):
            yield part
    except OSError as error:
        fix = "free disk space, or choose another folder with -o"
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
    """Return the values that the user must fill in, by file."""
    todo = {f"systems/{name}.json": system.missing(description) for name, description in descriptions.items()}
    for entry in entries:
        todo |= manual.missing(entry)
    return {file: fields for file, fields in todo.items() if fields}
