"""Prepare the data and the base checkpoint, not timed, once per rank: `python -m jobs.tasks.prepare PLAN`.

Existing data is not changed. A folder gets its final name when it is complete, so that two runs may prepare at the same
time, and an interrupted run leaves no folder that looks complete.
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contract import checksums, mllog, plan_kinds, run_files
from bench.contract.atomic_files import atomic_folder
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import DataSource
from bench.errors import ConfigError
from jobs.data.prepare_rows import locked_folder
from jobs.engines import engine_of
from jobs.ranks import process_group
from jobs.ranks.guard import guarded
from jobs.ranks.identity import Rank, from_environment
from jobs.tasks.describe import describe
from jobs.tasks.train import Loop, train

_LOG = logging.getLogger(__name__)
TOKENIZE_TIMEOUT_S = 6 * 3600.0
"""Ranks that wait while rank 0 tokenises files time out after process_group.SLOWER times as long."""
EVAL_SEED_OFFSET = 1_000_003
"""Added to the seed for the evaluation rows."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.tasks.prepare", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder")
    args = parser.parse_args()
    folder = args.plan.resolve().parent
    who = from_environment()
    with guarded(folder / run_files.rank_error(f"prepare{run_files.array_task()}", who.rank)) as guard:
        plan = plan_kinds.required(plan_kinds.load(args.plan), TrainingPlan)
        path = folder / run_files.prepare_log(run_files.array_task())
        if who.rank == 0:
            path.unlink(missing_ok=True)  # from an interrupted attempt; nothing reads it
        log = mllog.Writer(path if who.rank == 0 else None)
        guard.finish = log.abort
        log.event(mllog.CACHE_CLEAR, False, reason="not timed")
        log.start(mllog.INIT_START)
        _show_progress(who)
        with started(plan, who), cache_locked(plan, who):
            prepare(plan, who, log)


@contextmanager
def started(plan: TrainingPlan, who: Rank) -> Iterator[None]:
    """Join the groups of the engine that trains the base; without a base, a process group that waits for the rows."""
    if plan.base is None:
        process_group.join(plan, who)
        yield
        process_group.shut_down()
        return
    module = engine_of(plan.base)
    module.start_ranks(plan.base, who)
    yield
    module.end_ranks()


def _show_progress(who: Rank) -> None:
    """Print progress lines of the package jobs on rank 0."""
    if who.rank == 0:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("jobs").addHandler(handler)
        logging.getLogger("jobs").setLevel(logging.INFO)


def prepare(plan: TrainingPlan, who: Rank, log: mllog.Writer) -> None:
    """Create what is missing: rank 0 the rows, then all ranks the base checkpoint."""
    if plan.config.training_data.source.reads_files:
        process_group.outlast(TOKENIZE_TIMEOUT_S)
    if who.rank == 0:
        for needed in (plan, plan.base):
            if needed is not None and needed.data_dir is not None:
                prepare_rows_of(needed)
    if plan.base is not None and broadcast_from_rank_0(not Path(str(plan.base_dir)).exists()):
        train_base(plan.base, Path(str(plan.base_dir)), log)


def prepare_rows_of(plan: TrainingPlan) -> None:
    """Write the rows of a plan; rows that a site prepares are only checked to exist.

    Raises:
        ConfigError: prepared rows are missing, files or a tokenizer do not match the config, or the model's vocabulary
            is smaller than the grammar's.
    """
    data, folder = plan.config.training_data, Path(str(plan.data_dir))
    if data.source is DataSource.megatron:
        return
    if data.source is DataSource.prepared:
        if not (folder / "train_tokens.npy").exists():
            raise ConfigError(
                f"there are no prepared rows of {data.name}",
                where=str(folder / "train_tokens.npy"),
                fix="set DATADIR to a folder of prepared rows, which `python -m jobs.tasks.convert rows` creates",
                rule="CFG-06",
            )
        return
    if data.source.reads_files:
        from jobs.data import prepare_rows

        for line in prepare_rows.described(prepare_rows.prepare(plan)):
            _LOG.info("%s", line)
    elif not folder.exists():
        _write_grammar_rows(plan, folder)


def _write_grammar_rows(plan: TrainingPlan, folder: Path) -> None:
    from jobs.data import rows as rows_of
    from jobs.data import tiny_reports

    data = plan.config.training_data
    vocab_size, num_words = plan.config.model.vocab_size, len(tiny_reports.vocabulary())
    if vocab_size < num_words:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}, but the generated reports have {num_words} different words",
            where="model.vocab_size",
            fix=f"set model=tiny, or set model.vocab_size to {num_words} or more",
        )

    splits = (("train", data.num_train_rows, data.seed), ("eval", data.eval_rows, data.seed + EVAL_SEED_OFFSET))
    with atomic_folder(folder) as part:
        for name, num_rows, seed in splits:
            rows = tiny_reports.rows(num_rows, seq_length=data.seq_length, seed=seed, with_summaries=data.answer_only)
            rows_of.save(part, name, *rows)
        checksums.write(part, sorted(path.name for path in part.iterdir()))


def train_base(plan: TrainingPlan, folder: Path, log: mllog.Writer) -> None:
    """Train the base task from scratch and save its weights."""
    trial, module = plan.trials[0], engine_of(plan)
    describe(plan, trial, module.versions(), log)
    engine = module.build(plan, trial.seed)
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    train(Loop(plan, engine, trial, log))
    engine.save(folder, adapters=False)


def broadcast_from_rank_0(choice: bool) -> bool:
    """Return rank 0's choice on every rank; also a barrier."""
    import torch

    flag = torch.tensor([int(choice)], device=process_group.device())
    torch.distributed.broadcast(flag, src=0)
    return bool(flag.item())


@contextmanager
def cache_locked(plan: TrainingPlan, who: Rank) -> Iterator[None]:
    """Let one run at a time write to a cache: rank 0 waits for the lock, and the other ranks wait for rank 0.

    If the site prepares everything, nothing is written and no lock is taken.
    """
    is_created_here = plan.base is not None or plan.config.training_data.source is not DataSource.prepared
    if who.rank != 0 or plan.data_dir is None or not is_created_here:
        yield
        return
    with locked_folder(Path(plan.data_dir).parent):
        yield


if __name__ == "__main__":
    main()
