"""Stalls of three ranks over gloo on two simulated nodes, as separate processes."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.backends.local import free_port
from bench.backends.nodes.lead import first_error
from bench.contract import run_files
from bench.contract.plan import Command
from bench.diagnosis import explain
from helpers import ranks
from helpers.paths import ROOT

pytestmark = [
    pytest.mark.trains,
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="over gloo"),
]
NODES = ("dgx-0", "dgx-0", "dgx-1")
COMMAND = Command(name="trial 0", argv=[], log=None, limit_min=None)
LINES = (ROOT / "tests/helpers/stalling.py").read_text().splitlines()
SLEEPS_AT = f"tests/helpers/stalling.py:{LINES.index('    time.sleep(600)') + 1} in sleep: time.sleep(600)"


def trial(
    folder: Path, *mishap: str, nodes: tuple[str, ...] = NODES, meanwhile: Callable[[], None] = lambda: None
) -> list[tuple[int, str]]:
    """Run real ranks of tests.helpers.stalling on these nodes; meanwhile, what a launcher would do."""
    (folder / "rank_logs").mkdir(exist_ok=True)
    shared = os.environ | {"WORLD_SIZE": str(len(nodes)), "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": "0", "SLURMD_NODENAME": node} for rank, node in enumerate(nodes)]
    with ThreadPoolExecutor(1) as one:
        command = ("tests.helpers.stalling", *mishap)
        running = one.submit(ranks.ended_in, folder, command, [shared | place for place in places], timeout_s=120)
        while not running.done():
            meanwhile()
            time.sleep(0.05)
        return running.result()


def kill_what_is_stopped(folder: Path) -> Callable[[], None]:
    """Return what ends a rank that is stopped once another one has failed, as srun does."""

    def kill() -> None:
        if any(folder.glob(run_files.rank_error("trial 0", "*"))):
            for path in folder.glob("pid_*"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    if Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(") ")[2][0] == "T":
                        os.kill(int(path.read_text()), signal.SIGKILL)

    return kill


@pytest.mark.parametrize(
    ("mishap", "blamed"),
    [
        (("stop", "0"), "rank 0 on dgx-0 did not respond and wrote no stack; no progress for "),
        (("sleep", "2"), f"rank 2 on dgx-1 stopped at {SLEEPS_AT}; 2 other ranks waited; no progress for "),
        (("load", "0"), f"rank 0 on dgx-0 stopped at {SLEEPS_AT}; 2 other ranks waited; no progress for "),
        (
            ("network", "-1"),
            "every rank waited for data that did not arrive; likely cause: the network between dgx-0, dgx-1; "
            "rank 0 at ",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_stalled_ranks_end_and_report_the_cause(tmp_path: Path, mishap: tuple[str, ...], blamed: str) -> None:
    """The launcher and `why` report the first error, although a rank that ends breaks the others' collective."""
    ended = trial(tmp_path, *mishap, "4", meanwhile=kill_what_is_stopped(tmp_path))
    assert all(code in (1, -9) for code, _ in ended), ended
    error = first_error(tmp_path, COMMAND)
    assert error is not None and (error.rule, error.exit_code) == ("RUN-17", 1)
    assert error.what.startswith(blamed), error.what
    stacks = {int(path.stem[-1]): path.read_text() for path in tmp_path.glob("rank_logs/*.stack")}
    assert set(stacks) == {0, 1, 2} - ({int(mishap[1])} if mishap[0] == "stop" else set())
    for rank, text in stacks.items():
        first, _, dump = text.partition("\n")
        assert (json.loads(first)["rank"], json.loads(first)["node"]) == (rank, NODES[rank])
        assert 'stalling.py", line' in dump and "most recent call first" in dump
    diagnosis = explain([tmp_path])
    assert (diagnosis.rule, diagnosis.evidence) == ("RUN-17", f"RUN-17: {error.what}"[:400])
    if mishap == ("sleep", "2"):  # before its eleventh all-reduce; two collectives were before the first
        missing = "rank 2 did not enter collective 13 (all_reduce) of all ranks, in which ranks 0, 1 waited"
        assert f"flight recorder: {missing}" in str(diagnosis.detail)


def test_a_stalled_rank_ends_even_if_the_run_folder_hangs(tmp_path: Path) -> None:
    """Opening a pipe without a reader blocks, like opening a file on a server that is down."""
    (tmp_path / "rank_logs").mkdir()
    os.mkfifo(tmp_path / "rank_logs" / "trial_0_rank_0.stack.part")
    ((code, printed),) = trial(tmp_path, "sleep", "0", "1", nodes=("dgx-0",))
    assert code == 1 and "Timeout (0:00:03)!" in printed and 'stalling.py", line' in printed


@pytest.mark.slow
def test_a_suspended_and_resumed_job_continues(tmp_path: Path) -> None:
    """As Slurm suspends and resumes a job: a watchdog does not count the time in which its process was stopped."""
    stopped: list[int] = []

    def suspend() -> None:
        if len([*tmp_path.glob("pausing_*")]) == 3 and not stopped:
            stopped.extend(int(path.read_text()) for path in tmp_path.glob("pid_*"))
            time.sleep(2)  # the watchdogs look every second, and must have seen progress
            for which, after_s in ((signal.SIGSTOP, 12), (signal.SIGCONT, 0)):
                for pid in stopped:
                    os.kill(pid, which)
                time.sleep(after_s)

    ended = trial(tmp_path, "pause", "-1", "8", meanwhile=suspend)
    assert len(stopped) == 3 and ended == [(0, "done\n")] * 3
