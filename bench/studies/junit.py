"""The arms and reference values of a study as JUnit cases."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.console.junit import Case
from bench.results.reference import ReferenceVerdict
from bench.results.study import StudyResult
from bench.runs.folder import short
from bench.studies import reading
from bench.studies.session import RunStatus, State


def of_arms(folder: Path, command: str) -> list[Case]:
    """Return one case for each arm of a study in this folder; `command` continues the study.

    Raises:
        ConfigError: it is not a study's folder.
    """
    runs, cannot_run = reading.runs_of(folder)
    by_arm: dict[str, list[RunStatus]] = {arm: [] for arm in cannot_run}
    for run in runs:
        by_arm.setdefault(run.name.arm.name, []).append(run)
    return [_of_arm(folder, arm, of_arm, cannot_run.get(arm, ""), command) for arm, of_arm in by_arm.items()]


def _of_arm(folder: Path, arm: str, runs: Sequence[RunStatus], cannot_run: str, command: str) -> Case:
    failed = [run for run in runs if run.state in (State.failed, State.out_of_memory, State.invalid)]
    lines = [f"{run.folder.name} {run.state}{f': {run.reason}' if run.reason else ''}" for run in failed]
    waiting = sum(not run.is_done for run in runs)
    fix = f"runstop why {short(failed[0].folder)}; to repeat the failed runs: {command}" if failed else ""
    has_failed = bool(failed) and not cannot_run
    return Case(
        group=f"study.{folder.name}",
        name=arm,
        failure="; ".join(lines) if has_failed else "",
        details="\n".join([*lines, f"  where: {folder}", f"  fix:   {fix}"]) if has_failed else "",
        skipped=cannot_run or (f"{waiting} of {len(runs)} runs have no result yet" if waiting and not failed else ""),
    )


def of_references(result: StudyResult) -> Iterable[Case]:
    """Yield one case for each reference value."""
    for one in result.references:
        failed = one.verdict is not ReferenceVerdict.passed
        fix = "find out what changed with runstop compare; if the change is wanted, change `value` in the study's file"
        yield Case(
            group=f"study.{result.name}.references",
            name=" ".join(filter(None, (one.platform, one.arm, one.measurement))),
            failure=f"{one.verdict}: {one.text}" if failed else "",
            details=f"{one.text}\n  where: references of the study {result.name}\n  fix:   {fix}" if failed else "",
            output="" if failed else one.text,
        )
