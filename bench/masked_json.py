"""Write JSON with secrets masked: lines for `--json`, and files."""

import json
from pathlib import Path
from typing import Any

from bench.contract import atomic_files
from bench.masking import masked_all


def line(content: Any) -> str:
    """Return one line of JSON without NaN."""
    return json.dumps(masked_all(content), allow_nan=False)


def text(content: Any) -> str:
    """Return the text of the file that `write` writes."""
    return atomic_files.text(masked_all(content))


def write(path: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    atomic_files.write(path, masked_all(content))
