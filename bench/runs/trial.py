"""What came of one trial: its log as we and the referee read it, against what was planned."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.contract import plan as plans
from bench.contract.plan import Plan, Trial
from bench.mlperf.official import RULESETS, Verdict, official_verdict
from bench.mlperf.result import Result, parse
from bench.runs import ledger
from bench.runs.ledger import Outcome


@dataclass(frozen=True, slots=True)
class Judged:
    """One trial's log, as we and the referee read it."""

    result: Result
    verdicts: list[Verdict]
    not_as_planned: list[str]

    @property
    def proven(self) -> bool:
        """Whether the log proves that the trial did what its task asks."""
        reached = self.result.target is None or self.result.converged
        passed = not any(verdict.passed is False for verdict in self.verdicts)
        return self.result.valid and reached and passed and not self.not_as_planned


def judge(log: Path, plan: Plan | None = None, trial: Trial | None = None) -> Judged:
    """Return what a log proves, what the official checker says of it, and where it differs from the planned trial."""
    result = parse(log)
    rulesets = RULESETS if result.has_target else ()  # MLPerf has no rules for runs without a target
    verdicts = [official_verdict(log, ruleset=ruleset) for ruleset in rulesets]
    if plan is None or trial is None:
        return Judged(result, verdicts, [])
    planned = {
        "seed": (result.seed, trial.seed),
        "submission_benchmark": (result.benchmark, plan.submission.benchmark),
        "submission_division": (result.division, plan.submission.division),
        "target_accuracy": (result.target, plan.config.task.training.target_eval_loss),
        "global_batch_size": (result.global_batch_size, plan.batch.global_batch_size),
    }
    start, source = plan.config.task.training.starts_from, plan.config.data.source
    for key, want in ((mllog.INITIAL_WEIGHTS, start), (mllog.DATA_SOURCE, source)):
        planned[key] = (result.hyperparameters.get(key), want.name)
    if not result.has_target:
        last = result.evaluations[-1].samples if result.evaluations else None
        planned["samples trained on"] = (last, plans.samples(plan, plan.max_steps))
    differing = [f"{key} is {got}, planned {want}" for key, (got, want) in planned.items() if got != want]
    return Judged(result, verdicts, differing)


def close(folder: Path, plan: Plan, trial: Trial, *, failed: bool) -> Judged | None:
    """Judge a trial that has ended and enter it in the ledger; None, and aborted, for one that failed before its end.

    A failure after a successful run_stop does not undo it.

    Raises:
        LogError: the trial ended well and left no log.
    """
    log = folder / trial.log
    if failed and not (log.exists() and parse(log).status == mllog.SUCCESS):
        ledger.end(folder, trial.index, Outcome.aborted)
        return None
    judged = judge(log, plan, trial)
    ledger.end(folder, trial.index, Outcome.proven if judged.proven else Outcome.not_proven, **facts(judged))
    return judged


def settle(folder: Path, plan: Plan, trial: Trial) -> None:
    """Enter a trial whose log says that it ended well, if its job was cut short before it could enter it."""
    log = folder / trial.log
    is_running = ledger.read(folder)[trial.index].outcome is Outcome.running
    if is_running and log.exists() and parse(log).status == mllog.SUCCESS:
        close(folder, plan, trial, failed=False)


def facts(judged: Judged) -> dict[str, Any]:
    """Return what the ledger keeps of a finished trial beside its outcome."""
    return {
        "minutes": judged.result.minutes,
        "samples_to_target": judged.result.samples_to_target,
        "eval_final": judged.result.eval_final,
        "official": {verdict.ruleset: verdict.passed for verdict in judged.verdicts},
        "not_as_planned": judged.not_as_planned,
    }
