"""What came of one trial: its log as we and the referee read it, against what was planned."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, mllog
from bench.contract import plan as plans
from bench.contract.plan import GenerationPlan, KernelsPlan, Plan, ServingPlan, TrainingPlan, Trial
from bench.errors import LogError
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks, reader
from bench.mlperf import result as results
from bench.mlperf.official import RULESETS, Verdict, official_verdict
from bench.mlperf.result import Result, parse
from bench.results import GenerationResult, KernelsResult, ServingResult
from bench.results import generation as generation_results
from bench.results import kernels as kernel_results
from bench.results import serving as serving_results
from bench.rules.finding import Finding, broken
from bench.runs import ledger
from bench.runs.ledger import Outcome


@dataclass(frozen=True, slots=True)
class Judged:
    """One trial's log, as we and the referee read it."""

    result: Result
    verdicts: list[Verdict]
    not_as_planned: list[str]
    kernels: KernelsResult | None = None
    """What a trial of a kernels task measured."""
    generation: GenerationResult | None = None
    """What a trial of a generation task measured."""
    serving: ServingResult | None = None
    """What a trial of a serving task measured."""

    @property
    def proven(self) -> bool:
        """Whether the log proves that the trial did what its task asks."""
        if (of_kind := self.kernels or self.generation or self.serving) is not None:
            return self.result.valid and of_kind.proven and not self.not_as_planned
        reached = self.result.target is None or self.result.converged
        passed = not any(verdict.passed is False for verdict in self.verdicts)
        return self.result.valid and reached and passed and not self.not_as_planned


def judge(log: Path, plan: Plan | None = None, trial: Trial | None = None) -> Judged:
    """Return what a log proves, what the official checker says of it, and where it differs from the planned trial."""
    records = logs.read(log)
    result = results.result(records, str(log), reader.system(log))
    rulesets = RULESETS if result.has_target else ()  # MLPerf has no rules for runs without a target
    verdicts = [official_verdict(log, ruleset=ruleset) for ruleset in rulesets]
    found = (kernel_results.read(records), generation_results.read(records), serving_results.read(records))
    if plan is None or trial is None:
        return Judged(result, verdicts, [], *found)
    kernels, generation, serving = found
    if isinstance(plan, TrainingPlan):
        differing = _differs_from_training(plan, trial, result)
    elif isinstance(plan, KernelsPlan):
        differing = _differs_from_points(plan, trial, result, kernels)
    elif isinstance(plan, ServingPlan):
        differing = _differs_from_loads(plan, trial, result, serving)
    else:
        differing = _differs_from_answers(plan, trial, result, generation)
    differing += [missing.titled for missing in provenance_checks.missing_attachments(records)]
    return Judged(result, verdicts, differing, *found)


def _differs_from_points(plan: KernelsPlan, trial: Trial, result: Result, kernels: KernelsResult | None) -> list[str]:
    """Return in what a log differs from the planned trial of a kernels task."""
    asked = [] if kernels is None else [one.point for one in kernels.measured]
    missing = {name for name, _ in kernels.missing} if kernels else set()
    unasked = [point.name for point in plan.points if point not in asked and point.name not in missing]
    differing = [f"{name} is not measured as planned" for name in unasked]
    return differing + ([] if result.seed == trial.seed else [f"seed is {result.seed}, planned {trial.seed}"])


def _differs_from_answers(
    plan: GenerationPlan, trial: Trial, result: Result, generation: GenerationResult | None
) -> list[str]:
    """Return in what a log differs from the planned trial of a generation task."""
    if generation is None:
        return [f"{mllog.ANSWERS_ASKED} is missing"]
    task = plan.config.task.generation
    assert task is not None
    wanted = {"replicas": plan.world.dp, "tp": plan.world.tp, "weights": plan.weights.name, "order": task.order.name}
    wanted |= {"batching": task.batching.name, "max_batch": task.max_batch, "model": plan.config.model.name}
    wanted |= {name: getattr(task.sampling, name) for name in ("temperature", "top_k", "top_p")}
    found = {name: generation.about.get(name) for name in wanted}
    start = mllog.RANDOM if plan.base_dir is None else "checkpoint"
    both = {name: (found[name], wanted[name]) for name in wanted}
    both |= {"seed": (result.seed, trial.seed)}
    both |= {mllog.INITIAL_WEIGHTS: (result.hyperparameters.get(mllog.INITIAL_WEIGHTS), start)}
    differing = [f"{name} is {got}, planned {want}" for name, (got, want) in both.items() if got != want]
    if list(generation.asked) != [one.length for one in plan.asked]:
        differing.append("the lengths of its answers are not those of the plan")
    replica_of = {one.index: one.replica for one in plan.asked}
    others = [one.index for one in generation.answers if replica_of.get(one.index) != one.replica]
    return differing + [f"answer {index} was given by another replica" for index in others[:1]]


def _differs_from_loads(plan: ServingPlan, trial: Trial, result: Result, serving: ServingResult | None) -> list[str]:
    """Return in what a log differs from the planned trial of a serving task."""
    loads = () if serving is None else tuple(one.load for one in serving.loads)
    missing = () if serving is None else serving.missing
    differing = [
        f"{load.name} is not measured as planned"
        for load in plan.loads
        if load not in loads and load.name not in missing
    ]
    return differing + ([] if result.seed == trial.seed else [f"seed is {result.seed}, planned {trial.seed}"])


def _differs_from_training(plan: TrainingPlan, trial: Trial, result: Result) -> list[str]:
    """Return in what a log differs from the planned trial of a training task."""
    planned = {
        "seed": (result.seed, trial.seed),
        "submission_benchmark": (result.benchmark, plan.submission.benchmark),
        "submission_division": (result.division, plan.submission.division),
        "target_accuracy": (result.target, plan.config.training.target_eval_loss),
        "global_batch_size": (result.global_batch_size, plan.batch.global_batch_size),
    }
    start, source = plan.config.training.starts_from, plan.config.data.source
    for key, want in ((mllog.INITIAL_WEIGHTS, start), (mllog.DATA_SOURCE, source)):
        planned[key] = (result.hyperparameters.get(key), want.name)
    if not result.has_target:
        last = result.evaluations[-1].samples if result.evaluations else None
        planned["samples trained on"] = (last, plans.samples(plan, plan.max_steps))
    return [f"{key} is {got}, planned {want}" for key, (got, want) in planned.items() if got != want]


def foreign(folder: Path, trial: Trial, *, may_have_moved: bool = False) -> Finding | None:
    """Return that a trial's log is not the file that its last attempt wrote.

    None if it is, if there is no log, and for attempts of versions that bound no logs. A folder that may have moved
    has files of other inodes and owners, so that only the nonce counts.
    """
    path, entries = folder / trial.log, ledger.found(folder)
    nonce = entries[trial.index].nonce if trial.index < len(entries) else None
    if nonce is None or not os.path.lexists(path):
        return None
    try:
        log = logs.read(path)
        what = provenance_checks.stranger(log, nonce)
        if what is None:
            what = None if may_have_moved else provenance_checks.copied(log)
        else:
            what += whose(entries, log.events[0].value)
    except LogError as error:
        what = error.what
    return broken("LOG-17", f"{path.name} was not written by this attempt: {what}", str(path)) if what else None


def whose(entries: list[ledger.Entry], nonce: Any) -> str:
    """Return which other attempt of this run a nonce belongs to, as the end of a sentence."""
    for entry in entries:
        for number, attempt in enumerate(entry.attempts, 1):
            if attempt.nonce is not None and attempt.nonce == nonce:
                return f": attempt {number} of trial {entry.trial} of this run"
    return ""


def close(folder: Path, plan: Plan, trial: Trial, *, failed: bool) -> Judged | None:
    """Judge a trial that has ended and enter it in the ledger; None, and aborted, for one that failed before its end.

    A failure after a successful run_stop does not undo it. A log that this attempt did not write is never judged.

    Raises:
        LogError: the trial ended well, and left no log, or there is one that it did not write.
    """
    log = folder / trial.log
    if found := foreign(folder, trial):
        ledger.end(folder, trial.index, Outcome.aborted, cause=found.titled, not_as_planned=[found.titled])
        if failed:
            return None
        raise _refused(found)
    if failed and not (log.exists() and parse(log).status == mllog.SUCCESS):
        ledger.end(folder, trial.index, Outcome.aborted, **content(log))
        return None
    judged = judge(log, plan, trial)
    outcome = Outcome.proven if judged.proven else Outcome.not_proven
    ledger.end(folder, trial.index, outcome, **facts(judged), **content(log))
    return judged


def require_own(folder: Path, trial: Trial) -> None:
    """Raise LogError if a trial's log is not the one that its last attempt wrote."""
    if found := foreign(folder, trial):
        raise _refused(found)


def _refused(found: Finding) -> LogError:
    return LogError(found.what, where=found.where, fix=found.fix, rule=found.rule)


def settle(folder: Path, plan: Plan, trial: Trial) -> None:
    """Enter a trial whose log says that it ended well, if its job was cut short before it could enter it."""
    log = folder / trial.log
    if ledger.read(folder)[trial.index].outcome is not Outcome.running:
        return
    if found := foreign(folder, trial):
        ledger.end(folder, trial.index, Outcome.interrupted, cause=found.titled)
    elif log.exists() and parse(log).status == mllog.SUCCESS:
        close(folder, plan, trial, failed=False)


def content(log: Path) -> dict[str, Any]:
    """Return what the ledger keeps of the file itself; nothing where there is none."""
    if not log.exists():
        return {}
    kept = atomic_files.of(log)
    return {"log_sha256": kept.sha256, "log_bytes": kept.bytes}


def facts(judged: Judged) -> dict[str, Any]:
    """Return what the ledger keeps of a finished trial beside its outcome."""
    return {
        "minutes": judged.result.minutes,
        "samples_to_target": judged.result.samples_to_target,
        "eval_final": judged.result.eval_final,
        "official": {verdict.ruleset: verdict.passed for verdict in judged.verdicts},
        "not_as_planned": judged.not_as_planned
        + (judged.kernels.problems if judged.kernels else [])
        + (judged.serving.problems if judged.serving else []),
    }
