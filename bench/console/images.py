"""Show container images as tables."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.console import progress
from bench.images.importer import Imported
from bench.images.store import DIGEST_DIGITS, Entry, Record
from bench.report.tables import Row, TextTable
from bench.rules.finding import Finding


def imported_sheet(imported: Imported) -> TextTable:
    """Return the imported image, and how to run in it."""
    record = imported.record
    is_tag = record.source.startswith(("docker", "podman")) and "@sha256:" not in record.source
    since = "" if imported.is_new else f"since {record.imported}"
    since += "; the tag may point to a newer image: --again imports it" if since and is_tag else ""
    rows = [("image", str(imported.path), since), *_rows(record)]
    return TextTable(
        "imported" if imported.is_new else "already imported", rows, caption=f"export CONT={imported.path}"
    )


def verified_sheet(path: Path, record: Record | None, faults: list[Finding]) -> TextTable:
    """Return the record of an image file, and what is wrong with it."""
    verdict = ("intact", "no" if faults else "yes", "" if faults else "content, name and record match")
    wrong = [(fault.rule, fault.what, f"fix: {fault.fix}") for fault in faults]
    return TextTable(str(path), [verdict, *wrong, *(_rows(record) if record else [])])


def list_sheet(folder: Path, entries: list[Entry]) -> TextTable:
    rows = [_line(entry) for entry in entries]
    caption = "to check the content of a file: runstop image verify FILE" if rows else "no images in this folder"
    return TextTable(f"images in {folder}", rows, ("image", "source", "GiB", "imported", "sha256", "problems"), caption)


def _rows(record: Record) -> list[Row]:
    marker = record.marker or {}
    versions = marker.get("versions")
    contents = ", ".join(f"{key} {value}" for key, value in versions.items()) if isinstance(versions, dict) else ""
    system = (record.os_release or {}).get("PRETTY_NAME", "")
    return [
        ("source", record.source, f"by {record.importer}, {record.imported}"),
        ("sha256", record.sha256, f"{record.size_bytes / 2**30:.3f} GiB"),
        (
            "architecture",
            record.architecture or "",
            system if record.architecture else "unknown: the image has no program",
        ),
        ("marker", str(marker.get("name") or ""), "" if marker else "none: the image was not built from containers/"),
        *((key, str(marker[key]), "") for key in ("base", "digest", "commit") if marker.get(key)),
        *([("versions", contents, "")] if contents else []),
    ]


def _line(entry: Entry) -> tuple[str, ...]:
    record = entry.record
    known = (record.source, record.imported, record.sha256[:DIGEST_DIGITS]) if record else ("", "", "")
    wrong = "; ".join(f"{fault.rule} {fault.what}" for fault in entry.faults)
    return entry.path.name, known[0], f"{entry.size_bytes / 2**30:.3f}", known[1], known[2], wrong


@contextmanager
def show_progress(part: Path, *, say: Callable[[str], None], every_s: float = progress.PIPE_S) -> Iterator[None]:
    """Show the elapsed time and the written size of the image until the block ends."""
    began_s = time.monotonic()
    with progress.shown(lambda: state(part, time.monotonic() - began_s), say=say, every_s=every_s):
        yield


def state(part: Path, elapsed_s: float) -> str:
    """Return the elapsed time and the written size of the image; Enroot writes only after unpacking all layers."""
    written = 0
    with suppress(FileNotFoundError):
        written = part.stat().st_size
    size = f"{written / 2**30:.2f} GiB written" if written else "nothing written yet"
    return f"importing, {int(elapsed_s) // 60}:{int(elapsed_s) % 60:02} elapsed, {size}"
