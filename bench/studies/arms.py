"""Build the arms of a study: the listed ones and every combination of its axes, with the cases that match."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.errors import ConfigError
from bench.results.study import PlannedArm
from bench.studies.spec import Calculated, Case, Statement, Study, matches

NAME_LABEL = "arm"
"""The label with the name of the arm, which every arm has."""
_UNSAFE = re.compile(r"[^A-Za-z0-9-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm with its labels, overrides and cases applied."""

    name: str
    labels: Mapping[str, str]
    overrides: tuple[str, ...]
    """Those of the study, of the arm, and of the matching cases; later ones win."""
    not_advisable: str | None = None
    calculated: Calculated | None = None
    note: str | None = None

    @property
    def slug(self) -> str:
        """The name as it is used in folder names."""
        return slug(self.name)

    @property
    def all_labels(self) -> dict[str, str]:
        """Its labels and its name, by which figures, cases and tables select arms."""
        return {NAME_LABEL: self.name, **self.labels}


def slug(name: str) -> str:
    """Return the name of an arm as it is used in folder names."""
    return _UNSAFE.sub("_", name).strip("_")


def build(study: Study, *, where: str) -> list[Arm]:
    """Return the arms in the order of the file: the listed ones, and the combinations of the axes.

    Raises:
        ConfigError: there is no arm, two arms have the same folder, or a case matches no arm.
    """
    every = list(_every(study))
    _check_cases(study, every, where=where)
    arms = [arm for arm in (_with_cases(arm, study.cases) for arm in every) if arm is not None]
    if not arms:
        raise ConfigError("the study has no arms (configurations)", where=where, fix="add arms or axes to the study")
    for a, b in itertools.combinations(arms, 2):
        if a.slug.lower() == b.slug.lower():
            raise ConfigError(
                f"the arms {a.name!r} and {b.name!r} of the study have the same folder name, {a.slug}",
                where=where,
                fix="rename one of these arms",
            )
    if nameless := [arm.name for arm in arms if not arm.slug]:
        raise ConfigError(
            f"the arm name {nameless[0]!r} has no letter or digit, so it cannot be used as a folder name",
            where=where,
            fix="rename the arm to a name with letters or digits",
        )
    return arms


def _every(study: Study) -> Iterator[Arm]:
    parts = (_of_axes, _listed) if study.axes_first else (_listed, _of_axes)
    return itertools.chain.from_iterable(part(study) for part in parts)


def _listed(study: Study) -> Iterator[Arm]:
    for name, arm in study.arms.items():
        yield Arm(name=name, labels=study.labels | arm.labels, overrides=(*study.overrides, *arm.overrides))


def _of_axes(study: Study) -> Iterator[Arm]:
    if not study.axes:
        return
    for choices in itertools.product(*(axis.items() for axis in study.axes.values())):
        labels = dict(zip(study.axes, (choice for choice, _ in choices), strict=True))
        overrides = tuple(itertools.chain(study.overrides, *(words for _, words in choices)))
        yield Arm(name=" ".join(labels.values()), labels=study.labels | labels, overrides=overrides)


def _with_cases(arm: Arm, cases: tuple[Case, ...]) -> Arm | None:
    """Return an arm with the matching cases applied, later ones over earlier; None if a case leaves it out."""
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
            labels = ", ".join(f"{name}: {value}" for name, value in case.match.items())
            known = sorted({f"{name}: {value}" for arm in arms for name, value in arm.labels.items()})
            raise ConfigError(
                f"the key `match` of this case has the labels {labels}, but no arm of the study has these labels",
                where=f"{where}: cases[{number}]",
                fix=f"set `match` to labels of an arm; the arms have the labels {', '.join(known) or '(none)'}",
            )


def stated_pairs(statement: Statement, arms: Sequence[Arm]) -> Iterator[tuple[Arm, Arm | None]]:
    """Yield the pairs of arms that a statement is about; the second one is None for a statement about values."""
    for stated in statement.arms:
        for first in (arm for arm in arms if matches(arm.all_labels, stated.first)):
            if stated.second is None:
                yield first, None
                continue
            for second in (arm for arm in arms if matches(arm.all_labels, stated.second)):
                is_same = all(first.all_labels.get(name) == second.all_labels.get(name) for name in statement.same)
                if is_same and first.name != second.name:
                    yield first, second


def blocks(arms: Sequence[PlannedArm], *, runs: int, seed: int) -> list[tuple[str, ...]]:
    """Return the run order of the arms in each block: shuffled in every other block, and reversed in the next one.

    The shuffle includes arms that cannot run, which are left out afterwards: the order of the others stays the same
    when these can run. Over two blocks each arm runs as often before another one as after it, so that drift (heat,
    other jobs) does not favour one of a pair. More runs do not change the order of earlier blocks.
    """
    orders: list[tuple[str, ...]] = []
    for block in range(runs):
        if block % 2:
            orders.append(orders[-1][::-1])
            continue
        shuffled = [arm.name for arm in arms]
        random.Random(f"{seed} {block}").shuffle(shuffled)
        orders.append(tuple(shuffled))
    running = {arm.name for arm in arms if arm.runs}
    return [tuple(name for name in block if name in running) for block in orders]
