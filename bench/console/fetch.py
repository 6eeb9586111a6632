"""Show downloads, their folders, and MLPerf's locations as tables."""

import shlex
import time
from pathlib import Path

from bench.fetch import sources
from bench.fetch.download import Planned, Progress, gb
from bench.fetch.record import Record
from bench.report.tables import TextTable


def planned_sheet(planned: Planned, token: str) -> TextTable:
    """Return what a download would bring, and whether it fits."""
    repo, request = planned.repo, planned.request
    kept = "the revision of the folder" if planned.is_continued else f"of {request.revision or 'the default branch'}"
    gated = "gated: the account must have access" if repo.is_gated else ""
    skipped = len(repo.files) - len(planned.files)
    are = "is" if skipped == 1 else "are"
    left_out = f"{skipped} of the repository {are} left out" if skipped else "all of the repository"
    rows = [
        ("repository", repo.page, gated),
        ("revision", repo.revision, kept),
        ("token", token or "none", ""),
        ("folder", str(request.folder), ""),
        ("files", str(len(planned.files)), left_out),
        ("size", gb(planned.bytes), f"{gb(planned.present_bytes)} in the folder" if planned.present_bytes else ""),
        ("to download", gb(planned.missing_bytes), ""),
        ("free on the disk", gb(planned.free_bytes), ""),
    ]
    return TextTable(f"{request.kind} {repo.name}", rows)


def fetched_sheet(folder: Path, record: Record) -> TextTable:
    """Return a folder that was downloaded, and how to use it."""
    total = gb(sum(file.bytes for file in record.files.values()))
    rows = [
        ("revision", record.revision, ""),
        ("files", str(len(record.files)), f"{total}, all with the hub's checksums"),
        ("to check later", shlex.join(["runstop", "fetch", "--check", str(folder)]), ""),
    ]
    variable = "MODEL" if record.kind == "model" else "DATADIR"
    return TextTable(f"downloaded {folder}", rows, caption=f"export {variable}={shlex.quote(str(folder.absolute()))}")


def checked_sheet(folder: Path, record: Record, wrong: list[tuple[str, str]]) -> TextTable:
    """Return whether the files of a folder are those that were downloaded."""
    rows = [
        ("intact", "no" if wrong or not record.complete else "yes", ""),
        *((path, what, "") for path, what in wrong),
        ("repository", record.repo, record.endpoint),
        ("revision", record.revision, ""),
        ("files", str(len(record.files)), "" if record.complete else "the download is not complete"),
    ]
    broken = f"move wrong files away; then run: {record.command(folder)}" if wrong or not record.complete else ""
    return TextTable(str(folder), rows, caption=broken)


def progress_line(progress: Progress, began_s: float) -> str:
    """Return how far a download is."""
    rate = progress.received_bytes / 1e6 / max(time.monotonic() - began_s, 1e-3)
    size = f"{gb(progress.done_bytes)} of {gb(progress.total_bytes)}"
    return f"downloading, {progress.done_files} of {progress.num_files} files, {size}, {rate:,.1f} MB/s"


def locations_text(benchmark: str) -> str:
    """Return where MLPerf keeps the inputs of a benchmark, and what the user does to get them."""
    lines = [f"runstop downloads no inputs of {benchmark} from MLPerf:"]
    for location in sources.MLPERF[benchmark]:
        lines += ["", location.input, f"  why not:  {location.reason}"]
        lines += [f"  step {number}:   {step}" for number, step in enumerate(location.steps, 1)]
        lines += [f"  source:   {location.source}"]
    return "\n".join(lines)
