"""The files of a run folder that list nodes of a job: those that are used, spare, or left out.

Standard library only: ranks import it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, regular_files
from bench.contract.run_files import LEFT_OUT


def names(file: Path) -> list[str]:
    """Return the nodes in a file of names, such as SPARE_NODES; none if it does not exist."""
    text = regular_files.read_text(file) if file.exists() else ""
    return [name for name in text.strip().split(",") if name]


def write(file: Path, nodes: Sequence[str]) -> None:
    """Replace a file of names; raises like `atomic_files.write_text`."""
    atomic_files.write_text(file, ",".join(nodes) + "\n")


def entries(run: Path) -> dict[str, dict[str, Any]]:
    """Return the nodes that any job of a run has left out, each with the reason, the time and the job."""
    content = atomic_files.read_object(run / LEFT_OUT)
    return {str(name): entry for name, entry in content.items() if isinstance(entry, dict)}


def left_out(run: Path, job: str) -> dict[str, str]:
    """Return the nodes that a job has left out, each with the reason."""
    return {name: str(entry.get("why")) for name, entry in entries(run).items() if entry.get("job") == job}
