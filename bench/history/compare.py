"""Compare two sets of runs: select their values, pair them, and list what else differs between the sets."""

import glob
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.contract.run_files import LEDGER, PLAN, RESULTS
from bench.errors import ConfigError
from bench.history import measured_trials
from bench.history.measured_trials import Runs, ValidTrial
from bench.results.comparison import Comparison, Pairing, compare, values_by_block
from bench.results.measurement import MAIN, Measurement, differing_clocks, higher_is_better
from bench.runs import names


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSet:
    """The runs of one of the two compared systems."""

    path: str
    """As the user gave it."""
    runs: Runs

    @property
    def name(self) -> str:
        return Path(self.path).name or self.path

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(trial.folder for trial in self.trials))

    @property
    def trials(self) -> tuple[ValidTrial, ...]:
        """Ordered by start time."""
        return tuple(sorted(self.runs.trials, key=lambda trial: trial.began_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two systems by one measurement, and what differs between their runs."""

    run_sets: tuple[RunSet, RunSet]
    comparison: Comparison
    differences: tuple[tuple[str, str, str], ...]
    """Differing hardware, software and settings: name, value of the first set, value of the second set."""
    notes: tuple[str, ...]
    """What a reader must know about the values."""


def run_set(text: str) -> RunSet:
    """Return the runs of a run folder, a log, a folder of runs, a glob pattern, or STUDY/ARM.

    Raises:
        ConfigError: there are no runs.
    """
    return read(*matching(text))


def read(path: Path, folders: Sequence[Path]) -> RunSet:
    """Return the runs of a set, as `matching` returns it.

    Raises:
        ConfigError: there are no runs.
    """
    parts = (
        [measured_trials.in_log(path)] if path.is_file() else [measured_trials.in_folder(folder) for folder in folders]
    )
    if not parts:
        raise _no_runs(path)
    runs = Runs(
        trials=tuple(trial for part in parts for trial in part.trials),
        left_out=tuple(reason for part in parts for reason in part.left_out),
    )
    return RunSet(path=str(path), runs=runs)


def matching(text: str) -> tuple[Path, list[Path]]:
    """Return the path of a set, and the run folders in it, which are not read yet.

    Raises:
        ConfigError: there is no such run, the pattern is not valid, or the path is a study without an arm.
    """
    path = Path(text)
    folders = [] if path.is_file() else _folders(path)
    if folders or path.exists() or glob.has_magic(text) or (path.parent / names.STUDY).exists():
        return path, folders
    folders = names.several(text, files=True)
    return (path if folders[1:] else folders[0]), folders


def _folders(path: Path) -> list[Path]:
    """Return the run folders of a path, which may be a glob pattern or an arm of a study.

    Raises:
        ConfigError: the pattern is not valid, or the path is a study without an arm.
    """
    if glob.has_magic(str(path)) and not path.exists():
        component = next((part for part in path.parts if "**" in part and part != "**"), None)
        if component is not None:  # an error until 3.13
            fix = "write ** only as a whole path component: 'runs/**/*fp8*'"
            what = f"the path component {component} has ** and other characters, which a glob pattern does not allow"
            raise ConfigError(what, where=str(path), fix=fix)
        matches = Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        return [folder for match in sorted(matches) for folder in _folders(match)]
    if not path.is_dir():
        return sorted(one for one in path.parent.glob(f"{glob.escape(path.name)}.*") if names.arm_of(one) == path.name)
    if any((path / name).exists() for name in (LEDGER, PLAN)) or any(path.glob(RESULTS)):
        return [path]
    if (path / names.STUDY).exists():
        fix = f"give one arm of the study as {path}/ARM; arms with runs: {_arms_with_runs(path)}"
        raise ConfigError(
            "a whole study cannot be compared, because a study has several arms (configurations)",
            where=str(path),
            fix=fix,
        )
    return sorted({file.parent for name in (LEDGER, RESULTS) for file in path.glob(f"*/{name}")})


def _arms_with_runs(study: Path) -> str:
    return ", ".join(sorted({arm for one in study.iterdir() if (arm := names.arm_of(one))})) or "none"


def _no_runs(path: Path) -> ConfigError:
    fix = "give a run, a quoted pattern ('runs/*fp8*'), a folder of runs, or STUDY/ARM"
    if (path.parent / names.STUDY).exists():
        fix = f"give an arm with runs: {_arms_with_runs(path.parent)}"
    return ConfigError("this path contains no run", where=str(path), fix=fix)


def compare_runs(first: Path, second: Path, *, measurement: str | None = None) -> Compared:
    """Compare the valid trials of two run folders, or of two folders of runs.

    Raises:
        ConfigError: as `run_set` and `compared`.
    """
    return compared(run_set(str(first)), run_set(str(second)), measurement=measurement)


def compared(
    first: RunSet,
    second: RunSet,
    *,
    measurement: str | None = None,
    pairing: Pairing | None = None,
    margin: float = 0.02,
) -> Compared:
    """Compare two systems by a measurement, by default the main one that both have.

    Without a pairing, runs of a study are paired by block, alternating runs by time, and other runs are not paired.
    The value of a run is the mean of its trials. If a system has one run, each of its trials is a value.

    Raises:
        ConfigError: a set has no valid trial, a run is in both sets, a set lacks the measurement, or the runs cannot
            be paired as requested.
    """
    _check(first, second)
    one, other = _common(first, second, measurement)
    pairing = pairing or _pairing(first, second)
    comparison = compare(
        *_values(first, second, one.name, pairing),
        names=_names(first, second),
        measurement=one.name,
        unit=one.unit,
        higher_is_better=higher_is_better(one),
        margin=margin,
        pairing=pairing,
    )
    return Compared(
        run_sets=(first, second),
        comparison=comparison,
        differences=(*_differences(first, second), *_clocks(first, second)),
        notes=tuple(_notes(first, second, pairing)),
    )


def _check(first: RunSet, second: RunSet) -> None:
    for one in (first, second):
        if not one.trials:
            reasons = "; ".join(one.runs.left_out) or "the folder has no logs"
            raise ConfigError(
                f"these runs have no valid trial: {reasons}",
                where=one.path,
                fix="run `runstop why RUN` to see the cause",
            )
    if shared := {trial.log_sha256 for trial in first.trials} & {trial.log_sha256 for trial in second.trials}:
        name = next(trial.folder for trial in first.trials if trial.log_sha256 in shared)
        raise ConfigError(
            "this run is in the first and in the second set of runs",
            where=str(name),
            fix="give every run in only one of the two sets",
        )


def _common(first: RunSet, second: RunSet, name: str | None) -> tuple[Measurement, Measurement]:
    """Return the compared measurement, as each set has it."""
    one, other = (_measured(run_set) for run_set in (first, second))
    common = [each for each in one if each in other and one[each].unit == other[each].unit]
    chosen = next((each for each in ([name] if name else (*MAIN, *common)) if each in common), None)
    if chosen is None:
        what = (
            f"at least one of the two sets of runs does not have the measurement {name}"
            if name
            else "the two sets have no measurement in common"
        )
        fix = "give two sets of runs of the same task"
        if common:
            fix = f"choose one of the measurements that both sets of runs have: {', '.join(common)}"
        raise ConfigError(what, where="--measurement", fix=fix)
    return one[chosen], other[chosen]


def _measured(run_set: RunSet) -> dict[str, Measurement]:
    return {name: one for trial in run_set.trials for name, one in trial.measurements.items()}


def _pairing(first: RunSet, second: RunSet) -> Pairing:
    studies = {
        folder.parent if names.arm_of(folder) else None for run_set in (first, second) for folder in run_set.folders
    }
    if len(studies) == 1 and None not in studies:
        return Pairing.block
    began = {trial.folder: trial.began_ms for run_set in (second, first) for trial in reversed(run_set.trials)}
    turns = [folder in first.folders for folder in sorted(began, key=lambda folder: began[folder])]
    took_turns = len(turns) > 2 and all(a != b for a, b in zip(turns[::2], turns[1::2], strict=False))
    return Pairing.order if took_turns and len(turns) % 2 == 0 else Pairing.none


def _values(first: RunSet, second: RunSet, name: str, pairing: Pairing) -> tuple[Sequence[float], Sequence[float]]:
    if pairing is Pairing.block:
        one, other = (
            {_block(folder): value for folder, value in _of_runs(run_set, name).items()} for run_set in (first, second)
        )
        return values_by_block(one, other)
    if pairing is Pairing.order:
        return tuple(_of_runs(first, name).values()), tuple(_of_runs(second, name).values())
    return _unpaired(first, name), _unpaired(second, name)


def _of_runs(run_set: RunSet, name: str) -> dict[Path, float]:
    """Return the mean over the trials of each run, ordered by start time."""
    of_each: dict[Path, list[float]] = {folder: [] for folder in run_set.folders}
    for trial in run_set.trials:
        if name in trial.measurements:
            of_each[trial.folder].append(trial.measurements[name].value)
    return {folder: fmean(values) for folder, values in of_each.items() if values}


def _unpaired(run_set: RunSet, name: str) -> tuple[float, ...]:
    if len(run_set.folders) > 1:
        return tuple(_of_runs(run_set, name).values())
    return tuple(trial.measurements[name].value for trial in run_set.trials if name in trial.measurements)


def _block(folder: Path) -> Hashable:
    match = names.BLOCK.fullmatch(folder.name)
    return match["block"] if match else folder


def _names(first: RunSet, second: RunSet) -> tuple[str, str]:
    """Return the names of the sets: the last parts of their paths if these differ, else the paths."""
    return (first.path, second.path) if first.name == second.name else (first.name, second.name)


def _differences(first: RunSet, second: RunSet) -> Iterator[tuple[str, str, str]]:
    """Yield differing hardware, software and settings; the settings come from the plans if every run has one."""
    by_plan = all(trial.planned for run_set in (first, second) for trial in run_set.trials)
    one, other = (
        _joined([{**trial.facts, **(trial.planned if by_plan else trial.logged)} for trial in run_set.trials])
        for run_set in (first, second)
    )
    for name in dict.fromkeys((*one, *other)):
        if one.get(name, "") != other.get(name, ""):
            yield name, one.get(name, ""), other.get(name, "")


def _clocks(first: RunSet, second: RunSet) -> list[tuple[str, str, str]]:
    return list(differing_clocks(*([trial.measurements for trial in run_set.trials] for run_set in (first, second))))


def _joined(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the different values of each fact over the trials of a set."""
    names = dict.fromkeys(name for of_one in facts for name in of_one)
    return {name: " | ".join(sorted({of_one.get(name, "") for of_one in facts})) for name in names}


def _notes(first: RunSet, second: RunSet, pairing: Pairing) -> Iterator[str]:
    for title, one, other in _clocks(first, second):
        yield f"the {title} was {one} and {other}; speeds at different clocks are not comparable"
    for run_set in (first, second):
        if len(run_set.folders) == 1 and len(run_set.trials) > 1 and pairing is Pairing.none:
            yield (
                f"the {len(run_set.trials)} values of {run_set.name} are from trials of one run on the same nodes: "
                "values of a second run may differ more"
            )
        yield from (f"not counted: {reason}" for reason in run_set.runs.left_out)
