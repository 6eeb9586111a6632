"""Run one trial, once per rank: `python -m jobs.tasks.train PLAN --trial K`. It reads the plan and writes the log."""

import itertools
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bench.contract import checksums, codec, mllog, run_files
from bench.contract import plan as plans
from bench.contract.groups import of_group
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from jobs import profiles
from jobs.engines import Engine, EngineModule, LocalSgdEngine, WarmUpTimes, engine_of
from jobs.local_sgd import groups
from jobs.profiles import nsys
from jobs.ranks import process_group, program, rank_times, timing, transport
from jobs.ranks.program import Begun
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import AVERAGING, EVALUATION, LOADING, SAVING, TRAINING, Alive, Watchdog, ignore_progress
from jobs.tasks import inputs
from jobs.tasks.checkpoints import Checkpoints
from jobs.tasks.describe import describe, log_caches

if TYPE_CHECKING:
    from jobs.data.rows import Rows
from bench.contract import plan_kinds


@dataclass(frozen=True, slots=True)
class Loop:
    """What the training loop of one rank needs."""

    plan: TrainingPlan
    engine: Engine
    trial: Trial
    log: mllog.Writer
    alive: Alive = ignore_progress
    """Called with the progress of this rank."""
    saving: Checkpoints | None = None
    """Its `done` is the number of steps that an earlier attempt completed; None without checkpoints."""
    local_sgd: LocalSgdEngine | None = None
    """None without local SGD."""
    times: rank_times.RankTimes = field(default_factory=rank_times.RankTimes)
    """Finds slow ranks; by default nothing is measured."""


def main() -> None:
    nsys.restart(sys.argv[1:])
    with program.begun("jobs.tasks.train", __doc__, TrainingPlan) as begun:
        run(begun, begun.watchdog())


def run(begun: Begun[TrainingPlan], watchdog: Watchdog | None = None) -> None:
    """Initialise, warm up on synthetic rows, train from run_start to run_stop, then save the adapters."""
    plan, trial, who, log, folder = begun.plan, begun.trial, begun.who, begun.log, begun.folder
    capture = nsys.capture(plan)  # refuses a missing nsys before anything is measured
    log_caches(folder / run_files.caches(trial.index), log)
    log.start(mllog.INIT_START)
    module = engine_of(plan)
    module.start_ranks(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it runs git
        describe(plan, trial, module.versions(), log)
    loop = ready(begun, module, watchdog)
    timing.settle()
    timing.forget_memory(plans.gpus_per_rank(plan.config))
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    train(loop, capture)
    timing.log_memory(plan, log)
    telemetry.log(log)
    loop.times.finish()
    if loop.saving is not None:
        loop.saving.finish()
    if plans.keeps_adapters(plan.config) and groups.number() == 0:
        adapters = folder / run_files.adapters(trial.index)
        loop.engine.save(adapters, adapters=True)
        if begun.who.rank == 0:
            log.attach(adapters / checksums.MANIFEST)
    del loop  # the engine holds process groups
    module.end_ranks()


def ready(begun: Begun[TrainingPlan], module: EngineModule, watchdog: Watchdog | None) -> Loop:
    """Return the loop of a trial, after loading weights, warming up, and loading the state of an earlier attempt."""
    plan, trial, log = begun.plan, begun.trial, begun.log
    weights = inputs.check_weights(plan, log, begun.who)
    engine = module.build(of_group(plan), trial.seed)
    if plan.base_dir is not None:
        engine.load(Path(plan.base_dir), adapters=False)
    warm_up(begun, engine, watchdog)
    if weights is not None:  # after the warm-up: an engine may read them only then
        weights.require_unchanged()
    own_group = groups.current()
    local_sgd = None if own_group is None else module.local_sgd(engine, plan, own_group)
    saving = None
    if plan.config.training.checkpoint_every_steps is not None:
        saving = Checkpoints(plan, trial, engine, begun.folder, log, rank=begun.who.rank)
        step = saving.resume()
        if local_sgd is not None:
            local_sgd.begin(step)
    alive = watchdog.alive if watchdog else ignore_progress
    times = rank_times.of_trial(plan, begun.who, log, begun.folder, trial.index)
    return Loop(plan, engine, trial, log, alive, saving, local_sgd, times)


def warm_up(begun: Begun[TrainingPlan], engine: Engine, watchdog: Watchdog | None) -> None:
    """Warm up on synthetic rows, and log the facts that the warm-up determines."""
    plan, trial, log = begun.plan, begun.trial, begun.log
    profile = profiles.for_trial(plan, trial.index, begun.folder)
    usual = engine.warm_up(plan.config.training_recipe.warmup_iterations, trial.seed, profile=profile)
    if watchdog is not None and usual is not None:
        expect(watchdog, usual, plan)
    transport.log_used(plan, begun.who, begun.folder, log)
    log_facts(plan, engine, log)
    if profile is not None:
        profiles.log_files(profile, log)


def log_facts(plan: TrainingPlan, engine: Engine, log: mllog.Writer) -> None:
    """Log the local SGD settings and the facts of the engine."""
    if (local_sgd := plan.config.training_recipe.averaging) is not None:
        log.event(mllog.LOCAL_SGD, plan.world.groups, group=0, **codec.plain(local_sgd))
    for key, value, metadata in engine.facts():
        log.event(key, value, **metadata)


def expect(watchdog: Watchdog, usual: WarmUpTimes, plan: TrainingPlan) -> None:
    """Set the watchdog's limits from the times of the warm-up, and raise torch's time-outs above them."""
    num_batches = math.ceil(plan.config.training_data.eval_rows / of_group(plan).batch.global_batch_size)
    process_group.outlast(watchdog.expect(step_s=usual.step_s, eval_s=num_batches * usual.eval_batch_s))


def train(loop: Loop, capture: nsys.Capture = nsys.NOTHING) -> None:
    """Train until the target or the last step, and log run_stop. Rows are read here and not earlier.

    capture: the steps that Nsight Systems records.

    Raises:
        BenchError: the loss is not a finite number.
    """
    from jobs.data import rows as rows_of

    plan, log, done = loop.plan, loop.log, loop.saving.done if loop.saving else 0
    loop.alive(LOADING, done, None)
    train_rows, eval_rows = inputs.open_rows(plan, log, seed=loop.trial.seed)
    done = loop.local_sgd.rejoin(done) if loop.local_sgd is not None else done
    order = itertools.islice(rows_of.train_order(plan, loop.trial.seed), done, None)
    pace = begin(plan, log, done, loop.alive, cost=loop.saving.restart_cost() if loop.saving and done else None)
    loop.times.begin(pace.end)
    step = done
    for step in range(done + 1, plan.max_steps + 1):
        indices = next(order)
        own = loop.local_sgd.group_rows(indices) if loop.local_sgd else indices
        capture.before(step)
        loss_share = loop.engine.train_step(train_rows, own, step)
        capture.after(step)
        is_saved = loop.saving is not None and loop.saving.is_due(step)
        average_weights(loop, loss_share, step, is_saved=is_saved)
        loop.times.stepped(end := pace.stepped(rows_of.real_tokens(train_rows, indices)))
        loop.alive(TRAINING, step, end)
        if step % plan.config.training_recipe.log_every_steps == 0 or step == plan.max_steps:
            pace.log(step, loop.engine.mean_loss(loss_share))
            loop.times.exchange(step)
        is_last, must_end = step == plan.max_steps, loop.times.must_end
        if not (is_saved or step in plan.evaluation.at_steps or is_last or must_end):
            continue
        log.stop(mllog.BLOCK_STOP, **place(plan, step))
        if step in plan.evaluation.at_steps and reaches_target(loop, eval_rows, step):
            log.finish("success", **place(plan, step))
            break
        if must_end and not is_last:
            end_for_replacement(loop, step)
        if is_saved:
            save(loop, step)
        if not is_last:
            log.start(mllog.BLOCK_START, **place(plan, step))
            pace.restart(step)
            loop.times.begin(pace.end)
    else:
        log.finish("aborted" if plan.config.training.has_target else "success", **place(plan, step))
    loop.alive(SAVING, step, None)
    if loop.saving is not None:
        loop.saving.save(step)


def begin(
    plan: TrainingPlan, log: mllog.Writer, done: int, alive: Alive, *, cost: dict[str, Any] | None = None
) -> timing.Pace:
    """Log the start of training, or that it resumes after some steps; return the Pace that times it.

    cost: of the restart, for the log.
    """
    if done:
        log.event(mllog.RESUMED, done, **place(plan, done), **(cost or {}))
    pace = timing.Pace(plan, log, done)
    log.start(mllog.BLOCK_START, **place(plan, done))
    alive(TRAINING, done, None)
    return pace


def average_weights(loop: Loop, loss_share: object, step: int, *, is_saved: bool) -> None:
    """With local SGD: start or end the weight averaging that is due after a step, and log it."""
    if loop.local_sgd is None or not loop.local_sgd.is_due(step, is_saved=is_saved):
        return
    loop.alive(AVERAGING, step, None)
    for key, value, metadata in loop.local_sgd.average(step, loss_share, is_saved=is_saved):
        loop.log.event(key, value, **place(loop.plan, step), **metadata)
    loop.alive(TRAINING, step, None)


def reaches_target(loop: Loop, rows: "Rows", step: int) -> bool:
    """Evaluate after a step; return whether the loss is at or below the target, if there is one.

    Raises:
        BenchError: the loss is not a finite number.
    """
    loop.alive(EVALUATION, step, None)
    loop.log.start(mllog.EVAL_START, **place(loop.plan, step))
    with loop.times.evaluating():
        loss = loop.engine.evaluate(rows)
    loss = log_evaluation(loop.plan, loss, step, loop.log)
    loop.alive(TRAINING, step, None)
    return loop.plan.config.training.is_reached_by(loss)


def save(loop: Loop, step: int) -> None:
    """Start saving the training state after a step, and log the seconds without training."""
    assert loop.saving is not None
    loop.alive(SAVING, step, None)
    since_s = time.perf_counter()
    loop.saving.save(step)
    loop.log.event(mllog.CHECKPOINT, time.perf_counter() - since_s, **place(loop.plan, step))
    loop.alive(TRAINING, step, None)


def end_for_replacement(loop: Loop, step: int) -> NoReturn:
    """End this attempt after a step, so that the next one uses a spare node; all ranks call this together.

    The state is saved before, unless repeating the steps since the last checkpoint takes less time.

    Raises:
        BenchError: always; rank 0 names the slow node.
    """
    slow = loop.times.to_replace
    assert loop.saving is not None, "else no node is replaced"
    if loop.saving.is_worth_saving(step, step_s=slow.own_s if slow else 0.0):
        save(loop, step)
    loop.saving.finish()
    loop.times.end_attempt()


def log_evaluation(plan: TrainingPlan, loss: float, step: int, log: mllog.Writer) -> float:
    """Log the loss and the end of an evaluation after a step; return the loss.

    Raises:
        BenchError: the loss is not a finite number.
    """
    at = place(plan, step)
    epochs = (
        at["samples_count"] / plan.config.training_data.num_train_rows
    )  # required by the open division of ruleset 5.1.0
    log.event(mllog.EVAL_ACCURACY, timing.finite(loss, "evaluation", step), **at, epoch_num=epochs)
    log.stop(mllog.EVAL_STOP, **at)
    return loss


def place(plan: TrainingPlan, step: int) -> dict[str, int]:
    """Return the metadata for the progress of a trial."""
    return {"samples_count": plan_kinds.samples(plan, step), "step": step}


if __name__ == "__main__":
    main()
