"""Read the outcomes that versions before 2026-11-25 wrote to ledger.json and status.json."""

from typing import Any

RENAMED = {"proven": "valid", "not proven": "invalid", "fine": "passed"}


def with_current_outcome(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object whose outcome has its present name."""
    outcome = raw.get("outcome")
    return raw | {"outcome": RENAMED[outcome]} if isinstance(outcome, str) and outcome in RENAMED else raw
