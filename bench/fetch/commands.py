"""The command of `runstop fetch` that brings what a model folder lacks, for the fix of an error."""

from contextlib import suppress
from pathlib import Path

from bench.contract.model import Model
from bench.errors import ConfigError
from bench.fetch import record, sources


def model_command(folder: Path, model: Model) -> str:
    """Return the command that downloads a model into a folder, or what the folder lacks of it; empty if there is none.

    A folder of another repository stays as it is: only a new folder is named then.
    """
    with suppress(ConfigError):
        if (known := record.read(folder)) is not None:
            return "" if known.complete and not _is_incomplete(folder, known) else known.command(folder)
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    return sources.model_command(model, str(folder) if is_new else "FOLDER")


def _is_incomplete(folder: Path, known: record.Record) -> bool:
    return any(not (folder / name).is_file() for name in known.files)


def or_download(command: str) -> str:
    """Return the second half of a fix: the command of `runstop fetch`, if there is one."""
    if not command:
        return ""
    return f"; where to get it: {command}" if " mlperf " in command else f"; to download it: {command}"
