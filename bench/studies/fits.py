"""Estimate the memory of the arms of statements about it, also of arms that do not fit and so have no plan."""

from collections.abc import Sequence
from dataclasses import replace

from bench.errors import ConfigError
from bench.planning import compose, layouts
from bench.results.study import PlannedArm
from bench.studies.arms import Arm
from bench.studies.plans import Request
from bench.studies.spec import matches


def with_fits(request: Request, planned: Sequence[PlannedArm]) -> list[PlannedArm]:
    """Return planned arms; those that a statement says to fit, or not to fit, have the plan's estimate."""
    about_memory = [one for one in request.study.statements if one.fits is not None]
    stated = [arms.first for statement in about_memory for arms in statement.arms]
    return [
        _with_fit(request, arm, one) if any(matches(arm.all_labels, match) for match in stated) else one
        for arm, one in zip(request.arms, planned, strict=True)
    ]


def _with_fit(request: Request, arm: Arm, planned: PlannedArm) -> PlannedArm:
    try:
        memory = layouts.choose(compose.unplanned(request.overrides(arm), config_dir=request.config_dir)).memory
    except ConfigError:  # it cannot be planned for another reason, which the arm has
        return planned
    return replace(planned, fits=memory.fits, needed_gib=memory.total_gib, capacity_gib=memory.capacity_gib)
