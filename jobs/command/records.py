"""Write the log of a trial from what its program says, and time its steps by the arrival of their lines."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bench.contract import mllog
from bench.contract.plan_kinds import TrainingPlan, samples
from bench.errors import BenchError
from jobs.command.adapters import MllogRecord, Reported, Unreadable

Describe = Callable[[], Mapping[str, Any]]
"""Returns the keys that describe the trial, with their values."""


class Recorder(Protocol):
    """Writes the log of a trial. `at_s` is the monotonic time at which a line was read."""

    has_stopped: bool
    """Whether run_stop is logged."""

    @property
    def place(self) -> str:
        """How far the program has trained, such as `step 12`; for messages."""

    def start(self) -> None:
        """Write the records before the program starts."""

    def record(self, reported: Reported, at_s: float) -> None:
        """Write what a line says.

        Raises:
            BenchError: a loss is not a finite number.
            Unreadable: a record of the program may not be taken over.
        """

    def finish(self) -> None:
        """Write what is left once the program has ended without an error.

        Raises:
            BenchError: the program reported nothing about its training, or ended before its last step.
        """


class StepRecorder:
    """For programs without MLLOG: the same records as `jobs.tasks.train`, as far as the program shows them.

    run_start is before the program starts, because the start of its training is unknown. Steps are timed from the end
    of the first reported step. The time of an evaluation is unknown: it is between two steps, and counts as neither.
    """

    def __init__(
        self, plan: TrainingPlan, log: mllog.Writer, describe: Describe, *, earlier_step: int | None = None
    ) -> None:
        """earlier_step: the first step that an earlier attempt reported, if the program resumes from checkpoints."""
        self._plan, self._log, self._describe, self._earlier_step = plan, log, describe, earlier_step
        self.step, self.has_stopped = 0, False
        self._resumed: int | None = None
        self._logged: int | None = None
        """The step of the last record; None before the first step."""
        self._since_s = self._last_s = 0.0
        self._times_s: list[float] = []
        self._own: dict[str, list[float]] = {}
        self._loss: float | None = None
        self._has_reached = False

    @property
    def place(self) -> str:
        return f"step {self.step}"

    def start(self) -> None:
        for key, value in self._describe().items():
            self._log.event(key, value)
        self._log.stop(mllog.INIT_STOP)
        self._log.start(mllog.RUN_START)

    def record(self, reported: Reported, at_s: float) -> None:
        if reported.resumed is not None and self._logged is None:
            self._resumed = reported.resumed
        for name in ("tokens", "step_time_s"):
            if (value := getattr(reported, name)) is not None and math.isfinite(value):
                self._own.setdefault(name, []).append(value)
        if reported.step is not None and reported.eval_loss is None and reported.step > self.step:
            self._stepped(reported.step, reported.loss, at_s)
        if reported.eval_loss is not None:
            self._evaluated(reported, at_s)

    def _stepped(self, step: int, loss: float | None, at_s: float) -> None:
        """Record the end of a step; log it if it is due."""
        loss = self._loss if loss is None else _finite(loss, "training", f"step {step}")
        if self._logged is None:
            self._begin(step, at_s)
            if loss is not None:
                self._log.event(mllog.TRAIN_LOSS, loss, **self._place(step), **{mllog.BY_PROGRAM: True})
        elif step == self.step + 1 and len(self._times_s) == self.step - self._logged:
            self._times_s.append(at_s - self._last_s)
        self.step, self._last_s, self._loss = step, at_s, loss
        every = self._plan.recipe.log_every_steps
        if self._logged is not None and (step // every > self._logged // every or step == self._plan.max_steps):
            self._log_steps()

    def _begin(self, step: int, at_s: float) -> None:
        """Begin to time steps, from the end of the first one that is reported."""
        resumed = self._resumed
        if resumed is None and self._earlier_step is not None and step > self._earlier_step:
            resumed = step
        if resumed:
            self._log.event(mllog.RESUMED, resumed, **self._place(resumed), **{mllog.BY_PROGRAM: True})
        self._log.event(mllog.TIMED_FROM, step, **self._place(step))
        self._log.start(mllog.BLOCK_START, **self._place(step))
        self._logged, self._since_s = step, at_s

    def _log_steps(self) -> None:
        """Log the steps since the last record: their times by the runner's clock, and what the program says."""
        if self._logged is None or self.step == self._logged:
            return
        count, place = self.step - self._logged, self._place(self.step)
        step_time_s = (self._last_s - self._since_s) / count
        if self._loss is not None:
            self._log.event(mllog.TRAIN_LOSS, self._loss, **place, **{mllog.BY_PROGRAM: True})
        stats: dict[str, Any] = {"train_step_time": step_time_s}
        if step_time_s > 0:
            stats["throughput"] = self._plan.batch.global_batch_size / step_time_s
        if len(self._times_s) == count:
            stats[mllog.STEP_TIMES] = [round(time_s, 6) for time_s in self._times_s]
        own = {name: sum(values) / len(values) for name, values in self._own.items()}
        self._log.event(mllog.TRACKED_STATS, stats, **place, **({mllog.BY_PROGRAM: own} if own else {}))
        self._logged, self._since_s = self.step, self._last_s
        self._times_s.clear()
        self._own.clear()

    def _evaluated(self, reported: Reported, at_s: float) -> None:
        assert reported.eval_loss is not None
        step = max(self.step, reported.step or 0)
        loss = _finite(reported.eval_loss, "evaluation", f"step {step}")
        self._log_steps()
        is_training = self._logged is not None
        if is_training:
            self._log.stop(mllog.BLOCK_STOP, **self._place(self.step))
        own: dict[str, Any] = {mllog.BY_PROGRAM: True}
        if reported.eval_time_s is not None and math.isfinite(reported.eval_time_s):
            own = {mllog.BY_PROGRAM: {"eval_time_s": reported.eval_time_s}}
        rows = self._plan.data.train_rows
        epochs = {"epoch_num": samples(self._plan, step) / rows} if rows else {}
        self._log.event(mllog.EVAL_ACCURACY, loss, **self._place(step), **epochs, **own)
        self.step = step
        if is_training and self._plan.config.training.is_reached_by(loss):
            self._has_reached = self.has_stopped = True
            self._log.finish(mllog.SUCCESS, **self._place(step))
        elif is_training:
            self._log.start(mllog.BLOCK_START, **self._place(step))
            self._logged, self._since_s, self._last_s = step, at_s, at_s

    def finish(self) -> None:
        if self._logged is None:
            raise nothing_read("training step")
        if self.has_stopped:
            return
        self._log_steps()
        self._log.stop(mllog.BLOCK_STOP, **self._place(self.step))
        self.has_stopped = True
        has_target, last = self._plan.config.training.has_target, self._plan.max_steps
        is_complete = self.step >= last and not has_target
        self._log.finish(mllog.SUCCESS if is_complete else mllog.ABORTED, **self._place(self.step))
        if not is_complete and not has_target:
            raise BenchError(
                f"the program ended after step {self.step:,}, but the plan has {last:,} steps",
                where="task.training.max_steps, engine.command",
                fix="pass the placeholder {max_steps} to the program, or set task.training.max_steps to the number of "
                "steps of the program. Let the program print its last step; if hf_trainer or llama_factory prints only "
                "every Nth step, set engine.command.every_steps=N",
                rule="RUN-23",
            )

    def _place(self, step: int) -> dict[str, int]:
        return {"samples_count": samples(self._plan, step), "step": step}


OURS = {
    *(mllog.RUN_ATTEMPT, mllog.LOG_SHA256, mllog.ATTACHED_FILE, mllog.INPUT_SHA256, mllog.GPU_TELEMETRY),
    *(mllog.PROGRAM, mllog.PROGRAM_OUTPUT, mllog.TIMED_FROM),
}
"""Keys that only the runner may write."""
SAMPLE, STEP, TRACKED_STEP = "sample {:,}", "step {:,}", "step {:,} of tracked_stats, which may count samples"
"""What a program counts; the first known one is shown."""
LOSSES = (mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS)


class MllogRecorder:
    """For programs with MLLOG: takes over their records, with the time at which they were read as time_ms."""

    def __init__(self, log: mllog.Writer, describe: Describe) -> None:
        self._log, self._describe = log, describe
        self.has_stopped = False
        self._newest: dict[str, float] = {}
        self._seen: set[str] = set()

    def start(self) -> None:
        """Write nothing: what the program does not log itself is written before its init_stop or run_start."""

    def record(self, reported: Reported, at_s: float) -> None:
        record = reported.record
        assert record is not None, "the adapter mllog returns records"
        if record.key in OURS:
            raise Unreadable(f"only the runner may log {record.key}")
        if record.key in (mllog.RUN_START, mllog.INIT_STOP):
            self._complete(record.key)
        if record.key == mllog.INIT_START or self.has_stopped:
            return  # the runner has logged init_start; after run_stop nothing belongs to the trial
        self._count(record)
        if record.key in LOSSES and isinstance(record.value, float):
            _finite(record.value, "training" if record.key == mllog.TRAIN_LOSS else "evaluation", self.place)
        own = {name: value for name, value in record.metadata.items() if name != mllog.MONOTONIC_MS}
        own |= {mllog.BY_PROGRAM: True, mllog.PROGRAM_TIME_MS: record.time_ms}
        try:
            self._write(record, own)
        except ValueError as error:
            raise Unreadable(str(error)) from error

    def _complete(self, key: str) -> None:
        """Log the description of the trial that the program has not logged, and init_stop before run_start."""
        if mllog.INIT_STOP not in self._seen:
            for name, value in self._describe().items():
                if name not in self._seen:
                    self._log.event(name, value)
            if key == mllog.RUN_START:
                self._log.stop(mllog.INIT_STOP)

    def _write(self, record: MllogRecord, metadata: dict[str, Any]) -> None:
        self._seen.add(record.key)
        if record.key == mllog.RUN_STOP:
            status = metadata.pop("status", None)
            self.has_stopped = self._log.finish(status if isinstance(status, str) else mllog.ABORTED, **metadata)
            return
        write = {"INTERVAL_START": self._log.start, "INTERVAL_END": self._log.stop}
        write.get(record.event_type, self._log.event)(record.key, record.value, **metadata)

    def _count(self, record: MllogRecord) -> None:
        """Keep the highest count that the program has logged, of each unit.

        In tracked_stats, `step` counts samples in most published logs of llama2_70b_lora, tokens in those of gpt3, and
        optimizer steps in others.
        """
        for name, unit in (("samples_count", SAMPLE), ("step", STEP)):
            count = record.metadata.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool) and math.isfinite(count):
                unit = TRACKED_STEP if unit == STEP and record.key == mllog.TRACKED_STATS else unit
                self._newest[unit] = max(count, self._newest.get(unit, 0))
                return

    @property
    def place(self) -> str:
        unit = next((unit for unit in (SAMPLE, STEP, TRACKED_STEP) if unit in self._newest), STEP)
        return unit.format(round(self._newest.get(unit, 0)))

    def finish(self) -> None:
        for key in (mllog.RUN_START, mllog.RUN_STOP):
            if key not in self._seen:
                raise nothing_read(key)


def nothing_read(what: str) -> BenchError:
    """Return the error for a program that ended without an error, but never reported what its adapter must read."""
    return BenchError(
        f"the program ended, but the adapter has found no {what} in the program's output",
        where="engine.command.adapter, engine.command.patterns, engine.command.file",
        fix="compare the lines in rank_logs/ with what the adapter reads; let the program print to standard output "
        "without a buffer",
        rule="RUN-21",
    )


def _finite(loss: float, phase: str, place: str) -> float:
    """Return the loss; raise BenchError if it is not a finite number."""
    if math.isfinite(loss):
        return loss
    raise BenchError(
        f"the {phase} loss is {loss} at {place}, but must be a finite number",
        where="the output of the program",
        fix="lower the program's learning rate, or look for NaN and infinity in the rows and weights of the program",
        rule="RUN-05",
    )


def first_step(records: list[dict[str, Any]]) -> int | None:
    """Return the first step that an attempt reported, from its records; None if it reported none."""
    steps = [record.get("value") for record in records if record.get("key") == mllog.TIMED_FROM]
    return next((step for step in steps if isinstance(step, int)), None)
