"""Find the arms that measure each figure of a published table, on the hardware of its document."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from bench.contract.plan_kinds import KernelsPlan
from bench.contract.task import Kind
from bench.planning import compose
from bench.results.kind import KINDS
from bench.results.measurement import HARDWARE, SHARE_OF_PEAK
from bench.results.modules import NAMES as MODULES
from bench.results.names import ESTIMATED, MEASURED_BATCH
from bench.results.published import Figure, PublishedTable
from bench.results.study import PlannedArm
from bench.studies import arms as arms_of
from bench.studies import library, plans, tables
from bench.studies.arms import Arm
from bench.studies.measured import EPOCH
from bench.studies.plans import Request
from bench.studies.spec import Study, matches

REAL_ROWS = "model.weights=checkpoint"
"""The override with which a study on random rows trains on those of its task, whose epochs have a time."""
SERVERS = {
    "8 x NVIDIA A800 80 GB": ("cluster=dgx1", "gpu@cluster.gpu=a800"),
    "8 x NVIDIA GeForce RTX 4090": ("cluster=dgx1", "gpu@cluster.gpu=rtx4090"),
    "8 x NVIDIA GeForce RTX 3090": ("cluster=dgx1", "gpu@cluster.gpu=rtx3090"),
    "DGX A100 nodes of 8 x NVIDIA A100 80 GB": ("cluster=dgx8", "gpu@cluster.gpu=a100"),
    "nodes of 8 x AMD Instinct MI300X": ("cluster=kubernetes_mi300x", REAL_ROWS),
    "nodes of 8 x NVIDIA H100 80 GB": ("cluster=dgx2",),
    "2 nodes of 8 x NVIDIA H100 80 GB": ("cluster=dgx2",),
    "8 x NVIDIA H100 80 GB": ("cluster=dgx1",),
    "none; the slides do not say": ("cluster=dgx8", "gpu@cluster.gpu=a100_40gb"),
}
"""The overrides that plan an arm for the hardware of a document, by the beginning of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A published number that no arm measures."""

    figure: Figure
    why: str

    def __str__(self) -> str:
        labels = ", ".join(f"{name}: {value}" for name, value in self.figure.labels.items())
        return f"{self.figure.measurement} {self.figure.printed!r} of {labels}: {self.why}"


@cache
def studies_of(publication: str) -> tuple[tuple[str, Study, tuple[Arm, ...]], ...]:
    """Return the studies that name a published table, with their arms."""
    loaded = ((name, library.load(name)) for name in library.names())
    return tuple(
        (name, study, tuple(arms_of.build(study, where=name)))
        for name, study in loaded
        if publication in study.published
    )


def missing(table: PublishedTable, *, must_plan: bool) -> list[Missing]:
    """Return the numbers of a table that no arm measures, without those whose file has the reason.

    must_plan: an arm that the plan refuses on the hardware of the document does not count.
    """
    return [
        Missing(figure=figure, why=why)
        for figure in table.figures
        if figure.value is not None and not figure.not_measured
        for why in [_why_missing(table, figure, must_plan=must_plan)]
        if why
    ]


def server(table: PublishedTable) -> tuple[str, ...]:
    """Return the overrides for the hardware of a document."""
    return next(overrides for begin, overrides in SERVERS.items() if table.hardware.startswith(begin))


def _why_missing(table: PublishedTable, figure: Figure, *, must_plan: bool) -> str:
    """Return why no arm of any study measures a figure; empty if one does."""
    reasons = {"": "no study names this table"}
    for name, study, arms in studies_of(table.name):
        reasons[name] = f"no arm of {name} has these labels and a column with this measurement"
        for arm in _measuring(table, figure, study, arms):
            planned = _planned(name, arm.name, server(table)) if must_plan else None
            if planned is None or planned.runs or figure.measurement in tables.SIZES:
                return ""
            reasons[name] = f"{arm.name} of {name} is refused: {planned.reason}"
    return list(reasons.values())[-1]


def _measuring(table: PublishedTable, figure: Figure, study: Study, arms: tuple[Arm, ...]) -> Iterator[Arm]:
    """Yield the arms next to which a study shows a figure, and which have its measurement."""
    of_coefficient = figure.measurement == tables.COEFFICIENT
    labels = {name: value for name, value in figure.labels.items() if not of_coefficient or name != tables.OF_LABEL}
    for arm in arms:
        is_shown = matches(arm.all_labels, study.published_match.get(table.name, {}))
        if figure.labels and is_shown and matches(arm.all_labels, labels):
            if of_coefficient:
                has = figure.labels[tables.OF_LABEL] in {one.measurement for one in study.coefficients}
            else:
                has = figure.measurement in _columns(study, arm, arms, has_rows=REAL_ROWS in server(table))
            if has:
                yield arm


def _columns(study: Study, arm: Arm, arms: tuple[Arm, ...], *, has_rows: bool) -> set[str]:
    """Return the measurements of an arm that the study has as columns."""
    own = {column.measurement for column in study.columns} & _measured(arm, has_rows=has_rows)
    every = [one.all_labels for one in arms]
    relative = (one for one in study.relatives if one.measurement in own and matches(arm.all_labels, one.match))
    return own | {one.name for one in relative if tables.reference_of(arm.all_labels, every, one) is not None}


def _measured(arm: Arm, *, has_rows: bool) -> frozenset[str]:
    """Return what the kind of an arm's task measures."""
    task = next(one.partition("=")[2] for one in reversed(arm.overrides) if one.startswith("task="))
    more: set[str] = set()
    if "launch.profile=modules" in arm.overrides:
        more |= set(MODULES)
    if arm.calculated is not None and (has_rows or "model.weights=random" not in arm.overrides):
        more.add(EPOCH)
    return _of_task(task) - {EPOCH} | more


@cache
def _of_task(task: str) -> frozenset[str]:
    kind = compose.unplanned([f"task={task}"]).task.kind
    names = {*KINDS[kind].units, *HARDWARE}
    if kind is Kind.train:
        names |= {*ESTIMATED, *MEASURED_BATCH}
    if kind is Kind.kernels:
        plan = compose.compose([f"task={task}", "cluster=dgxh200"])
        assert isinstance(plan, KernelsPlan)
        for point in plan.points:
            names |= {f"best {point.kernel}", point.name, f"{point.name} latency"}
            names |= set() if point.peak is None else {f"{point.name}{SHARE_OF_PEAK}"}
    return frozenset(names)


@cache
def _planned(study_name: str, arm_name: str, overrides: tuple[str, ...]) -> PlannedArm:
    study = library.load(study_name)
    arms = [arm for arm in arms_of.build(study, where=study_name) if arm.name == arm_name]
    (planned,) = plans.plan_arms(Request(study=study, arms=arms, cli_overrides=overrides))
    return planned
