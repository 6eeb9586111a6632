"""Replay real llama2_70b_lora logs, and say how often the ranges of minutes that `watch` shows held the truth.

    python experiments/forecast_minutes.py CORPUS

Each log of a run that converged is looked at when 10 %, 20 %, … 90 % of its time is over, as `watch` would show it
then: with the shipped curve, and without knowing the rest of the log.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from bench.mlperf import reader
from bench.mlperf.benchmarks import LLAMA2_70B_LORA
from bench.mlperf.forecast import outside_band
from bench.watch.prediction import Outlook, Planned, look
from bench.watch.progress import Progress
from bench.watch.tracker import Tracker

LOOKS = tuple(tenth / 10 for tenth in range(1, 10))
"""When a log is looked at, in shares of its time."""
GOAL = LLAMA2_70B_LORA.goals[0]


@dataclass(frozen=True, slots=True)
class Moment:
    """What `watch` shows at one moment of a run, and what came of it."""

    outlook: Outlook
    seen: int
    """Evaluations."""
    is_outside: bool
    """Whether the run lay outside the reference band then."""
    ends: dict[int, float]
    """Minutes at which each evaluation was there, by samples."""
    minutes: float
    """When the run reached the target."""


def moments(log: Path) -> Iterator[Moment]:
    """Yield the moments of a log; none of a run that did not converge or gives no samples."""
    events = reader.read(log)[0]
    tracker = Tracker()
    tracker.update(events)
    start, done = tracker.progress.run_start_ms, tracker.progress.evaluations
    is_complete = start is not None and done and GOAL.is_reached_by(done[-1].value)
    if not is_complete or tracker.progress.benchmark != "llama2_70b_lora" or any(e.samples is None for e in done):
        return
    ends = {e.samples: (e.time_ms - start) / 60_000 for e in done}
    minutes = ends[done[-1].samples]
    for share in LOOKS:
        now_ms = start + round(share * minutes * 60_000)
        tracker = Tracker()
        tracker.update(event for event in events if event.time_ms <= now_ms)
        progress = tracker.progress
        yield Moment(look(progress, Planned(), now_ms), len(progress.evaluations), _is_outside(progress), ends, minutes)


def _is_outside(progress: Progress) -> bool:
    pairs = [(e.samples, e.value) for e in progress.evaluations]
    return outside_band(pairs, benchmark=progress.benchmark, global_batch_size=progress.global_batch_size)


def holds(moment: Moment) -> bool:
    """Return whether the range of minutes held the time of the evaluation that reached the target."""
    low, _, high = moment.outlook.minutes_range
    return low is not None and low <= moment.minutes and (high is None or moment.minutes <= high)


def show(title: str, moments: list[Moment]) -> None:
    """Print how often the ranges of minutes held the truth, and how wide they were."""
    known = [m for m in moments if m.outlook.minutes_range]
    if not known:
        return
    widths = [(high - low) / m.minutes for m in known for low, _, high in [m.outlook.minutes_range] if low and high]
    times = [(c, m.ends[c.samples]) for m in known for c in m.outlook.coming if c.samples in m.ends]
    pace = fmean(c.minutes_low <= end <= c.minutes_high for c, end in times)
    width = f"{median(widths):>12.1%}" if widths else f"{'':>12}"
    held = fmean(map(holds, known))
    print(f"{title:<36}{len(moments):>8}{len(known):>8}{held:>10.1%}{width}{len(times):>8}{pace:>10.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args()
    logs = sorted(args.corpus.rglob("llama2_70b_lora/*.txt"))
    runs = [of_log for log in logs if (of_log := list(moments(log)))]
    if not runs:
        print(f"no llama2_70b_lora logs of runs that converged under {args.corpus}", file=sys.stderr)
        return 2
    every = [m for run in runs for m in run]
    print(f"{len(runs)} runs, each at {len(LOOKS)} moments. Width is over the minutes to target, median.")
    print(f"{'90 % range of minutes to target':<36}{'moments':>8}{'known':>8}{'held':>10}{'width':>12}", end="")
    print(f"{'times':>8}{'held':>10}")
    show("all", every)
    show("inside the reference band", [m for m in every if not m.is_outside])
    show("outside the reference band", [m for m in every if m.is_outside])
    for seen in range(6):
        show(f"{seen} evaluations seen", [m for m in every if m.seen == seen])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
