"""Check the weights and rows that a trial reads against their checksums, and name the checksums in the log.

The files of a checkpoint are hashed before run_start, each by one rank of each node: every node checks what its ranks
read. Rows are checked when they are read, one by one (`jobs.data.rows`). A folder without a manifest, such as a
download from Hugging Face, has nothing to be compared with: the log names its checksum, which must be that of the
run's other trials.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import atomic_files, checkpoint, checksums, mllog
from bench.contract.atomic_files import Content
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.errors import ConfigError
from jobs.ranks import process_group
from jobs.ranks.identity import Rank, node_name

if TYPE_CHECKING:
    from jobs.data.rows import Rows

State = dict[str, tuple[int, int, int]]
THREADS = 8
"""Files that a single rank hashes at the same time."""
FIX = "find out who changed the weights, then copy or create the weights again"


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint whose files were checked."""

    folder: Path
    state: State
    """Size, modification time and inode of each file before it was hashed."""

    def require_unchanged(self) -> None:
        """Raise ConfigError if a file was replaced or written since it was hashed; call this after loading it."""
        after = _state(self.folder)
        for name in sorted(self.state.keys() | after.keys()):
            if self.state.get(name) != after.get(name):
                raise checksums.changed(f"{name} was changed while runstop loaded this file", self.folder, fix=FIX)


def check_weights(plan: Plan, log: mllog.Writer, who: Rank | None) -> Weights | None:
    """Check the checkpoint of a plan; return None for random weights, or if there is none to check.

    All ranks call this together; with `who` None the program has one rank, which hashes all files.

    Raises:
        ConfigError: a file was changed since the checkpoint was written, or the nodes have different files.
    """
    if plan.inputs.checkpoint is None:
        return None
    folder = checkpoint.located(Path(expanded(plan.inputs.checkpoint) or plan.inputs.checkpoint), plan.config)
    if not folder.is_dir():  # the loader says what is missing
        return None
    state, here = _state(folder), node_name()
    share = _share(folder, who)
    every = [(here, share, checksums.differing(share, checksums.listed(folder)))]
    if who is not None:
        every = [each for each in process_group.gathered(who, every[0]) if each is not None]
    for node, _, difference in every:
        if difference:
            raise checksums.changed(f"the weights were changed: {difference}", f"{folder} on {node}", fix=FIX)
    own = {name: content for node, contents, _ in every if node == here for name, content in contents.items()}
    own |= _hashed(folder, state.keys() - own.keys())  # the share of a failed rank, with local SGD
    for node, contents, _ in every:
        if file := next((name for name, content in contents.items() if own.get(name) != content), None):
            what = f"the nodes {node} and {here} have different weights in the file {file}"
            raise checksums.changed(what, folder, fix="copy the same weights to every node, or use a shared folder")
    size = sum(content.bytes for content in own.values())
    log.event(mllog.INPUT_SHA256, checksums.identity(own), input=mllog.CHECKPOINT_FILES, files=len(own), bytes=size)
    return Weights(folder, state)


def _share(folder: Path, who: Rank | None) -> dict[str, Content]:
    """Return the checksums of this rank's share of the files: the ranks of a node share them, the largest first."""
    names = sorted(checksums.weight_files(folder), key=lambda name: (-(folder / name).stat().st_size, name))
    if who is None:
        return _hashed(folder, names, threads=THREADS)
    together = [rank for rank, node in enumerate(process_group.node_names(who)) if node == node_name()]
    return _hashed(folder, names[together.index(who.rank) :: len(together)])


def _hashed(folder: Path, names: Iterable[str], *, threads: int = 1) -> dict[str, Content]:
    try:
        return checksums.of_files(folder, names, threads=threads)
    except OSError as error:
        raise ConfigError(
            f"the weights cannot be read: {error.strerror}",
            where=str(error.filename or folder),
            fix="give this user read permission for the file, or copy the weights again",
            rule="CFG-06",
        ) from error


def _state(folder: Path) -> State:
    stats = {name: (folder / name).stat() for name in checksums.weight_files(folder)}
    return {name: (one.st_size, one.st_mtime_ns, one.st_ino) for name, one in stats.items()}


def log_tokenizer(file: Path, log: mllog.Writer) -> None:
    """Log the checksum of the tokenizer.json that turns prompts into tokens."""
    log.event(mllog.INPUT_SHA256, atomic_files.sha256(file), input=mllog.TOKENIZER)


def open_rows(plan: TrainingPlan, log: mllog.Writer, *, seed: int = 0) -> "tuple[Rows, Rows]":
    """Return the training and the evaluation rows, and log their checksums. All ranks call this together.

    seed: of the trial, for rows in Megatron's files.

    Raises:
        ConfigError: they are not the rows of the plan, were changed since they were written, or differ between ranks.
    """
    from jobs.data import rows as rows_of

    both = rows_of.load(plan, "train", seed=seed), rows_of.load(plan, "eval", seed=seed)
    for name, rows in zip((mllog.TRAIN_ROWS, mllog.EVAL_ROWS), both, strict=True):
        if (sha256 := rows.sha256) is not None:
            _require_equal(name, sha256, Path(str(plan.data_dir)))
            log.event(mllog.INPUT_SHA256, sha256, input=name, rows=len(rows.tokens))
    return both


def _require_equal(name: str, sha256: str, folder: Path) -> None:
    """Require that all ranks of this process group have opened the same rows."""
    if "torch" not in sys.modules:  # as in the runner of a user's program, which has no process group
        return
    import torch

    if not torch.distributed.is_initialized():
        return
    values = [("", "")] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, (node_name(), sha256))
    if other_node := next((node for node, value in values if value != sha256), None):
        what = f"the nodes {other_node} and {node_name()} have different {name}"
        raise checksums.changed(what, folder, fix="copy the same rows to every node, or use a shared folder")
