"""What an echo task says of itself: words that rank 0 repeats into its log."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Echo:
    """The words, and how often each of them is repeated."""

    words: list[str]
    repeats: int
    loses: str | None = None
    """A word that is lost, so that the run fails."""
