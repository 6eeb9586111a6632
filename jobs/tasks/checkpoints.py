"""Save and load the checkpoints of one trial, RUN/checkpoints/trial_K/step_N, from which its next attempt resumes.

A rank copies its state and continues training while a thread writes the copy. A folder gets its final name once every
rank has written, and the last two checkpoints are kept. Threads call no collectives: rank 0's thread polls for the
records of the other ranks.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, checkpoint, codec, mllog, plan_kinds, run_files
from bench.contract.checkpoint import NUM_KEPT, STEP
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError, ConfigError
from jobs.engines import Engine, Snapshot
from jobs.local_sgd import groups
from jobs.ranks import process_group
from jobs.tasks import earlier_attempts

POLL_S = 0.05
UNFINISHED = ".part"


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete checkpoint."""

    folder: Path
    step: int
    manifest: dict[str, Any]


class Checkpoints:
    """Saves and resumes one trial. All ranks call every method together."""

    def __init__(
        self, plan: TrainingPlan, trial: Trial, engine: Engine, run: Path, log: mllog.Writer, *, rank: int
    ) -> None:
        self._plan, self._trial, self._engine, self._log, self._rank = plan, trial, engine, log, rank
        self._run = run
        own = groups.current()
        self._num_ranks = plan.world.num_ranks // (plan.world.groups or 1)
        self._every = plan.config.training.checkpoint_every_steps or plan.max_steps
        self._folder_of_group_0 = self._folder = run / run_files.checkpoints(trial.index)
        if own is not None:
            self._rank = own.position
            self._folder = self._folder_of_group_0 / f"group_{own.number}" if own.number else self._folder_of_group_0
        self._thread: threading.Thread | None = None
        self._has_written = threading.Event()
        self._error: Exception | None = None
        self.done = 0
        """The step that was resumed from; 0 if the trial starts from scratch."""
        self._newest = 0
        self._took_s: float | None = None
        """The last step that this attempt has saved, and how long writing it took; None before the first."""

    def resume(self) -> int:
        """Load the newest checkpoint that is not damaged, and return its step; 0 if there is none.

        Raises:
            ConfigError: it was saved with another model, seed, data or batch; or the disk is too small.
        """
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(unfinished)
        _require_room(self._folder_of_group_0, _sum(self._engine.state_bytes()) * (self._plan.world.groups or 1))
        own = groups.current()
        if own is not None and own.number:
            return self._resume_from(own.get("resumed"))
        self._resume()
        if own is not None and own.rank == 0:
            own.set("resumed", self.done)
        return self.done

    def restart_cost(self) -> dict[str, Any]:
        """Return what resuming this trial has cost, for the log of rank 0; empty on other ranks."""
        if self._rank != 0:
            return {}
        samples = plan_kinds.samples(self._plan, self.done)
        return earlier_attempts.cost(self._run, self._trial, step=self.done, samples=samples)

    def _resume(self) -> None:
        for saved in complete(self._folder):
            if saved.step >= self._plan.max_steps:  # this trial finished, but its result was not recorded
                continue
            if reason := self._damage(saved):
                self._skip(saved, reason)
                continue
            require_same(saved, self._plan, self._trial)
            self._load(saved)
            break

    def _resume_from(self, step: int) -> int:
        """Resume from group 0's step and return it: from this group's checkpoint of it, else from that of group 0.

        Raises:
            ConfigError: this node can read neither.
        """
        places = (folder / f"{STEP}{step}" for folder in (self._folder, self._folder_of_group_0)) if step else ()
        for folder in places:
            saved = Complete(folder, step, checkpoint.manifest(folder))
            if not self._damage(saved):
                self._load(saved)
                return step
        if step:
            what = f"group 0 resumes from step {step}, but this group has no checkpoint of this step"
            fix = "put the run folder on a file system that all nodes share"
            raise ConfigError(what, where=str(self._folder_of_group_0), fix=fix, rule="CFG-06")
        return step

    def _load(self, saved: Complete) -> None:
        own = saved.folder.parent == self._folder
        same_layout = own and saved.manifest["training"]["world"] == codec.plain(self._plan.world)
        self._engine.load_state(saved.folder, step=saved.step, seed=self._trial.seed, same_layout=same_layout)
        self.done = saved.step

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, unless it is the last one.

        Raises:
            BenchError: the checkpoint before could not be written.
        """
        self._check()
        return step % self._every == 0 and step < self._plan.max_steps

    def is_worth_saving(self, step: int, *, step_s: float) -> bool:
        """Return whether saving after this step takes less time than repeating the steps since the last checkpoint.

        step_s: the time of a step, on rank 0. Until a checkpoint has been written, saving counts as worth it.
        """
        goes_back = self._rank == 0 and self._took_s is not None and (step - self._newest) * step_s < self._took_s
        return _sum(goes_back) == 0

    def save(self, step: int) -> None:
        """Copy the state after a step, and start writing it, after the checkpoint before is complete.

        If a rank has no memory for a copy, wait until this checkpoint is complete too.

        Raises:
            BenchError: one of them could not be written.
        """
        self.finish()
        part = self._folder / f"{STEP}{step}{UNFINISHED}"
        if self._rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        snapshot = self._engine.snapshot()
        num_waiting = _sum(not snapshot.is_copy)  # also a barrier: the folder now exists for all ranks
        self._has_written.clear()
        self._newest = step
        self._thread = threading.Thread(target=self._write, args=(snapshot, part, step), daemon=True)
        self._thread.start()
        if num_waiting:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            BenchError: it could not be written, by this rank or by another one.
        """
        if self._thread is None:
            return
        self._has_written.wait()
        num_failed = _sum(self._error is not None)
        self._check()
        if num_failed:
            what, fix = (
                "another rank could not write its part of a checkpoint",
                "read the error of the other rank in rank_logs/",
            )
            raise BenchError(what, where=str(self._folder), fix=fix, rule="CFG-08")
        self._thread.join()
        self._check()
        self._thread = None

    def _check(self) -> None:
        if (error := self._error) is None:
            return
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise BenchError(
            f"a checkpoint cannot be written: {reason}",
            where=str(self._folder),
            fix="free disk space, or set LOGDIR to a larger disk; the next attempt resumes from the last checkpoint",
            rule="CFG-08",
        ) from error

    def _write(self, snapshot: Snapshot, part: Path, step: int) -> None:
        """Write this rank's state; rank 0 then waits for the other ranks, and renames the folder to its final name."""
        since_s = time.perf_counter()
        try:
            snapshot.write(part)
            self._has_written.set()
            if self._rank == 0:
                while len(list(part.glob("rank_*.json"))) < self._num_ranks:
                    time.sleep(POLL_S)
                self._engine.complete(part, about(self._plan, self._trial, step))
                whole = self._folder / f"{STEP}{step}"
                if whole.exists():  # it was damaged, or a finished trial wrote it whose result was not recorded
                    _remove(whole)
                part.rename(whole)
                for old in checkpoint.steps(self._folder)[NUM_KEPT:]:
                    _remove(self._folder / f"{STEP}{old}")
            self._took_s = time.perf_counter() - since_s
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._error = error
        finally:
            self._has_written.set()

    def _damage(self, saved: Complete) -> str:
        """Return how the files differ from the manifest, or an empty text; each rank reads its share of them."""
        import torch

        reasons = [""] * self._num_ranks
        torch.distributed.all_gather_object(reasons, damage(saved, slice(self._rank, None, self._num_ranks)))
        return next(filter(None, reasons), "")

    def _skip(self, saved: Complete, reason: str) -> None:
        self._log.event(mllog.DAMAGED_CHECKPOINT, saved.folder.name, reason=reason)
        if self._rank == 0:
            what = f"checkpoint {saved.folder.name} is damaged ({reason}); trying an older one"
            print(what, file=sys.stderr, flush=True)


def _remove(whole: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves no incomplete checkpoint."""
    renamed = whole.with_name(f"{whole.name}.old{UNFINISHED}")
    whole.rename(renamed)
    shutil.rmtree(renamed)


def complete(folder: Path) -> Iterator[Complete]:
    """Yield a trial's complete checkpoints, the newest first."""
    for step in checkpoint.steps(folder):
        yield Complete(folder / f"{STEP}{step}", step, checkpoint.manifest(folder / f"{STEP}{step}"))


def about(plan: TrainingPlan, trial: Trial, step: int) -> dict[str, Any]:
    """Return the model and the training settings for a manifest."""
    training = {
        "step": step,
        "samples": plan_kinds.samples(plan, step),
        "precision": plan.config.precision.name,
        "world": codec.plain(plan.world),
        "same": _must_be_same(plan, trial),
    }
    return {"model": codec.plain(plan.config.model), "training": training}


def _must_be_same(plan: TrainingPlan, trial: Trial) -> dict[str, Any]:
    """Return the settings that determine the rows of each step, its learning rate, and what is trained."""
    config = plan.config
    return {
        "seed": trial.seed,
        "global_batch_size": plan.batch.global_batch_size,
        "train_rows": config.training_data.num_train_rows,
        "seq_length": config.training_data.seq_length,
        "trains": config.training.trains.name,
        "max_steps": plan.max_steps,
    } | (
        {} if config.training_recipe.averaging is None else {"local_sgd": codec.plain(config.training_recipe.averaging)}
    )


def require_same(saved_checkpoint: Complete, plan: TrainingPlan, trial: Trial) -> None:
    """Refuse a checkpoint of another training; its layout may differ.

    Raises:
        ConfigError: the model, or a setting for the order of the data or the learning rates, differs.
    """
    checkpoint.require_model(saved_checkpoint.folder, plan.config.model)
    saved, planned = saved_checkpoint.manifest["training"]["same"], _must_be_same(plan, trial)
    differing = [key for key in (saved | planned) if saved.get(key) != planned.get(key)]
    if differing:
        differences = "; ".join(f"{key} was {saved.get(key)}, but is now {planned.get(key)}" for key in differing)
        raise ConfigError(
            f"this checkpoint was saved with other settings: {differences}",
            where=str(saved_checkpoint.folder),
            fix="resume with the config that saved the checkpoint; to load only the weights of this checkpoint, set "
            "task.training.starts_from=checkpoint",
            rule="CFG-06",
        )


def damage(saved: Complete, share: slice) -> str:
    """Return how the first damaged file of a share differs from the manifest; an empty text if none is damaged."""
    if "training" not in saved.manifest:
        return "the manifest cannot be read"
    for entry in saved.manifest["files"][share]:
        path = saved.folder / entry["path"]
        if not path.is_file():
            return f"{path.name} is missing"
        if atomic_files.sha256(path) != entry["sha256"]:
            return f"{path.name} has another SHA-256"
    return ""


def _sum(value: int) -> int:
    """Return the sum over all ranks, which call this together."""
    import torch

    total = torch.tensor(int(value), dtype=torch.int64, device=process_group.device())
    torch.distributed.all_reduce(total)
    return int(total)


def _require_room(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError unless the disk has space for all groups' checkpoints: those kept and the one in progress."""
    need, free = (NUM_KEPT + 1) * num_bytes - _size(folder), shutil.disk_usage(folder).free
    if need > free:
        raise ConfigError(
            f"{NUM_KEPT + 1} checkpoints of {num_bytes / 2**30:.1f} GiB do not fit: {free / 2**30:.1f} GiB are free",
            where=str(folder),
            fix="free disk space, set LOGDIR to a larger disk, or set task.training.checkpoint_every_steps=null",
            rule="CFG-08",
        )


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, without those that another group removes meanwhile."""
    size = 0
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # os.walk itself skips folders that were removed
            size += path.stat().st_size
    return size
