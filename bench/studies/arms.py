"""The arms of a study: those that it lists, and every combination of its axes, each with the cases that match it."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.errors import ConfigError
from bench.results.study import PlannedArm
from bench.studies.spec import Calculated, Case, Study, matches

NAME_LABEL = "arm"
"""The label that every arm has: its name."""
_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm, with all that the study says of it."""

    name: str
    labels: Mapping[str, str]
    overrides: tuple[str, ...]
    """Of the study, of the arm, then of the cases that match, each over the ones before."""
    not_advisable: str | None = None
    calculated: Calculated | None = None
    note: str | None = None

    @property
    def slug(self) -> str:
        """Its name, as a part of a folder's."""
        return slug(self.name)

    @property
    def all_labels(self) -> dict[str, str]:
        """Its labels and its name, which figures, cases and tables may ask for alike."""
        return {NAME_LABEL: self.name, **self.labels}


def slug(name: str) -> str:
    """Return an arm's name as a part of a folder's."""
    return _UNSAFE.sub("_", name).strip("_")


def of(study: Study, *, where: str) -> list[Arm]:
    """Return the arms in the order of the file: those that are listed, and the combinations of the axes.

    Raises:
        ConfigError: there is none, two have the same name or folder, or a case matches none.
    """
    every = list(_every(study))
    _check_cases(study, every, where=where)
    arms = [arm for arm in (_with_cases(arm, study.cases) for arm in every) if arm is not None]
    if not arms:
        raise ConfigError("a study without arms", where=where, fix="give arms or axes")
    for a, b in itertools.combinations(arms, 2):
        if a.slug.lower() == b.slug.lower():
            raise ConfigError(
                f"the arms {a.name!r} and {b.name!r} would share a folder, {a.slug}", where=where, fix="rename one"
            )
    if nameless := [arm.name for arm in arms if not arm.slug]:
        raise ConfigError(f"{nameless[0]!r} names no folder", where=where, fix="use letters or digits in its name")
    return arms


def _every(study: Study) -> Iterator[Arm]:
    parts = (_of_axes, _listed) if study.axes_first else (_listed, _of_axes)
    return itertools.chain.from_iterable(part(study) for part in parts)


def _listed(study: Study) -> Iterator[Arm]:
    for name, arm in study.arms.items():
        yield Arm(name=name, labels=arm.labels, overrides=(*study.overrides, *arm.overrides))


def _of_axes(study: Study) -> Iterator[Arm]:
    if not study.axes:
        return
    for choices in itertools.product(*(axis.items() for axis in study.axes.values())):
        labels = dict(zip(study.axes, (choice for choice, _ in choices), strict=True))
        overrides = tuple(itertools.chain(study.overrides, *(words for _, words in choices)))
        yield Arm(name=" ".join(labels.values()), labels=labels, overrides=overrides)


def _with_cases(arm: Arm, cases: tuple[Case, ...]) -> Arm | None:
    """Return an arm with what the cases say of it; None if one leaves it out. A later case counts over earlier ones."""
    mine = [case for case in cases if matches(arm.all_labels, case.match)]
    if any(case.leave_out for case in mine):
        return None
    return Arm(
        name=arm.name,
        labels=arm.labels,
        overrides=tuple(itertools.chain(arm.overrides, *(case.overrides for case in mine))),
        not_advisable=next((case.not_advisable for case in reversed(mine) if case.not_advisable), None),
        calculated=next((case.calculated for case in reversed(mine) if case.calculated), None),
        note=next((case.note for case in reversed(mine) if case.note), None),
    )


def _check_cases(study: Study, arms: list[Arm], *, where: str) -> None:
    for number, case in enumerate(study.cases):
        if not any(matches(arm.all_labels, case.match) for arm in arms):
            words = ", ".join(f"{name}: {value}" for name, value in case.match.items())
            known = sorted({f"{name}: {value}" for arm in arms for name, value in arm.labels.items()})
            raise ConfigError(
                f"a case that matches no arm: {words}",
                where=f"{where}: cases[{number}]",
                fix=f"the labels of the arms are {', '.join(known) or 'none'}",
            )


def blocks(arms: Sequence[PlannedArm], *, runs: int, seed: int) -> list[tuple[str, ...]]:
    """Return the arms of each block in their order: drawn in every other block, and turned round in the next one.

    All arms are drawn, those too that do not run and are left out: the others' order is the same once these can run.
    Over two blocks each arm comes as often before another one as after it, so that what drifts with time (heat, other
    jobs) does not favour one of a pair. More runs leave the order of the earlier blocks as it is.
    """
    found: list[tuple[str, ...]] = []
    for block in range(runs):
        if block % 2:
            found.append(found[-1][::-1])
            continue
        drawn = [arm.name for arm in arms]
        random.Random(f"{seed} {block}").shuffle(drawn)
        found.append(tuple(drawn))
    running = {arm.name for arm in arms if arm.runs}
    return [tuple(name for name in block if name in running) for block in found]
