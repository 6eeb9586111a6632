"""The result of a run: its status, and the judged logs of its trials."""

from dataclasses import dataclass
from pathlib import Path

from bench.contract.plan import Plan
from bench.contract.run_files import STATUS
from bench.errors import BenchError, IncompleteError
from bench.results.kind import Judged, judge
from bench.runs import run as runs
from bench.runs.folder import named, plan_in, short
from bench.runs.status import Ending, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A run that has ended and whose trials all have results, valid or not."""

    folder: Path
    plan: Plan
    status: Status
    trials: tuple[Judged, ...]

    @property
    def valid(self) -> bool:
        """Whether every trial is valid."""
        return self.status.exit_code == 0 and all(trial.valid for trial in self.trials)

    @property
    def minutes(self) -> list[float | None]:
        """run_start to run_stop of each trial; None if its log does not show both."""
        return [trial.result.minutes for trial in self.trials]


def read(folder: Path) -> RunResult:
    """Return the result of a run folder.

    Raises:
        IncompleteError: the run has not ended, or it was interrupted.
        BenchError: the run failed before each trial had a result; the message is that of the run's status.
    """
    run, plan = runs.find(folder), plan_in(folder)
    status = run.status
    if status is None or plan is None:
        what = f"the run has no result: its state is {run.state_name}"
        raise IncompleteError(what, where=str(folder / STATUS), fix=f"to see why: runstop why {short(folder)}")
    if not run.outcomes or not all(outcome.is_result for outcome in run.outcomes):
        kind = IncompleteError if status.outcome is Ending.interrupted else BenchError
        what = status.what or f"the run ended with the outcome {status.outcome}"
        raise kind(
            what,
            where=str(folder),
            fix=named(status.fix or "runstop why RUN", folder),
            rule=status.rule,
        )
    trials = tuple(judge(folder / trial.log, plan, trial) for trial in plan.trials)
    return RunResult(folder=folder, plan=plan, status=status, trials=trials)
