"""What trains, behind one protocol: `jobs.tasks` knows no engine by name."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from bench.contract.plan import Plan
from jobs.ranks.identity import Rank

if TYPE_CHECKING:
    import numpy as np

    from jobs.data.rows import Rows


class Engine(Protocol):
    """The model, its optimizer and what they can do, on one rank; every method is called by all ranks together."""

    def load(self, folder: Path, *, adapters: bool) -> None:
        """Load a checkpoint: the adapters, or all other weights. The optimizer starts anew.

        Raises:
            ConfigError: the folder holds no checkpoint of this model.
        """

    def save(self, folder: Path, *, adapters: bool) -> None:
        """Save the adapters, or all other weights, so that any layout can load them."""

    def warm_up(self, iterations: int, seed: int, *, profile: Path | None) -> None:
        """Train and evaluate on made-up rows, and leave no trace; `profile` gets the kernels of the last step."""

    def train_step(self, rows: "Rows", indices: "np.ndarray", step: int) -> Any:
        """Start the update by the rows of one global batch; return what `mean_loss` takes, without waiting for the device."""

    def mean_loss(self, share: Any) -> float:
        """Return the mean loss over the rows of a step (nats per token), the same on every rank; waits for the device."""

    def evaluate(self, rows: "Rows") -> float:
        """Return the mean over all rows of each row's mean loss (nats per token that counts)."""


class EngineModule(Protocol):
    """What the package of an engine offers."""

    def start_ranks(self, plan: Plan, who: Rank) -> None:
        """Join the process groups of the plan's layout.

        Raises:
            SubmitError: not as many ranks as planned, no GPU for this one, or they cannot meet.
        """

    def end_ranks(self) -> None:
        """Leave the process groups together."""

    def build(self, plan: Plan, seed: int) -> Engine:
        """Return the engine with random weights drawn from the seed; the ranks have been started."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that it trains with, for the log."""


def engine_of(plan: Plan) -> EngineModule:
    """Return the package of the plan's engine."""
    return cast(EngineModule, import_module(f"jobs.engines.{plan.config.engine.name.name}"))
