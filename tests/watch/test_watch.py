"""Watching a trial at any moment of its log: progress, forecast, warnings, and the end of watching."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console
from scipy import stats

from bench import answers as printed
from bench import cli, watch
from bench.contract import plan_kinds, run_files, telemetry
from bench.contract.stall import Stall
from bench.contract.telemetry import Sample
from bench.mlperf import reader
from bench.mlperf import result as results
from bench.mlperf.reader import Event
from bench.planning import compose
from bench.watch import prediction, sources
from bench.watch.lines import View, evaluation_line, line
from bench.watch.prediction import Planned
from bench.watch.progress import Evaluated, Progress
from bench.watch.screen import picture
from bench.watch.tracker import Tracker
from helpers import answers
from helpers.paths import CORPUS
from helpers.types import MakeLog

FORMATS = {
    "v4.0 NVIDIA, no training records": "v4.0/NVIDIA/h200_ngc24.04_nemo/llama2_70b_lora/result_0.txt",
    "v4.0 Juniper, no eval_start": (
        "v4.0/JuniperNetworks/h100_n4_ngc24.1_pytorch_deepspeed/llama2_70b_lora/result_0.txt"
    ),
    "v4.1 512 GPUs": "v4.1/Oracle/512xBM.GPU.H100.8/llama2_70b_lora/result_0.txt",
    "v5.0 AMD": "v5.0/AMD/MI325X_EPYC_9575F_pytorch/llama2_70b_lora/result_0.txt",
    "v5.0 MangoBoost": "v5.0/MangoBoost/MI300X-LLMBoost-GPUBoost-2node/llama2_70b_lora/result_0.txt",
    "v5.0 ASUSTeK, blank behind a key": "v5.0/ASUSTeK/ESC_N8_E11_n2/llama2_70b_lora/result_1.txt",
    "v5.0 Dell, killed": "v5.0/Dell/9xXE9712x4GB200/llama2_70b_lora/result_9.txt",
    "v5.0 NVIDIA, steps that count samples": "v5.0/NVIDIA/tyche_ngpu512_ngc25.04_nemo/llama31_405b/result_0.txt",
    "v5.1 NVIDIA, blocks that count alone": "v5.1/NVIDIA/theia_ngpu8_ngc25.09_nemo/llama2_70b_lora/result_0.txt",
    "v6.0 Dell": "v6.0/Dell/1xXE7740x8H200-NVL-141GB/llama2_70b_lora/result_0.txt",
}
STEP_MS, EVAL_MS = 3_000, 28_000


def trial(*losses: float, gbs: int = 8, train_loss: float = 1.3) -> list[Event]:
    """Return a llama2_70b_lora trial up to its last evaluation: 3 s a step, a line per 10 steps, 28 s an evaluation."""
    events: list[Event] = []
    now = [0]

    def say(key: str, value: Any = None, after_ms: int = 0, **metadata: Any) -> None:
        now[0] += after_ms
        events.append(Event(now[0], "POINT_IN_TIME", key, value, metadata, len(events) + 1))

    say("init_start")
    for key, value in {
        "submission_benchmark": "llama2_70b_lora",
        "global_batch_size": gbs,
        "eval_samples": 173,
    }.items():
        say(key, value)
    say("run_start", after_ms=60_000)
    samples = 0
    for number, loss in enumerate(losses):
        say("block_start", samples_count=samples)
        end = 1536 + 384 * number
        while samples + 10 * gbs <= end:
            samples += 10 * gbs
            say("train_loss", train_loss, 10 * STEP_MS, samples_count=samples, lr=4e-4)
        say("eval_start", after_ms=(end - samples) // gbs * STEP_MS, samples_count=end)
        samples = end
        say("eval_accuracy", loss, EVAL_MS, samples_count=end)
        say("eval_stop", samples_count=end)
    return events


def tracked(events: Sequence[Event]) -> Progress:
    tracker = Tracker()
    tracker.update(events)
    return tracker.progress


def warnings(events: Sequence[Event], *, after_s: float = 0, **planned: Any) -> list[str]:
    seen = prediction.look(tracked(events), Planned(**planned), events[-1].time_ms + round(after_s * 1000))
    return [warning.split(":")[0] for warning in seen.warnings]


@pytest.mark.parametrize("name", FORMATS)
def test_progress_at_every_line_of_every_format(name: str) -> None:
    log = CORPUS / FORMATS[name]
    if not log.exists():
        pytest.skip("the corpus is not here")
    result, events = results.parse(log), reader.read(log)[0]
    truth = max(e.samples for e in result.evaluations if e.samples is not None)
    last_record = max((samples for samples, _ in result.train_losses if samples), default=0)
    tracker, before = Tracker(), 0
    for event in events:
        tracker.update([event])
        now = tracker.progress
        assert before <= (now.samples or 0) <= max(truth, last_record)
        assert [e.value for e in now.evaluations] == [e.value for e in result.evaluations][: len(now.evaluations)]
        before = now.samples or 0
        if result.step_time_ms and len(now.step_times_ms) >= 5:
            assert now.step_time_ms == pytest.approx(result.step_time_ms.median, rel=0.08)
    assert (now.samples, now.trial, len(now.evaluations)) == (max(truth, last_record), 1, len(result.evaluations))
    assert now.step_time_ms is not None
    if result.step_time_ms:
        assert now.step_time_ms == pytest.approx(result.step_time_ms.median, rel=0.02)


@pytest.mark.long
def test_forecast_of_evaluation_times_is_right() -> None:
    """A forecast in minutes before the first evaluation equals the actual end of the evaluations."""
    whole = trial(0.94, 0.935, 0.93, 0.927, 0.924)
    start = next(e.time_ms for e in whole if e.key == "run_start")
    ends = {e.metadata["samples_count"]: (e.time_ms - start) / 60_000 for e in whole if e.key == "eval_accuracy"}
    for known in range(20, len(whole) - 1):
        if whole[known].key == "submission_benchmark":
            continue
        for later_ms in (0, STEP_MS):
            seen = prediction.look(tracked(whole[:known]), Planned(), whole[known - 1].time_ms + later_ms)
            coming = {c.samples: c.minutes for c in seen.coming if c.samples in ends}
            assert coming == pytest.approx({at: ends[at] for at in coming}, abs=0.25)
            assert sum(c.probability for c in seen.coming) <= 1 + 1e-9
    assert seen.samples_range is not None


def test_running_evaluation_is_the_next_one() -> None:
    events = trial(0.94, 0.935)
    running = events[: [e.key for e in events].index("eval_accuracy")]
    seen = prediction.look(tracked(running), Planned(), running[-1].time_ms + 10_000)
    assert seen.next_samples == 1536
    assert seen.next_s == pytest.approx(seen.eval_time_s - 10)
    assert seen.eval_time_is_estimated
    after = prediction.look(tracked(events), Planned(), events[-1].time_ms)
    assert (after.next_samples, after.next_s, after.eval_time_is_estimated) == (2304, 48 * 3 + 28, False)


def test_evaluation_time_without_eval_start_is_estimated() -> None:
    """Some logs have only eval_accuracy: each evaluation is timed from the one before, not from the last block."""
    events = trial(0.94, 0.935, 0.93)
    first, *later = [n for n, event in enumerate(events) if event.key == "eval_accuracy"]
    silent = [event for event in events[: first + 1] if event.key != "eval_start"] + [events[n] for n in later]
    progress = tracked(silent)
    assert progress.eval_time_is_estimated
    assert progress.eval_times_s == pytest.approx((EVAL_MS / 1000,) * 3)


@pytest.mark.parametrize(("after_s", "is_stalled"), [(400, False), (575.9, False), (576.1, True), (700, True)])
def test_first_evaluation_may_be_silent_as_long_as_training_took(after_s: float, is_stalled: bool) -> None:
    """192 steps of 3 s are 576 s."""
    events = trial(0.94)
    running = events[: [event.key for event in events].index("eval_accuracy")]
    assert ("stalled" in warnings(running, after_s=after_s)) is is_stalled


def test_the_first_evaluation_of_a_run_that_trains_all_weights_is_estimated_as_published() -> None:
    """As measured on one H200: six steps of 15.8 s with 32 rows, then an evaluation of 1,024 rows that took 141.5 s."""
    settings = [("init_start", None), ("global_batch_size", 32), ("eval_samples", 1024), ("run_start", None)]
    timed = [
        ("block_start", 0, 0),
        *(("train_loss", 11.9, 15_800 * step) for step in range(1, 7)),
        ("eval_start", 0, 94_800),
    ]
    events = [Event(0, "", key, value, {}, 1) for key, value in settings]
    for n, (key, value, time_ms) in enumerate(timed):
        events.append(Event(time_ms, "", key, value, {"samples_count": 32 * min(n, 6)}, 1))
    seen = prediction.look(tracked(events), Planned(eval_samples=(192,)), 95_000)
    assert seen.eval_time_s == pytest.approx(141.5, rel=0.12) and seen.eval_time_is_estimated
    assert warnings(events, after_s=141.5) == [] and warnings(events, after_s=500) == ["stalled"]
    lora = [*events[:3], Event(0, "", "lora_rank", 16, {}, 1), *events[3:]]
    assert prediction.look(tracked(lora), Planned(), 95_000).eval_time_s == pytest.approx(0.45 * 1024 / 32 * 15.8)


def gbs_9(*samples: int) -> Progress:
    progress = tracked(trial(0.94, gbs=9)[:4])
    progress.evaluations = tuple(Evaluated(at, 0.94, 0) for at in samples)
    return progress


def test_the_next_evaluations_are_at_the_trials_own_interval() -> None:
    """The rules say 1548 and every 387 samples at GBS 9; published runs of v5.0 evaluated at 1530 and every 378."""
    assert prediction.due(gbs_9(), Planned())[:2] == (1548, 1935)
    assert prediction.due(gbs_9(1530, 1908), Planned())[:3] == (2286, 2664, 3042)
    assert prediction.due(gbs_9(1530, 1908), Planned(eval_samples=(1530, 1908, 2295)))[:2] == (2295,)


def test_a_trial_outside_the_band_has_a_forecast_and_a_warning() -> None:
    events = trial(0.957, 0.953)
    seen = prediction.look(tracked(events), Planned(), events[-1].time_ms)
    (warning,) = seen.warnings
    assert warning.startswith("outside the reference band: 0.9530 at 1,920 samples; 99 % of published runs: ")
    assert float(warning.split()[-1]) < 0.953
    assert seen.minutes_range is not None and len(seen.coming) > 10
    other = trial(1.49)
    assert prediction.look(tracked(other), Planned(), other[-1].time_ms).samples_range is None


def test_range_of_minutes_uses_students_t() -> None:
    """Step times of 2.9, 3.0 and 3.1 s; the evaluations after the first took 27, 28 and 29 s."""
    progress = tracked(trial(0.94, 0.935))
    progress.step_times_ms, progress.eval_times_s = (2900.0, 3000.0, 3100.0), (60.0, 27.0, 28.0, 29.0)
    (first, second) = prediction.evaluation_etas(
        progress, (2304, 2688), progress.last_ms or 0, step=prediction.step_time_s(progress)
    )
    half_step = stats.t(2).ppf(0.95) * 0.1 * math.sqrt(4 / 3)
    half_eval = stats.t(2).ppf(0.95) * 1.0 * math.sqrt(4 / 3)
    assert first.seconds.typical == pytest.approx(48 * 3 + 28)
    assert second.seconds.typical == pytest.approx(96 * 3 + 2 * 28)
    half = math.hypot(96 * half_step, 2 * half_eval)
    assert second.seconds.high - second.seconds.typical == pytest.approx(half)
    assert second.seconds.typical - second.seconds.low == pytest.approx(half)


@pytest.mark.parametrize("minutes", [0, 1, 10, 60, 600])
def test_before_the_first_step_time_the_pace_is_that_of_published_systems(minutes: int) -> None:
    """A run that has not evaluated 1,536 samples after so many minutes is at most so fast."""
    progress = tracked(trial())
    now_ms = (progress.run_start_ms or 0) + minutes * 60_000
    seen = prediction.look(progress, Planned(limit_min=15), now_ms)
    assert seen.minutes_range is not None and seen.minutes_range[0] is not None
    low, middle, high = seen.minutes_range
    assert low >= minutes * 2688 / (1536 + 173) and low < (middle or 0) < (high or math.inf)
    assert seen.basis is not None and "pace of published systems" in seen.basis
    assert (seen.next_s, seen.chance_in_time, seen.step_time_ms, seen.warnings) == (None, None, None, ())
    other = prediction.look(progress, Planned(is_published=False, title="lora_tiny"), now_ms)
    assert other.minutes_range is None and other.coming == ()
    measured = prediction.look(tracked(trial(0.94)), Planned(), now_ms)
    assert measured.basis is not None and "pace of published systems" not in measured.basis


def test_forecast_has_the_probability_of_each_evaluation() -> None:
    events = trial(0.94, 0.935)
    progress = tracked(events)
    seen = prediction.look(progress, Planned(), events[-1].time_ms)
    assert all(c.minutes_low < c.minutes < c.minutes_high for c in seen.coming)
    view = View(name="log", progress=progress, planned=Planned(), outlook=seen)
    at_3072 = next(round(c.probability * 100) for c in seen.coming if c.samples == 3072)
    assert "min (90 % range); chances " in line(view) and f"{at_3072} % at 3,072" in line(view)


def test_warnings() -> None:
    good, bad = trial(0.94, 0.935), float("nan")
    assert warnings(good) == []
    assert warnings(good, after_s=110) == []
    assert warnings(good, after_s=130) == ["stalled"]
    evaluating = good[: len(good) - 2]
    assert evaluating[-1].key == "eval_start"
    assert warnings(evaluating, after_s=60) == []
    assert warnings(evaluating, after_s=90) == ["stalled"]
    assert warnings(trial(1.49)) == ["outside the reference band"]
    assert warnings(trial(0.94, 1.2)) == ["diverges"]
    assert warnings([*good, Event(good[-1].time_ms, "", "train_loss", bad, {}, 9)]) == ["diverges"]
    no_number = replace(next(event for event in reversed(good) if event.key == "eval_accuracy"), value=bad)
    assert warnings([*good, no_number]) == ["diverges"]
    assert warnings([*good, no_number, replace(no_number, value=0.93)]) == []
    risen = [Event(good[-1].time_ms, "", "train_loss", 2.5, {"samples_count": 1930 + n}, 9) for n in range(5)]
    assert "diverges" in warnings([*good, *risen])


@pytest.mark.parametrize(
    ("after_s", "evaluates", "text"),
    [
        (130, False, "2:10 of training (4.3 times the median of 0:30); the watchdog ends the trial after at most 3:30"),
        (220, False, "3:40 of training (7.3 times the median of 0:30); the watchdog did not end the trial after 3:30"),
        (
            280,
            True,
            "4:40 of evaluation (10.0 times the median of 0:28); the watchdog ends the trial after at most 10:20",
        ),
    ],
)
def test_stall_is_relative_to_the_trials_speed(after_s: int, evaluates: bool, text: str) -> None:
    """By hand: 30 s between lines, 20 x 3 s below the floor of 120 s, 60 s for the reports; 20 x 28 s and 60 s."""
    good = trial(0.94, 0.935)
    events = good[: len(good) - 2] if evaluates else good
    seen = prediction.look(tracked(events), Planned(stall=Stall()), events[-1].time_ms + 1000 * after_s)
    assert seen.warnings[0].startswith(f"stalled: no new line for {text}") and "(RUN-17)" in seen.warnings[0]


def test_only_ranks_of_trials_have_a_watchdog() -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", "launch.stall.factor=7"])
    limits = {command.name: sources.planned(plan, command).stall for command in plan.commands}
    assert (limits["prepare"], limits["trial 0"]) == (None, Stall(factor=7, floor_s=120))


def test_the_chance_to_be_in_time_uses_the_range_of_each_time() -> None:
    """By hand: 5, 50 and 95 % at the ends and the middle of a range; half of the upper range is 0.822 sigma."""
    time = prediction.Span(100.0, 80.0, 140.0)
    within = [prediction._chance_within(time, limit_s) for limit_s in (80, 100, 120, 140)]
    assert within == pytest.approx([0.05, 0.5, 0.7946, 0.95], abs=1e-4)
    exact = prediction.Span(100.0, 100.0, 100.0)
    assert [prediction._chance_within(exact, limit_s) for limit_s in (99, 100)] == [0, 1]
    ahead = [prediction.EvaluationEta(8, prediction.Span(60.0, 50.0, 65.0)), prediction.EvaluationEta(16, time)]
    coming = tuple(prediction.Coming(samples, 1, 1, 1, share, share) for samples, share in ((8, 0.25), (16, 0.5)))
    for left_s, expected in ((100.0, 0.25 + 0.5 * 0.5), (49.0, 0.0), (1000.0, 0.75)):
        seen = prediction.Outlook(left_s=left_s, coming=coming)
        assert prediction._chance_in_time(seen, ahead) == pytest.approx(expected, abs=1e-4)
    assert prediction._chance_in_time(prediction.Outlook(left_s=59.0), ahead) == 0
    assert prediction._chance_in_time(prediction.Outlook(left_s=61.0), ahead) is None


def test_a_stopped_trial_that_missed_its_target_says_so() -> None:
    def state(status: str, loss: float, *, has_target: bool = True) -> str:
        events = [event for event in trial(loss) if has_target or event.key != "submission_benchmark"]
        progress = tracked([*events, Event(10**9, "INTERVAL_END", "run_stop", None, {"status": status}, 99)])
        return View(name="a", progress=progress, planned=Planned(), outlook=prediction.Outlook()).state

    assert state("success", 0.95) == "stopped: success, but the target was not reached"
    assert state("success", 0.92) == "target reached"
    assert state("aborted", 0.95) == "stopped: aborted"
    assert state("success", 0.95, has_target=False) == "stopped: success"


def test_short_walltime_is_warned_about() -> None:
    events = trial(0.94, 0.935)
    used_min = events[-1].time_ms / 60_000
    assert warnings(events, limit_min=used_min + 1) == ["cannot reach the target"]
    assert warnings(events, limit_min=used_min + 4) == ["will likely not reach the target"]
    assert warnings(events, limit_min=used_min + 30) == []


KEYS = (
    "init_start", "run_start", "block_start", "train_loss", "tracked_stats", "eval_start", "eval_accuracy", "eval_stop",
    "run_stop", "global_batch_size", "target_accuracy", "submission_benchmark", "eval_samples",
)  # fmt: skip
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(-10, 10**13),
    st.sampled_from(["llama2_70b_lora", "bert", "\x1b[2J"]),
    st.dictionaries(st.sampled_from(["train_loss", "train_step_time", "lr"]), st.floats()),
)  # fmt: skip
EVENTS = st.builds(
    Event,
    st.integers(-(10**6), 10**13),
    st.just(""),
    st.sampled_from(KEYS),
    ANYTHING,
    st.dictionaries(st.sampled_from(["samples_count", "step", "lr", "status", "epoch_num"]), ANYTHING),
    st.just(1),
)


@pytest.mark.long
@given(st.lists(EVENTS, max_size=25), st.integers(0, 10**13))
def test_watch_handles_any_log(events: list[Event], now_ms: int) -> None:
    progress, planned = tracked(events), Planned(limit_min=30)
    view = View(
        name="log", progress=progress, planned=planned, outlook=prediction.look(progress, planned, now_ms), note=None
    )
    answers.one(printed.line(printed.progress(now_ms, [view])))
    assert line(view).isprintable()
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(picture([view, view], width=80, height=24))


@given(st.lists(EVENTS, max_size=25), st.integers(0, 25))
def test_progress_does_not_depend_on_poll_times(events: list[Event], cut: int) -> None:
    tracker = Tracker()
    tracker.update(events[:cut])
    tracker.update(events[cut:])
    assert repr(tracker.progress) == repr(tracked(events))


@pytest.mark.parametrize(("width", "height"), [(80, 20), (140, 40), (60, 12)])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    running = tracked(trial(0.94, 0.935))
    seen = prediction.look(running, Planned(limit_min=15), running.last_ms + 300_000)
    views = [View(name=f"trial {n} of 10", progress=running, planned=Planned(), outlook=seen) for n in range(10)]
    console = Console(file=io.StringIO(), width=width, height=height)
    for shown in (views, views[:1]):
        lines = console.render_lines(picture(shown, width=width, height=height))
        assert len(lines) < height
        assert "0.9350" in "".join(segment.text for row in lines for segment in row)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_the_newest_evaluation_is_shown_at_every_width(width: int) -> None:
    running = tracked(trial(0.96, 0.95, 0.94, 0.935))
    view = View(
        name="trial 0",
        progress=running,
        planned=Planned(),
        outlook=prediction.look(running, Planned(), running.last_ms),
    )
    console = Console(file=io.StringIO(), width=width, height=30)
    rows = console.render_lines(picture([view], width=width, height=30))
    texts = ["".join(segment.text for segment in row) for row in rows]
    (evaluation,) = (text for text in texts if text.startswith("evaluation"))
    assert "0.9350" in evaluation and ("(target 0.925)" in evaluation) == (width >= 40)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", *argv])
    return int(str(ended.value.code)), capsys.readouterr().out


def test_pipe_gets_lines_with_timestamps(written_log: MakeLog, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, str(written_log()))
    unverified, *dated = output.splitlines()
    lines = [text[len("2026-11-21 12:00:00  ") :] for text in dated]
    assert (code, len(lines)) == (0, 4)
    assert unverified.startswith("Unverified.")
    assert lines[:3] == [
        "result_0.txt  evaluation 0.9500 at 1,536 samples, target 0.925 not reached",
        "result_0.txt  evaluation 0.9300 at 1,920 samples, target 0.925 not reached",
        "result_0.txt  evaluation 0.9200 at 2,304 samples, target 0.925 reached",
    ]
    assert lines[3].startswith(
        "result_0.txt  target reached  0.0 s  trained 2,304 samples, step 288  train loss 1.0200"
    )


@pytest.mark.parametrize(("losses", "code"), [((0.95, 0.92), 0), ((0.95, 0.93), 1)])
def test_until_target(written_log: MakeLog, capsys: pytest.CaptureFixture[str], losses: Any, code: int) -> None:
    assert run(capsys, "--until-target", str(written_log(evals=losses)))[0] == code


@pytest.mark.parametrize(("fid", "clip_at", "is_reached"), [(85.0, 512, True), (85.0, 256, False), (95.0, 512, False)])
def test_several_targets_are_reached_by_one_checkpoint(fid: float, clip_at: int, is_reached: bool) -> None:
    records = [
        ("submission_benchmark", "stable_diffusion", {}),
        *[("global_batch_size", 256, {}), ("run_start", None, {}), ("train_loss", 0.1, {"samples_count": 256})],
        *[("eval_start", None, {"samples_count": 256}), ("eval_stop", None, {"samples_count": 256})],
        ("eval_accuracy", fid, {"samples_count": 512, "metric": "FID"}),
        ("eval_accuracy", 0.16, {"samples_count": clip_at, "metric": "CLIP"}),
    ]
    progress = tracked([Event(n * 60_000, "", *event, n) for n, event in enumerate(records, 1)])  # type: ignore[arg-type]
    assert prediction.reached(progress, Planned()) is is_reached
    view = View(name="log", progress=progress, planned=Planned(), outlook=prediction.look(progress, Planned(), 0))
    texts = [evaluation_line(view, evaluated) for evaluated in progress.evaluations]
    assert texts[0].endswith("target 90 reached" if fid < 90 else "target 90 not reached")
    assert texts[1] == f"log  evaluation CLIP 0.1600 at {clip_at} samples, target 0.15 reached"


def test_eval_accuracy_after_eval_stop_keeps_evaluation_time() -> None:
    events, end = trial(0.95), trial(0.95)[-1]
    late = Event(end.time_ms + 1000, "", "eval_accuracy", 0.2, {"samples_count": 1536}, end.line + 1)
    assert tracked([*events, late]).eval_times_s == (EVAL_MS / 1000,)


def test_json_is_one_object(written_log: MakeLog, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "--once", "--json", str(written_log(evals=(0.95,), status="aborted")))
    printed_update = answers.one(output)
    (shown,) = printed_update["trials"]
    assert code == 0
    assert (shown["samples"], shown["phase"], shown["is_reached"], shown["target"]) == (1536, "stopped", False, 0.925)
    assert "Unverified" in printed_update["note"]


def test_time_out_of_range_is_shown_as_unknown(written_log: MakeLog, capsys: pytest.CaptureFixture[str]) -> None:
    log = written_log(evals=(0.95,))
    lines = log.read_text().splitlines(keepends=True)
    (place,) = (number for number, text in enumerate(lines) if '"eval_accuracy"' in text)
    lines[place] = re.sub(r'"time_ms": \d+', f'"time_ms": {10**17}', lines[place])
    log.write_text("".join(lines))
    code, output = run(capsys, "--once", str(log))
    assert code == 0 and "unknown time  " in output


def test_missing_log_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "--once", str(tmp_path / "slurm-70.out"))
    assert (code, "waiting" in output) == (0, True)
    never = (str(tmp_path / "run-with-a-typo"), str(tmp_path / "nowhere" / "slurm-70.out"))
    for refused in ([str(tmp_path)], ["--trials", "0", "x"], ["--replay", "x", "y"], *([path] for path in never)):
        assert run(capsys, *refused)[0] == 2


def test_replaced_log_restarts_the_trial(written_log: MakeLog, tmp_path: Path) -> None:
    first = written_log(evals=(0.92,)).rename(tmp_path / "first")
    second = written_log(evals=(0.94, 0.93)).rename(tmp_path / "second")
    log = tmp_path / "slurm-70.out"
    job = sources.log_files([log], trials=2)
    log.write_bytes(b"12: " + first.read_bytes() + b"noise\n")
    job.poll()
    assert (job.views()[0].name, job.has_stopped()) == ("slurm-70.out trial 1 of 2", False)
    assert not job.is_reached()
    with log.open("ab") as more:
        more.write(second.read_bytes())
    job.poll()
    (view,) = job.views()
    assert (view.name, len(view.progress.evaluations), job.has_stopped()) == ("slurm-70.out trial 2 of 2", 2, True)
    log.write_bytes(first.read_bytes())
    job.poll()
    (view,) = job.views()
    assert (view.note, view.progress.trial, len(view.progress.evaluations)) == ("the log was restarted", 1, 1)


def test_run_folder_is_shown(written_log: MakeLog, tmp_path: Path) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local", "trials=3", "walltime=10"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    job = sources.run_folder(folder)
    job.poll()
    assert [view.state for view in job.views()] == ["waiting"] * 3
    (folder / "prepare.txt").write_text(written_log(evals=()).read_text().split('"run_stop"')[0])
    job.poll()
    assert [view.name for view in job.views()] == ["prepare"]
    (tmp_path / "result_0.txt").rename(folder / "result_1.txt")
    written_log().rename(folder / "result_0.txt")
    outcomes = ("invalid", "aborted", "planned")
    (folder / "ledger.json").write_text(
        json.dumps([{"trial": n, "outcome": outcome} for n, outcome in enumerate(outcomes)])
    )
    job.poll()
    assert not job.is_over()
    (folder / "result_1.txt").write_text((folder / "prepare.txt").read_text())
    job.poll()
    assert [view.state for view in job.views()] == ["target reached, invalid", "stopped: aborted", "waiting"]
    assert job.views()[0].planned.limit_min == 10
    (folder / "status.json").write_text("{}")
    assert job.is_over()


def test_the_hottest_gpu_is_shown_while_a_trial_trains(written_log: MakeLog, tmp_path: Path) -> None:
    """The files of three nodes: one is two minutes old, as of a node whose sampler has died."""
    folder, now_ms = tmp_path / "run", time.time_ns() // 1_000_000
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(compose.compose(["task=lora_tiny", "cluster=local"])))
    (folder / "result_0.txt").write_text(written_log().read_text().split('"run_stop"')[0])
    for node, at_ms, temperatures in (("a", now_ms, (60, 61)), ("b", now_ms, (55, 71)), ("c", now_ms - 120_000, (90,))):
        samples = [
            Sample(
                time_ms=at_ms, monotonic_ms=0, gpu=gpu, power_w=690.4, temperature_c=value, throttle=("power brake",)
            )
            for gpu, value in enumerate(temperatures)
        ]
        (folder / run_files.telemetry(0, node)).write_text(telemetry.header() + telemetry.lines(samples))
    job = sources.run_folder(folder)
    job.poll()
    (view,) = job.views()
    assert "GPUs 71 °C, 690 W, throttled: power brake (hottest of 4: GPU 1)" in line(view)
    (shown,) = answers.one(printed.line(printed.progress(0, [view])))["trials"]
    assert shown["hottest_gpu"]["temperature_c"] == 71
    (folder / "result_0.txt").write_text(written_log(name="whole").read_text())
    job.poll()
    assert job.views()[0].hottest is None, "it is over"


def test_a_replay_ends_as_the_log_does(written_log: MakeLog) -> None:
    log = written_log()
    job = sources.replay(log, speed=1e6)
    assert watch.watch(job, watch.How(interval_s=0.01), console=Console(file=io.StringIO()))
    assert repr(job.trials[0].progress) == repr(tracked(reader.read(log)[0]))


@pytest.mark.parametrize("terminal", [True, False])
def test_follow_shows_the_last_lines(written_log: MakeLog, tmp_path: Path, terminal: bool) -> None:
    screen = io.StringIO()

    def is_alive() -> bool:
        written_log()
        return False

    console = Console(file=screen, force_terminal=terminal, width=100, height=30)
    watch.follow(tmp_path / "result_0.txt", Planned(), name="trial 0", is_alive=is_alive, console=console)
    assert "0.9200 at 2,304" in screen.getvalue()


def test_interrupt_restores_the_cursor(tmp_path: Path) -> None:
    screen = io.StringIO()

    def is_alive() -> bool:
        raise KeyboardInterrupt

    console = Console(file=screen, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        watch.follow(tmp_path / "log", Planned(), name="trial 0", is_alive=is_alive, console=console)
    assert screen.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.starts
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_sets_the_exit_code(tmp_path: Path, number: int, code: int) -> None:
    argv = [sys.executable, "-m", "bench", "watch", str(tmp_path / "none.txt")]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        assert "Unverified" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(30) == code
