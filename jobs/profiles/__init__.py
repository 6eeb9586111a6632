"""Profiles of warm-up steps: what rank 0 writes, and where. Importing this module does not import torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.contract import mllog, run_files
from bench.contract.plan import Plan
from bench.contract.schema import ProfileKind


@dataclass(frozen=True, slots=True)
class Profile:
    """What is profiled, and its files: `kernels` is the one of its kind, `modules` and `trace` are those of theirs."""

    kind: ProfileKind
    kernels: Path
    modules: Path
    trace: Path


def of_trial(plan: Plan, trial: int, folder: Path) -> Profile | None:
    """Return what to profile in a trial; None: nothing."""
    kind = plan.config.launch.profile
    if kind is ProfileKind.none:
        return None
    names = run_files.profile(trial), run_files.module_times(trial), run_files.trace(trial)
    return Profile(kind, *(folder / name for name in names))


def log_files(profile: Profile, log: mllog.Writer) -> None:
    """Log the checksums of what rank 0 has written, and where the time of a step goes."""
    for path in (profile.kernels, profile.modules, profile.trace):
        if path.exists():
            log.attach(path)
    if profile.modules.exists():
        log.event(mllog.MODULE_TIMES, json.loads(profile.modules.read_text())["times"])
