"""Read from a log how groups of ranks trained apart: what their merges took, and which group left or came back."""

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
class Apart:
    """What a log says of groups that were merged at intervals. Medians are over the merges."""

    groups: int
    """At the start."""
    every_steps: int | None
    merges: int
    rank_bytes: float | None
    """What rank 0 sent in a merge."""
    exchange_s: float | None
    """Until the means were there."""
    waited_s: float | None
    """For groups that were behind."""
    stopped_s: float
    """For which training stood still, over all merges."""
    inner_step_ms: dict[str, float]
    """Of each group, without merges."""
    losses: dict[str, float]
    """The last training loss of each group; the evaluation is that of the merged model."""
    left: dict[str, int | None]
    """Groups that left, and after which step; of one that left again, the last time."""
    joined: dict[str, int | None]
    """Groups that were started again, and after which step they train again."""

    def efficiency(self, steps_time_s: float | None) -> float | None:
        """Return the share of the time of all steps in which training did not stand still for a merge."""
        return 1 - self.stopped_s / steps_time_s if steps_time_s and steps_time_s > self.stopped_s else None


def of(log: Log) -> Apart | None:
    """Return how groups trained apart; None where all ranks trained together."""
    record = log.single(mllog.LOCAL_SGD)
    groups = log.integer(mllog.LOCAL_SGD)
    if record is None or groups is None:
        return None
    merges = log.all(mllog.OUTER_STEP)
    step_times: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, float] = {}
    for merge in merges:
        losses |= _numbers(merge, "losses")
        for group, time_s in _numbers(merge, "step_times_s").items():
            step_times[group].append(1000 * time_s)
    return Apart(
        groups=groups,
        every_steps=_whole(record.metadata.get("every_steps")),
        merges=len(merges),
        rank_bytes=_median(merges, "rank_bytes"),
        exchange_s=_median(merges, "exchange_s"),
        waited_s=_median(merges, "waited_for_groups_s"),
        stopped_s=sum(stopped_s(log).values()),
        inner_step_ms={group: median(times) for group, times in step_times.items()},
        losses=losses,
        left={str(event.value): _whole(event.metadata.get("merge_step")) for event in log.all(mllog.GROUP_LEFT)},
        joined={str(event.value): _whole(event.metadata.get("step")) for event in log.all(mllog.GROUP_JOINED)},
    )


def stopped_s(log: Log) -> dict[int, float]:
    """Return for how long training stood still for a merge, by the step whose time holds it."""
    found: dict[int, float] = defaultdict(float)
    for event in log.all(mllog.OUTER_STEP):
        step, time_s = _whole(event.metadata.get("step")), number(event.metadata.get("training_stopped_s"))
        if step is not None and time_s is not None and time_s > 0:
            found[step] += time_s
    return dict(found)


def check(log: Log) -> Iterator[Finding]:
    """Yield each group that has left; what the run proves is what the others did."""
    for event in log.all(mllog.GROUP_LEFT):
        step, limit_s = (event.metadata.get(name) for name in ("merge_step", "time_limit_s"))
        what = f"group {event.value!r:.20} was not at the merge after step {step!r:.20} within {limit_s!r:.20} s"
        back = next((e for e in log.all(mllog.GROUP_JOINED) if e.value == event.value and e.line > event.line), None)
        until = f"until it joined again after step {back.metadata.get('step')!r:.20}" if back else "from there on"
        yield finding("RUN-19", "warning", event.line, f"{what}: the others trained on its rows {until}")


def _numbers(event: Event, name: str) -> dict[str, float]:
    """Return the numbers of a table in an event's metadata."""
    table = event.metadata.get(name)
    return {key: value for key, value in table.items() if is_number(value)} if isinstance(table, dict) else {}


def _median(events: Sequence[Event], name: str) -> float | None:
    found = [value for event in events if is_number(value := event.metadata.get(name))]
    return median(found) if found else None


def _whole(value: Any) -> int | None:
    return int(value) if is_number(value) and value == int(value) else None
