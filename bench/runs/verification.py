"""Check a run folder: every file against the manifest, each log against the ledger, the plan against script and config.

It says whether the folder is as its run left it, not whether the trials are good: an aborted trial can be verified too.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import backends
from bench.contract import atomic_files, codec, run_files
from bench.contract.atomic_files import Content
from bench.contract.plan import Plan
from bench.contract.run_files import CONFIG, LEDGER, MANIFEST, PLAN, SCRIPT
from bench.errors import BenchError, ConfigError, LogError
from bench.images import store
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks
from bench.mlperf import result as results
from bench.mlperf.log import Log
from bench.runs import ledger, manifest, trial
from bench.runs import status as statuses
from bench.runs.folder import plan_in
from bench.runs.ledger import Entry
from bench.runs.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One thing that was checked."""

    what: str
    expected: str
    found: str
    passed: bool | None
    """None for what is only told."""
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked of a run folder."""

    folder: str
    compared: tuple[Compared, ...]

    @property
    def passed(self) -> bool:
        return all(each.passed is not False for each in self.compared)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as strict JSON holds them."""
        return {"folder": self.folder, "verified": self.passed, "compared": [asdict(each) for each in self.compared]}


def verify(folder: Path) -> Verification:
    """Return what was found in a run folder, which may have been copied or moved.

    Raises:
        ConfigError: the folder is not a run's.
    """
    if not any((folder / name).is_file() for name in (PLAN, LEDGER, MANIFEST)):
        raise ConfigError("no run in this folder", where=str(folder), fix="name a run folder, as `runs` lists them")
    known, plan = manifest.read(folder), plan_in(folder)
    compared = [*_manifest(folder, known), *_trials(folder, plan), *_plan(folder, plan), *_image(known)]
    return Verification(folder=str(folder), compared=tuple(compared))


def _same(what: str, expected: str, found: str, *, rule: str | None = None) -> Compared:
    """Return a comparison that passes if what was found is what was expected; else it breaks the rule."""
    passed = expected == found
    return Compared(what=what, expected=expected, found=found, passed=passed, rule=None if passed else rule)


def _told(what: str, found: str) -> Compared:
    return Compared(what=what, expected="", found=found, passed=None)


def _manifest(folder: Path, known: Manifest | None) -> Iterator[Compared]:
    if known is None:
        yield _same(MANIFEST, "as the run wrote it", _why_none(folder))
        return
    yield _same(MANIFEST, "as the run wrote it", "as the run wrote it")
    yield _told("written", f"{known.written} by runstop {known.bench}")
    present = manifest.files(folder)
    for name in sorted({*known.files, *present}):
        found = _content(folder / name) if name in present else "missing, or a link"
        yield _same(name, _shown(known.files.get(name, "no such file")), _shown(found))
    for name in known.folders:
        yield _same(f"{name}/", "there", "there" if (folder / name).is_dir() else "missing")


def _why_none(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return "changed since, or of another version"
    if statuses.read(folder) is None:
        return "missing: the run has not ended"
    return "missing: the run was ended before it could write one, or is of an earlier version"


def _content(path: Path) -> Content | str:
    try:
        return atomic_files.of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _shown(found: Content | str) -> str:
    return found if isinstance(found, str) else f"{found.bytes:,} bytes, sha256 {found.sha256}"


def _trials(folder: Path, plan: Plan | None) -> Iterator[Compared]:
    try:
        entries = ledger.read(folder)
    except BenchError as error:
        yield _same(LEDGER, "a ledger", error.what)
        return
    logs_of = {each.index: each.log for each in plan.trials} if plan else {}
    for entry in entries:
        if entry.outcome.is_result or entry.log_sha256 is not None:
            yield from _log(folder / logs_of.get(entry.trial, run_files.result(entry.trial)), entry, entries)
        else:
            why = "; ".join(map(str, entry.not_as_planned or ["no log is judged"]))
            yield _told(f"trial {entry.trial}", f"{entry.outcome}: {why}")


def _log(path: Path, entry: Entry, entries: list[Entry]) -> Iterator[Compared]:
    """Yield how a log fits what the ledger keeps of it, and what the log says of itself."""
    try:
        log = logs.read(path)
    except LogError as error:
        yield _same(f"{path.name}, ledger", "a log", error.what, rule="LOG-18")
        return
    if entry.log_sha256 is None or entry.log_bytes is None:
        yield _told(f"{path.name}, ledger", "no checksum: an earlier version kept none")
    else:
        wanted = Content(bytes=entry.log_bytes, sha256=entry.log_sha256)
        yield _same(f"{path.name}, ledger", _shown(wanted), _shown(_content(path)), rule="LOG-18")
    if entry.nonce is None:
        yield _told(f"{path.name}, attempt", "no nonce: an earlier version drew none")
    else:
        yield from _bound(path, log, entry.nonce, entries)
    if entry.outcome.is_result:
        yield from _facts(path, entry)


def _bound(path: Path, log: Log, nonce: str, entries: list[Entry]) -> Iterator[Compared]:
    """Yield whether a log is of its attempt, and as that left it."""
    wrong, wanted = provenance_checks.stranger(log, nonce), f"nonce {nonce}"
    wrong = wrong and f"{wrong}{trial.whose(entries, log.events[0].value)}"
    yield _same(f"{path.name}, attempt", wanted, wrong or wanted, rule="LOG-17")
    if not wrong and (moved := provenance_checks.copied(log)):
        yield _told(f"{path.name}, place", f"moved or copied since: {moved.removeprefix(provenance_checks.COPY)}")
    findings = [finding for check in provenance_checks.CHECKS for finding in check(log)]
    findings += provenance_checks.missing_attachments(log)
    for what in [finding.what for finding in findings] or ["as written"]:
        yield _same(f"{path.name}, its own checksums", "as written", what, rule="LOG-18")


def _facts(path: Path, entry: Entry) -> Iterator[Compared]:
    """Yield whether the ledger's numbers are those of the log."""
    result = results.parse(path)
    for name in ("minutes", "samples_to_target", "eval_final"):
        kept, found = getattr(entry, name), getattr(result, name)
        if kept is not None or found is not None:
            yield _same(f"{path.name}, {name} in the ledger", str(found), str(kept))


def _plan(folder: Path, plan: Plan | None) -> Iterator[Compared]:
    if plan is None:
        yield _same(PLAN, "a plan", "none that can be read")
        return
    if (folder / SCRIPT).is_file():
        texts = [(folder / name).read_text(errors="replace") for name in (SCRIPT, PLAN)]
        differing = next(iter(backends.of(plan).differences(*texts)), "the same plan")
        yield _same(f"{SCRIPT}, its plan", "the same plan", differing)
    if (folder / CONFIG).is_file():
        yield _config((folder / CONFIG).read_text(errors="replace"), plan)


def _config(config_yaml: str, plan: Plan) -> Compared:
    from bench.planning import compose

    what = f"{CONFIG}, in the plan"
    try:
        config = compose.read(config_yaml)
    except ConfigError as error:
        return _told(what, error.what)
    config = compose.as_planned(config)
    asked, planned = _leaves(codec.plain(config)), _leaves(codec.plain(plan.config))
    differing = (
        f"{key} is {planned.get(key)!r:.40}, and {asked.get(key)!r:.40} was asked for"
        for key in sorted(asked.keys() | planned.keys())
        if asked.get(key) != planned.get(key) and not _is_of_the_site(key, asked.get(key))
    )
    return _same(what, "the same config", next(differing, "the same config"))


def _is_of_the_site(key: str, value: Any) -> bool:
    """Return whether a value depends on where the run was started, or is left to the job's shell."""
    return key.startswith(("cluster.paths.", "launch.folder")) or "$" in str(value)


def _leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by their dotted keys."""
    if not isinstance(value, dict):
        return {at: value}
    nested = [_leaves(inner, f"{at}.{name}" if at else str(name)) for name, inner in value.items()]
    return {key: leaf for leaves in nested for key, leaf in leaves.items()}


def _image(known: Manifest | None) -> Iterator[Compared]:
    if known is None or known.image is None:
        return
    what, digest = f"image {known.image.get('name')}", known.image.get("sha256")
    is_same = store.is_unchanged(known.image)
    if is_same is None:
        yield _told(what, f"not compared: not here, or never recorded; sha256 {digest}")
    else:
        yield _same(what, f"sha256 {digest}", f"sha256 {digest}" if is_same else "another file")
