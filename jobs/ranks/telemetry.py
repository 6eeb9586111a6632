"""Sample the GPUs of each node in one process while a trial runs, and log a summary. It never fails a run.

Local rank 0 of each node starts `jobs.ranks.gpu_sampler` before the warm-up and ends it after run_stop. Rank 0 logs a
record for each node; if nothing was measured, the record has the reason. A user's program has no warm-up: rank 0 starts
the sampler of its node alone, and starts the program after the first sample (`jobs.command.describe.Telemetry`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.contract import mllog, run_files, telemetry
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.contract.telemetry import NUMBERS, Sample
from jobs.ranks import gpu_sampler, process_group
from jobs.ranks.identity import Rank, node_name

MAX_GAP_S = 5.0
"""Longest time between two samples over which power is integrated."""
LEVELS = tuple(name for name in NUMBERS if name != "energy_j")
Span = tuple[int, int]
"""Start and stop of the run, or of a block of training, in milliseconds of the monotonic clock."""
Record = dict[str, Any]


class NotMeasured(Exception):
    """The samples do not cover the run; the text has the reason."""


def summary(samples: Sequence[Sample], moments: Sequence[tuple[str, int]]) -> Record:
    """Return the log record of one node: {samples, longest_gap_s, gpus}.

    `moments` has the times at which the run and its blocks started and stopped. energy_j is for the whole run, and
    training_energy_j for its blocks, if there are any, without loading and evaluations.

    Raises:
        NotMeasured: no GPU was sampled during the run, or not until its end.
    """
    run = next(iter(spans(moments, mllog.RUN_START, mllog.RUN_STOP)), None)
    if run is None:
        raise NotMeasured("the log has no run_start with a run_stop")
    blocks = spans(moments, mllog.BLOCK_START, mllog.BLOCK_STOP)
    by_gpu: dict[int, list[Sample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    if not by_gpu:
        raise NotMeasured("there are no samples")
    for of_gpu in by_gpu.values():
        if of_gpu[0].monotonic_ms > run[0] or of_gpu[-1].monotonic_ms < run[1]:
            raise NotMeasured("the GPUs were not sampled from run_start to run_stop")
    gpus = [_gpu(of_gpu, run, blocks) | {"gpu": gpu} for gpu, of_gpu in sorted(by_gpu.items())]
    first = next(iter(by_gpu.values()))
    return {"samples": len(_within(first, run)), "longest_gap_s": longest_gap_s(first, run), "gpus": gpus}


def spans(moments: Sequence[tuple[str, int]], start: str, stop: str) -> list[Span]:
    """Return each start with the stop that follows it."""
    marks = [(key, time_ms) for key, time_ms in moments if key in (start, stop)]
    return [(began, ended) for (key, began), (after, ended) in pairwise(marks) if (key, after) == (start, stop)]


def longest_gap_s(samples: Sequence[Sample], run: Span) -> float:
    """Return the longest time between two samples that overlaps the run."""
    pairs = pairwise(sample.monotonic_ms for sample in samples)
    return max((later - sooner for sooner, later in pairs if later > run[0] and sooner < run[1]), default=0) / 1000


def _gpu(samples: Sequence[Sample], run: Span, blocks: Sequence[Span]) -> Record:
    inside = _within(samples, run)
    if not inside:
        raise NotMeasured(f"there is no sample in the {(run[1] - run[0]) / 1000:.1f} s of the run")
    levels = {name: [value for s in inside if (value := getattr(s, name)) is not None] for name in LEVELS}
    summarised = {name: {"median": median(v), "max": max(v)} for name, v in levels.items() if v}
    return summarised | _throttle(inside) | _energy(samples, run, blocks)


def _within(samples: Sequence[Sample], run: Span) -> list[Sample]:
    return [sample for sample in samples if run[0] <= sample.monotonic_ms <= run[1]]


def _throttle(samples: Sequence[Sample]) -> Record:
    """Return the share of the samples with each throttle reason; nothing if the driver reports no reasons."""
    known = [sample.throttle for sample in samples if sample.throttle is not None]
    names = dict.fromkeys(name for active in known for name in active)
    shares = {name: round(sum(name in active for active in known) / len(known), 4) for name in names}
    return {"throttle": shares} if known else {}


def _energy(samples: Sequence[Sample], run: Span, blocks: Sequence[Span]) -> Record:
    """Return the energy from the GPU's counter, else from its power; nothing if neither covers the whole run.

    With both, integrated_energy_j is that of the power.
    """
    counter = [(s.monotonic_ms, s.energy_j) for s in samples if s.energy_j is not None]
    power = [(s.monotonic_ms, s.power_w) for s in samples if s.power_w is not None]
    has_power = _covers(power, run) and longest_gap_s(samples, run) <= MAX_GAP_S
    integrated = {}
    if _covers(counter, run):
        by, (times_ms, energy_j) = "counter", np.array(counter).T
        if has_power:
            of_power = np.interp(run, np.array(power)[:, 0], _integrated(power))
            integrated = {"integrated_energy_j": round(float(of_power[1] - of_power[0]), 3)}
    elif has_power:
        by, times_ms = "power", np.array(power)[:, 0]
        energy_j = _integrated(power)
    else:
        return {}
    of_run, *of_blocks = (float(np.diff(np.interp(span, times_ms, energy_j))[0]) for span in (run, *blocks))
    if of_run < 0:  # the driver was reloaded
        return {}
    of_training = {"training_energy_j": round(sum(of_blocks), 3)} if blocks else {}
    return {"energy_j": round(of_run, 3), "energy_by": by} | of_training | integrated


def _covers(series: Sequence[tuple[int, float]], run: Span) -> bool:
    return bool(series) and series[0][0] <= run[0] and series[-1][0] >= run[1]


def _integrated(power: Sequence[tuple[int, float]]) -> np.ndarray:
    """Return the energy since the first sample at each one, by trapezoids of power over time."""
    times_ms, power_w = np.array(power).T
    return np.concatenate([[0.0], np.cumsum(np.diff(times_ms) / 1000 * (power_w[1:] + power_w[:-1]) / 2)])


FIRST_S = 10.0
"""Time limit for the first sample, after which a run starts without one."""
END_S = 20.0
"""Time limit for the sampler to end: short enough for a hanging driver, long enough for a busy CPU."""
ROOT = Path(__file__).parents[2]


class Telemetry:
    """The telemetry of one rank: local rank 0 samples its node, the other ranks only take part in `log`."""

    def __init__(self, plan: Plan, who: Rank, folder: Path, trial: int) -> None:
        self._who, self._folder = who, folder
        self._is_on = plan.config.launch.telemetry and plan.config.cluster.device is Device.cuda
        self._sampler: Sampler | None = None
        if self._is_on and who.local_rank == 0:
            file = folder / run_files.telemetry(trial, node_name())
            self._sampler = Sampler(file, uuids(plans.gpus_per_node(plan)), is_amd=is_amd())

    def log(self, log: mllog.Writer) -> None:
        """Log a record for each node, and attach the samples; all ranks call this together, after run_stop."""
        if not self._is_on:
            return
        mine = None if self._sampler is None else (node_name(), self._sampler.file.name, self._sampler.summary(log))
        for node, name, record in filter(None, process_group.gathered(self._who, mine)):
            log.event(mllog.GPU_TELEMETRY, record, node=node)
            file = self._folder / run_files.RANK_LOGS / name
            for each in (file, telemetry.node_file(file)):
                with suppress(OSError):  # nothing was sampled (the record has the reason), or the node has no meter
                    log.attach(each)


def uuids(num_gpus: int) -> list[str]:
    """Return the UUIDs of the GPUs of this node's ranks, in CUDA's order."""
    import torch

    properties = (torch.cuda.get_device_properties(gpu) for gpu in range(num_gpus))
    return [str(getattr(each, "uuid", "")) for each in properties]


def is_amd() -> bool:
    """Return whether torch was built for AMD's GPUs, which it also calls CUDA devices."""
    import torch

    return torch.version.hip is not None


class Sampler:
    """The process that writes GPU samples to a file."""

    def __init__(self, file: Path, uuids: Sequence[str], *, is_amd: bool = False) -> None:
        self.file = file
        self._refused, self._process = "", None
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "jobs.ranks.gpu_sampler", str(file), str(os.getpid()), *uuids]
        command += [gpu_sampler.AMD] if is_amd else []
        try:
            file.parent.mkdir(exist_ok=True)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            self._refused = f"the sampler could not be started: {error.strerror}"

    def wait_for_first(self) -> None:
        """Wait for the first sample: a run that starts sooner is not sampled from its start.

        This ends, too, if the process ends, or after FIRST_S: telemetry never stops a run.
        """
        deadline = time.monotonic() + FIRST_S
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if telemetry.newest(self.file):
                    return
            time.sleep(0.02)

    def summary(self, log: mllog.Writer) -> dict[str, Any]:
        """End the process and return the record of this node."""
        try:
            account = self.end()
            record = summary(list(telemetry.read(self.file)), log.moments)
            settings = {each["gpu"]: each for each in account["gpus"]}
            return account | record | {"gpus": [settings[each["gpu"]] | each for each in record["gpus"]]}
        except NotMeasured as reason:
            return {mllog.NOT_MEASURED: str(reason)}
        except OSError as error:
            return {mllog.NOT_MEASURED: f"the samples could not be read: {error.strerror}"}

    def end(self) -> dict[str, Any]:
        """End the process; return the sampler's summary of the GPUs and their driver.

        Raises:
            NotMeasured: it did not sample to the end.
        """
        if self._process is None:
            raise NotMeasured(self._refused)
        try:
            printed, errors = self._process.communicate(timeout=END_S)  # closes its standard input, which ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may be in an uninterruptible driver call
                self._process.communicate(timeout=1)
            raise NotMeasured(
                f"the sampler did not end within {END_S:g} s: the driver hangs, or the CPUs are busy"
            ) from None
        if (code := self._process.returncode) < 0:
            raise NotMeasured(f"the sampler was ended by signal {-code} ({signal.strsignal(-code)})")
        if code:
            raise NotMeasured((errors.strip().splitlines() or [f"exit code {code}"])[-1])
        try:
            return dict(json.loads(printed.splitlines()[-1]))
        except (ValueError, IndexError, TypeError):
            raise NotMeasured("the sampler ended without its summary of the GPUs") from None
