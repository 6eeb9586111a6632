"""The protocol of a training engine; `jobs.tasks` knows no engine by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from jobs.profiles import Profile
from jobs.ranks.identity import Rank

if TYPE_CHECKING:
    import numpy as np

    from jobs.data.rows import Rows
    from jobs.local_sgd.groups import Groups


Fact = tuple[str, Any, dict[str, Any]]
"""A key of the log, its value and its metadata."""


@dataclass(frozen=True, slots=True)
class WarmUpTimes:
    """What the last iteration of a warm-up took, with the device's work; the first one compiles."""

    step_s: float
    eval_batch_s: float
    """Evaluating one global batch."""


class Snapshot(Protocol):
    """This rank's part of a training state, as it was when it was taken."""

    @property
    def is_copy(self) -> bool:
        """Whether training may go on while it is written; False where the host has no room for a copy.

        Ranks need not agree: each looks at its own host's memory.
        """

    def write(self, folder: Path) -> None:
        """Write it, and then rank_N.json, which says so; a thread may call this. It calls no collective."""


class Engine(Protocol):
    """The model and its optimizer on one rank. All ranks call every method together."""

    def load(self, folder: Path, *, adapters: bool) -> None:
        """Load a checkpoint: the adapters, or all other weights. The optimizer starts anew.

        Raises:
            ConfigError: the folder holds no checkpoint of this model.
        """

    def save(self, folder: Path, *, adapters: bool) -> None:
        """Save the adapters, or all other weights, so that any layout can load them."""

    def state_bytes(self) -> int:
        """Return what a snapshot of this rank takes on disk."""

    def snapshot(self) -> Snapshot:
        """Return the training state: what is trained, the optimizer and the generators. The one before was written."""

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        """Turn a folder that all ranks have written to into a checkpoint; rank 0 does. It calls no collective."""

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        """Go on from a checkpoint, whatever layout saved it.

        Raises:
            ConfigError: it is not a checkpoint of this training.
        """

    def warm_up(self, iterations: int, seed: int, *, profile: Profile | None) -> WarmUpTimes | None:
        """Train and evaluate on synthetic rows, then restore all state; rank 0 writes what `profile` asks for.

        Return what that took; None without an iteration.
        """

    def facts(self) -> Sequence[Fact]:
        """Return what the log must say of how this engine computes, as the warm-up has shown it."""

    def train_step(self, rows: "Rows", indices: "np.ndarray", step: int) -> Any:
        """Launch the update by one global batch, without waiting for the device; return the argument of `mean_loss`."""

    def mean_loss(self, share: Any) -> float:
        """Return the mean loss over a step's rows (nats per token), the same on every rank. It waits for the device."""

    def evaluate(self, rows: "Rows") -> float:
        """Return the mean over all rows of each row's mean loss (nats per token that counts)."""


class Apart(Protocol):
    """What a rank of a group that trains apart does besides, with the other groups. All living ranks call it alike."""

    def begin(self, step: int) -> None:
        """Begin after a step: the first one, or the one whose state was loaded."""

    def enter(self, step: int) -> int:
        """Return the step after which this group trains: the given one, unless it was started again and joins later.

        Raises:
            BenchError: the others have finished, or do not let it in.
        """

    def mine(self, indices: "np.ndarray") -> "np.ndarray":
        """Return this group's share of the rows of a batch.

        Raises:
            BenchError: the groups that are left cannot share it evenly.
        """

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Return whether the groups are merged after this step, or a merge ends. What is saved waits for its end."""

    def after(self, step: int, share: Any, *, is_saved: bool) -> Sequence[Fact]:
        """Do what is due after a step, whose `train_step` returned the share; return what the log must say of it.

        Raises:
            BenchError: the other groups have gone on without this one, or rank 0 is gone.
        """


class EngineModule(Protocol):
    """What an engine's package exports."""

    def start_ranks(self, plan: Plan, who: Rank) -> None:
        """Join the process groups of the plan's layout.

        Raises:
            SubmitError: not as many ranks as planned, no GPU for this one, or they cannot meet.
        """

    def end_ranks(self) -> None:
        """Leave the process groups together."""

    def build(self, plan: TrainingPlan, seed: int) -> Engine:
        """Return the engine with random weights drawn from the seed; the ranks have been started."""

    def apart(self, engine: Engine, plan: TrainingPlan, groups: "Groups") -> Apart:
        """Return what merges the groups of a plan; an engine whose plans have no groups need not export it."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that it uses, for the log."""


def engine_of(plan: Plan) -> EngineModule:
    """Return the package of the plan's engine."""
    return cast(EngineModule, import_module(f"jobs.engines.{plan.config.engine.name.name}"))
