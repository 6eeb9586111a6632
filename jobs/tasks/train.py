"""Run one trial, once per rank: `python -m jobs.tasks.train PLAN --trial K`. It reads the plan and writes the log."""

import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import codec, mllog, run_files
from bench.contract import plan as plans
from bench.contract.groups import of_group
from bench.contract.plan import Plan, Trial
from jobs import profiles
from jobs.engines import Apart, Engine, WarmUpTimes, engine_of
from jobs.ranks import groups, process_group, program, timing, transport
from jobs.ranks.identity import Rank
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import EVALUATION, LOADING, MERGING, SAVING, TRAINING, Alive, Watchdog, nobody_asks
from jobs.tasks.checkpoints import Checkpoints
from jobs.tasks.describe import describe

if TYPE_CHECKING:
    from jobs.data.rows import Rows


Saving = Checkpoints | None
"""None where nothing is saved."""


def main() -> None:
    with program.begun("jobs.tasks.train", __doc__, plans.required_training) as begun:
        run(begun.plan, begun.trial, begun.who, begun.log, begun.folder, watchdog=begun.watchdog())


def run(
    plan: Plan, trial: Trial, who: Rank, log: mllog.Writer, folder: Path, *, watchdog: Watchdog | None = None
) -> None:
    """Initialise, warm up on synthetic rows, train from run_start to run_stop, then save the adapters."""
    log_caches(folder / run_files.caches(trial.index), log)
    log.start(mllog.INIT_START)
    module = engine_of(plan)
    module.start_ranks(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it asks git
        describe(plan, trial, module.versions(), log)
    engine = module.build(of_group(plan), trial.seed)
    if plan.base_dir is not None:
        engine.load(Path(plan.base_dir), adapters=False)
    profile = profiles.of_trial(plan, trial.index, folder)
    usual = engine.warm_up(plan.config.recipe.warmup_iterations, trial.seed, profile=profile)
    if watchdog is not None and usual is not None:
        expect(watchdog, usual, plan)
    transport.log_used(plan, who, folder, log)
    log_facts(plan, engine, log)
    if profile is not None:
        profiles.log_files(profile, log)
    own = groups.mine()
    apart = None if own is None else module.apart(engine, plan, own)
    saving = None
    if plan.config.training.checkpoint_every_steps is not None:
        saving = Checkpoints(plan, trial, engine, folder, log, rank=who.rank)
        step = saving.resume()
        if apart is not None:
            apart.begin(step)
    timing.settle()
    timing.forget_memory(plans.gpus_per_rank(plan.config))
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    train(plan, engine, trial, log, watchdog.alive if watchdog else nobody_asks, saving, apart)
    timing.log_memory(plan, log)
    telemetry.log(log)
    if saving is not None:
        saving.finish()
    if plans.keeps_adapters(plan.config) and groups.number() == 0:
        engine.save(folder / run_files.adapters(trial.index), adapters=True)
    module.end_ranks()


def log_facts(plan: Plan, engine: Engine, log: mllog.Writer) -> None:
    """Log how this run trains, as its plan says and as the warm-up has shown."""
    if (local_sgd := plan.config.recipe.local_sgd) is not None:
        log.event(mllog.LOCAL_SGD, plan.world.groups, group=0, **codec.plain(local_sgd))
    for key, value, metadata in engine.facts():
        log.event(key, value, **metadata)


def expect(watchdog: Watchdog, usual: WarmUpTimes, plan: Plan) -> None:
    """Tell the watchdog what the warm-up says of a step and of an evaluation, and let torch wait for longer than it."""
    num_batches = math.ceil(plan.config.data.eval_rows / plan.batch.global_batch_size)
    process_group.outlast(watchdog.expect(step_s=usual.step_s, eval_s=num_batches * usual.eval_batch_s))


def log_caches(record: Path, log: mllog.Writer) -> None:
    """Log what each node did with its page cache; the batch script's record has `NODE cleared` or `NODE kept`."""
    if not record.exists():
        log.event(mllog.CACHE_CLEAR, False, reason="only the cluster can drop page caches")
        return
    for line in record.read_text().splitlines():
        node, _, outcome = line.partition(" ")
        log.event(mllog.CACHE_CLEAR, outcome == "cleared", node=node)


def train(
    plan: Plan,
    engine: Engine,
    trial: Trial,
    log: mllog.Writer,
    alive: Alive = nobody_asks,
    saving: Saving = None,
    apart: Apart | None = None,
) -> None:
    """Train until the target or the last step, and log run_stop. No row is read before this is called.

    `alive` is told how far this rank is; `saving` knows how many steps an earlier attempt has made.

    Raises:
        BenchError: the loss is not a finite number.
    """
    from jobs.data import rows as rows_of

    done = saving.done if saving else 0
    alive(LOADING, done, None)
    train_rows, eval_rows = rows_of.load(plan, "train"), rows_of.load(plan, "eval")
    done = apart.enter(done) if apart is not None else done
    order = itertools.islice(rows_of.train_order(plan, trial.seed), done, None)
    pace = begin(plan, log, done, alive)
    for step in range(done + 1, plan.max_steps + 1):
        indices = next(order)
        share = engine.train_step(train_rows, apart.mine(indices) if apart else indices, step)
        is_saved = saving is not None and saving.is_due(step)
        if apart is not None and apart.is_due(step, is_saved=is_saved):
            merge(plan, apart, share, step, log, alive, is_saved=is_saved)
        alive(TRAINING, step, pace.stepped(rows_of.real_tokens(train_rows, indices)))
        if step % plan.config.recipe.log_every_steps == 0 or step == plan.max_steps:
            pace.log(step, engine.mean_loss(share))
        if not (is_saved or step in plan.evaluation.at_steps or step == plan.max_steps):
            continue
        log.stop(mllog.BLOCK_STOP, **place(plan, step))
        if step in plan.evaluation.at_steps and reaches_target(plan, engine, eval_rows, step, log, alive):
            log.finish("success", **place(plan, step))
            break
        if saving is not None and is_saved:
            save(plan, saving, step, log, alive)
        if step < plan.max_steps:
            log.start(mllog.BLOCK_START, **place(plan, step))
            pace.restart(step)
    else:
        log.finish("success" if plan.config.training.target_eval_loss is None else "aborted", **place(plan, step))
    alive(SAVING, step, None)
    if saving is not None:
        saving.save(step)


def begin(plan: Plan, log: mllog.Writer, done: int, alive: Alive) -> timing.Pace:
    """Log that training begins, or goes on after some steps, and return what measures its pace."""
    if done:
        log.event(mllog.RESUMED, done, **place(plan, done))
    pace = timing.Pace(plan, log, done)
    log.start(mllog.BLOCK_START, **place(plan, done))
    alive(TRAINING, done, None)
    return pace


def merge(
    plan: Plan, apart: Apart, share: object, step: int, log: mllog.Writer, alive: Alive, *, is_saved: bool
) -> None:
    """Merge this rank's group with the others after a step, or end a merge, and log it."""
    alive(MERGING, step, None)
    for key, value, metadata in apart.after(step, share, is_saved=is_saved):
        log.event(key, value, **place(plan, step), **metadata)
    alive(TRAINING, step, None)


def reaches_target(plan: Plan, engine: Engine, rows: "Rows", step: int, log: mllog.Writer, alive: Alive) -> bool:
    """Evaluate after a step; return whether the loss is at or below the target, if there is one."""
    target = plan.config.training.target_eval_loss
    alive(EVALUATION, step, None)
    loss = evaluate(plan, engine, rows, step, log)
    alive(TRAINING, step, None)
    return target is not None and loss <= target


def save(plan: Plan, saving: Checkpoints, step: int, log: mllog.Writer, alive: Alive) -> None:
    """Begin to save the training state after a step, and log for how long nothing was trained."""
    alive(SAVING, step, None)
    since_s = time.perf_counter()
    saving.save(step)
    log.event(mllog.CHECKPOINT, time.perf_counter() - since_s, **place(plan, step))
    alive(TRAINING, step, None)


def evaluate(plan: Plan, engine: Engine, rows: "Rows", step: int, log: mllog.Writer) -> float:
    """Return the evaluation loss after a step, and log it.

    Raises:
        BenchError: the loss is not a finite number.
    """
    log.start(mllog.EVAL_START, **place(plan, step))
    return log_evaluation(plan, engine.evaluate(rows), step, log)


def log_evaluation(plan: Plan, loss: float, step: int, log: mllog.Writer) -> float:
    """Log the loss of an evaluation after a step, and that it is over; return the loss.

    Raises:
        BenchError: the loss is not a finite number.
    """
    at = place(plan, step)
    epochs = at["samples_count"] / plan.config.data.train_rows  # ruleset 5.1.0's open division asks for it
    log.event(mllog.EVAL_ACCURACY, timing.finite(loss, "evaluation", step), **at, epoch_num=epochs)
    log.stop(mllog.EVAL_STOP, **at)
    return loss


def place(plan: Plan, step: int) -> dict[str, int]:
    """Return the metadata by which the log says how far a trial is."""
    return {"samples_count": plans.samples(plan, step), "step": step}


if __name__ == "__main__":
    main()
