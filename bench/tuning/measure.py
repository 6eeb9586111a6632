"""Measure the best settings of the ranking in blocks: as a study, whose runs are started as every other run."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from bench import backends
from bench.backends.protocol import Queue, SharesNodes
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError, LogError
from bench.planning import compose, make_plan
from bench.planning.checks import training
from bench.prediction import candidates, uncertainty
from bench.results.comparison import t_interval
from bench.results.tuning import Candidate, Outcome, Tried, Tuning
from bench.runs.folder import short
from bench.studies import folder as folders
from bench.studies import measured, session
from bench.studies.run_missing import run_missing
from bench.studies.session import RunStatuses, Session, State
from bench.studies.spec import Arm, ColumnSpec, Jobs, Study, Window
from bench.texts import counted
from bench.tuning import proof
from bench.tuning.decide import MARGIN, Decision, confidence, decide

SKIPPED_STEPS = 5
"""Steps at the start of each run that are not measured."""
CONFIDENCE = 0.95
"""Of the interval of the mean step of one setting."""
FAILED = (State.failed, State.out_of_memory, State.invalid)
"""A run in one of these states takes its settings out."""
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a call of `runstop tune` measures."""

    overrides: tuple[str, ...]
    config_dir: Path | None = None
    best: int = 4
    """How many of the best settings are measured."""
    blocks: int = 6
    """The most runs of each."""
    steps: int = 20
    """Measured steps of a run."""
    budget_min: float | None = None
    """Minutes after which this call starts no further block; None: no limit."""

    @property
    def arguments(self) -> list[str]:
        """The arguments that repeat the request."""
        usual = Request(overrides=())
        options: dict[str, tuple[object, object]] = {
            "--best": (self.best, usual.best),
            "--blocks": (self.blocks, usual.blocks),
            "--steps": (self.steps, usual.steps),
            "--budget": (self.budget_min, usual.budget_min),
            "--config-dir": (self.config_dir, usual.config_dir),
        }
        given = ((name, value) for name, (value, default) in options.items() if value != default)
        return [*self.overrides, *(text for name, value in given for text in (name, f"{value}"))]

    @property
    def keys(self) -> list[str]:
        """The keys that the user has set."""
        return [compose.override_key(override) for override in self.overrides]


def dry_run(request: Request) -> Tuning:
    """Return the ranking; nothing is written or started.

    Raises:
        ConfigError: the request is wrong, or no settings fit.
    """
    config, ranked = _ranking(request)
    return replace(_unmeasured(request, config, ranked), stopped_by="--dry-run starts nothing")


def tune(request: Request, *, say: Say, clock: Callable[[], float] = time.monotonic) -> Tuning:
    """Measure the best settings until one is fastest; write the proof and its overrides into the folder of the runs.

    Raises:
        ConfigError: the request is wrong, no settings fit, or another process tunes the same task.
        BenchError: no run has a result.
    """
    config, ranked = _ranking(request)
    chosen, ready = _chosen(request, config, ranked)
    say(f"{counted(len(ranked), 'candidate')} fit; the best {len(chosen)} are measured, in {short(ready.folder)}")
    stopped_by, known = _measure(request, chosen, ready, say=say, clock=clock)
    unmeasured = replace(_unmeasured(request, config, ranked), folder=str(ready.folder), stopped_by=stopped_by)
    tuning = _result(request, unmeasured, chosen, known)
    if not tuning.best:
        failed = "; ".join(f"{one.candidate.name}: {one.reason or one.outcome}" for one in tuning.tried)
        raise BenchError(
            f"no run has a result, so runstop cannot choose the best settings: {failed}",
            where=short(ready.folder),
            fix=f"run `runstop why {short(ready.folder)}/RUN` to find the cause, then run the same command again",
        )
    return proof.write(tuning, request.overrides)


def _unmeasured(request: Request, config: Config, ranked: Sequence[Candidate]) -> Tuning:
    """Return the ranking as a result without measurements."""
    return Tuning(
        task=config.task.name,
        cluster=config.cluster.name,
        folder="",
        num_candidates=len(ranked),
        tried=tuple(Tried(candidate=one, outcome=Outcome.not_measured) for one in ranked),
        estimated_by=_estimated_by(ranked),
        steps=request.steps,
        command=proof.command(request.arguments),
    )


def _ranking(request: Request) -> tuple[Config, list[Candidate]]:
    """Return the task's config, and its settings in the order of the model."""
    for override in request.overrides:
        if (key := compose.override_key(override)) in OF_TUNE:
            what = f"you cannot set {key}, because tune sets this key for each run"
            raise ConfigError(what, where=override, fix=f"remove {override}{OF_TUNE[key]}")
    whole = compose.unplanned(request.overrides, config_dir=request.config_dir)
    _check(whole)
    overrides = [*_of_speed(request, whole), *request.overrides]
    config = compose.as_planned(compose.unplanned(overrides, config_dir=request.config_dir))
    make_plan.check(replace(config, walltime=config.walltime or 1))
    return config, candidates.ranked(config, fixed=request.keys)


OF_TUNE = {
    "trials": "; --blocks sets the number of runs",
    "launch.folder": "",
    "launch.array": "",
    "launch.dry_run": "; write --dry-run instead",
}
"""Overrides that a user cannot set, with what to do instead."""


def _of_speed(request: Request, config: Config) -> list[str]:
    """Return the overrides of short runs that only measure speed, without those that the user has set."""
    size, rows = config.training_recipe.global_batch_size, config.training_data.num_train_rows
    every = min(size * (SKIPPED_STEPS + request.steps), rows // size * size)
    own = {"model.weights": "random", "launch.health": "false", "recipe.lr_warmup_steps": "0"}
    own |= {"recipe.eval_every_samples": str(max(every, 1))}
    own |= {"data.eval_rows": str(min(config.training_data.eval_rows, size))}
    return [f"{key}={value}" for key, value in own.items() if key not in request.keys]


def _check(config: Config) -> None:
    """Raise ConfigError if the task has no settings to tune."""
    training.require_megatron(config, "tune")
    if config.parallel.groups is not None:
        what = "tune does not support local SGD, because its groups do not do the same work as a single group"
        raise ConfigError(what, where="parallel.groups", fix="remove parallel.groups, or choose another task")


def _study(request: Request, config: Config, chosen: Sequence[Candidate], *, runs: int) -> Study:
    is_shared = isinstance(backends.get(config.cluster.backend), SharesNodes)
    is_queue = isinstance(backends.get(config.cluster.backend), Queue)
    return Study(
        title=f"Settings of {config.task.name} on {config.cluster.name}",
        question="Which settings of the same work have the shortest step?",
        source="ours; runstop tune",
        overrides=tuple(_of_speed(request, config)),
        arms={one.name: Arm(labels={"rank": str(one.rank)}, overrides=one.overrides) for one in chosen},
        runs=runs,
        jobs=Jobs.shared if is_shared else Jobs.sequential if is_queue else None,
        margin=MARGIN,
        window=Window(skip_steps=SKIPPED_STEPS, steps=request.steps),
        columns=(
            ColumnSpec(measurement="estimated_step_time", title="step, estimated", unit="ms", higher_is_better=False),
            ColumnSpec(measurement="step_time", title="step", unit="ms", higher_is_better=False, interval=True),
            ColumnSpec(measurement="throughput", title="throughput", unit="samples/s", higher_is_better=True),
            ColumnSpec(measurement="peak_memory", title="peak memory", unit="GiB", higher_is_better=False),
        ),
    )


def _chosen(request: Request, config: Config, ranked: Sequence[Candidate]) -> tuple[list[Candidate], Session]:
    """Return the best settings that can be planned, and the session of their study; others are left out.

    Raises:
        ConfigError: none can be planned.
    """
    chosen: list[Candidate] = []
    rest, reason = list(ranked), ""
    while rest and len(chosen) < request.best:
        some, rest = rest[: request.best - len(chosen)], rest[request.best - len(chosen) :]
        ready = _session(request, config, some, runs=1)
        if not chosen and all(planned.runs for planned in ready.planned):
            return some, ready
        for one, planned in zip(some, ready.planned, strict=True):
            reason = planned.reason or reason
            chosen += [one] if planned.runs else []
    if not chosen:
        raise ConfigError(
            f"no setting of this task can be planned; why the last setting cannot be planned: {reason}",
            where="cluster, task",
            fix="run `runstop plan` with the same task and cluster, and correct the config until this command succeeds",
        )
    return chosen, _session(request, config, chosen, runs=1)


def _session(request: Request, config: Config, chosen: Sequence[Candidate], *, runs: int) -> Session:
    name = f"tune-{config.task.name}-{_checksum(request)}"
    study = _study(request, config, chosen, runs=runs)
    waits = [session.WAIT + "=true"]
    overrides = [*(one for one in request.overrides if compose.override_key(one) != session.WAIT), *waits]
    return session.of_study(study, name, overrides, config_dir=request.config_dir, tune=request.arguments)


def _checksum(request: Request) -> str:
    """Return a checksum of all that changes the work or the measured steps: other work has another folder."""
    of_work = sorted(one for one in request.overrides if compose.override_key(one) not in folders.NEUTRAL)
    return hashlib.sha256("\n".join([*of_work, str(request.steps)]).encode()).hexdigest()[:6]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """All runs so far, and what they say."""

    statuses: RunStatuses
    values: Mapping[str, Mapping[int, float]]
    """The median step in ms, by settings and block."""
    decision: Decision


def _measure(
    request: Request, chosen: Sequence[Candidate], ready: Session, *, say: Say, clock: Callable[[], float]
) -> tuple[str, _Known]:
    """Run block after block; return why no further one starts, and what is known then."""
    began, longest_s, names = clock(), 0.0, [one.name for one in chosen]
    known = _known(request, names, ready)
    decision, alive = known.decision, known.decision.alive
    if not alive:  # every one failed in an earlier call: try again
        decision, alive = replace(decision, num_blocks=0), names
    while True:
        if decision.is_final or not alive:
            return "the intervals are separate", known
        if decision.num_blocks == request.blocks:
            return f"each has {counted(request.blocks, 'run')}, the most that --blocks allows", known
        spent_s = clock() - began
        if request.budget_min is not None and spent_s + longest_s > 60 * request.budget_min:
            return f"another block would exceed the budget of {request.budget_min:g} minutes", known
        block, block_began = decision.num_blocks + 1, clock()
        say(f"block {block}: {', '.join(alive)}")
        run_missing(replace(_with_runs(ready, block), left_out=frozenset(names) - set(alive)))
        longest_s = max(longest_s, clock() - block_began)
        before, known = (decision.num_blocks, alive), _known(request, names, ready)
        decision, alive = known.decision, known.decision.alive
        if (decision.num_blocks, alive) == before:
            return "runs of this block have no result", known


def _with_runs(ready: Session, runs: int) -> Session:
    """Return the session with another number of blocks."""
    study = msgspec.structs.replace(ready.request.study, runs=runs)
    stored = msgspec.structs.replace(ready.stored, study=study)
    return replace(ready, request=replace(ready.request, study=study), stored=stored)


def _known(request: Request, names: Sequence[str], ready: Session) -> _Known:
    every = _with_runs(ready, request.blocks)
    statuses = every.statuses(must_query=False)
    values, failed = _values(every, statuses)
    decision = decide(names, values, failed=failed, max_blocks=request.blocks)
    return _Known(statuses=statuses, values=values, decision=decision)


def _values(ready: Session, statuses: RunStatuses) -> tuple[dict[str, dict[int, float]], dict[str, int]]:
    """Return the median step in ms by settings and block, and by settings the first block in which it failed."""
    values: dict[str, dict[int, float]] = {arm.name: {} for arm in ready.planned}
    failed: dict[str, int] = {}
    for (name, block), run in sorted(statuses.runs.items(), key=lambda item: item[0][1]):
        if run.state is State.valid:
            try:
                of_run = measured.of_run(run.folder, run.name.arm, window=ready.request.study.window)
                values[name][block] = of_run.numbers["step_time"].value
                continue
            except LogError:
                pass
        elif run.state not in FAILED:
            continue
        failed.setdefault(name, block)
    return values, failed


def _result(request: Request, unmeasured: Tuning, chosen: Sequence[Candidate], known: _Known) -> Tuning:
    decision, (commit, hardware) = known.decision, _facts(known.statuses)
    is_spent = decision.num_blocks == request.blocks and not decision.is_final
    further = replace(request, blocks=2 * request.blocks) if is_spent else request
    return replace(
        unmeasured,
        tried=tuple(_tried(one, known, request.blocks) for one in chosen),
        best=decision.best,
        is_decided=decision.is_final,
        num_blocks=decision.num_blocks,
        margin=MARGIN,
        confidence=confidence(len(chosen), request.blocks),
        command=proof.command(further.arguments),
        commit=commit,
        hardware=hardware,
    )


def _tried(candidate: Candidate, known: _Known, blocks: int) -> Tried:
    judged, values = known.decision.judged[candidate.name], known.values[candidate.name]
    of_block = [values[block] for block in sorted(values)]
    low = high = None
    if len(of_block) > 1:
        ends = t_interval(np.log(np.asarray(of_block)), confidence=CONFIDENCE)
        low, high = (math.exp(end) for end in (ends[0], ends[2]))
    comparison = judged.comparison
    percents: tuple[float | None, ...] = (None,) * 3
    if comparison is not None and comparison.ratio is not None:
        assert comparison.low is not None and comparison.high is not None
        percents = tuple(100 * (one - 1) for one in (comparison.ratio, comparison.low, comparison.high))
    runs = [known.statuses.runs[candidate.name, block] for block in range(blocks)]
    reasons = [run.reason for run in runs if run.state in FAILED]
    return Tried(
        candidate=candidate,
        outcome=judged.outcome,
        values_ms=tuple(of_block),
        median_ms=median(of_block) if of_block else None,
        low_ms=low,
        high_ms=high,
        slower_percent=percents[0],
        slower_low=percents[1],
        slower_high=percents[2],
        than=comparison.names[1] if comparison else "",
        reason=reasons[0] if judged.outcome is Outcome.failed and reasons else "",
        runs=tuple(run.folder.name for run in runs if run.folder.exists()),
    )


def _facts(statuses: RunStatuses) -> tuple[str, str]:
    """Return the commit and the hardware of the first valid run."""
    for run in statuses.in_state(State.valid):
        facts = measured.of_run(run.folder, run.name.arm, window=None).facts
        return facts.get("commit", ""), facts.get("accelerator") or facts.get("host processor model name", "")
    return "", ""


def _estimated_by(ranked: Sequence[Candidate]) -> str:
    if ranked[0].step_ms is None:
        return "no step is estimated, because this device has no measured rates: simpler settings come first"
    errors, waiting = (uncertainty.of_runstop(waits_for_host=waits) for waits in (False, True))
    return (
        f"{errors.num_rows} {errors.rows}, {errors.low:.2f} to {errors.high:.2f} of the estimate "
        f"({waiting.low:.2f} to {waiting.high:.2f} if the step waits for the host)"
    )
