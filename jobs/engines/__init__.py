"""The protocol of a training engine. `jobs.tasks` uses only this protocol and imports no engine by name."""

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
    """Duration of the last warm-up iteration, device work included. The first iteration compiles and is not used."""

    step_s: float
    eval_batch_s: float
    """Time to evaluate one global batch."""


class Snapshot(Protocol):
    """This rank's part of the training state at one step."""

    @property
    def is_copy(self) -> bool:
        """Whether training may continue while the snapshot is written. False if host memory has no room for a copy.

        Ranks need not agree: each checks the memory of its own host.
        """

    def write(self, folder: Path) -> None:
        """Write the snapshot, then rank_N.json, which marks it as complete. A thread may call this: no collectives."""


class Engine(Protocol):
    """The model and its optimizer on one rank. All ranks call every method together."""

    def load(self, folder: Path, *, adapters: bool) -> None:
        """Load a checkpoint: the adapters, or all other weights. The optimizer state is reset.

        Raises:
            ConfigError: the folder holds no checkpoint of this model.
        """

    def save(self, folder: Path, *, adapters: bool) -> None:
        """Save the adapters, or all other weights, in a form that any parallel layout can load."""

    def state_bytes(self) -> int:
        """Return the size of this rank's snapshot on disk."""

    def snapshot(self) -> Snapshot:
        """Return the training state: trained weights, optimizer and random generators.

        The caller has written the snapshot before this one: its memory is used again.
        """

    def complete(self, folder: Path, about: dict[str, Any]) -> None:
        """Turn a folder that all ranks have written to into a checkpoint. Only rank 0 calls this: no collectives."""

    def load_state(self, folder: Path, *, step: int, seed: int, same_layout: bool) -> None:
        """Resume from a checkpoint that any parallel layout has saved.

        Raises:
            ConfigError: it is not a checkpoint of this training.
        """

    def warm_up(self, iterations: int, seed: int, *, profile: Profile | None) -> WarmUpTimes | None:
        """Train and evaluate on synthetic rows, then restore all state. Rank 0 writes the files of `profile`.

        Return the times of the last iteration; None if `iterations` is 0.
        """

    def facts(self) -> Sequence[Fact]:
        """Return the log entries about how this engine computes, as observed during the warm-up."""

    def train_step(self, rows: "Rows", indices: "np.ndarray", step: int) -> Any:
        """Launch the update by one global batch without waiting for the device; return the argument of `mean_loss`."""

    def mean_loss(self, share: Any) -> float:
        """Return the mean loss over a step's rows (nats per token), the same on every rank. It waits for the device."""

    def evaluate(self, rows: "Rows") -> float:
        """Return the mean over all rows of each row's mean loss (nats per token that counts)."""


class LocalSgdEngine(Protocol):
    """The part of local SGD in the training loop of a rank. All ranks of all active groups make the same calls."""

    def begin(self, step: int) -> None:
        """Start after step 0, or after the step of a loaded checkpoint."""

    def rejoin(self, step: int) -> int:
        """Return the step after which this group trains: the given one, unless it was restarted and rejoins later.

        Raises:
            BenchError: the other groups have finished, or do not readmit it.
        """

    def group_rows(self, indices: "np.ndarray") -> "np.ndarray":
        """Return this group's share of the rows of a batch.

        Raises:
            BenchError: the batch cannot be split equally over the active groups.
        """

    def is_due(self, step: int, *, is_saved: bool) -> bool:
        """Return whether a weight averaging starts or ends after this step. A checkpoint waits for the end of one."""

    def average(self, step: int, loss_share: Any, *, is_saved: bool) -> Sequence[Fact]:
        """Start or end the weight averaging that is due after a step; return its log records.

        loss_share: what `train_step` returned.

        Raises:
            BenchError: the other groups continued without this one, or rank 0 ended.
        """


class EngineModule(Protocol):
    """What an engine's package exports."""

    def start_ranks(self, plan: Plan, who: Rank) -> None:
        """Join the process groups of the plan's layout.

        Raises:
            SubmitError: the number of ranks differs from the plan, this rank has no GPU, or the rendezvous failed.
        """

    def end_ranks(self) -> None:
        """Destroy the process groups; all ranks call this together."""

    def build(self, plan: TrainingPlan, seed: int) -> Engine:
        """Return the engine with random weights of this seed; `start_ranks` has been called."""

    def local_sgd(self, engine: Engine, plan: TrainingPlan, groups: "Groups") -> LocalSgdEngine:
        """Return the local SGD of an engine. Only an engine that supports parallel.groups exports it."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that the engine uses, for the log."""


def engine_of(plan: Plan) -> EngineModule:
    """Return the package of the plan's engine."""
    return cast(EngineModule, import_module(f"jobs.engines.{plan.config.engine.name.name}"))
