"""JSON for others to read, with the secrets masked that logs may have brought: lines for `--json`, and files."""

import json
from pathlib import Path
from typing import Any

from bench.contract import atomic_files
from bench.masking import masked_all


def line(content: Any) -> str:
    """Return one line of JSON without NaN."""
    return json.dumps(masked_all(content), allow_nan=False)


def text(content: Any) -> str:
    """Return what `write` writes."""
    return atomic_files.text(masked_all(content))


def write(path: Path, content: Any) -> None:
    """Replace a JSON file in one step, as `bench.contract.atomic_files.write`."""
    atomic_files.write(path, masked_all(content))
