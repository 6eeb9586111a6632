"""Judge the statements of a study by the runs of its arms, and by published figures."""

from collections.abc import Iterator, Mapping, Sequence

from bench.results.comparison import values_by_block
from bench.results.statement import (
    Bounds,
    Decision,
    Fit,
    PublishedRatios,
    StatedValues,
    StatementResult,
    StatementVerdict,
    decide,
    decide_fit,
)
from bench.results.study import Published, Row
from bench.studies import tables
from bench.studies.arms import Arm, stated_pairs
from bench.studies.session import State
from bench.studies.spec import Statement, Study
from bench.studies.tables import ArmRuns


def judged(study: Study, of_arms: Sequence[ArmRuns], rows: Sequence[Row]) -> tuple[StatementResult, ...]:
    """Return the statements of a study with their verdicts; `of_arms` has the runs of each arm, `rows` its row."""
    by_name = {runs.arm.name: runs for runs in of_arms}
    published = {row.arm: row.published for row in rows}
    devices = dict.fromkeys(runs.planned.device for runs in of_arms if runs.planned.device)
    return tuple(_judged(one, by_name, published, tuple(devices)) for one in study.statements)


def _judged(
    statement: Statement,
    by_name: Mapping[str, ArmRuns],
    published: Mapping[str, Mapping[str, tuple[Published, ...]]],
    devices: Sequence[str],
) -> StatementResult:
    bounds = Bounds(at_least=statement.at_least, at_most=statement.at_most)
    named = list(stated_pairs(statement, [runs.arm for runs in by_name.values()]))
    if statement.gpus and not any(part in device for part in statement.gpus for device in devices):
        decision = Decision(
            verdict=StatementVerdict.not_measured,
            reason=f"it is about {' and '.join(statement.gpus)}, not {', '.join(devices) or 'this cluster'}",
        )
    elif statement.fits is not None:
        decision = decide_fit([_fit(by_name[arm.name]) for arm, _ in named], fits=statement.fits)
    else:
        decision = decide([_values(statement.measurement, by_name, *pair) for pair in named], bounds)
    return StatementResult(
        text=statement.text,
        source=statement.source,
        measurement=statement.measurement,
        bounds=bounds,
        verdict=decision.verdict,
        reason=decision.reason,
        intervals=decision.intervals,
        deciding=decision.deciding,
        published=tuple(_published(statement.measurement, bounds, named, published)),
    )


def _values(measurement: str, by_name: Mapping[str, ArmRuns], first: Arm, second: Arm | None) -> StatedValues:
    """Return the values of an arm, or the ratios of two arms in the blocks that both have."""
    of_pair = [by_name[arm.name] for arm in (first, second) if arm is not None]
    name = second.name if second else ""
    if why := [f"{runs.arm.name}: {runs.planned.reason}" for runs in of_pair if not runs.planned.runs]:
        return StatedValues(first=first.name, second=name, reason="; ".join(why), cannot_run=True)
    values = [tables.by_block(runs, measurement) for runs in of_pair]
    why = [f"{runs.arm.name}: {_why(runs)}" for runs, known in zip(of_pair, values, strict=True) if not known]
    if why:
        return StatedValues(first=first.name, second=name, reason="; ".join(why))
    if second is None:
        return StatedValues(first=first.name, values=tuple(values[0].values()))
    both = values_by_block(*values)
    ratios = tuple(one / other for one, other in zip(*both, strict=True) if other)
    return StatedValues(
        first=first.name, second=name, values=ratios, reason="" if ratios else "no block has valid runs of both"
    )


def _fit(runs: ArmRuns) -> Fit:
    """Return whether an arm fits: by its runs, else by the estimate of its plan."""
    planned = runs.planned
    if runs.valid:
        return Fit(name=runs.arm.name, fits=True, how="it ran")
    if runs.too_large or any(why.startswith(State.out_of_memory) for why in runs.missing.values()):
        return Fit(name=runs.arm.name, fits=False, how="it ran out of memory")
    if planned.fits is None or planned.needed_gib is None:
        return Fit(name=runs.arm.name, fits=None, how=_why(runs))
    capacity = f" of {planned.capacity_gib:g}" if planned.capacity_gib else ""
    return Fit(name=runs.arm.name, fits=planned.fits, how=f"~ {planned.needed_gib:.1f}{capacity} GiB by the plan")


def _why(runs: ArmRuns) -> str:
    return "; ".join(dict.fromkeys(runs.missing.values())) or "not measured by its runs"


def _published(
    measurement: str,
    bounds: Bounds,
    named: Sequence[tuple[Arm, Arm | None]],
    published: Mapping[str, Mapping[str, tuple[Published, ...]]],
) -> Iterator[PublishedRatios]:
    """Yield, by publication, the range of the same ratios or values of its figures."""
    ratios: dict[str, list[float]] = {}
    for first, second in named:
        ours = _figures(published[first.name], measurement)
        theirs = _figures(published[second.name], measurement) if second else dict.fromkeys(ours, 1.0)
        for publication in ours:
            if theirs.get(publication):
                ratios.setdefault(publication, []).append(ours[publication] / theirs[publication])
    for publication, values in ratios.items():
        within = all(bounds.includes(value, value) for value in values)
        yield PublishedRatios(publication=publication, n=len(values), low=min(values), high=max(values), within=within)


def _figures(published: Mapping[str, tuple[Published, ...]], measurement: str) -> dict[str, float]:
    return {one.publication: one.value for one in published.get(measurement, ()) if one.value is not None}
