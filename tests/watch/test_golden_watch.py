"""What `watch` shows and forecasts at moments of a trial: golden_watch.txt, so that a change shows all it changes.

After a change on purpose, run it once with WRITE_WATCH=1, and read the difference.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.contract.stall import Stall
from bench.mlperf.reader import Event
from bench.watch import prediction
from bench.watch.hardware import Hottest
from bench.watch.lines import View, evaluation_line, line, warning_lines
from bench.watch.prediction import Planned
from bench.watch.screen import picture
from bench.watch.tracker import Tracker
from helpers import golden, user_tables
from helpers.golden import significant

GOLDEN = Path(__file__).with_name("golden_watch.txt")
STEPS_MS = (3000, 3030, 2970, 3300, 2700, 2900, 3100)


class Log:
    """The records of a trial, written one after the other."""

    def __init__(self, start: bool = True, **configured: Any) -> None:
        self.events, self.now_ms = list[Event](), 1_000_000
        self.say("init_start")
        for key, value in configured.items():
            self.say(key, value)
        if start:
            self.say("run_start", after_ms=60_000)

    def say(self, key: str, value: Any = None, after_ms: int = 0, **metadata: Any) -> None:
        self.now_ms += after_ms
        self.events.append(Event(self.now_ms, "POINT_IN_TIME", key, value, metadata, len(self.events) + 1))

    def train(self, first: int, last: int, *, loss: float = 1.3, every: int = 80) -> "Log":
        """Train on samples up to `last`, with a record of each `every` samples, ten steps."""
        self.say("block_start", samples_count=first)
        for number, samples in enumerate(range(first + every, last + 1, every)):
            time_ms = STEPS_MS[number % len(STEPS_MS)] * 10
            self.say("train_loss", loss - samples / 1e5, time_ms, samples_count=samples, lr=4e-4)
        return self

    def evaluate(self, samples: int, *losses: float, after_ms: int = 28_000, metric: str | None = None) -> "Log":
        self.say("eval_start", after_ms=1500, samples_count=samples)
        for loss in losses:
            own = {} if metric is None else {"metric": metric}
            self.say("eval_accuracy", loss, after_ms, samples_count=samples, **own)
            self.say("eval_stop", samples_count=samples)
        return self


LORA = {"submission_benchmark": "llama2_70b_lora", "global_batch_size": 8, "eval_samples": 173}
OWN = {"global_batch_size": 16, "submission_platform": "1x\x1b[2Jexample", "seed": 1}


def lora() -> Log:
    return Log(**LORA, submission_platform="1xexample", target_accuracy=0.925)


def moments() -> dict[str, tuple[list[Event], Planned, float]]:
    """Return the records of each moment, what is planned, and the seconds after the latest record."""
    begun, trained = lora(), lora().train(0, 800)
    once = lora().train(0, 1520).evaluate(1536, 0.94)
    twice = lora().train(0, 1520).evaluate(1536, 0.94).train(1536, 1916).evaluate(1920, 0.935, after_ms=25_000)
    evaluating = lora().train(0, 1520).evaluate(1536)
    third = lora().train(0, 1520).evaluate(1536, 0.94).train(1536, 1916).evaluate(1920, 0.935, after_ms=25_000)
    third.train(1920, 2300).evaluate(2304, 0.929, after_ms=26_000).train(2304, 2500)
    done = lora().train(0, 1520).evaluate(1536, 0.93).train(1536, 1916).evaluate(1920, 0.92)
    done.say("run_stop", after_ms=100, status="success", samples_count=1920)
    aborted = lora().train(0, 400)
    aborted.say("run_stop", after_ms=5000, status="aborted", samples_count=400)
    own, evaluated = (Log(**OWN).train(0, 640, every=160) for _ in range(2))
    planned = Planned(title="lora_tiny", is_published=False, target=1.0, max_samples=3200, eval_samples=(800, 1600))
    diverged = lora().train(0, 480).train(480, 800, loss=9.0)
    nan = lora().train(0, 160)
    nan.say("train_loss", float("nan"), 30_000, samples_count=240)
    far = lora().train(0, 1520).evaluate(1536, 1.49)
    off_band = lora().train(0, 1520).evaluate(1536, 0.957).train(1536, 1916).evaluate(1920, 0.953)
    stall = Stall(factor=3.0, floor_s=100.0)
    other = Log(submission_benchmark="bert", global_batch_size=8, target_accuracy=0.72).train(0, 240)
    full = Log(submission_benchmark="llama31_8b", global_batch_size=32, eval_samples=1024, target_accuracy=3.3)
    full.train(0, 6400, every=320)
    return {
        "before the log": ([], Planned(title="lora70b"), 0),
        "before the start": (Log(start=False, **LORA).events, Planned(limit_min=15), 90),
        "no step yet": (begun.events, Planned(limit_min=60), 60),
        "training": (trained.events, Planned(limit_min=90), 0),
        "training, some time later": (trained.events, Planned(limit_min=90), 29),
        "a quiet log": (trained.events, Planned(), 60),
        "a stalled trial": (trained.events, Planned(), 700),
        "a stalled trial of a watchdog": (trained.events, Planned(stall=stall), 700),
        "the first evaluation": (evaluating.events, Planned(), 10),
        "after one evaluation": (once.events, Planned(limit_min=30), 0),
        "after two evaluations": (twice.events, Planned(limit_min=25), 12),
        "little time left": (twice.events, Planned(limit_min=16), 12),
        "no time left": (twice.events, Planned(limit_min=15), 12),
        "after three evaluations": (third.events, Planned(max_samples=6400), 1),
        "target reached": (done.events, Planned(limit_min=30), 900),
        "aborted": (aborted.events, Planned(), 0),
        "an own task": (own.events, planned, 5),
        "an own task without a plan": (own.events, Planned(), 5),
        "an own task without a target": (own.events, replace(planned, target=None), 5),
        "after the planned evaluations": (evaluated.evaluate(1600, 1.1).events, planned, 5),
        "divergence": (diverged.events, Planned(), 0),
        "a loss of nan": (nan.events, Planned(), 0),
        "unlike published runs": (far.events, Planned(), 0),
        "outside of the band": (off_band.events, Planned(), 0),
        "another benchmark": (other.events, Planned(), 0),
        "training of all weights": (full.events, Planned(limit_min=600), 0),
    }


def view_of(events: Sequence[Event], planned: Planned, after_s: float, **more: Any) -> View:
    tracker = Tracker()
    tracker.update(events)
    now_ms = (events[-1].time_ms if events else 1_000_000) + round(after_s * 1000)
    seen = prediction.look(tracker.progress, planned, now_ms)
    return View(name="trial 0", progress=tracker.progress, planned=planned, outlook=seen, **more)


def screen(views: Sequence[View], width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(views, width=width, height=height))
    assert isinstance(console.file, io.StringIO)
    return [f"  |{row.rstrip()}" for row in console.file.getvalue().splitlines()]


@pytest.mark.long
def test_moments_of_trials_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    lines, views = list[str](), list[View]()
    for name, (events, planned, after_s) in moments().items():
        view = view_of(events, planned, after_s)
        views.append(replace(view, name=name))
        seen = asdict(view.outlook) | {"coming": [asdict(coming) for coming in view.outlook.coming]}
        if view.outlook.step_time_trend is not None:
            seen["step_time_trend"] = round(view.outlook.step_time_trend, 12) + 0.0  # no rounding noise, and no -0.0
        lines += [name, *screen([view], 110, 40), f"  {line(view)}", *(f"  {one}" for one in warning_lines(view))]
        lines += [f"  {key} = {significant(value)}" for key, value in seen.items() if value not in (None, (), [])]
        lines += [f"  {evaluation_line(view, one)}" for one in view.progress.evaluations] + [""]
    for count, width, height in ((1, 50, 12), (3, 100, 30), (26, 100, 24), (26, 70, 14), (26, 60, 9)):
        lines += [f"{count} trials on {width} x {height}", *screen(views[-count:], width, height), ""]
    hottest = Hottest(16, 3, 690.4, 1755.0, 71.2, ("power brake", "thermal"))
    events, planned, after_s = moments()["training"]
    for more in ({"note": "the log\x1b was restarted"}, {"hottest": hottest}, {"outcome": "invalid"}):
        lines += [f"  {line(view_of(events, planned, after_s, **more))}"]
    events, planned, after_s = moments()["target reached"]
    for outcome in ("valid", "invalid", None):
        lines += [f"  {view_of(events, planned, after_s, outcome=outcome).state}"]
    lines += [f"  {replace(hottest, power_w=None, throttle=None).text()}", ""]
    golden.require("\n".join(lines), GOLDEN, variable="WRITE_WATCH")
