"""Profiles of warm-up steps and their files. Importing this module does not import torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.contract import mllog, run_files
from bench.contract.plan import Plan
from bench.contract.schema import ProfileKind


@dataclass(frozen=True, slots=True)
class Profile:
    """The kind of a profile and its files: `kernels` for profile=kernels, `modules` and `trace` for profile=modules."""

    kind: ProfileKind
    kernels: Path
    modules: Path
    trace: Path


def for_trial(plan: Plan, trial: int, folder: Path) -> Profile | None:
    """Return the profile of a trial's warm-up; None: nothing is profiled."""
    kind = plan.config.launch.profile
    if kind in (ProfileKind.none, ProfileKind.nsys):
        return None
    names = run_files.profile(trial), run_files.module_times(trial), run_files.trace(trial)
    return Profile(kind, *(folder / name for name in names))


def log_files(profile: Profile, log: mllog.Writer) -> None:
    """Log the checksums of the files that rank 0 has written, and the time of a step by module."""
    for path in (profile.kernels, profile.modules, profile.trace):
        if path.exists():
            log.attach(path)
    if profile.modules.exists():
        log.event(mllog.MODULE_TIMES, json.loads(profile.modules.read_text())["times"])
