"""Fit the reference curve on real llama2_70b_lora logs, and score the forecasts of bench.mlperf.forecast on them.

    python experiments/forecast.py CORPUS          score; each system is forecast with a curve fitted on all the others
    python experiments/forecast.py CORPUS --fit    print the curve as JSON, fitted on all
    python experiments/forecast.py CORPUS --shipped    score the shipped curve without any fit

The published distributions stay whole: of their 1,369 runs at batch size 8 a system has ten. A log's system is the
folder above its benchmark's: CORPUS/<round>/<submitter>/<system>/llama2_70b_lora/result_0.txt.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import minimize

from bench.mlperf.benchmarks import LLAMA2_70B_LORA
from bench.mlperf.forecast import Forecast, predict
from bench.mlperf.forecast.curve import LAGS, Curve, Reference, is_outside, lag_weights, reference
from bench.mlperf.result import parse

BENCHMARK = "llama2_70b_lora"
GOAL = LLAMA2_70B_LORA.goals[0]
START = Curve(limit_loss=0.92, drop_loss=0.02, rate=1.3, lag_scale=0.06, noise_scale=0.001, source="start of the fit")
NEVER = 0.001
"""The log score is limited to that of an event with this probability."""
GRID_EVALUATIONS = 40
"""How many evaluations a trial's grid continues after its last one."""
MANY_SEEN = 5
"""Evaluations from which on rows are one."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a log tells of a trial, and what was known of its benchmark before."""

    system: str
    known: Reference
    evaluations: tuple[tuple[float, float], ...]
    converged: bool

    @property
    def grid(self) -> list[int]:
        """The samples at which the trial evaluates, continued past its end, as its plan defines them."""
        at = [int(samples) for samples, _ in self.evaluations]
        interval = at[-1] - at[-2]
        return [*at, *range(at[-1] + interval, at[-1] + GRID_EVALUATIONS * interval, interval)]


@dataclass(frozen=True, slots=True)
class Moment:
    """A forecast made once `seen` evaluations were known, and what came next."""

    seen: int
    forecast: Forecast | None
    baseline: Forecast | None
    """The published distribution of the runs that had not converged by then."""
    next_reached: bool
    samples_to_target: float | None
    is_outside: bool
    """Whether most evaluations lay outside the reference band then."""


def trials(corpus: Path) -> list[Trial]:
    """Return the trials with two evaluations or more; with one, the interval is unknown."""
    trials = []
    for path in sorted(corpus.rglob(f"{BENCHMARK}/*.txt")):
        result = parse(path)
        known = reference(BENCHMARK, result.global_batch_size)
        evaluations = tuple((e.samples, e.value) for e in result.evaluations if e.samples is not None)
        if result.benchmark == BENCHMARK and known and len(evaluations) > 1:
            trials.append(Trial(str(path.relative_to(corpus).parent.parent), known, evaluations, result.converged))
    return trials


def fit(runs: Sequence[Trial], start: Curve) -> Curve:
    """Return the curve that makes the runs likeliest, without those that then lie outside the band."""
    first = _likeliest(runs, start)
    inside = [run for run in runs if not is_outside(run.evaluations, replace(run.known, curve=first))]
    curve = _likeliest(inside, first)
    num_systems = len({run.system for run in inside})
    fitted_on = f"{len(inside)} runs of {num_systems} systems, MLCommons training results v4.0-v6.0"
    left_out = f"{len(runs) - len(inside)} runs outside the band left out"
    return replace(curve, source=f"marginal maximum likelihood over the lags: {fitted_on}; {left_out}")


def _likeliest(runs: Sequence[Trial], start: Curve) -> Curve:
    """Maximise the likelihood of all evaluations; each run's lag is summed over."""
    data = [
        (np.array([[run.known.progress(at)] for at, _ in run.evaluations]), np.array([[y] for _, y in run.evaluations]))
        for run in runs
    ]
    names = ("limit_loss", "drop_loss", "rate", "lag_scale", "noise_scale")

    def curve(logs: Sequence[float]) -> Curve:
        return Curve(**dict(zip(names, map(math.exp, logs), strict=True)), source=start.source)

    def cost(logs: Sequence[float]) -> float:
        return -sum(_log_likelihood(curve(logs), progress, losses) for progress, losses in data)

    x0 = [math.log(getattr(start, name)) for name in names]
    simplex = [
        x0,
        *([x + step * (i == k) for k, x in enumerate(x0)] for i, step in enumerate((0.002, 0.1, 0.1, 0.2, 0.1))),
    ]
    options = {"initial_simplex": simplex, "xatol": 1e-4, "fatol": 1e-3, "maxiter": 2000}
    return curve(minimize(cost, x0, method="Nelder-Mead", options=options).x)


def _log_likelihood(curve: Curve, progress: np.ndarray, losses: np.ndarray) -> float:
    means = curve.limit_loss + curve.drop_loss * np.exp(-curve.rate * (progress - LAGS))
    scaled = np.abs(losses - means) / curve.noise_scale
    logs = (-scaled - 2 * np.log1p(np.exp(-scaled)) - math.log(curve.noise_scale)).sum(axis=0)
    return float(np.log(np.exp(logs - logs.max()) @ lag_weights(curve.lag_scale)) + logs.max())


def moments(run: Trial, curve: Curve) -> Iterator[Moment]:
    """Yield a forecast before each evaluation of a trial."""
    for seen in range(len(run.evaluations)):
        forecast, base = (
            predict(run.evaluations[:seen], replace(run.known, curve=c), goal=GOAL, grid=run.grid)
            for c in (curve, None)
        )
        samples, loss = run.evaluations[seen]
        end = run.evaluations[-1][0] if run.converged else None
        unlike = is_outside(run.evaluations[:seen], replace(run.known, curve=curve))
        yield Moment(seen, forecast, base, GOAL.is_reached_by(loss), end, unlike)


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
    _show_ranges(spoken, both, picks)
    _show_calibration(spoken)


def show_by_band(title: str, moments: Sequence[Moment]) -> None:
    """Print scores of all moments, and of those inside and outside the reference band."""
    show(title, moments)
    for name, outside in (("inside", False), ("outside", True)):
        if part := [m for m in moments if m.is_outside == outside]:
            show(f"{title}: {name} the reference band", part)


def _show_ranges(
    spoken: Sequence[Moment], both: Sequence[Moment], picks: dict[str, Callable[[Moment], Forecast | None]]
) -> None:
    """Print how often ranges held the truth; they are whole evaluations, so they state more than 90 %."""
    print(f"  {'90 % range of samples to target':<34}{'n':>6}{'stated':>10}{'covered':>10}{'median width':>14}")
    rows = [(f"forecast, {k} seen", [m for m in spoken if m.seen == k], "forecast") for k in range(MANY_SEEN)]
    rows += [(f"forecast, {MANY_SEEN} and more seen", [m for m in spoken if m.seen >= MANY_SEEN], "forecast")]
    rows += [(f"{name}, all", both, name) for name in picks]
    rows += [("forecast, also without a baseline", spoken, "forecast")]
    for label, group, name in rows:
        pairs = [(forecast, m.samples_to_target) for m in group if m.samples_to_target and (forecast := picks[name](m))]
        if pairs:
            held = fmean(stated(forecast) for forecast, _ in pairs)
            hit = fmean(covers(forecast, samples) for forecast, samples in pairs)
            wide = median(width(forecast) for forecast, _ in pairs)
            print(f"  {label:<34}{len(pairs):>6}{held:>10.1%}{hit:>10.1%}{wide:>14.0f}")


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
    parser.add_argument("--fit", action="store_true", help="print the fitted curve instead")
    parser.add_argument("--shipped", action="store_true", help="score the shipped curve, without any fit")
    args = parser.parse_args()
    runs = trials(args.corpus)
    if not runs:
        print(f"no {BENCHMARK} logs under {args.corpus}", file=sys.stderr)
        return 2
    if args.shipped:
        show_by_band("shipped curve", [m for run in runs if run.known.curve for m in moments(run, run.known.curve)])
        return 0
    best = fit(runs, START)
    if args.fit:
        fitted = asdict(best).items()
        print(json.dumps({k: v if isinstance(v, str) else float(f"{v:.5g}") for k, v in fitted}, indent=2))
        return 0
    systems = sorted({run.system for run in runs})
    print(f"{len(runs)} trials of {len(systems)} systems. {best.source}")
    without = {name: fit([run for run in runs if run.system != name], best) for name in systems}
    left_out = [m for run in runs for m in moments(run, without[run.system])]
    show_by_band("each system forecast without its own runs", left_out)
    show("in sample", [m for run in runs for m in moments(run, best)])
    unlike = {run.system for run in runs if is_outside(run.evaluations[:1], run.known)}
    print(f"\noutside the band at the first evaluation: {', '.join(sorted(unlike)) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
