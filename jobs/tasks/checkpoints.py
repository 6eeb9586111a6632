"""The checkpoints of one trial: RUN/checkpoints/trial_K/step_N, from which its next attempt goes on.

A rank copies its state and goes on training, while a thread writes the copy. A folder takes its name once every rank
has written, and the last two are kept. No collective is called from a thread: rank 0's looks for the others' records.
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
from bench.contract.checkpoint import KEPT, STEP
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError, ConfigError
from jobs.engines import Engine, Snapshot
from jobs.local_sgd import groups
from jobs.ranks import process_group

POLL_S = 0.05
UNFINISHED = ".part"


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint that is there as a whole."""

    folder: Path
    step: int
    manifest: dict[str, Any]


class Checkpoints:
    """Saves and resumes one trial. All ranks call every method together."""

    def __init__(
        self, plan: TrainingPlan, trial: Trial, engine: Engine, run: Path, log: mllog.Writer, *, rank: int
    ) -> None:
        self._plan, self._trial, self._engine, self._log, self._rank = plan, trial, engine, log, rank
        own = groups.mine()
        self._num_ranks = plan.world.num_ranks // (plan.world.groups or 1)
        self._every = plan.config.training.checkpoint_every_steps or plan.max_steps
        self._leads = self._folder = run / run_files.checkpoints(trial.index)
        if own is not None:
            self._rank = own.position
            self._folder = self._leads / f"group_{own.number}" if own.number else self._leads
        self._thread: threading.Thread | None = None
        self._has_written = threading.Event()
        self._error: Exception | None = None
        self.done = 0
        """The step that was resumed from; 0 for a trial that begins."""

    def resume(self) -> int:
        """Load the newest checkpoint that is not damaged, and return its step; 0 if there is none.

        Raises:
            ConfigError: it belongs to a training with another model, seed, data or batch; or the disk has no room.
        """
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self._folder.glob(f"*{UNFINISHED}"):
                shutil.rmtree(unfinished)
        _require_room(self._leads, _sum(self._engine.state_bytes()) * (self._plan.world.groups or 1))
        own = groups.mine()
        if own is not None and own.number:
            return self._follow(own.told("resumed"))
        self._resume()
        if own is not None and own.rank == 0:
            own.tell("resumed", self.done)
        return self.done

    def _resume(self) -> None:
        for found in complete(self._folder):
            if found.step >= self._plan.max_steps:  # its trial ended, and nobody had judged it yet
                continue
            if reason := self._damage(found):
                self._skip(found, reason)
                continue
            require_same(found, self._plan, self._trial)
            self._load(found)
            break

    def _follow(self, step: int) -> int:
        """Go on from the step from which group 0 does, and return it; without such a state, from that of group 0.

        Raises:
            ConfigError: this node cannot read that.
        """
        places = (folder / f"{STEP}{step}" for folder in (self._folder, self._leads)) if step else ()
        for folder in places:
            found = Complete(folder, step, checkpoint.manifest(folder))
            if not self._damage(found):
                self._load(found)
                return step
        if step:
            what, fix = f"group 0 goes on from step {step}, and this group has no state of it", "share the run folder"
            raise ConfigError(what, where=str(self._leads), fix=fix, rule="CFG-06")
        return step

    def _load(self, found: Complete) -> None:
        own = found.folder.parent == self._folder
        same_layout = own and found.manifest["training"]["world"] == codec.plain(self._plan.world)
        self._engine.load_state(found.folder, step=found.step, seed=self._trial.seed, same_layout=same_layout)
        self.done = found.step

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step and go on; raise what has kept this rank from writing.

        Raises:
            BenchError: with the reason.
        """
        self._check()
        return step % self._every == 0 and step < self._plan.max_steps

    def save(self, step: int) -> None:
        """Copy the state after a step, and begin to write it; wait first until the one before is there as a whole, and
        where one rank has no room for a copy, until this one is too.

        Raises:
            BenchError: one of them could not be written.
        """
        self.finish()
        part = self._folder / f"{STEP}{step}{UNFINISHED}"
        if self._rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        snapshot = self._engine.snapshot()
        num_waiting = _sum(not snapshot.is_copy)  # behind it the folder is there for all
        self._has_written.clear()
        self._thread = threading.Thread(target=self._write, args=(snapshot, part, step), daemon=True)
        self._thread.start()
        if num_waiting:
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint in flight is there as a whole.

        Raises:
            BenchError: it could not be written, by this rank or by another one.
        """
        if self._thread is None:
            return
        self._has_written.wait()
        num_failed = _sum(self._error is not None)
        self._check()
        if num_failed:
            what, fix = "another rank could not write its part of a checkpoint", "see what that rank says"
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
            fix="make room, or set LOGDIR to a larger disk; the next attempt goes on from the last complete checkpoint",
            rule="CFG-08",
        ) from error

    def _write(self, snapshot: Snapshot, part: Path, step: int) -> None:
        """Write this rank's state; rank 0 then waits for the others, and gives the folder its name."""
        try:
            snapshot.write(part)
            self._has_written.set()
            if self._rank == 0:
                while len(list(part.glob("rank_*.json"))) < self._num_ranks:
                    time.sleep(POLL_S)
                self._engine.complete(part, about(self._plan, self._trial, step))
                whole = self._folder / f"{STEP}{step}"
                if whole.exists():  # it was damaged, or a trial that nobody had judged ended there
                    _remove(whole)
                part.rename(whole)
                for old in checkpoint.steps(self._folder)[KEPT:]:
                    _remove(self._folder / f"{STEP}{old}")
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self._error = error
        finally:
            self._has_written.set()

    def _damage(self, found: Complete) -> str:
        """Return in what files differ from the manifest, or nothing; each rank reads its share of them."""
        import torch

        reasons = [""] * self._num_ranks
        torch.distributed.all_gather_object(reasons, damage(found, slice(self._rank, None, self._num_ranks)))
        return next(filter(None, reasons), "")

    def _skip(self, found: Complete, reason: str) -> None:
        self._log.event(mllog.DAMAGED_CHECKPOINT, found.folder.name, reason=reason)
        if self._rank == 0:
            what = f"checkpoint {found.folder.name} is damaged, and an older one is used: {reason}"
            print(what, file=sys.stderr, flush=True)


def _remove(whole: Path) -> None:
    """Remove a checkpoint, which is none from the first moment on."""
    going = whole.with_name(f"{whole.name}.old{UNFINISHED}")
    whole.rename(going)
    shutil.rmtree(going)


def complete(folder: Path) -> Iterator[Complete]:
    """Yield a trial's checkpoints that are there as a whole, the newest first."""
    for step in checkpoint.steps(folder):
        yield Complete(folder / f"{STEP}{step}", step, checkpoint.manifest(folder / f"{STEP}{step}"))


def about(plan: TrainingPlan, trial: Trial, step: int) -> dict[str, Any]:
    """Return what a manifest says of the training, beside its files."""
    training = {
        "step": step,
        "samples": plan_kinds.samples(plan, step),
        "precision": plan.config.precision.name,
        "world": codec.plain(plan.world),
        "same": _must_be_same(plan, trial),
    }
    return {"model": codec.plain(plan.config.model), "training": training}


def _must_be_same(plan: TrainingPlan, trial: Trial) -> dict[str, Any]:
    """Return what decides which rows a step takes, its learning rate, and what is trained."""
    config = plan.config
    return {
        "seed": trial.seed,
        "global_batch_size": plan.batch.global_batch_size,
        "train_rows": config.training_data.train_rows,
        "seq_length": config.training_data.seq_length,
        "trains": config.training.trains.name,
        "max_steps": plan.max_steps,
    } | (
        {} if config.training_recipe.averaging is None else {"local_sgd": codec.plain(config.training_recipe.averaging)}
    )


def require_same(found: Complete, plan: TrainingPlan, trial: Trial) -> None:
    """Do nothing if a checkpoint is one of this training, whatever its layout.

    Raises:
        ConfigError: the model, or what decides the data's order or the learning rates, is another one.
    """
    checkpoint.require_model(found.folder, plan.config.model)
    saved, planned = found.manifest["training"]["same"], _must_be_same(plan, trial)
    differing = [key for key in (saved | planned) if saved.get(key) != planned.get(key)]
    if differing:
        raise ConfigError(
            "this checkpoint is of another training: "
            + ", ".join(f"{key} {saved.get(key)} instead of {planned.get(key)}" for key in differing),
            where=str(found.folder),
            fix="go on with the config that saved it, or start from its weights alone: starts_from=checkpoint",
            rule="CFG-06",
        )


def damage(found: Complete, share: slice) -> str:
    """Return in what the first damaged file of a share of them differs from the manifest, or nothing."""
    if "training" not in found.manifest:
        return "its manifest cannot be read"
    for entry in found.manifest["files"][share]:
        path = found.folder / entry["path"]
        if not path.is_file():
            return f"{path.name} is missing"
        if atomic_files.sha256(path) != entry["sha256"]:
            return f"{path.name} has another sha256"
    return ""


def _sum(value: int) -> int:
    """Return the sum of the ranks' numbers; all of them ask."""
    import torch

    total = torch.tensor(int(value), dtype=torch.int64, device=process_group.device())
    torch.distributed.all_reduce(total)
    return int(total)


def _require_room(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError unless the disk has room for all groups' checkpoints: those kept and the one being written."""
    need, free = (KEPT + 1) * num_bytes - _size(folder), shutil.disk_usage(folder).free
    if need > free:
        raise ConfigError(
            f"{free / 2**30:.1f} GiB are free, and {KEPT + 1} checkpoints of {num_bytes / 2**30:.1f} GiB need more",
            where=str(folder),
            fix="make room, set LOGDIR to a larger disk, or set task.training.checkpoint_every_steps=null",
            rule="CFG-08",
        )


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, without those that another group removes meanwhile."""
    size = 0
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with suppress(FileNotFoundError):  # os.walk itself passes over folders that are gone
            size += path.stat().st_size
    return size
