"""Replay real logs, and say how often the ranges of minutes that `watch` shows held the truth.

    python experiments/forecast_minutes.py CORPUS             each log without the published runs and pace of its system
    python experiments/forecast_minutes.py CORPUS --draw 300  of 300 logs, drawn with a fixed seed
    python experiments/forecast_minutes.py CORPUS --without submitter   without all systems of its submitter

Each log of a run that converged is looked at when 10 %, 20 %, … 90 % of its time is over, as `watch` would show it
then, without knowing the rest of the log. CORPUS/<round>/<submitter>/<system>/<benchmark>/result_0.txt.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from bench.mlperf import forecast, published, reader
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.forecast import outside_band
from bench.mlperf.forecast.curve import Reference, reference
from bench.mlperf.forecast.prior import prior
from bench.watch import prediction
from bench.watch.prediction import Outlook, Planned, look
from bench.watch.progress import Progress
from bench.watch.tracker import Tracker

LOOKS = tuple(tenth / 10 for tenth in range(1, 10))
"""When a log is looked at, in shares of its time."""
LORA = "llama2_70b_lora"


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


SYSTEMS = published.systems


def leave_out(benchmark: str, round_: str, submitter: str, system: str) -> None:
    """Forecast as if this system was not published; an empty system means all of the submitter, in all rounds."""

    def is_out(of_round: str, name: str) -> bool:
        if not system:
            return name.startswith(f"{submitter}/")
        return (of_round, name) == (round_, f"{submitter}/{system}")

    def without(name: str | None, gbs: int | None) -> Reference | None:
        known = reference(name, gbs)
        if known is None or name is None or gbs is None:
            return None
        return replace(known, prior=prior(name, gbs, without=lambda it: is_out(it.round, it.system)))

    others = tuple(it for it in SYSTEMS(benchmark) if not is_out(it.round, f"{it.submitter}/{it.system}"))
    forecast.reference = without
    published.systems = lambda name: others if name == benchmark else ()
    prediction._forecast.cache_clear()
    prediction._published_step_times_s.cache_clear()


def moments(log: Path, benchmark: str = LORA) -> Iterator[Moment]:
    """Yield the moments of a log; none of a run that did not converge or gives no samples."""
    events = reader.read(log)[0]
    tracker = Tracker()
    tracker.update(events)
    start, done = tracker.progress.run_start_ms, tracker.progress.evaluations
    goal = BENCHMARKS[benchmark].goals[0]
    is_complete = start is not None and done and goal.is_reached_by(done[-1].value)
    if not is_complete or tracker.progress.benchmark != benchmark or any(e.samples is None for e in done):
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
    parser.add_argument("--draw", type=int, metavar="N", help="number of logs (default: all)")
    parser.add_argument("--without", choices=("system", "submitter"), default="system")
    parser.add_argument("--benchmark", choices=(LORA, "llama31_8b"), default=LORA)
    args = parser.parse_args()
    logs = sorted(args.corpus.glob(f"*/*/*/{args.benchmark}/*.txt"))
    if args.draw:
        logs = random.Random(1).sample(logs, min(args.draw, len(logs)))
    runs = []
    for log in logs:
        round_, submitter, system = log.relative_to(args.corpus).parts[:3]
        leave_out(args.benchmark, round_, submitter, system if args.without == "system" else "")
        runs.append((round_, list(moments(log, args.benchmark))))
    runs = [(round_, of_log) for round_, of_log in runs if of_log]
    if not runs:
        print(f"no {args.benchmark} logs of runs that converged under {args.corpus}", file=sys.stderr)
        return 2
    every = [m for _, of_log in runs for m in of_log]
    print(f"{len(runs)} runs, each at {len(LOOKS)} moments. Width is over the minutes to target, median.")
    print(f"{'90 % range of minutes to target':<36}{'moments':>8}{'known':>8}{'held':>10}{'width':>12}", end="")
    print(f"{'times':>8}{'held':>10}")
    show("all", every)
    for round_ in sorted({name for name, _ in runs}):
        show(f"round {round_}", [m for name, of_log in runs if name == round_ for m in of_log])
    show("before a step was measured", [m for m in every if m.outlook.step_time_ms is None])
    show("since a step was measured", [m for m in every if m.outlook.step_time_ms is not None])
    show("inside the reference band", [m for m in every if not m.is_outside])
    show("outside the reference band", [m for m in every if m.is_outside])
    for seen in range(6):
        show(f"{seen} evaluations seen", [m for m in every if m.seen == seen])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
