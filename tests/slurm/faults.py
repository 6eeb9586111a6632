"""The fault matrix: what may happen to a run on a cluster, and what must come out of it.

    make faults                                      play every row on a Slurm of its own, and print the table
    python tests/slurm/faults.py --only rank clock   the rows whose names hold one of these words

Rows that break nodes, partitions or Slurm itself are played alone, the others side by side. pytest plays the same rows
(test_faults.py): some in the gate, the others with -m faults.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for helpers, where no pytest has done so

import inflict
from booted import Cluster, running, small_disk
from breaking import drop_packets, reset_connections, send
from matrix import (
    ANY_FAILURE,
    ENDLESS,
    IN_LOW,
    ONE_TRIAL,
    TWO_TRIALS,
    Answer,
    Fault,
    Played,
    fails,
    play_all,
    recovers,
    table,
)
from user import User

from bench.console import sheet

UNHARMED = recovers()
LOST = "(requeued DUE TO NODE FAILURE|lost without a word)"
ALERT = ("launch.stall.floor_s=10",)
"""The watchdog of the ranks looks soon."""
PATIENT = ("launch.stall=null",)
"""It looks late: the ranks are held for another reason."""
NOT_PROVEN = Answer(
    slurm="FAILED",
    outcome="not proven",
    exit_code=ANY_FAILURE,
    trials=("proven", "not proven"),
    attempts=("not proven",),
    rule="LOG-19",
    evidence="",
)

FAULTS = (
    # --- Nodes and Slurm
    Fault(
        name="power cut: the node of the batch script",
        inflict=inflict.power_cut("dgx-0"),
        answer=recovers(LOST),
        alone=True,
    ),
    Fault(
        name="power cut: the other node",
        inflict=inflict.power_cut("dgx-1"),
        answer=recovers("requeued DUE TO NODE FAILURE"),
        alone=True,
    ),
    Fault(
        name="preempted",
        inflict=inflict.preempt(),
        answer=recovers("requeued DUE TO PREEMPTION"),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted with a grace time",
        inflict=inflict.preempt(grace_s=60),
        answer=recovers("SLU-10: preempted"),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut",
        inflict=inflict.one_after_the_other(inflict.preempt(), inflict.power_cut("dgx-0")),
        answer=recovers("requeued DUE TO PREEMPTION", LOST),
        overrides=IN_LOW,
        alone=True,
    ),
    Fault(
        name="preempted, then a power cut, of two attempts",
        inflict=inflict.one_after_the_other(inflict.preempt(), inflict.power_cut("dgx-1")),
        answer=Answer(
            slurm="FAILED",
            outcome="failed",
            exit_code=ANY_FAILURE,
            trials=("proven", "interrupted"),
            attempts=("interrupted: requeued DUE TO PREEMPTION", "interrupted: requeued DUE TO NODE FAILURE"),
            rule="SLU-10",
            evidence="DUE TO PREEMPTION",
        ),
        overrides=(*IN_LOW, "launch.attempts=2"),
        alone=True,
    ),
    Fault(
        name="slurmctld is killed and comes back",
        inflict=inflict.kill_daemon("slurmctld", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="slurmdbd is killed and comes back",
        inflict=inflict.kill_daemon("slurmdbd", down_s=5),
        answer=UNHARMED,
        alone=True,
    ),
    Fault(
        name="time limit near",
        inflict=inflict.near_limit,
        answer=recovers("SLU-07: the time limit is near"),
        overrides=(*TWO_TRIALS, *PATIENT),
    ),
    Fault(
        name="time limit too short for a trial",
        inflict=inflict.limit_min(2),
        answer=fails("SLU-07", "the time limit is near", trials=("aborted",)),
        overrides=ENDLESS,
        trial=0,
        only_the_script_knows=True,
    ),
    Fault(
        name="walltime of a trial",
        inflict=lambda scene: None,
        answer=fails("SLU-07", "DUE TO TIME LIMIT", trials=("aborted",)),
        overrides=(*ENDLESS, "walltime=1"),
        trial=0,
    ),
    Fault(name="requeued by an admin", inflict=inflict.admin("scontrol", "requeue"), answer=recovers("requeued")),
    Fault(
        name="cancelled",
        inflict=inflict.admin("scancel"),
        answer=Answer(
            slurm="CANCELLED",
            outcome="interrupted",
            exit_code=143,
            trials=("proven", "running"),
            attempts=("running",),
            rule="SLU-08",
            evidence="CANCELLED AT",
        ),
        in_gate=True,
    ),
    Fault(name="suspended and resumed", inflict=inflict.suspend, answer=UNHARMED),
    # --- Processes
    Fault(
        name="batch script: SIGKILL",
        inflict=inflict.kill_batch_script,
        answer=Answer(
            slurm="FAILED",
            outcome=None,
            exit_code=None,
            trials=("proven", "running"),
            attempts=("running",),
            rule="RUN-02",
            evidence="CANCELLED AT",
        ),
    ),
    Fault(
        name="srun: SIGKILL",
        inflict=inflict.kill_srun,
        answer=fails("RUN-02", "Killed"),
    ),
    Fault(
        name="rank: SIGKILL",
        inflict=send(signal.SIGKILL),
        answer=fails("RUN-02", "dgx-1: task 1: Killed"),
        in_gate=True,
    ),
    Fault(
        name="rank: SIGTERM",
        inflict=send(signal.SIGTERM),
        answer=fails("RUN-02", "143"),
        in_gate=True,
    ),
    Fault(
        name="rank: SIGSEGV",
        inflict=send(signal.SIGSEGV),
        answer=fails("RUN-04", "Segmentation fault", trials=("aborted",)),
        overrides=ONE_TRIAL,
        trial=0,
    ),
    Fault(
        name="rank: the loss is not a number",
        inflict=lambda scene: None,
        answer=fails("RUN-05", "the training loss is (nan|inf)", trials=("aborted", "planned")),
        overrides=(*TWO_TRIALS, "recipe.lr=1e30", "recipe.clip_grad=1e30"),
        trial=None,
        in_gate=True,
    ),
    Fault(
        name="rank: an unknown exception",
        start=inflict.with_customized_python,
        inflict=lambda scene: None,
        answer=fails("RUN-13", r"KeyError: 'no such expert' \(at .*sitecustomize.py:\d+ in fail", trials=("aborted",)),
        overrides=ONE_TRIAL,
        trial=None,
        in_gate=True,
    ),
    Fault(
        name="rank: hangs",
        inflict=send(signal.SIGSTOP),
        answer=fails("RUN-17", "rank 1"),
        overrides=(*TWO_TRIALS, *ALERT),
    ),
    Fault(name="rank: paused for 6 s", inflict=inflict.pause_rank, answer=UNHARMED),
    Fault(
        name="launcher killed",
        start=inflict.launched_and_followed,
        inflict=inflict.kill_launcher,
        answer=UNHARMED,
    ),
    Fault(name="second launch into the folder", inflict=inflict.launch_again, answer=UNHARMED),
    # --- Network
    Fault(
        name="sockets reset",
        inflict=reset_connections,
        answer=fails("NCC-06", "gloo|Connection (reset|closed)"),
    ),
    Fault(
        name="packets dropped",
        inflict=drop_packets,
        answer=fails("RUN-17", "rank"),
        overrides=(*TWO_TRIALS, *ALERT),
    ),
    Fault(
        name="packets dropped for 5 s",
        inflict=lambda scene: drop_packets(scene, for_s=5),
        answer=UNHARMED,
    ),
    # --- Files
    Fault(
        name="data gone",
        start=inflict.with_own_cache,
        inflict=inflict.remove_data,
        answer=fails("CFG-06", "tiny_report"),
        trial=0,
        in_gate=True,
    ),
    Fault(
        name="disk full",
        start=inflict.on_small_disk,
        inflict=inflict.fill_disk,
        answer=fails("CFG-08", "No space left"),
        in_gate=True,
        cannot=inflict.no_small_disk,
    ),
    Fault(
        name="ledger halved",
        inflict=inflict.halve("ledger.json"),
        answer=Answer(
            slurm="FAILED",
            outcome="failed",
            exit_code=ANY_FAILURE,
            trials=(),
            attempts=(),
            rule="RUN-10",
            evidence="the ledger cannot be read",
        ),
    ),
    Fault(
        name="status removed",
        inflict=inflict.kill_rank_and_remove_status,
        answer=replace(fails("RUN-02", "task 1: Killed"), outcome=None, exit_code=None),
    ),
    Fault(
        name="foreign log copied in",
        inflict=inflict.copy_foreign_log,
        answer=fails("CFG-05", "has a log already"),
        trial=0,
        in_gate=True,
    ),
    # --- Clock
    Fault(
        name="clock set back by 8 s",
        start=inflict.with_movable_clock,
        inflict=inflict.move_clock("-8"),
        answer=NOT_PROVEN,
        cannot=inflict.no_faketime,
    ),
    Fault(
        name="clock put forward by 2 h",
        start=inflict.with_movable_clock,
        inflict=inflict.move_clock("+2h"),
        answer=NOT_PROVEN,
        cannot=inflict.no_faketime,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="words of names")
    parser.add_argument("--folder", help="a new folder, in which the runs are kept")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in args.only)]
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = Path(args.folder or temporary).resolve()
        (folder / "disk").mkdir(parents=True)
        with small_disk(folder / "disk") as disk, running() as cluster:
            played = list(shown_live(play_all(user_of(cluster, folder, disk), chosen)))
    sheet.show(table(sorted(played, key=lambda one: FAULTS.index(one.fault))))
    return int(any(one.wrong for one in played))


def user_of(cluster: Cluster, folder: Path, disk: Path | None) -> User:
    """Return somebody whose cache is filled."""
    for name in ("cache", "home"):
        (folder / name).mkdir()
    user = User(cluster, folder / "cache", folder / "home", disk)
    user.prepare()
    return user


def shown_live(played: Iterator[Played]) -> Iterator[Played]:
    """Yield the rows, and say of each how it went as soon as that is known."""
    for one in played:
        print(f"{one.verdict:8} {one.seconds:4.0f} s  {one.fault.name}", *one.wrong, sep="\n    ", file=sys.stderr)
        yield one


if __name__ == "__main__":
    sys.exit(main())
