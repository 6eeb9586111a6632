"""Check a run folder: every file against the manifest, each log against the ledger, the plan against script and config.

It shows whether the folder has changed since its run ended, not whether the trials are valid: an aborted trial can be
verified, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import backends
from bench.contract import atomic_files, codec, regular_files, run_files
from bench.contract.atomic_files import Content
from bench.contract.checksums import CHANGED
from bench.contract.plan import Plan
from bench.contract.run_files import CONFIG, LEDGER, MANIFEST, PLAN, SCRIPT
from bench.errors import BenchError, ConfigError, LogError
from bench.images import store
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks
from bench.mlperf import result as results
from bench.mlperf.log import Log
from bench.runs import ledger, manifest, names, trial
from bench.runs import status as statuses
from bench.runs.folder import plan_in
from bench.runs.ledger import Entry
from bench.runs.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The comparison of an expected and an actual value."""

    what: str
    expected: str
    actual: str
    passed: bool | None
    """None for information that is not checked."""
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All checks of a run folder."""

    folder: str
    compared: tuple[Compared, ...]

    @property
    def passed(self) -> bool:
        return all(each.passed is not False for each in self.compared)


def verify(folder: Path, manifest_data: bytes | None = None) -> Verification:
    """Check a run folder, which may have been copied or moved; `manifest_data` replaces the content of its manifest.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    if not any((folder / name).is_file() for name in (PLAN, LEDGER, MANIFEST)):
        raise names.not_a_run(folder)
    known = manifest.read(folder) if manifest_data is None else manifest.loads(manifest_data)
    plan = plan_in(folder)
    compared = [*_manifest(folder, known), *_trials(folder, plan), *_plan(folder, plan), *_image(known)]
    return Verification(folder=str(folder), compared=tuple(compared))


def _same(what: str, expected: str, actual: str, *, rule: str | None = None) -> Compared:
    """Return a check that passes if both texts are equal; else it breaks the rule."""
    passed = expected == actual
    return Compared(what=what, expected=expected, actual=actual, passed=passed, rule=None if passed else rule)


def _information(what: str, text: str) -> Compared:
    return Compared(what=what, expected="", actual=text, passed=None)


def _manifest(folder: Path, known: Manifest | None) -> Iterator[Compared]:
    if known is None:
        yield _same(MANIFEST, "as written by the run", _why_none(folder))
        return
    yield _same(MANIFEST, "as written by the run", "as written by the run")
    yield _information("written", f"{known.written} by runstop {known.bench}")
    unlisted = tuple(f"{name}/" for name in known.folders)
    present = [name for name in manifest.files(folder) if name in known.files or not name.startswith(unlisted)]
    for name in sorted({*known.files, *present}):
        actual = _content(folder / name) if name in present else "missing, or a symbolic link"
        yield _same(name, _shown(known.files.get(name, "no such file")), _shown(actual))
    for name in known.folders:
        yield _same(f"{name}/", "present", "present" if (folder / name).is_dir() else "missing")
        yield _information(f"{name}/, its files", "no checksums: an earlier version wrote none")


def _why_none(folder: Path) -> str:
    if (folder / MANIFEST).exists():
        return "changed since, or written by another version"
    if statuses.read(folder) is None:
        return "missing: the run has not ended"
    return "missing: the run was killed before it could write one, or an earlier version wrote the run"


def _content(path: Path) -> Content | str:
    try:
        return atomic_files.checksum(path, max_bytes=regular_files.MAX_LOG_BYTES)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _shown(content: Content | str) -> str:
    return content if isinstance(content, str) else f"{content.bytes:,} bytes, sha256 {content.sha256}"


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
            why = "; ".join(map(str, entry.not_as_planned or ["its log was not judged"]))
            yield _information(f"trial {entry.trial}", f"{entry.outcome}: {why}")


def _log(path: Path, entry: Entry, entries: list[Entry]) -> Iterator[Compared]:
    """Yield the checks of a log against the ledger and against its own checksums."""
    try:
        log = logs.read(path)
    except LogError as error:
        yield _same(f"{path.name}, ledger", "a log", error.what, rule="LOG-18")
        return
    if entry.log_sha256 is None or entry.log_bytes is None:
        yield _information(f"{path.name}, ledger", "no checksum: an earlier version wrote none")
    else:
        wanted = Content(bytes=entry.log_bytes, sha256=entry.log_sha256)
        yield _same(f"{path.name}, ledger", _shown(wanted), _shown(_content(path)), rule="LOG-18")
    if entry.nonce is None:
        yield _information(f"{path.name}, attempt", "no nonce: an earlier version wrote none")
    else:
        yield from _bound(path, log, entry.nonce, entries)
    if entry.outcome.is_result:
        yield from _facts(path, entry)


def _bound(path: Path, log: Log, nonce: str, entries: list[Entry]) -> Iterator[Compared]:
    """Yield whether the trial's last attempt wrote the log, and whether the log has changed since."""
    wrong, wanted = provenance_checks.nonce_mismatch(log, nonce), f"nonce {nonce}"
    wrong = wrong and f"{wrong}{trial.owning_attempt(entries, log.events[0].value)}"
    yield _same(f"{path.name}, attempt", wanted, wrong or wanted, rule="LOG-17")
    if not wrong and (moved := provenance_checks.copy_mismatch(log)):
        yield _information(
            f"{path.name}, place", f"moved or copied since: {moved.removeprefix(provenance_checks.COPY)}"
        )
    findings = [finding for check in provenance_checks.CHECKS for finding in check(log)]
    findings += provenance_checks.missing_attachments(log)
    for what in [finding.what for finding in findings] or ["as written"]:
        yield _same(f"{path.name}, its own checksums", "as written", what, rule="LOG-18")


def _facts(path: Path, entry: Entry) -> Iterator[Compared]:
    """Yield whether the numbers in the ledger are those in the log."""
    result = results.parse(path)
    for name, sha256 in (entry.inputs or {}).items():
        in_log = f"sha256 {result.inputs.get(name)}"
        yield _same(f"{path.name}, {name} in the ledger", in_log, f"sha256 {sha256}", rule=CHANGED)
    for name in ("minutes", "samples_to_target", "eval_final"):
        in_ledger, in_log = getattr(entry, name), getattr(result, name)
        if in_ledger is not None or in_log is not None:
            expected = "not in the log" if in_log is None else str(in_log)
            actual = "not in the ledger" if in_ledger is None else str(in_ledger)
            yield _same(f"{path.name}, {name} in the ledger", expected, actual)


def _plan(folder: Path, plan: Plan | None) -> Iterator[Compared]:
    if plan is None:
        yield _same(PLAN, "a plan", "missing, or cannot be read")
        return
    if (changed := ledger.changed_plan(folder)) is not None:
        yield _same(f"{PLAN}, ledger", "the plan with which the run started", changed.what, rule=CHANGED)
    try:
        if regular_files.is_regular(folder / SCRIPT):
            texts = [regular_files.read_text(folder / name, errors="replace") for name in (SCRIPT, PLAN)]
            differing = next(iter(backends.for_plan(plan).differences(*texts)), "the same plan")
            yield _same(f"{SCRIPT}, its plan", "the same plan", differing)
        if regular_files.is_regular(folder / CONFIG):
            yield _config(regular_files.read_text(folder / CONFIG, errors="replace"), plan)
    except OSError as error:
        yield _same(f"{SCRIPT} and {CONFIG}", "readable", f"cannot be read: {error.strerror}")


def _config(config_yaml: str, plan: Plan) -> Compared:
    from bench.planning import compose

    what = f"{CONFIG}, in the plan"
    try:
        config = compose.read(config_yaml)
    except ConfigError as error:
        return _information(what, error.what)
    config = compose.as_planned(config)
    if config.data is not None and config.data.train_rows is None and plan.config.data is not None:
        config.data.train_rows = plan.config.data.train_rows  # counted before the plan was written
    in_config, in_plan = _leaves(codec.plain(config)), _leaves(codec.plain(plan.config))
    differing = (
        f"{key} is {in_plan.get(key)!r:.40} in the plan, and {in_config.get(key)!r:.40} in {CONFIG}"
        for key in sorted(in_config.keys() | in_plan.keys())
        if in_config.get(key) != in_plan.get(key) and not _is_of_the_site(key, in_config.get(key))
    )
    return _same(what, "the same config", next(differing, "the same config"))


def _is_of_the_site(key: str, value: Any) -> bool:
    """Return whether a value depends on the machine that started the run, or is expanded by the job's shell."""
    return key.startswith(("cluster.paths.", "launch.folder")) or "$" in str(value)


def _leaves(value: Any, at: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted keys."""
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
        yield _information(
            what, f"not compared: the image is not on this machine, or its digest was never recorded; sha256 {digest}"
        )
    else:
        yield _same(what, f"sha256 {digest}", f"sha256 {digest}" if is_same else "another file")
