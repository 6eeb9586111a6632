"""Score the forecasts of bench.mlperf.forecast on real logs of systems that they do not know.

    python experiments/forecast.py CORPUS                     each system is forecast without its own published runs
    python experiments/forecast.py CORPUS --without submitter each submitter without all its runs, also in the curve
    python experiments/forecast.py CORPUS --without round     each round without all systems of this round
    python experiments/forecast.py CORPUS --without nothing   as shipped
    python experiments/forecast.py CORPUS --fit 250           print the curve as JSON, fitted on 250 sampled trials

The five numbers of the curve are the shipped ones, except with --without submitter. The benchmark is llama2_70b_lora,
or that of --benchmark. A log's system is the folder above its benchmark's:
CORPUS/<round>/<submitter>/<system>/<benchmark>/result_0.txt.
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import minimize

from bench.mlperf.benchmarks import BENCHMARKS, Goal
from bench.mlperf.forecast import Forecast, predict
from bench.mlperf.forecast.curve import Curve, Reference, is_outside, lag_weights, reference
from bench.mlperf.forecast.prior import PublishedSystem, prior
from bench.mlperf.forecast.recipes import log_densities
from bench.mlperf.result import parse

STARTS = {
    "llama2_70b_lora": Curve(
        limit_loss=0.92, drop_loss=0.02, rate=1.3, lag_scale=0.06, noise_scale=0.001, source="start of the fit"
    ),
    "llama31_8b": Curve(
        limit_loss=3.15,
        drop_loss=0.9,
        rate=1.8,
        lag_scale=0.05,
        noise_scale=0.004,
        source="start of the fit",
        from_progress=0.6,
        lag_step=0.01,
        spike_nats=0.05,
        trust=0.6,
        farthest_loss=1.0,
        has_switching=False,
    ),
}
"""Of the fit, by benchmark."""
FIT_RUNS = 120
"""Drawn for the curve of each submitter that is left out."""
NEVER = 0.001
"""The log score is limited to that of an event with this probability."""
GRID_EVALUATIONS = 40
"""How many evaluations a trial's grid continues after its last one."""
MANY_SEEN = 5
"""Evaluations from which on rows are one."""
LAST_FALLS, SWITCH_FALL = 3, 0.013
"""A recipe that switches to a higher precision has such a fall, in nats, among its last three."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a log tells of a trial, and what was known of its benchmark before."""

    system: str
    """<round>/<submitter>/<system>."""
    benchmark: str
    known: Reference
    evaluations: tuple[tuple[float, float], ...]
    converged: bool

    @property
    def submitter(self) -> str:
        return self.system.split("/")[1]

    @property
    def goal(self) -> Goal:
        return BENCHMARKS[self.benchmark].goals[0]

    @property
    def grid(self) -> list[int]:
        """The samples at which the trial evaluates, continued past its end, as its plan defines them."""
        at = [int(samples) for samples, _ in self.evaluations]
        interval = at[-1] - at[-2]
        return [*at, *range(at[-1] + interval, at[-1] + GRID_EVALUATIONS * interval, interval)]


@dataclass(frozen=True, slots=True)
class Moment:
    """A forecast made once `seen` evaluations were known, and what came next."""

    trial: Trial
    seen: int
    forecast: Forecast | None
    baseline: Forecast | None
    """The published distribution of the runs that had not converged by then."""
    next_reached: bool
    samples_to_target: float | None
    is_outside: bool
    """Whether most evaluations lay outside the reference band then."""


def trials(corpus: Path, benchmark: str) -> list[Trial]:
    """Return the different trials with two evaluations or more; with one, the interval is unknown."""
    trials: dict[object, Trial] = {}
    for path in sorted(corpus.glob(f"*/*/*/{benchmark}/*.txt")):
        result = parse(path)
        known = reference(benchmark, result.global_batch_size)
        evaluations = tuple((e.samples, e.value) for e in result.evaluations if e.samples is not None)
        if result.benchmark == benchmark and known and len(evaluations) > 1:
            trial = Trial(str(path.relative_to(corpus).parent.parent), benchmark, known, evaluations, result.converged)
            trials.setdefault((result.global_batch_size, evaluations), trial)
    return list(trials.values())


def leaving_out(runs: Sequence[Trial], out: str) -> Iterator[Trial]:
    """Yield each trial with what is known without the published runs of its system, submitter or round.

    Without a submitter, the curve is fitted again on the runs of the others.
    """
    curves = {}
    for run in runs if out == "submitter" else ():
        others = [other for other in runs if other.submitter != run.submitter]
        if run.submitter not in curves and others:
            sampled = random.Random(1).sample(others, min(FIT_RUNS, len(others)))
            curves[run.submitter] = fit(sampled, STARTS[run.benchmark])
    for run in runs:
        round_, _, system = run.system.partition("/")
        is_out: dict[str, Callable[[PublishedSystem], bool]] = {
            "nothing": lambda each: False,
            "system": lambda each, round_=round_, system=system: (each.round, each.system) == (round_, system),
            "submitter": lambda each, own=run.submitter: each.system.split("/")[0] == own,
            "round": lambda each, round_=round_: each.round == round_,
        }
        own = prior(run.benchmark, run.known.convergence.global_batch_size, without=is_out[out])
        curve = curves.get(run.submitter, run.known.curve)
        yield replace(run, known=replace(run.known, prior=own, curve=curve))


def fit(runs: Sequence[Trial], start: Curve) -> Curve:
    """Return the curve that makes the runs likeliest, without those that then lie outside the band."""
    first = _likeliest(runs, start)
    inside = [run for run in runs if not is_outside(run.evaluations, replace(run.known, curve=first))]
    curve = _likeliest(inside, first)
    num_systems = len({run.system for run in inside})
    fitted_on = f"{len(inside)} runs of {num_systems} systems, MLCommons training results"
    left_out = f"{len(runs) - len(inside)} runs outside the band left out"
    return replace(curve, source=f"marginal maximum likelihood over the lags: {fitted_on}; {left_out}")


def _likeliest(runs: Sequence[Trial], start: Curve) -> Curve:
    """Maximise the likelihood of all evaluations; each run's lag is summed over."""
    points = [
        (n, run.known.progress(at), loss)
        for n, run in enumerate(runs)
        for at, loss in run.evaluations
        if run.known.progress(at) >= start.from_progress
    ]
    place, progress, losses = map(np.array, zip(*points, strict=True))
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    names = ("limit_loss", "drop_loss", "rate", "lag_scale", "noise_scale")

    def curve(logs: Sequence[float]) -> Curve:
        return replace(start, **dict(zip(names, map(math.exp, logs), strict=True)))

    def cost(logs: Sequence[float]) -> float:
        fitted = curve(logs)
        noise = losses[:, None] - fitted.losses(progress, lags=fitted.lags)
        of_runs = np.add.reduceat(log_densities(noise, fitted), starts, axis=0)
        most = of_runs.max(axis=1)
        weights = lag_weights(fitted.lags, scale=fitted.lag_scale)
        return -float((np.log(np.exp(of_runs - most[:, None]) @ weights) + most).sum())

    x0 = [math.log(getattr(start, name)) for name in names]
    simplex = [
        x0,
        *([x + step * (i == k) for k, x in enumerate(x0)] for i, step in enumerate((0.002, 0.1, 0.1, 0.2, 0.1))),
    ]
    options = {"initial_simplex": simplex, "xatol": 1e-3, "fatol": 1e-2, "maxiter": 2000}
    return curve(minimize(cost, x0, method="Nelder-Mead", options=options).x)


def moments(run: Trial) -> Iterator[Moment]:
    """Yield a forecast before each evaluation of a trial."""
    for seen in range(len(run.evaluations)):
        forecast, base = (
            predict(run.evaluations[:seen], known, goal=run.goal, grid=run.grid)
            for known in (run.known, replace(run.known, curve=None))
        )
        samples, loss = run.evaluations[seen]
        end = run.evaluations[-1][0] if run.converged else None
        unlike = is_outside(run.evaluations[:seen], run.known)
        yield Moment(run, seen, forecast, base, run.goal.is_reached_by(loss), end, unlike)


def next_chance(forecast: Forecast) -> float:
    return forecast.chances[0].probability


def covers(forecast: Forecast, samples: float) -> bool:
    low, high = forecast.samples_low, forecast.samples_high
    return low is not None and low <= samples and (high is None or samples <= high)


def stated(forecast: Forecast) -> float:
    beyond = forecast.later if forecast.samples_high is None else 0.0
    return beyond + sum(chance.probability for chance in forecast.chances if covers(forecast, chance.samples))


def width(forecast: Forecast) -> float:
    if forecast.samples_low is None or forecast.samples_high is None:
        return math.inf
    return forecast.samples_high - forecast.samples_low


def show(title: str, moments: Sequence[Moment]) -> None:
    """Print scores, ranges and calibration of forecasts made at these moments."""
    print(f"\n{title}")
    spoken = [m for m in moments if m.forecast]
    both = [m for m in spoken if m.baseline]
    print(f"  moments {len(moments)}, with a forecast {len(spoken)}, with a baseline too {len(both)}")
    picks: dict[str, Callable[[Moment], Forecast | None]] = {
        "forecast": lambda m: m.forecast,
        "published only": lambda m: m.baseline,
    }
    print(f"  {'next evaluation, n = ' + str(len(both)):<34}{'log score':>12}{'Brier':>10}")
    for name, pick in picks.items():
        pairs = [(next_chance(forecast), m.next_reached) for m in both if (forecast := pick(m))]
        logs = fmean(math.log(max(NEVER, p if hit else 1 - p)) for p, hit in pairs)
        print(f"  {name:<34}{logs:>12.4f}{fmean((p - hit) ** 2 for p, hit in pairs):>10.4f}")
    _show_ranges(spoken)
    _show_calibration(spoken)


def _show_ranges(moments: Sequence[Moment]) -> None:
    """Print by group how often ranges held the truth; they are whole evaluations, so they state at least 90 %.

    The error is the standard error of held - stated, in which the moments of one system count as one.
    """
    title = "90 % range of samples to target"
    print(
        f"  {title:<34}{'systems':>8}{'moments':>9}{'stated':>9}{'held':>9}{'error':>8}{'width':>8}{'median off':>12}"
    )
    for label, group in _groups(moments):
        rows = [(m, m.forecast, m.samples_to_target) for m in group if m.forecast and m.samples_to_target]
        if not rows:
            continue
        held = fmean(covers(forecast, samples) for _, forecast, samples in rows)
        by_system: dict[str, float] = defaultdict(float)
        for m, forecast, samples in rows:
            by_system[m.trial.system] += covers(forecast, samples) - stated(forecast)
        error = math.sqrt(sum(excess**2 for excess in by_system.values())) / len(rows)
        off = fmean(_evaluations_off(m, forecast.samples_median) for m, forecast, _ in rows)
        wide = median(_evaluations_off(m, forecast.samples_high, forecast.samples_low) + 1 for m, forecast, _ in rows)
        promised = fmean(stated(forecast) for _, forecast, _ in rows)
        print(f"  {label:<34}{len(by_system):>8}{len(rows):>9}{promised:>9.1%}{held:>9.1%}{error:>8.1%}", end="")
        print(f"{wide:>8.0f}{off:>12.2f}")


def _evaluations_off(m: Moment, samples: float | None, other: float | None = None) -> float:
    """Return how many evaluations lie between two numbers of samples; the second is by default the true one."""
    points = np.array(m.trial.grid)
    ends = [
        len(points) if at is None else np.searchsorted(points, at) for at in (samples, other or m.samples_to_target)
    ]
    return float(abs(ends[0] - ends[1]))


def _groups(moments: Sequence[Moment]) -> Iterator[tuple[str, list[Moment]]]:
    """Yield the moments by batch size, evaluations seen, round, and kind of recipe."""
    yield "all", list(moments)
    for gbs in sorted({m.trial.known.convergence.global_batch_size for m in moments}):
        of_size = [m for m in moments if m.trial.known.convergence.global_batch_size == gbs]
        yield f"GBS {gbs}", of_size
        yield f"GBS {gbs}, before the first", [m for m in of_size if not m.seen]
    for seen in range(MANY_SEEN):
        yield f"{seen} seen", [m for m in moments if m.seen == seen]
    yield f"{MANY_SEEN} and more seen", [m for m in moments if m.seen >= MANY_SEEN]
    for round_ in sorted({m.trial.system.partition("/")[0] for m in moments}):
        yield f"round {round_}", [m for m in moments if m.trial.system.startswith(f"{round_}/")]
    for outside in (False, True):
        name = f"{'outside' if outside else 'inside'} the reference band"
        yield name, [m for m in moments if m.is_outside == outside]
    first = defaultdict(list)
    for m in moments:
        if m.seen == 0:
            first[m.trial.system].append(_kind(m.trial))
    for kind in ("usual", "switching", "slow"):
        yield f"{kind} systems", [m for m in moments if _most(first[m.trial.system]) == kind]


def _kind(trial: Trial) -> str:
    """Return the kind of recipe of a whole trial: switching if its loss falls steeply at the end, or slow."""
    losses = [loss for _, loss in trial.evaluations]
    if not is_outside(trial.evaluations[:4], trial.known):
        return "usual"
    falls = [before - after for before, after in zip(losses, losses[1:], strict=False)]
    return "switching" if max(falls[-LAST_FALLS:]) > SWITCH_FALL else "slow"


def _most(kinds: Sequence[str]) -> str:
    return max(kinds, key=kinds.count)


def _show_calibration(spoken: Sequence[Moment]) -> None:
    print(f"  {'stated chance at the next':<34}{'n':>6}{'stated':>10}{'reached':>10}")
    edges = (0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0 + 1e-9)
    for low, high in zip(edges, edges[1:], strict=False):
        inside = [(p, m.next_reached) for m in spoken if m.forecast and low <= (p := next_chance(m.forecast)) < high]
        if inside:
            stated, hit = (fmean(column) for column in zip(*inside, strict=True))
            print(f"  {f'{low:.0%} to {min(1, high):.0%}':<34}{len(inside):>6}{stated:>10.1%}{hit:>10.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--fit", type=int, metavar="N", help="print the curve fitted on N trials instead")
    parser.add_argument("--without", choices=("system", "submitter", "round", "nothing"), default="system")
    parser.add_argument("--benchmark", choices=STARTS, default="llama2_70b_lora")
    args = parser.parse_args()
    runs = trials(args.corpus, args.benchmark)
    if not runs:
        print(f"no {args.benchmark} logs under {args.corpus}", file=sys.stderr)
        return 2
    if args.fit:
        fitted = asdict(fit(random.Random(1).sample(runs, min(args.fit, len(runs))), STARTS[args.benchmark])).items()
        print(json.dumps({k: float(f"{v:.4g}") if type(v) is float else v for k, v in fitted}, indent=2))
        return 0
    print(f"{len(runs)} different trials of {len({run.system for run in runs})} systems")
    left_out = [m for run in leaving_out(runs, args.without) for m in moments(run)]
    show(
        f"each {args.without if args.without != 'nothing' else 'trial'} forecast"
        f"{'' if args.without == 'nothing' else ' without its own published runs'}",
        left_out,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
