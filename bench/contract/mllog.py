"""MLPerf log lines: their keys, and the writer.

A line is `:::MLLOG {json}`. The writer is strict: one file per trial, one record per line, valid JSON only. The reader
(`bench.mlperf.reader`) accepts more. Standard library only: ranks import it.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.contract import atomic_files, run_files
from bench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The attempt of a trial to which a log belongs."""

    nonce: str
    trial: int
    attempt: int
    """Counted from 1."""
    plan_sha256: str | None = None
    """The plan that the ranks must read (`plan_kinds.identity`); None in bindings of earlier versions."""


def save(folder: Path, binding: Binding) -> None:
    """Write the binding to the file that rank 0 reads."""
    path = folder / run_files.binding(binding.trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, asdict(binding))


def load(folder: Path, trial: int) -> Binding | None:
    """Return the binding of a trial's log; None without an attempt, as for ranks started by hand."""
    with suppress(TypeError):
        return Binding(**atomic_files.read_object(folder / run_files.binding(trial)))
    return None


def own(folder: Path, trial: int, env: Mapping[str, str] = os.environ) -> Binding | None:
    """Return the binding of the attempt that this rank was started for; None for ranks started by hand.

    Raises:
        ConfigError: the trial has a later attempt.
    """
    binding, nonce = load(folder, trial), env.get(run_files.ATTEMPT_VARIABLE)
    if nonce and (binding is None or binding.nonce != nonce):
        raise ConfigError(
            f"this rank belongs to an earlier attempt of trial {trial}, but a later attempt has already begun",
            where=str(folder / run_files.binding(trial)),
            fix="no action is needed: the ranks of the later attempt write the log",
            rule="CFG-05",
        )
    return binding


CACHE_CLEAR = "cache_clear"
INIT_START, INIT_STOP = "init_start", "init_stop"
RUN_START, RUN_STOP = "run_start", "run_stop"
BLOCK_START, BLOCK_STOP = "block_start", "block_stop"
EVAL_START, EVAL_STOP, EVAL_ACCURACY = "eval_start", "eval_stop", "eval_accuracy"
TRAIN_LOSS, TRACKED_STATS = "train_loss", "tracked_stats"

SUBMISSION_BENCHMARK, SUBMISSION_DIVISION = "submission_benchmark", "submission_division"
SUBMISSION_ORG, SUBMISSION_PLATFORM, SUBMISSION_STATUS = "submission_org", "submission_platform", "submission_status"

TARGET_ACCURACY, SEED = "target_accuracy", "seed"
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = "global_batch_size", "micro_batch_size"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
TRAIN_SAMPLES, EVAL_SAMPLES = "train_samples", "eval_samples"
OPT_BASE_LEARNING_RATE = "opt_base_learning_rate"
OPT_LEARNING_RATE_TRAINING_STEPS = "opt_learning_rate_training_steps"
OPT_LEARNING_RATE_WARMUP_FACTOR = "opt_learning_rate_warmup_factor"
OPT_ADAMW_WEIGHT_DECAY, OPT_GRADIENT_CLIP_NORM = "opt_adamw_weight_decay", "opt_gradient_clip_norm"
LORA_RANK, LORA_ALPHA = "lora_rank", "lora_alpha"
PRECISION_IN_LINEAR = "lowest_numerical_precision_in_linear"
PRECISION_IN_ATTN = "lowest_numerical_precision_in_attn"
PRECISION_IN_COMM = "lowest_numerical_precision_in_comm"
TENSOR_PARALLELISM, PIPELINE_PARALLELISM = "tensor_parallelism", "pipeline_parallelism"
CONTEXT_PARALLELISM, EXPERT_PARALLELISM = "context_parallelism", "expert_parallelism"
CONFIG_FILENAME = "config_filename"

INITIAL_WEIGHTS, DATA_SOURCE, RANDOM = "initial_weights", "data_source", "random"
"""Our own keys start here. These mark random weights or rows; metadata.shape_of: the benchmark of the same sizes."""
MODEL_TFLOP_PER_SAMPLE, ACCELERATOR_PEAK_TFLOPS = "model_tflop_per_sample", "accelerator_peak_tflops"
PEAK_MEMORY = "peak_memory_gib"
"""Peak of the fullest rank from run_start to run_stop: {allocated, reserved}, and the value {estimated} by the plan."""
GPU_TELEMETRY, NOT_MEASURED = "gpu_telemetry", "not_measured"
"""Per {node} from run_start to run_stop: power, clocks, temperature, memory and energy of its GPUs, or the reason why
they were {not_measured}. `jobs.ranks.telemetry` writes it, `bench.mlperf.telemetry` reads it."""
SLOW_RANKS = "slow_ranks"
"""Ranks of a {node} that have become persistently slower than the others, at {step}: the {cause}, the slowest one's own
time {own_ms} of a step (or an evaluation) without waiting, the median of the others {usual_ms}, the {percent} of the
run so far that this has cost, and the {reasons} that telemetry shows. `jobs.ranks.slow_ranks` decides."""
RANK_TIMES = "rank_times"
"""After run_stop: medians over all windows of each rank's own time of a step, {own_ms}, with the number of {windows}
and their {steps}, and the {slow} ranks with their share of the whole run."""
PRICE_PER_GPU_HOUR, CURRENCY = "price_per_gpu_hour", "currency"
"""The price of a GPU hour as set for the cluster, and its currency; both only if a price is set."""
MODULE_TIMES = "module_times"
"""Time breakdown of the profiled warm-up steps of rank 0: `bench.contract.modules.ModuleTimes`."""
STEP_TIMES, REAL_TOKENS = "step_times", "real_tokens"
"""In tracked_stats: seconds of each step since the last such record, and the tokens of these steps without padding."""
MONOTONIC_MS = "monotonic_ms"
"""Metadata of each of our records: the time since boot, which no process can change."""

RUN_ATTEMPT = "run_attempt"
"""The first record: the nonce of the attempt, with its trial and number, the {plan_sha256} of the plan that its ranks
read (`bench.contract.plan_kinds.identity`), and the inode and owner of the file."""
INPUT_SHA256 = "input_sha256"
"""The checksum of an {input} that the ranks read, by these names. Of the request lengths, the plan has the content."""
TRAIN_ROWS, EVAL_ROWS, CHECKPOINT_FILES, TOKENIZER = "train rows", "eval rows", "checkpoint", "tokenizer"
REQUEST_LENGTHS = "request lengths"
LOG_SHA256 = "log_sha256"
"""After run_stop, and after each later record: the SHA-256 of the first {bytes} of the file, up to this record."""
RESUMED = "resumed"
"""After run_start: the step from which this attempt resumed from a checkpoint, with {samples_count, step}, and what the
restart has cost (`jobs.tasks.earlier_attempts`)."""
FIRST_RUN_START_MS = "first_run_start_ms"
"""Metadata of `resumed`: the time of run_start of the trial's first attempt."""
DAMAGED_CHECKPOINT = "damaged_checkpoint"
"""A checkpoint that was not used, with the {reason}."""
CHECKPOINT = "checkpoint"
"""The training state after {step} was copied and is written in the background. Value: seconds without training."""
LOCAL_SGD = "local_sgd"
"""The number of local SGD groups, and the settings (`bench.contract.local_sgd`). train_loss is of {group} 0."""
OUTER_STEP = "outer_step"
"""The number of a weight averaging. {merge_step}: the step whose weights are averaged; {groups}: the groups that took
part, with their last training {losses} and the mean {step_times_s} of their inner steps since the averaging before;
{rank_bytes}: sent by rank 0; and the times {exchange_s}, {waited_for_groups_s} and {training_stopped_s}."""
GROUP_LEFT = "group_left"
"""A group that missed a weight averaging by its time limit: the others continue without it, and share its rows."""
GROUP_JOINED = "group_joined"
"""A restarted group that trains again after {step}, from the state of group 0, whose rank 0 sent {rank_bytes} in
{seconds}; 0 bytes if the transfer failed."""
ATTACHED_FILE = "attached_file"
"""A file that another program wrote: its path relative to the log's folder, {bytes} and {sha256}."""

PROGRAM = "program"
"""engine=command: the {argv} of the user's program on rank 0, {per} what it is started, its {adapter}, and the
{placeholders} by which it got values of the plan."""
RULESET = "ruleset"
"""In the record PROGRAM: the MLPerf ruleset by which the log is checked."""
PROGRAM_OUTPUT = "program_output"
"""When the program has ended: its {exit_code}, {lines} and {bytes} of its output, the {unreadable} lines among its
records with the {first} of them, and the {runner_s} by the runner's clock next to {by_program}: the program's own."""
TIMED_FROM = "timed_from"
"""The first step that a program reported: steps are timed from its end on, with {samples_count, step}."""
BY_PROGRAM = "by_program"
"""Metadata of a record with what only the program says: true for its value, or the values themselves."""
PROGRAM_TIME_MS = "program_time_ms"
"""Metadata of a record of the program's own: its time_ms there. time_ms is when the runner read it."""

STRATEGY = "strategy"
"""engine=huggingface: how the model is distributed, with the {engine} and its settings, and {rank_bytes}: the bytes of
weights on each rank while no layer runs."""
ATTENTION_BACKEND = "attention_backend"
"""The kernel of attention (flash, efficient, cudnn, math, eager, flash_attention_2), with the {requested} one."""
BF16_MODE = "bf16_mode"
"""The BF16 mode (deepspeed, autocast, pure), with the types of {weights}, {gradients}, {master} and {moments}."""
COMPILE_TIME = "compile_time_s"
"""Compile time before run_start."""
NCCL_TRANSPORT = "nccl_transport"
"""The transport between nodes by NCCL's own log (IB, Socket; none on a single node), the one within a node, {local}
(P2P, SHM), the {lines} of that log, and the {interfaces} that it lists."""
NUM_GPUS = "num_gpus"
"""GPUs of all ranks, if a rank has several."""

KERNELS_REQUESTED = "kernels_requested"
"""The names of all points of the plan, with the {tolerance} for rates below their limits."""
KERNEL_MEASURED = "kernel_measured"
"""A point's name, with its fields in the plan, {n, median_us, p10_us, p90_us} of the slowest {rank}, and the
{implementation}."""
KERNEL_FAILED = "kernel_failed"
"""The name of a point that failed, with the {reason}."""

ANSWERS_REQUESTED = "answers_requested"
"""The number of new tokens of each requested answer, in order, with {replicas, tp, order, batching, max_batch, prompts,
weights} and {temperature, top_k, top_p}; and, if estimated, the {bytes_per_token} that a GPU reads for one token of one
answer, and its {bandwidth_gbs}."""
ANSWERS = "answers"
"""After run_stop, per answer: its index, its replica, prompt tokens, new tokens, the time at which its batch was
submitted (since the replica's start), and the times of its first and last token since then."""
SERVER = "server"
"""The server's name, with its {argv} or {url}, {model}, {precision}, {tp}, and the start-up time {healthy_s}."""
LOADS_REQUESTED = "loads_requested"
"""The names of all loads of the plan, with the latency {limits} and {max_client_delay}; and, if lengths differ between
requests, the {lengths}: the name of the {file} and its {sha256}, or the distributions of {prompt} and
{answer}."""
LOAD_MEASURED = "load_measured"
"""A load's name, with its fields in the plan and, per request in order of arrival, {latency_s, ttft_s, tpot_s,
tokens_in, tokens_out} and {status}, or null; {together}: share of chunks that arrived together with the one before;
{client}: client overhead; {loadgen}: loadgen's results."""
SERVER_TIMES = "server_times"
"""A profile of one GPU of the server while it decodes; `bench.contract.server_times` has its fields."""
SERVER_MEMORY = "server_memory_gib"
"""The fullest GPU: memory {before} the server started, and its {peak} under load; or the reason {not_measured}."""

OLD_KEYS = {"kernels_asked": KERNELS_REQUESTED, "answers_asked": ANSWERS_REQUESTED, "loads_asked": LOADS_REQUESTED}
OLD_METADATA = {
    ATTENTION_BACKEND: {"asked": "requested"},
    KERNEL_MEASURED: {"ran": "implementation"},
    LOAD_MEASURED: {"bunched": "batched_tokens"},
}
"""Names in logs of earlier versions; `bench.mlperf.reader` returns the new names."""

SUCCESS, ABORTED = "success", "aborted"
"""The values of run_stop's metadata.status."""

_MOMENTS = (RUN_START, BLOCK_START, BLOCK_STOP, RUN_STOP)
_TOKEN = b":::MLLOG"
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


Clocks = Callable[[], tuple[int, int]]
"""Returns the wall clock and the monotonic clock in milliseconds; tests write logs with other clocks."""


class Writer:
    """The log of one trial; safe to use from several threads and from signal handlers. With path None (ranks
    that do not log) it discards everything.

    A log that is bound to an attempt starts with that attempt's nonce. From run_stop on, the last record is always the
    checksum of everything before it, which reveals a changed or truncated log.

    Raises:
        ConfigError: the file exists, or is a link: a second start never appends to an existing log.
    """

    def __init__(self, path: Path | None, binding: Binding | None = None, clocks: Clocks | None = None) -> None:
        self._read_clocks_ms = clocks or clocks_ms
        try:  # unbuffered: a line is one write; exclusive: no link is followed
            self._file = FileIO(os.devnull, "w") if path is None else FileIO(path, "x")
        except FileExistsError as error:
            raise ConfigError(
                "this trial already has a log, and a second start must not append to this log",
                where=str(path),
                fix="remove the setting launch.folder to get a new run folder, or move the old log to another folder",
                rule="CFG-05",
            ) from error
        self._lock = threading.RLock()
        self._started = self._stopped = self._is_over = False
        self._folder = None if path is None else path.parent
        self._binding = None if path is None else binding
        self._sha256, self._bytes = hashlib.sha256(), 0
        self.moments: list[tuple[str, int]] = []
        """Start and stop times of the run and its blocks, by key, in milliseconds of the monotonic clock."""
        if binding and self._binding:
            file = os.fstat(self._file.fileno())
            plan = {} if binding.plan_sha256 is None else {"plan_sha256": binding.plan_sha256}
            number = {"trial": binding.trial, "attempt": binding.attempt}
            self.event(RUN_ATTEMPT, binding.nonce, **number, **plan, inode=file.st_ino, uid=file.st_uid)

    def event(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write a POINT_IN_TIME record.

        Raises:
            ValueError: JSON cannot represent the value (NaN, infinity, a tensor); nothing was written.
            OSError: writing failed, for example on a full disk.
        """
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write an INTERVAL_START record; raises like `event`."""
        self._write("INTERVAL_START", key, value, metadata)

    def stop(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write an INTERVAL_END record; raises like `event`. Use `finish` for run_stop."""
        self._write("INTERVAL_END", key, value, metadata)

    def attach(self, file: Path) -> None:
        """Write the checksum of a complete file of another program in the log's folder; raises like `event`."""
        if self._folder is None:
            return
        attached = atomic_files.checksum(file)
        name = file.relative_to(self._folder).as_posix()
        self.event(ATTACHED_FILE, name, bytes=attached.bytes, sha256=attached.sha256)

    def finish(self, status: str, **metadata: Any) -> bool:
        """Write run_stop, but only once, after run_start and before `close`. Return whether this call wrote it."""
        with self._lock:
            if not self._started or self._stopped or self._file.closed:
                return False
            self._stopped = True  # before the write: a signal handler may run in between
            try:
                self._append("INTERVAL_END", RUN_STOP, None, metadata | {"status": status})
            except BaseException:
                self._stopped = False
                raise
            return True

    def abort(self) -> None:
        """Write run_stop as aborted, unless it was written, and discard later records of threads that still run."""
        with self._lock:
            try:
                self.finish(ABORTED)
            finally:
                self._is_over = True

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        if key == RUN_STOP:
            raise ValueError("run_stop cannot be logged directly, because only finish() writes this record")
        with self._lock:
            self._append(event_type, key, value, metadata)
            self._started |= key == RUN_START

    def _append(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        if self._is_over:
            return
        lines = self._line(event_type, key, value, metadata)
        if self._binding and self._stopped:
            whole = self._sha256.copy()
            whole.update(lines)
            size = {"bytes": self._bytes + len(lines)}
            lines += self._line("POINT_IN_TIME", LOG_SHA256, whole.hexdigest(), size)
        while lines:  # a full disk accepts part of a line, then raises
            written = self._file.write(lines)
            self._sha256.update(lines[:written])
            self._bytes += written
            lines = lines[written:]

    def _line(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> bytes:
        time_ms, monotonic_ms = self._read_clocks_ms()
        if key in _MOMENTS:
            self.moments.append((key, monotonic_ms))
        record = {
            "namespace": "",
            "time_ms": time_ms,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": _caller() | {MONOTONIC_MS: monotonic_ms} | metadata,
        }
        try:
            return b"%s %s\n" % (_TOKEN, json.dumps(record, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"the record {key} = {value!r} with metadata {metadata!r} cannot be logged: {error}"
            ) from error


def clocks_ms() -> tuple[int, int]:
    """Return the wall clock and the monotonic clock, read at one moment: the tightest of three readings.

    The monotonic clock is CLOCK_BOOTTIME: CLOCK_MONOTONIC stops while a laptop is suspended and the wall clock does
    not, so that the wall clock would appear to have been set. Without CLOCK_BOOTTIME (macOS), CLOCK_MONOTONIC
    includes that time. NTP's slewing changes the rate of both clocks equally; only a step changes their difference.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    readings = []
    for _ in range(3):  # this process may lose its CPU between two reads
        before = time.clock_gettime_ns(clock)
        wall = time.time_ns()
        readings.append((time.clock_gettime_ns(clock) - before, wall, before))
    _, wall, monotonic = min(readings)
    return wall // 1_000_000, monotonic // 1_000_000


def _caller() -> dict[str, Any]:
    """Return the caller's file, relative to the folder of `bench/`, and line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = os.path.abspath(frame.f_code.co_filename)
    inside = file.startswith(_PACKAGE_ROOT + os.sep)
    name = os.path.relpath(file, _PACKAGE_ROOT) if inside else os.path.basename(file)
    return {"file": name, "lineno": frame.f_lineno}
