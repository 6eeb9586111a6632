"""Measure the rates of this machine's GPU, and write them into a file of the user's config folder."""

import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.backends.nodes import processes
from bench.contract import atomic_files, codec, plan_kinds
from bench.contract.cluster import Gpu
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError, SubmitError
from bench.planning import calibration, compose, gpu_detection
from bench.planning.checks.memory import TooLittleMemoryError
from bench.user_folder import user_folder

MODULE = "jobs.engines.megatron.calibrate"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What was measured and where it is kept."""

    gpu: Gpu
    file: Path
    skipped: list[str]
    """Points of the sweep that do not fit in the GPU's memory."""
    link_error: str | None = None
    """Why the all-reduce between several GPUs was not measured."""


def calibrate(*, file: Path | None = None, say: Callable[[str], object] = print) -> Calibrated:
    """Measure the GPU of this machine and write its file; by default into the user's config folder.

    Raises:
        ConfigError: this machine has no GPU, or GPUs of different kinds.
        SubmitError: the measurement failed.
    """
    gpus = gpu_detection.detect(os.environ)
    if gpus is None:
        raise ConfigError(
            "this machine has no GPU to calibrate",
            where="NVML and amdsmi",
            fix="run this command on a machine with a GPU that nvidia-smi lists (for AMD: amd-smi list)",
            rule="HW-03",
        )
    name = gpu_detection.file_name(gpus.gpus[0].name)
    target = file or user_folder() / "gpu" / f"{name}.yaml"
    count = len(gpus.gpus)
    say(f"found {gpus}")
    if count > 1:
        say(f"the sweep measures the first GPU, {gpus.gpus[0].uuid}; all-reduces over all {count} measure the links")
    plans, skipped = _plans()
    say(f"training {len(plans)} small models, each for a few seconds")
    measured = _measured(plans)
    planned = next(iter(plans.values())).config.cluster.gpu
    assert planned is not None, "the plan of a machine with a GPU describes it"
    gpu = dataclasses.replace(
        planned,
        name=gpus.gpus[0].name,
        rates=calibration.rates(plans, measured, source=_source(gpus, measured)),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_text(target, _yaml(gpu))
    return Calibrated(gpu=gpu, file=target, skipped=skipped, link_error=measured.get("link_error"))


def _plans() -> tuple[dict[str, TrainingPlan], list[str]]:
    """Return the plan of each point of the sweep, and the names of the points that need more memory than there is."""
    plans: dict[str, TrainingPlan] = {}
    skipped = []
    has_fp8 = calibration.has_fp8(compose.unplanned(["task=lora_tiny", "cluster=local"]))
    for point in calibration.chosen(calibration.POINTS, with_fp8=has_fp8):
        try:
            plan = plan_kinds.required(compose.compose(point.overrides()), TrainingPlan)
        except TooLittleMemoryError:
            skipped.append(point.name)
        else:
            plans[point.name] = plan
    return plans, skipped


def _measured(plans: dict[str, TrainingPlan]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="runstop-calibrate-") as folder:
        points, result = Path(folder, "plans.json"), Path(folder, "result.json")
        points.write_text(json.dumps({name: json.loads(plan_kinds.dumps(plan)) for name, plan in plans.items()}))
        environment = next(iter(plans.values())).environment
        if code := processes.run_program([MODULE, str(points), str(result)], environment=environment):
            raise SubmitError(
                f"the program that measures the GPU ended with exit code {code}",
                where=f"python -m {MODULE}",
                fix="read the error in the output above, end other programs on the GPU, and run the same command again",
            )
        read: dict[str, Any] = json.loads(result.read_text())
        return read


def _source(gpus: gpu_detection.DetectedGpus, measured: dict[str, Any]) -> str:
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    which = f"; kernels of {gpus.gpus[0].uuid}" if len(gpus.gpus) > 1 else ""
    return f"runstop calibrate, {day}: {gpus}{which}; torch {measured['torch']}, CUDA {measured['cuda']}"


def _yaml(gpu: Gpu) -> str:
    fields = {key: value for key, value in codec.plain(gpu).items() if value is not None or key.startswith("peak_")}
    fields["rates"] = {key: value for key, value in fields["rates"].items() if value is not None}
    text = yaml.safe_dump(fields, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return (
        f"# Written by `runstop calibrate`. It is used on machines with this GPU, and by gpu@cluster.gpu=NAME.\n{text}"
    )
