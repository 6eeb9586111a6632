"""Whether the nodes of a run share its folder, and what of them must."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from bench.contract import plan_paths
from bench.contract.plan import TrainingPlan
from bench.errors import ConfigError

if TYPE_CHECKING:
    from bench.backends.nodes.nodes import Nodes


@contextmanager
def marked(run: Path) -> Iterator[str]:
    """Yield the name of a file by which other nodes see whether this folder is theirs too."""
    marker = run / f".lead-{token_hex(8)}"
    marker.touch()
    try:
        yield marker.name
    finally:
        marker.unlink()


def require_shared(nodes: "Nodes") -> None:
    """Raise ConfigError if the run needs a folder that nodes share with the lead, and they do not.

    Rank 0 writes the log there, and all ranks write checkpoints. Outputs, facts and adapters are sent to the lead.
    """
    others = [member for member in nodes.members if not member.is_shared]
    if rank_0 := next((member for member in others if member.number == 0), None):
        raise ConfigError(
            f"rank 0 writes the log, and {rank_0.name} does not see the run folder of this machine",
            where="LOGDIR",
            fix=f"start the run on {rank_0.name}, name this machine first, or put LOGDIR where both see it",
            rule="HST-09",
        )
    plan = nodes.plan
    saves = isinstance(plan, TrainingPlan) and plan.config.training.checkpoint_every_steps is not None
    if others and saves:
        names = ", ".join(member.name for member in others)
        raise ConfigError(
            f"all nodes write checkpoints into the run folder, and {names} has another one",
            where="task.training.checkpoint_every_steps",
            fix="put LOGDIR on a file system that every node shares, or set it to null",
            rule="HST-09",
        )


def require_prepared(nodes: "Nodes", check: Callable[[], None] = lambda: None) -> None:
    """Raise ConfigError if a node does not have, at the same path, what another one has prepared."""
    paths = plan_paths.to_prepare(nodes.plan)
    for member, there in zip(nodes.members, nodes.ask("exist", check=check, paths=paths), strict=True):
        if missing := [path for path in paths if path not in there]:
            raise ConfigError(
                f"{missing[0]} was prepared, and {member.name} does not have it",
                where="DATADIR, MODEL",
                fix="copy it to the same path on every host, or use a file system that all of them see",
                rule="HST-10",
            )
