"""Read from our own logs which ranks were persistently slower than the others.

`jobs.ranks.slow_ranks` decides it during training. A log may contain anything, so every value is checked.
"""

from collections.abc import Iterator

from bench import texts
from bench.contract import mllog
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event, clean
from bench.rules.finding import Finding

_SHOWN_REASONS = 4


def described(event: Event) -> str | None:
    """Return a record of slow ranks as a sentence; None if it is damaged.

    Raises no error: `watch` calls it on growing logs.
    """
    about, ranks = event.metadata, event.value
    times_ms = [number(about.get(name)) for name in ("own_ms", "usual_ms")]
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, int) for rank in ranks):
        return None
    if times_ms[0] is None or times_ms[1] is None:
        return None
    who = f"rank{'s' * (len(ranks) > 1)} {texts.ranges(ranks)} on {about.get('node', '?')}"
    what = "an evaluation" if about.get("cause") == "evaluation" else "a step"
    took = f"{times_ms[0]:,.4g} ms of {what} without waiting, others {times_ms[1]:,.4g} ms"
    percent, reasons = number(about.get("percent")), about.get("reasons")
    price = "" if percent is None else f"; {percent:.1f} % of the run until then"
    shown = [str(reason) for reason in reasons[:_SHOWN_REASONS]] if isinstance(reasons, list) else []
    return clean(f"{who}: slow {about.get('cause', '')} ({took}{price})" + "".join(f"; {each}" for each in shown))


def _check_slow_ranks(log: Log) -> Iterator[Finding]:
    """Yield each group of slow ranks of our own runs."""
    for event in log.all(mllog.SLOW_RANKS) if log.is_ours else ():
        if (text := described(event)) is not None:
            yield finding("RUN-26", "warning", event.line, text)


CHECKS = (_check_slow_ranks,)
