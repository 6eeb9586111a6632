"""Print messages that are not results to stderr, as plain lines or below a live picture."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    Messages: TypeAlias = Console


def to_stderr() -> "Messages":
    """Return what prints messages to stderr; a long one is left to the terminal to wrap, so that it can be pasted."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)
