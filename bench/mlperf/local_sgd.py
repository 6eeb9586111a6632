"""Read local SGD from a log: the time and bytes of weight averaging, and groups that left or rejoined."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.contract import mllog
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event, is_number
from bench.rules.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgdResult:
    """The results of local SGD in a log. Each median is over all weight averagings."""

    groups: int
    """The number of groups at the start."""
    every_steps: int | None
    averagings: int
    """Number of weight averagings."""
    rank_bytes: float | None
    """The median number of bytes that rank 0 sent in one weight averaging."""
    exchange_s: float | None
    """The median time of the exchange in one weight averaging."""
    waited_s: float | None
    """The median time that a group waited for slower groups in one weight averaging."""
    stopped_s: float
    """The total time without training, in all weight averagings."""
    inner_step_ms: dict[str, float]
    """The step time of each group, without weight averaging."""
    losses: dict[str, float]
    """The last training loss of each group. Evaluations use the averaged model instead."""
    left: dict[str, int | None]
    """For each group: the last step after which the group left."""
    joined: dict[str, int | None]
    """For each restarted group: the step after which it trains again."""

    def efficiency(self, steps_time_s: float | None) -> float | None:
        """Return the share of the time of all steps that was not spent on weight averaging."""
        return 1 - self.stopped_s / steps_time_s if steps_time_s and steps_time_s > self.stopped_s else None


def read(log: Log) -> LocalSgdResult | None:
    """Return what a log records of local SGD; None without it."""
    record = log.single(mllog.LOCAL_SGD)
    groups = log.integer(mllog.LOCAL_SGD)
    if record is None or groups is None:
        return None
    averagings = log.all(mllog.OUTER_STEP)
    step_times: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, float] = {}
    for averaging in averagings:
        losses |= _numbers(averaging, "losses")
        for group, time_s in _numbers(averaging, "step_times_s").items():
            step_times[group].append(1000 * time_s)
    return LocalSgdResult(
        groups=groups,
        every_steps=_whole(record.metadata.get("every_steps")),
        averagings=len(averagings),
        rank_bytes=_median(averagings, "rank_bytes"),
        exchange_s=_median(averagings, "exchange_s"),
        waited_s=_median(averagings, "waited_for_groups_s"),
        stopped_s=sum(stopped_s(log).values()),
        inner_step_ms={group: median(times) for group, times in step_times.items()},
        losses=losses,
        left={str(event.value): _whole(event.metadata.get("merge_step")) for event in log.all(mllog.GROUP_LEFT)},
        joined={str(event.value): _whole(event.metadata.get("step")) for event in log.all(mllog.GROUP_JOINED)},
    )


def stopped_s(log: Log) -> dict[int, float]:
    """Return the seconds without training during weight averaging, by the step whose time includes them."""
    by_step: dict[int, float] = defaultdict(float)
    for event in log.all(mllog.OUTER_STEP):
        step, time_s = _whole(event.metadata.get("step")), number(event.metadata.get("training_stopped_s"))
        if step is not None and time_s is not None and time_s > 0:
            by_step[step] += time_s
    return dict(by_step)


def check(log: Log) -> Iterator[Finding]:
    """Yield a warning for each group that left."""
    for event in log.all(mllog.GROUP_LEFT):
        step, limit_s = (event.metadata.get(name) for name in ("merge_step", "time_limit_s"))
        what = f"group {event.value!r:.20} did not finish averaging after step {step!r:.20} within {limit_s!r:.20} s"
        back = next((e for e in log.all(mllog.GROUP_JOINED) if e.value == event.value and e.line > event.line), None)
        until = (
            f"until it rejoined after step {back.metadata.get('step')!r:.20}" if back else "until the end of the run"
        )
        yield finding("RUN-19", "warning", event.line, f"{what}; the other groups trained on its rows {until}")


def _numbers(event: Event, name: str) -> dict[str, float]:
    """Return the numbers of a table in an event's metadata."""
    table = event.metadata.get(name)
    return {key: value for key, value in table.items() if is_number(value)} if isinstance(table, dict) else {}


def _median(events: Sequence[Event], name: str) -> float | None:
    values = [value for event in events if is_number(value := event.metadata.get(name))]
    return median(values) if values else None


def _whole(value: Any) -> int | None:
    return int(value) if is_number(value) and value == int(value) else None
