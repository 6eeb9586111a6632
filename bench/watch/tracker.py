"""Update the progress of a trial with the events of its log.

Records have the same meaning as in `bench.mlperf.result`; `bench.mlperf.log` defines which of them count samples.
"""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from bench.contract import mllog
from bench.mlperf import slow_ranks
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.log import Pace, Stretch
from bench.mlperf.reader import Event, is_number
from bench.watch.progress import Evaluated, Place, Progress

WINDOW = 256
"""The number of recent measurements that are kept: all steps of a LoRA run, the last ones of a longer run."""
SMOOTHED = 5
"""The smoothed training loss is the median of this many losses."""


class Tracker:
    """Keeps the progress of the latest trial of a log."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._pace = Pace()

    def update(self, events: Iterable[Event]) -> None:
        for event in events:
            self._update(event, event.key.rstrip())  # some loggers add a trailing space

    def _update(self, event: Event, key: str) -> None:
        stretch = self._pace.advance(event)
        if key in (mllog.INIT_START, mllog.RUN_START) and self.progress.run_start_ms is not None:
            self.progress = _next_trial(self.progress, key)
        now = self.progress
        now.first_ms = event.time_ms if now.first_ms is None else now.first_ms
        now.last_ms = max(event.time_ms, now.last_ms or event.time_ms)
        now.phase = "preparing" if now.phase == "waiting" else now.phase
        # Some programs evaluate after run_stop, and the last slow ranks are known only then.
        if now.phase == "stopped" and key not in (mllog.EVAL_ACCURACY, mllog.SLOW_RANKS):
            return
        # An evaluation without eval_start is part of the training interval that it ends.
        if stretch and stretch.time_ms > 0 and key != mllog.EVAL_ACCURACY:
            _trained(now, stretch, event.time_ms)
        if key in _FACTS and (fact := _fact(event.value, _FACTS[key][1])) is not None:
            setattr(now, _FACTS[key][0], fact)
        elif key in _HANDLERS:
            _HANDLERS[key](now, event)


_FACTS: dict[str, tuple[str, type[int] | type[float] | type[str]]] = {
    mllog.SUBMISSION_BENCHMARK: ("benchmark", str),
    mllog.SUBMISSION_PLATFORM: ("platform", str),
    mllog.SEED: ("seed", int),
    mllog.GLOBAL_BATCH_SIZE: ("global_batch_size", int),
    mllog.TARGET_ACCURACY: ("logged_target", float),
    mllog.EVAL_SAMPLES: ("num_eval_rows", int),
    mllog.LORA_RANK: ("lora_rank", int),
}
"""The fields that a key sets, and their types."""


def _fact(value: Any, kind: type[int] | type[float] | type[str]) -> int | float | str | None:
    if kind is str:
        return value if isinstance(value, str) else None
    if not is_number(value):
        return None
    number = int(value) if kind is int else float(value)
    return number if number > 0 else None


def _next_trial(ended: Progress, key: str) -> Progress:
    """Return the progress of the next trial in the same log. At run_start, its settings are already logged."""
    if key == mllog.INIT_START:
        return Progress(trial=ended.trial + 1)
    return Progress(trial=ended.trial + 1, **{field: getattr(ended, field) for field, _ in _FACTS.values()})


def _trained(now: Progress, stretch: Stretch, time_ms: int) -> None:
    if now.global_batch_size:
        step_time_ms = stretch.time_ms * now.global_batch_size / stretch.trained
        now.step_times_ms = (*now.step_times_ms, step_time_ms)[-WINDOW:]
    now.line_gaps_ms = (*now.line_gaps_ms, stretch.time_ms)[-WINDOW:]
    now.place = Place(int(stretch.samples), time_ms)


def _run_start(now: Progress, event: Event) -> None:
    now.phase, now.run_start_ms, now.place = "training", event.time_ms, Place(0, event.time_ms)
    if now.points_requested is not None:
        now.phase, now.place = "measuring", None
    if now.answers_requested is not None:
        now.phase, now.place = "generating", None


def _requested_points(now: Progress, event: Event) -> None:
    now.points_requested = len(event.value) if isinstance(event.value, list) else None
    now.points_name = "loads" if event.key == mllog.LOADS_REQUESTED else "points"


def _requested_answers(now: Progress, event: Event) -> None:
    now.answers_requested = len(event.value) if isinstance(event.value, list) else None


def _point(now: Progress, event: Event) -> None:
    now.points_done += 1
    now.last_point = event.value if isinstance(event.value, str) else None


def _resumed(now: Progress, event: Event) -> None:
    now.samples = _samples(now, event)


def _block_start(now: Progress, event: Event) -> None:
    now.phase, now.eval_start_ms, now.place = "training", None, Place(now.samples or 0, event.time_ms)


def _training(now: Progress, event: Event) -> None:
    """Read the training loss of a train_loss record, or of tracked_stats if it has one."""
    logged: dict[str, Any] = event.value if isinstance(event.value, dict) else {"train_loss": event.value}
    lr: Any = event.metadata.get("lr", logged.get("lr"))
    now.lr = lr if is_number(lr) else now.lr
    if (loss := logged.get("train_loss", logged.get("reduced_train_loss"))) is not None:
        _loss(now, loss)
    if (samples := _samples(now, event)) is not None:
        now.samples = max(samples, now.samples or 0)
    elif not now.line_gaps_ms:
        _uncounted(now, logged.get("train_step_time"), event.metadata.get("step"))


def _loss(now: Progress, loss: Any) -> None:
    if not is_number(loss):
        now.not_finite = f"train loss {loss!r:.20}"
        return
    now.train_loss, now.not_finite = loss, None
    now.recent_losses = (*now.recent_losses, loss)[-SMOOTHED:]
    if len(now.recent_losses) == SMOOTHED:
        smoothed = median(now.recent_losses)
        now.lowest_loss = smoothed if now.lowest_loss is None else min(now.lowest_loss, smoothed)


def _uncounted(now: Progress, step_time_s: Any, step: Any) -> None:
    """Read the logger's step time and step number if no record counts samples."""
    if not is_number(step_time_s) or step_time_s <= 0:
        return
    now.step_times_ms = (*now.step_times_ms, step_time_s * 1000)[-WINDOW:]
    # Some loggers count samples in `step`, others steps: a lower bound of the samples.
    if now.global_batch_size and is_number(step) and step > 0 and step % now.global_batch_size == 0:
        now.samples = max(int(step), now.samples or 0)


def _slow(now: Progress, event: Event) -> None:
    text = slow_ranks.described(event)
    now.slow = now.slow if text is None else (*now.slow, text)


def _eval_start(now: Progress, event: Event) -> None:
    now.phase, now.eval_start_ms, now.place = "evaluating", event.time_ms, None
    if (samples := _samples(now, event)) is not None:
        now.samples = max(samples, now.samples or 0)


def _evaluation(now: Progress, event: Event) -> None:
    samples = _samples(now, event)
    if now.eval_start_ms is None and now.phase != "stopped":
        _estimate_eval_time(now, samples, event.time_ms)
    if samples is not None:
        now.samples = max(samples, now.samples or 0)
    if not is_number(event.value):
        now.not_finite = f"evaluation {event.value!r:.20}"
        return
    metrics = [goal.metric for goal in now.goals if goal.metric is not None]
    metric = next((name for name in metrics if name == event.metadata.get("metric")), None)
    now.evaluations = (*now.evaluations, Evaluated(samples, event.value, event.time_ms, metric))
    now.not_finite = None


def _estimate_eval_time(now: Progress, samples: int | None, time_ms: int) -> None:
    """Estimate the time of an evaluation without eval_start: the time since the last position minus its steps."""
    place, gbs, step_time_ms = now.place, now.global_batch_size, now.step_time_ms
    now.place = None if samples is None else Place(samples, time_ms)
    if place is None or samples is None or step_time_ms is None or not gbs or samples <= place.samples:
        return  # for samples <= place.samples, its eval_stop was logged before
    took_s = (time_ms - place.time_ms - (samples - place.samples) / gbs * step_time_ms) / 1000
    if took_s > 0:
        now.eval_times_s, now.eval_time_is_estimated = (*now.eval_times_s, took_s)[-WINDOW:], True


def _eval_stop(now: Progress, event: Event) -> None:
    if now.eval_start_ms is not None and event.time_ms > now.eval_start_ms:
        now.eval_times_s = (*now.eval_times_s, (event.time_ms - now.eval_start_ms) / 1000)[-WINDOW:]
    now.phase, now.eval_start_ms, now.place = "training", None, Place(now.samples or 0, event.time_ms)


def _run_stop(now: Progress, event: Event) -> None:
    status, samples = event.metadata.get("status"), _samples(now, event)
    now.status = status if isinstance(status, str) else None
    now.samples = now.samples if samples is None else max(samples, now.samples or 0)
    now.phase, now.run_stop_ms, now.place, now.eval_start_ms = "stopped", event.time_ms, None, None


_HANDLERS: dict[str, Callable[[Progress, Event], None]] = {
    mllog.ANSWERS_REQUESTED: _requested_answers,
    **dict.fromkeys((mllog.KERNELS_REQUESTED, mllog.LOADS_REQUESTED), _requested_points),
    **dict.fromkeys((mllog.KERNEL_MEASURED, mllog.KERNEL_FAILED, mllog.LOAD_MEASURED), _point),
    mllog.RUN_START: _run_start,
    mllog.RESUMED: _resumed,
    mllog.BLOCK_START: _block_start,
    **dict.fromkeys((mllog.TRAIN_LOSS, mllog.TRACKED_STATS), _training),
    mllog.SLOW_RANKS: _slow,
    mllog.EVAL_START: _eval_start,
    mllog.EVAL_ACCURACY: _evaluation,
    mllog.EVAL_STOP: _eval_stop,
    mllog.RUN_STOP: _run_stop,
}


def _samples(now: Progress, event: Event) -> int | None:
    """Return the sample count of an event that is not a block event."""
    known = BENCHMARKS.get(now.benchmark or "")
    samples: Any = event.metadata.get("epoch_num" if known and known.epoch_num_is_samples else "samples_count")
    return int(samples) if is_number(samples) and samples >= 0 else None
