"""A small trial that stalls: `python -m tests.helpers.stalling MISHAP RANK FLOOR_S`, once per rank."""

import os
import signal
import sys
import time
from pathlib import Path

from bench.contract import run_files
from bench.contract.stall import Stall
from jobs.ranks import process_group
from jobs.ranks.guard import guarded
from jobs.ranks.identity import Rank, from_environment
from jobs.ranks.watchdog import LOADING, TRAINING, Watchdog

STEPS, STALLS_AT = 30, 11
"""Ten steps are done when it happens."""


EVERY_RANK = -1


def sleep(who: Rank) -> None:
    time.sleep(600)


def stop(who: Rank) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def receive(who: Rank) -> None:
    """Wait for data from the next rank, which waits as well."""
    import torch

    torch.distributed.recv(torch.zeros(1), src=(who.rank + 1) % who.world_size)


def pause(who: Rank) -> None:
    """Take 5 s, not counting those in which this process is stopped."""
    Path(f"pausing_{who.rank}").touch()
    for _ in range(50):
        time.sleep(0.1)


MISHAPS = {"sleep": sleep, "load": sleep, "stop": stop, "network": receive, "pause": pause}


def main() -> None:
    mishap, culprit, who, folder = sys.argv[1], int(sys.argv[2]), from_environment(), Path.cwd()
    (folder / f"pid_{who.rank}").write_text(str(os.getpid()))
    stall = Stall(factor=2, floor_s=float(sys.argv[3]))  # on a busy machine steps take long
    with guarded(folder / run_files.rank_error("trial 0", who.rank)) as guard:
        import torch

        meeting = f"tcp://{who.master_addr}:{who.master_port}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=who.rank, world_size=who.world_size)
        watchdog = Watchdog(who, stall, folder, "trial 0", guard.fail)
        watchdog.start(process_group.node_names(who))
        watchdog.alive(LOADING, 0, None)
        if mishap == "load" and who.rank == culprit:
            MISHAPS[mishap](who)
        watchdog.expect(step_s=0.02, eval_s=0.02)
        train(mishap, culprit, who, watchdog)
        print("done")


def train(mishap: str, culprit: int, who: Rank, watchdog: Watchdog) -> None:
    import torch

    watchdog.alive(TRAINING, 0, None)
    for step in range(1, STEPS + 1):
        if step == STALLS_AT and culprit in (who.rank, EVERY_RANK):
            MISHAPS[mishap](who)
        torch.distributed.all_reduce(torch.ones(1))
        time.sleep(0.02)
        watchdog.alive(TRAINING, step, None)


if __name__ == "__main__":
    main()
