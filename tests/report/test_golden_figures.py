"""What the figures of trials, profiles and predictions show: golden_figures.txt, so that a change shows its effects.

After a change on purpose, run it once with WRITE_FIGURES=1, and read the difference.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import matplotlib
import pytest
from matplotlib.figure import Figure

from bench.contract import mllog
from bench.contract.modules import ModuleTimes, Part, Phase, TimeRow
from bench.mlperf.published import samples_to_target
from bench.mlperf.result import Result, parse
from bench.mlperf.speed import Spread
from bench.prediction.scale import Point, PublishedSpeed, Range, Scaling, StackName
from bench.report import bars, figures, scaling_figure
from bench.report.figures import Bar
from bench.report.study import distributions
from bench.report.study.distributions import Curve, Distributions
from helpers import golden, plotted, user_tables
from helpers.golden import significant
from helpers.types import MakeLog

GOLDEN = Path(__file__).with_name("golden_figures.txt")
BARS = (
    Bar(name="ours", value=29.1, interval=(27.0, 31.0), ours=True, remark="(n = 3)"),
    Bar(name="narrow", value=20.0, interval=(19.9, 20.1), ours=True),
    Bar(name="published, with a name that is much too long for the margin of a figure", value=12.5),
)
Draw = Callable[[Path], None]


def trials(written_log: MakeLog) -> Iterator[tuple[str, Draw]]:
    good = parse(written_log())
    bad = parse(written_log(name="bad.txt", evals=(0.99, 0.98), status="aborted"))
    without = parse(written_log(name="without.txt", evals=(), target_accuracy=None))
    other = parse(
        written_log(name="other.txt", submission_benchmark="resnet", evals=(0.5, 0.76), target_accuracy=0.759)
    )
    timed = replace(good, evaluations=tuple(replace(each, samples=None) for each in good.evaluations))
    named = replace(good, evaluations=tuple(replace(each, metric="FID") for each in good.evaluations))
    quiet = replace(bad, evaluations=(), train_losses=())
    for name, one in {"good": good, "bad": bad, "without": without, "other": other, "timed": timed}.items():
        yield f"loss, {name}", lambda path, one=one: figures.loss_figure(one, path)
    band = [(1536.0, 0.93, 0.95), (1920.0, 0.92, 0.94)]
    several: list[Result] = [good, bad, quiet]
    yield "convergence", lambda path: figures.convergence_figure(several, path, heading="h", note="a = b", band=band)
    yield "metrics", lambda path: figures.convergence_figure([named, good], path, heading="h", note="", band=band)
    times = tuple((8.0 * n, 7000.0 if n % 4 == 0 else 2000.0 + n) for n in range(1, 25))
    spread = Spread(median=2000.0, p10=1990.0, p90=2100.0, mean=2000.0, count=24)
    slow = replace(good, step_times_ms=times, step_time_ms=spread)
    even = replace(good, step_times_ms=times[:3], step_time_ms=replace(spread, p90=2003.0))
    for name, runs in {"wide": [slow, even], "even": [even, bad], "many": [slow] * 30, "none": [quiet]}.items():
        names = [f"trial {number}" for number in range(len(runs))]
        yield (
            f"step times, {name}",
            lambda path, runs=runs, names=names: figures.step_time_figure(
                runs, path, heading="h", note="", names=names
            ),
        )


def others() -> Iterator[tuple[str, Draw]]:
    known = samples_to_target("llama2_70b_lora", 8)
    assert known is not None
    yield "samples", lambda path: figures.samples_figure({3072: 3, 3456: 1}, known, path, heading="h", note="")
    for name, shown in {"bars": BARS, "published": BARS[2:], "zero": (replace(BARS[2], value=0.0),)}.items():
        yield name, lambda path, shown=shown: figures.bars_figure(shown, path, heading="h", note="", what="minutes")
    for profiles in ([("one", PROFILE)], [("one", PROFILE), ("two", replace(PROFILE, step_ms=1000.0))]):
        yield (
            f"{len(profiles)} profiles",
            lambda path, profiles=profiles: figures.module_figure(profiles, path, heading="h", note=""),
        )
    for name, one in SCALINGS.items():
        yield f"scaling, {name}", lambda path, one=one: scaling_figure.draw(one, path, heading="lora on dgx")
    curves = tuple(Curve(name=f"arm {n}", place=n, values=(1.0, 2.5 + n, 4.0), total=3 + n % 2) for n in (0, 1, 11))
    yield (
        "distributions",
        lambda path: distributions.draw_distributions(
            Distributions(title="Latency", axis="seconds", curves=curves), path, note="a note"
        ),
    )


def _profile() -> ModuleTimes:
    """Return a profile in which the parts of each phase take 1, 2, 3 … ms, and one of them most of the time."""
    rows = [
        TimeRow(phase=phase, part=part, time_ms=time_ms, gemm_ms=0.5 * time_ms, busy_ms=time_ms, launches=2.0)
        for phase in Phase
        for time_ms, part in ((float(number) or 0.01, part) for number, part in enumerate(Part))
    ]
    return ModuleTimes(device="cuda", num_steps=2, step_ms=200.0, is_eager=True, rows=rows, num_layers=2)


PROFILE = _profile()


def _points(*counts: int) -> tuple[Point, ...]:
    return tuple(
        Point(
            num_nodes=count,
            num_gpus=8 * count,
            global_batch_size=8,
            step_s=Range(value=1.0, low=0.9, high=1.1),
            tokens_s_gpu=Range(value=1000.0 / count**0.25, low=900.0 / count**0.25, high=1100.0 / count**0.25),
        )
        for count in counts
    )


_FULL = Scaling(
    stack=StackName.runstop,
    points=(*_points(1, 2, 4, 8), Point(num_nodes=16, num_gpus=128, global_batch_size=8, why_not="none fits")),
    pays_until=4,
    intervals=(),
    not_calibrated="",
    currency="EUR",
    power_source="",
    published=tuple(PublishedSpeed(system=f"s{n}", num_gpus=8 * n, tokens_s_gpu=950.0 - n) for n in (1, 3)),
)
SCALINGS = {"full": _FULL, "alone": replace(_FULL, points=_FULL.points[:1], published=(), pays_until=None)}


@pytest.mark.long
def test_figures_are_the_golden_ones(written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    seconds = itertools.count(1_800_000_000, 30)
    monkeypatch.setattr(mllog, "clocks_ms", lambda: (1000 * (now_s := next(seconds)), 1000 * now_s))
    saved: list[Figure] = []
    lines = []
    with (
        matplotlib.rc_context(),
        mock.patch.object(Figure, "savefig", lambda figure, path, **how: saved.append(figure)),
    ):
        matplotlib.rcdefaults()
        for name, draw in (*trials(written_log), *others()):
            draw(tmp_path / "x.png")
            lines += [name, *(f"  {json.dumps(significant(part))}" for part in plotted.described(saved[-1]))]
    charts = (
        bars.bar_chart(BARS, what="minutes"),
        bars.samples_chart({3072: 3, 3456: 1}, samples_to_target("llama2_70b_lora", 8)),
        bars.modules_chart([("one", PROFILE), ("two", replace(PROFILE, step_ms=1000.0))]),
    )
    lines += [json.dumps(significant(chart), default=str) for chart in charts]
    golden.require("\n".join(lines), GOLDEN, variable="WRITE_FIGURES")
