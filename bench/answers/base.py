"""The base classes of the answers of `--json`; `bench.answers.schema` lists all answers."""

import msgspec


class Part(msgspec.Struct, kw_only=True):
    """An object inside of an answer."""


class Answer(msgspec.Struct, kw_only=True, tag_field="schema", tag="runstop/answer/1.0"):
    """A whole line of output; `schema` is its first field."""


class Evaluation(Part, kw_only=True):
    """One evaluation of a trial."""

    samples: float | None
    """The number of trained samples. Null if the log counts epochs or steps."""
    value: float
    line: int | None = None
    """The line number in the log."""
    time: str | None = None
    metric: str | None = None
    """The name of the metric. Only set if the benchmark has several metrics."""
