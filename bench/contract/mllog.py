"""MLPerf's log lines: their keys, and how they are written.

A line is `:::MLLOG {json}`. Writing is strict: one file per trial, one record per line, only what JSON can
hold. Reading, in `bench.mlperf.reader`, accepts more. Ranks import this module: it needs the standard library only.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
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
    """One attempt of one trial."""

    nonce: str
    trial: int
    attempt: int
    """Counted from 1."""


def save(folder: Path, binding: Binding) -> None:
    """Write the binding where rank 0 looks for it."""
    path = folder / run_files.binding(binding.trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write(path, asdict(binding))


def load(folder: Path, trial: int) -> Binding | None:
    """Return what a trial's log is bound to; None where nobody has opened an attempt, as for ranks started by hand."""
    with suppress(TypeError):
        return Binding(**atomic_files.read_object(folder / run_files.binding(trial)))
    return None


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
"""Our own keys start here. These say that weights or rows are random; metadata.shape_of names a benchmark as large."""
MODEL_TFLOP_PER_SAMPLE, ACCELERATOR_PEAK_TFLOPS = "model_tflop_per_sample", "accelerator_peak_tflops"
PEAK_MEMORY = "peak_memory_gib"
"""Of the fullest rank from run_start to run_stop: {allocated, reserved}, and what the plan {estimated}."""
GPU_TELEMETRY, NOT_MEASURED = "gpu_telemetry", "not_measured"
"""Of each {node} from run_start to run_stop: power, clocks, temperature, memory and energy of its GPUs, or in their
place the reason why they were {not_measured}. `jobs.ranks.telemetry` writes it, `bench.mlperf.telemetry` reads it."""
MODULE_TIMES = "module_times"
"""Where the time of the profiled warm-up steps of rank 0 goes: `bench.contract.modules.ModuleTimes`."""
STEP_TIMES, REAL_TOKENS = "step_times", "real_tokens"
"""In tracked_stats: seconds of each step since the last such record, and the tokens of these steps without padding."""
MONOTONIC_MS = "monotonic_ms"
"""In the metadata of each record of ours: the time since the machine booted, which nobody can set."""

RUN_ATTEMPT = "run_attempt"
"""The first record: the nonce of the attempt, with its trial and number, and the inode and owner of the file."""
LOG_SHA256 = "log_sha256"
"""Behind run_stop, and behind each record after it: the SHA-256 of all {bytes} of the file before this record."""
RESUMED = "resumed"
"""Behind run_start: the step after which this attempt goes on from a checkpoint, with {samples_count, step}."""
DAMAGED_CHECKPOINT = "damaged_checkpoint"
"""A checkpoint that was not used, with the {reason}."""
CHECKPOINT = "checkpoint"
"""The training state after {step} was copied, and is written while training goes on: the seconds without training."""
LOCAL_SGD = "local_sgd"
"""How many groups train apart, and how: `bench.contract.local_sgd.LocalSgd`. train_loss is then that of {group} 0."""
OUTER_STEP = "outer_step"
"""The number of a merge: after which {merge_step}, of which {groups}, with the last {losses} of their training and the
mean {step_times_s} of their inner steps since the merge before; the {rank_bytes} that rank 0 sent in {exchange_s}, for
how long it {waited_for_groups_s}, and for how long {training_stopped_s}."""
GROUP_LEFT = "group_left"
"""A group that was not at a merge within its time limit: the others go on without it, and share its rows."""
GROUP_JOINED = "group_joined"
"""A group that was started again and trains from {step} on, as a copy of group 0, whose rank 0 sent it {rank_bytes} in
{seconds}; 0 bytes if that broke off."""
ATTACHED_FILE = "attached_file"
"""A file that another program wrote: its path from the log's folder, {bytes} and {sha256}."""

STRATEGY = "strategy"
"""Of a peer of this project's engine: how it placed the model, with the {engine} and its settings, and {rank_bytes}, of
each rank the weights that it holds while no layer is at work."""
ATTENTION_BACKEND = "attention_backend"
"""The kernel that attention took (flash, efficient, cudnn, math, eager, flash_attention_2), with what was {asked}."""
BF16_MODE = "bf16_mode"
"""What BF16 means (deepspeed, autocast, pure), with the types of {weights}, {gradients}, {master} and {moments}."""
COMPILE_TIME = "compile_time_s"
"""What compiling took before run_start."""
NCCL_TRANSPORT = "nccl_transport"
"""How NCCL's own log says that ranks of different nodes are joined (IB, Socket; none where all share a node), how those
of one node are, {local} (P2P, SHM), the {lines} that say so, and the {interfaces} that it found."""
NUM_GPUS = "num_gpus"
"""Of all ranks, where a rank has several."""

KERNELS_ASKED = "kernels_asked"
"""The names of all points that the plan measures, with the {tolerance} by which the best may miss their limits."""
KERNEL_MEASURED = "kernel_measured"
"""A point's name, with all that the plan says of it, and {n, median_us, p10_us, p90_us} of the slowest {rank}; {ran} is
what computed it."""
KERNEL_FAILED = "kernel_failed"
"""The name of a point that could not be measured, with the {reason}."""

ANSWERS_ASKED = "answers_asked"
"""The number of new tokens of each answer that the plan asks for, in order, with {replicas, tp, order, batching,
max_batch, prompts, weights} and {temperature, top_k, top_p}; and where the plan estimates it, what a GPU reads for one
token of one answer, {bytes_per_token}, and {bandwidth_gbs}, at which rate."""
ANSWERS = "answers"
"""Of each answer that was given, behind run_stop: its index, its replica, the tokens of its prompt, its new tokens,
when its batch was handed in, since the replica's clock started, and since then its first and its last token."""
SERVER = "server"
"""The server's name, with its {argv} or {url}, {model}, {precision}, {tp}, and the seconds until it was {healthy_s}."""
LOADS_ASKED = "loads_asked"
"""The names of all loads that the plan has, with the {limits} of a good request and {max_client_delay}."""
LOAD_MEASURED = "load_measured"
"""A load's name, with all that the plan says of it and, in the order of arrival, {latency_s, ttft_s, tpot_s,
tokens_in, tokens_out} and the {status} of each request, null for what a request has not; {together} is the share of
chunks that arrived with the one before, {client} what the client delayed, {loadgen} what loadgen says of the load."""
SERVER_MEMORY = "server_memory_gib"
"""Of the fullest GPU: {before} the server was started, and the {peak} under load; or why it was {not_measured}."""

SUCCESS, ABORTED = "success", "aborted"
"""What run_stop's metadata.status may say."""

_MOMENTS = (RUN_START, BLOCK_START, BLOCK_STOP, RUN_STOP)
_TOKEN = b":::MLLOG"
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


Clocks = Callable[[], tuple[int, int]]
"""Returns the wall clock and the monotonic clock in milliseconds, for logs that are made up."""


class Writer:
    """The log of one trial; safe to use from several threads and from signal handlers. None, for a rank that does not
    write the log, takes everything and writes nothing.

    A log that is bound to an attempt begins with that attempt's nonce. From run_stop on, its last record is always the
    checksum of everything before it, so that a changed or shortened log shows that it is one.

    Raises:
        ConfigError: the file exists, or is a link: a trial that is started twice never adds to the log of the first.
    """

    def __init__(self, path: Path | None, binding: Binding | None = None, clocks: Clocks | None = None) -> None:
        self._read_clocks_ms = clocks or clocks_ms
        try:  # unbuffered: a line is one write; exclusive: no link is followed
            self._file = FileIO(os.devnull, "w") if path is None else FileIO(path, "x")
        except FileExistsError as error:
            raise ConfigError(
                "this trial has a log already, and a second start never adds to it",
                where=str(path),
                fix="start in a new folder, or move the old log away",
                rule="CFG-05",
            ) from error
        self._lock = threading.RLock()
        self._started = self._stopped = self._is_over = False
        self._folder = None if path is None else path.parent
        self._binding = None if path is None else binding
        self._sha256, self._bytes = hashlib.sha256(), 0
        self.moments: list[tuple[str, int]] = []
        """When the run and each of its blocks started and stopped, by key, in milliseconds of the monotonic clock."""
        if binding and self._binding:
            file, number = os.fstat(self._file.fileno()), {"trial": binding.trial, "attempt": binding.attempt}
            self.event(RUN_ATTEMPT, binding.nonce, **number, inode=file.st_ino, uid=file.st_uid)

    def event(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something is so at this moment.

        Raises:
            ValueError: JSON cannot hold the value (NaN, infinity, a tensor); nothing was written.
            OSError: the line could not be written, as on a full disk.
        """
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something begins; raises like `event`."""
        self._write("INTERVAL_START", key, value, metadata)

    def stop(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something ends; raises like `event`. For run_stop there is `finish`."""
        self._write("INTERVAL_END", key, value, metadata)

    def attach(self, file: Path) -> None:
        """Write the checksum of a file in the log's folder that another program has finished; raises like `event`."""
        if self._folder is None:
            return
        attached = atomic_files.of(file)
        name = file.relative_to(self._folder).as_posix()
        self.event(ATTACHED_FILE, name, bytes=attached.bytes, sha256=attached.sha256)

    def finish(self, status: str, **metadata: Any) -> bool:
        """Return whether this call wrote run_stop: only the first one after run_start does, and none after `close`."""
        with self._lock:
            if not self._started or self._stopped or self._file.closed:
                return False
            self._stopped = True  # before the write: a signal handler may come in between
            try:
                self._append("INTERVAL_END", RUN_STOP, None, metadata | {"status": status})
            except BaseException:
                self._stopped = False
                raise
            return True

    def abort(self) -> None:
        """Write run_stop as aborted, unless it stands there, and nothing from then on: other threads may still work."""
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
            raise ValueError("run_stop is written once, by finish()")
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
        while lines:  # a disk that fills up takes part of a line, then raises
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
            raise ValueError(f"{key} = {value!r} with {metadata!r} cannot be logged: {error}") from error


def clocks_ms() -> tuple[int, int]:
    """Return the wall clock and the monotonic clock, read at one moment: the tightest of three readings.

    The monotonic clock is CLOCK_BOOTTIME: CLOCK_MONOTONIC stops while a laptop is suspended and the wall clock does
    not, so that the wall clock would seem to have been set. Where there is no CLOCK_BOOTTIME (macOS), CLOCK_MONOTONIC
    counts such time too. NTP's slewing changes the rate of both clocks alike; only a step sets them apart.
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
    """Return where the log was called from: file, relative to the folder that holds `bench/`, and line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = os.path.abspath(frame.f_code.co_filename)
    inside = file.startswith(_PACKAGE_ROOT + os.sep)
    name = os.path.relpath(file, _PACKAGE_ROOT) if inside else os.path.basename(file)
    return {"file": name, "lineno": frame.f_lineno}
