"""Save a trial's states with room for a copy on rank 0 alone: `python -m tests.helpers.uneven_room plan.json`.

The engine is a script: a file of each rank, and steps that are one collective, whose sum every rank checks.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.contract import atomic_files, plan_kinds
from jobs.ranks import identity, process_group
from jobs.tasks.checkpoints import Checkpoints


def main() -> None:
    plan, who = plan_kinds.load(Path(sys.argv[1])), identity.from_environment()
    process_group.join(plan, who)
    import torch

    def write(folder: Path) -> None:
        atomic_files.write(folder / f"rank_{who.rank}.json", {})

    engine: Any = SimpleNamespace(
        state_bytes=lambda: 1,
        snapshot=lambda: SimpleNamespace(is_copy=who.rank == 0, write=write),
        complete=lambda folder, about: atomic_files.write(folder / "manifest.json", about),
    )
    no_log: Any = SimpleNamespace()
    saving = Checkpoints(plan, plan.trials[0], engine, Path(), no_log, rank=who.rank)
    saving.resume()
    for step in (2, 4):
        loss = torch.tensor(who.rank + 1, device=process_group.device())
        torch.distributed.all_reduce(loss)
        assert loss.item() == 3, f"step {step} took what another collective sent: {loss.item()}"
        saving.save(step)
    saving.finish()
    process_group.shut_down()


if __name__ == "__main__":
    main()
