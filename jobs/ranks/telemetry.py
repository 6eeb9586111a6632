"""Have one process a node sample its GPUs while a trial runs, and log what came of it. It never fails a run.

Local rank 0 of each node starts `jobs.ranks.gpu_sampler` before the warm-up and ends it behind run_stop. Rank 0 logs a
record for each node; where nothing was measured, the record says why.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.contract import mllog, run_files, telemetry
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.schema import Device
from jobs.ranks import process_group, telemetry_summary
from jobs.ranks.identity import Rank, node_name
from jobs.ranks.telemetry_summary import NotMeasured

END_S = 20.0
"""How long the sampler may take to end: a driver that hangs must not hold up the run, nor a busy CPU lose a record."""
ROOT = Path(__file__).parents[2]


class Telemetry:
    """What one rank has to do with the samples of its node: most ranks nothing but to wait for those that have."""

    def __init__(self, plan: Plan, who: Rank, folder: Path, trial: int) -> None:
        self._who, self._folder = who, folder
        self._is_on = plan.config.launch.telemetry and plan.config.cluster.device is Device.cuda
        self._sampler: Sampler | None = None
        if self._is_on and who.local_rank == 0:
            file = folder / run_files.telemetry(trial, node_name())
            self._sampler = Sampler(file, uuids(plans.gpus_per_node(plan)))

    def log(self, log: mllog.Writer) -> None:
        """Log a record for each node, and attach the samples; behind run_stop, and all ranks call this together."""
        if not self._is_on:
            return
        mine = None if self._sampler is None else (node_name(), self._sampler.file.name, self._sampler.summary(log))
        for node, name, record in filter(None, process_group.gathered(self._who, mine)):
            log.event(mllog.GPU_TELEMETRY, record, node=node)
            with suppress(OSError):  # there is no file where nothing was sampled; the record says so
                log.attach(self._folder / run_files.RANK_LOGS / name)


def uuids(num_gpus: int) -> list[str]:
    """Return the UUIDs of the GPUs of this node's ranks, as CUDA shows and counts them."""
    import torch

    properties = (torch.cuda.get_device_properties(gpu) for gpu in range(num_gpus))
    return [str(getattr(each, "uuid", "")) for each in properties]


class Sampler:
    """The process that samples GPUs into a file."""

    def __init__(self, file: Path, uuids: Sequence[str]) -> None:
        self.file = file
        self._refused, self._process = "", None
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "jobs.ranks.gpu_sampler", str(file), str(os.getpid()), *uuids]
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
            self._refused = f"the sampler cannot be started: {error.strerror}"

    def summary(self, log: mllog.Writer) -> dict[str, Any]:
        """End the process and return the record of this node."""
        try:
            account = self.end()
            record = telemetry_summary.summary(list(telemetry.read(self.file)), log.moments)
            settings = {each["gpu"]: each for each in account["gpus"]}
            return account | record | {"gpus": [settings[each["gpu"]] | each for each in record["gpus"]]}
        except NotMeasured as reason:
            return {mllog.NOT_MEASURED: str(reason)}
        except OSError as error:
            return {mllog.NOT_MEASURED: f"the samples cannot be read: {error.strerror}"}

    def end(self) -> dict[str, Any]:
        """End the process; return what the sampler says of the GPUs and their driver, after its last sample.

        Raises:
            NotMeasured: it has not sampled to the end.
        """
        if self._process is None:
            raise NotMeasured(self._refused)
        try:
            printed, errors = self._process.communicate(timeout=END_S)  # closes its standard input, which ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may wait for the driver in the kernel, which nobody can end
                self._process.communicate(timeout=1)
            raise NotMeasured(f"no end within {END_S:g} s: the driver hangs, or the CPUs are busy") from None
        if (code := self._process.returncode) < 0:
            raise NotMeasured(f"the sampler got signal {-code} ({signal.strsignal(-code)})")
        if code:
            raise NotMeasured((errors.strip().splitlines() or [f"exit code {code}"])[-1])
        try:
            return dict(json.loads(printed.splitlines()[-1]))
        except (ValueError, IndexError, TypeError):
            raise NotMeasured("the sampler ended without an account of the GPUs") from None
