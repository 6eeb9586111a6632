"""Compare two sets of runs: which values they have, how these are paired, and what else differs between them."""

import glob
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.contract.run_files import LEDGER, PLAN, RESULTS
from bench.errors import ConfigError
from bench.history import measured_trials
from bench.history.measured_trials import ProvenTrial, Runs
from bench.results.comparison import Comparison, Pairing, compare, values_by_block
from bench.results.measurement import MAIN, Measurement, clocks_apart, higher_is_better
from bench.runs import run

STUDY = "study.yaml"
"""Lies in a study's folder, beside the run folders ARM.BLOCK."""
_BLOCK = re.compile(r"(?P<arm>.+?)(\.b\d+)?\.(?P<block>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The runs of one of two systems."""

    path: str
    """As the user named it."""
    runs: Runs

    @property
    def name(self) -> str:
        return Path(self.path).name or self.path

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(trial.folder for trial in self.trials))

    @property
    def trials(self) -> tuple[ProvenTrial, ...]:
        """In the order of time."""
        return tuple(sorted(self.runs.trials, key=lambda trial: trial.began_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two systems by one measurement, and what differs between their runs."""

    sides: tuple[Side, Side]
    comparison: Comparison
    differences: tuple[tuple[str, str, str], ...]
    """Hardware, software and settings that are not the same: the name, the first one's and the second one's."""
    notes: tuple[str, ...]
    """How the values came about."""


def side(text: str) -> Side:
    """Return the runs that a user means: a run folder, a log, a folder of runs, a pattern, or STUDY/ARM.

    Raises:
        ConfigError: there are no runs.
    """
    path = run.resolved(Path(text))
    found = (
        [measured_trials.in_log(path)]
        if path.is_file()
        else [measured_trials.in_folder(folder) for folder in _folders(path)]
    )
    if not found:
        raise _no_runs(path)
    runs = Runs(
        trials=tuple(trial for one in found for trial in one.trials),
        left_out=tuple(reason for one in found for reason in one.left_out),
    )
    return Side(path=str(path), runs=runs)


def _folders(path: Path) -> list[Path]:
    """Return the run folders of a path, which may be a pattern or an arm of a study.

    Raises:
        ConfigError: it is no valid pattern, or a study without an arm.
    """
    if glob.has_magic(str(path)) and not path.exists():
        if joined := next((part for part in path.parts if "**" in part and part != "**"), None):  # an error until 3.13
            fix = "let ** stand alone between slashes: 'runs/**/*fp8*'"
            raise ConfigError(f"{joined} is no part of a pattern of paths", where=str(path), fix=fix)
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        return [folder for match in sorted(matches) for folder in _folders(match)]
    if not path.is_dir():
        return sorted(one for one in path.parent.glob(f"{glob.escape(path.name)}.*") if arm_of(one) == path.name)
    if any((path / name).exists() for name in (LEDGER, PLAN)) or any(path.glob(RESULTS)):
        return [path]
    if (path / STUDY).exists():
        fix = f"name one of them: {path}/ARM, of {_arms_with_runs(path)}"
        raise ConfigError("a study has several arms", where=str(path), fix=fix)
    return sorted({file.parent for name in (LEDGER, RESULTS) for file in path.glob(f"*/{name}")})


def arm_of(folder: Path) -> str:
    """Return the arm that a folder of a study is a run of; empty for a folder that is none."""
    match = _BLOCK.fullmatch(folder.name)
    return match["arm"] if match and (folder.parent / STUDY).exists() else ""


def _arms_with_runs(study: Path) -> str:
    return ", ".join(sorted({arm for one in study.iterdir() if (arm := arm_of(one))})) or "none"


def _no_runs(path: Path) -> ConfigError:
    fix = "name a run folder, a quoted pattern ('runs/*fp8*'), a folder of runs, or STUDY/ARM"
    if (path.parent / STUDY).exists():
        fix = f"name an arm as its folders do; those with runs are {_arms_with_runs(path.parent)}"
    return ConfigError("no runs here", where=str(path), fix=fix)


def compared(
    first: Side, second: Side, *, measurement: str | None = None, pairing: Pairing | None = None, margin: float = 0.02
) -> Compared:
    """Return how two systems compare by a measurement, by default the main one that both have.

    Unless a pairing is asked for, runs of a study are paired by block, runs that took turns in order of time, and
    others are not. A run is one value, the mean of its trials. Where a system has one run, each trial of it is a value.

    Raises:
        ConfigError: a side has no proven trial, a run is on both sides, not both sides have the measurement, or the
            runs cannot be paired as asked for.
    """
    _check(first, second)
    one, other = _common(first, second, measurement)
    pairing = pairing or _pairing(first, second)
    found = compare(
        *_values(first, second, one.name, pairing),
        names=_names(first, second),
        measurement=one.name,
        unit=one.unit,
        higher_is_better=higher_is_better(one),
        margin=margin,
        pairing=pairing,
    )
    return Compared(
        sides=(first, second),
        comparison=found,
        differences=(*_differences(first, second), *_clocks(first, second)),
        notes=tuple(_notes(first, second, pairing)),
    )


def _check(first: Side, second: Side) -> None:
    for one in (first, second):
        if not one.trials:
            why = "; ".join(one.runs.left_out) or "the folder has no logs"
            raise ConfigError(f"no proven trial: {why}", where=one.path, fix="python -m bench why says what went wrong")
    if shared := {trial.log_sha256 for trial in first.trials} & {trial.log_sha256 for trial in second.trials}:
        name = next(trial.folder for trial in first.trials if trial.log_sha256 in shared)
        raise ConfigError("a run is on both sides", where=str(name), fix="name each run on one side")


def _common(first: Side, second: Side, name: str | None) -> tuple[Measurement, Measurement]:
    """Return the measurement by which the sides are compared, as each has it."""
    one, other = (_measured(side) for side in (first, second))
    common = [each for each in one if each in other and one[each].unit == other[each].unit]
    chosen = next((each for each in ([name] if name else (*MAIN, *common)) if each in common), None)
    if chosen is None:
        known = ", ".join(common) or "nothing"
        what = f"{name} was not measured on both sides" if name else "the sides have no measurement in common"
        raise ConfigError(what, where="--measurement", fix=f"both sides have {known}")
    return one[chosen], other[chosen]


def _measured(side: Side) -> dict[str, Measurement]:
    return {name: one for trial in side.trials for name, one in trial.measurements.items()}


def _pairing(first: Side, second: Side) -> Pairing:
    studies = {folder.parent if arm_of(folder) else None for side in (first, second) for folder in side.folders}
    if len(studies) == 1 and None not in studies:
        return Pairing.block
    began = {trial.folder: trial.began_ms for side in (second, first) for trial in reversed(side.trials)}
    turns = [folder in first.folders for folder in sorted(began, key=lambda folder: began[folder])]
    took_turns = len(turns) > 2 and all(a != b for a, b in zip(turns[::2], turns[1::2], strict=False))
    return Pairing.order if took_turns and len(turns) % 2 == 0 else Pairing.none


def _values(first: Side, second: Side, name: str, pairing: Pairing) -> tuple[Sequence[float], Sequence[float]]:
    if pairing is Pairing.block:
        one, other = (
            {_block(folder): value for folder, value in _of_runs(side, name).items()} for side in (first, second)
        )
        return values_by_block(one, other)
    if pairing is Pairing.order:
        return tuple(_of_runs(first, name).values()), tuple(_of_runs(second, name).values())
    return _unpaired(first, name), _unpaired(second, name)


def _of_runs(side: Side, name: str) -> dict[Path, float]:
    """Return the mean over each run's trials, in order of time."""
    of_each: dict[Path, list[float]] = {folder: [] for folder in side.folders}
    for trial in side.trials:
        if name in trial.measurements:
            of_each[trial.folder].append(trial.measurements[name].value)
    return {folder: fmean(values) for folder, values in of_each.items() if values}


def _unpaired(side: Side, name: str) -> tuple[float, ...]:
    if len(side.folders) > 1:
        return tuple(_of_runs(side, name).values())
    return tuple(trial.measurements[name].value for trial in side.trials if name in trial.measurements)


def _block(folder: Path) -> Hashable:
    match = _BLOCK.fullmatch(folder.name)
    return match["block"] if match else folder


def _names(first: Side, second: Side) -> tuple[str, str]:
    """Return what the sides are called: by the last part of their paths, where that tells them apart."""
    return (first.path, second.path) if first.name == second.name else (first.name, second.name)


def _differences(first: Side, second: Side) -> Iterator[tuple[str, str, str]]:
    """Yield what differs of hardware, software and settings; those of the plans where every run has one."""
    by_plan = all(trial.planned for side in (first, second) for trial in side.trials)
    one, other = (
        _joined([{**trial.facts, **(trial.planned if by_plan else trial.logged)} for trial in side.trials])
        for side in (first, second)
    )
    for name in dict.fromkeys((*one, *other)):
        if one.get(name, "") != other.get(name, ""):
            yield name, one.get(name, ""), other.get(name, "")


def _clocks(first: Side, second: Side) -> list[tuple[str, str, str]]:
    return list(clocks_apart(*([trial.measurements for trial in side.trials] for side in (first, second))))


def _joined(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the different values of each fact over the trials of a side."""
    names = dict.fromkeys(name for of_one in facts for name in of_one)
    return {name: " | ".join(sorted({of_one.get(name, "") for of_one in facts})) for name in names}


def _notes(first: Side, second: Side, pairing: Pairing) -> Iterator[str]:
    for title, one, other in _clocks(first, second):
        yield f"{title}: {one} and {other}; at different clocks these are not the same machine"
    for side in (first, second):
        if len(side.folders) == 1 and len(side.trials) > 1 and pairing is Pairing.none:
            yield (
                f"the {len(side.trials)} values of {side.name} are trials of one run, on the same nodes one after "
                "another: another run may lie farther away than they do"
            )
        yield from (f"left out: {reason}" for reason in side.runs.left_out)
