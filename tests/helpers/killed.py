"""Train trial 0, and die while a checkpoint is written: `python -m tests.helpers.killed plan.json STEP`, once per rank.

Each rank ends by SIGKILL when half of its file of that step is on the disk; the checkpoint before it is complete.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.engines.megatron import cpu_patch


def main() -> None:
    plan, step = sys.argv[1:]
    cpu_patch.install()
    from jobs.engines.megatron import training_state
    from jobs.tasks import train
    from jobs.weights.checkpoint_writer import Piece

    write, pieces = training_state.Snapshot.write, training_state.Snapshot._pieces
    doomed: list[bool] = []

    def until_half(self: training_state.Snapshot) -> Iterator[Piece]:
        all_pieces = list(pieces(self))
        for number, piece in enumerate(all_pieces):
            if doomed and number > len(all_pieces) / 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece

    def noted(self: training_state.Snapshot, folder: Path) -> None:
        doomed.extend([True] * (folder.name == f"step_{step}.part"))
        write(self, folder)

    training_state.Snapshot.write, training_state.Snapshot._pieces = noted, until_half  # type: ignore[method-assign]
    sys.argv = ["train", plan, "--trial", "0"]
    train.main()


if __name__ == "__main__":
    main()
