"""What engine=nemo is told: where NeMo's own environment is. The standard library only."""

from dataclasses import dataclass

NEMO, VERSION = "nemo-toolkit", "2.7.3"
"""The last NeMo with `nemo.collections.llm`, whose recipes are used."""


@dataclass(slots=True, kw_only=True)
class Nemo:
    """The environment in which NeMo's recipe trains; what NeMo requires does not go with the rest of this project."""

    python: str
    """The interpreter of the trials: the path of one, or `python`, that of the ranks: in an image that has NeMo."""
