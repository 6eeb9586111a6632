"""What `--json` prints: one line of JSON without NaN, in which the secrets of logs are masked."""

import json
from typing import Any

from bench import masking


def line(content: Any) -> str:
    """Return what JSON can hold as such a line."""
    return json.dumps(masking.masked_all(content), allow_nan=False)
