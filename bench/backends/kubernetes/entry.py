"""The entry point of a pod: `python -m bench.backends.kubernetes.entry RUN --node K --lead HOST:PORT`.

It is the first process of its container and starts `bench.driver`. It finds the first pod if the cluster has no DNS,
shares the run's token in a file that only this user can read, and forwards signals. If a runner ends because another
node is lost, it is restarted in the same pod while the other node's pod is being replaced. If the run already has its
final status, the pod exits at once with the run's exit code: older Jobs restart pods whatever their exit code was.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import masking
from bench.backends import run_lock
from bench.backends.kubernetes import trainer_status
from bench.backends.kubernetes.pod_template import plan_file
from bench.backends.nodes.interruption import RESTART_EXIT_CODE
from bench.contract import atomic_files, run_files
from bench.contract.cluster import Discovery
from bench.errors import FINAL_CODES, exit_code_of

EVERY_S = 2.0
PATTERNS = (run_files.PREPARE_LOG, run_files.RESULTS, *(f"{run_files.RANK_LOGS}/*.{kind}" for kind in ("out", "err")))


@contextmanager
def printed(run: Path) -> Iterator[None]:
    """Print new lines of the run's files while the block runs, and the remaining ones at its end."""
    ended, places = threading.Event(), dict[Path, int]()

    def follow() -> None:
        while True:
            is_last = ended.wait(EVERY_S)
            for line in added(run, places):
                with suppress(OSError):
                    os.write(sys.stdout.fileno(), line)
            if is_last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10 * EVERY_S)


def added(run: Path, places: dict[Path, int]) -> Iterator[bytes]:
    """Yield new complete lines of the run's files, except the runner's own output, which it prints itself.

    `places` holds the offset up to which each file was read.
    """
    files = sorted(path for pattern in PATTERNS for path in run.glob(pattern))
    for path in (path for path in files if path != run / run_files.RUNNER_OUTPUT):
        with suppress(OSError), path.open("rb") as file:  # the next attempt may move it
            start = places.get(path, 0)
            start = 0 if os.fstat(file.fileno()).st_size < start else start  # shorter: a new attempt's file
            file.seek(start)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            places[path] = start + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield f"{path.name}: {masking.masked(line)}\n".encode()


RETRYABLE = 138
"""Replaces RESTART_EXIT_CODE of the runner: Kubeflow's training operator restarts pods with exit codes from 128 on."""
STARTS = 10
"""The most starts of a runner in one pod; the run's ledger counts the attempts at a trial."""
LEAD, TOKEN = ".lead", "RUNSTOP_TOKEN"
"""The file in a run folder with the first pod's address; the runner's environment variable for the token."""
WAIT_S = 900.0
"""How long to wait for the first pod: its image may have to be pulled."""
JOIN_S = 120.0
"""How long a pod tries to join the first pod before it reads its address again."""
POLL_S = 0.5
BEGUN_S = time.monotonic()
FROM_OPERATORS = ("MASTER_", "PET_", "TORCHELASTIC_", "KUBEFLOW_")
"""Variables that operators set for torchrun and trainers' callbacks; the runner sets the ranks' variables itself."""


def main() -> None:
    args = _parser().parse_args()
    run, job = args.run.absolute(), os.environ.get("RUNSTOP_JOB", "")
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: signals.append(number))
    if args.node == 0:
        with trainer_status.posting(run), printed(run):
            code = _work(args, run, job, signals)
    else:
        code = _work(args, run, job, signals)
    sys.exit(RETRYABLE if code == RESTART_EXIT_CODE else code)


def _work(args: argparse.Namespace, run: Path, job: str, signals: list[int]) -> int:
    """Start the runner, restart it as often as needed, and return the last one's exit code."""
    for number in range(STARTS):
        if (ended := exit_code_of_ended(run, job)) is not None:
            print(f"this job has already finished the run with exit code {ended}: nothing to do", flush=True)
            return ended
        code = _run([*_arguments(args, run, job, signals), "--attempt", str(number)], run, signals)
        if code != RESTART_EXIT_CODE:
            return _pod_exit_code(args.node, code, exit_code_of_ended(run, job))
    return RESTART_EXIT_CODE


def _pod_exit_code(node: int, code: int, of_run: int | None) -> int:
    """Return the exit code of a pod whose runner has ended with `code`; of_run: as `exit_code_of_ended`.

    After FINAL_CODES a Job fails and its pods are not replaced; only a run that has ended may do that.
    """
    if of_run is not None:
        return of_run
    return RETRYABLE if node and code in FINAL_CODES else code


def _arguments(args: argparse.Namespace, run: Path, job: str, signals: list[int]) -> list[str]:
    """Return the runner's arguments; wait until the first pod's address is known."""
    host, _, port = args.lead.rpartition(":")
    is_by_file = host == Discovery.file.name
    if args.node == 0:
        host = _own_address() if is_by_file else host
        _wait_for_predecessor(run, signals)
        _announce(run, host, int(port))
    else:
        announced = _announced(run, signals, is_by_file=is_by_file)
        host = announced if is_by_file else host
    words = ["--node", str(args.node), "--lead", f"{host}:{port}", "--job", job, "--restarts"]
    if args.node:
        return [*words, "--join-s", f"{JOIN_S:.0f}"]
    left_s = max(60.0, args.limit_s - (time.monotonic() - BEGUN_S))
    words += [] if args.trial_min is None else ["--trial-min", f"{args.trial_min:d}"]
    return [*words, "--plan", plan_file(), "--limit-min", f"{left_s / 60:.2f}"]


def exit_code_of_ended(run: Path, job: str) -> int | None:
    """Return the run's exit code, 0 to 2, if this job has written its final status; None if there is work left.

    An interrupted run has work left: it is resumed. If a later job has resumed it, this job has no work left.
    """
    jobs = [entry.get("id") for entry in atomic_files.read_object(run / run_files.JOB).get("jobs") or []]
    status = atomic_files.read_object(run / run_files.STATUS)
    if job in jobs[:-1]:
        return 1
    if jobs[-1:] != [job] or status.get("outcome") in (None, "interrupted"):
        return None
    code = int(status["exit_code"])
    return code if code in (0, *FINAL_CODES) else 1


def _own_address() -> str:
    return os.environ.get("RUNSTOP_POD_IP") or socket.gethostbyname(socket.gethostname())


def _wait_for_predecessor(run: Path, signals: list[int]) -> None:
    """Wait while an earlier pod, which is being terminated, still holds the lock of the run folder."""
    until_s = time.monotonic() + WAIT_S
    while run.exists() and run_lock.driver(run) is not None and time.monotonic() < until_s and not signals:
        time.sleep(POLL_S)


def _announce(run: Path, host: str, port: int) -> None:
    """Write the first pod's address and the run's token into the run folder; an existing token is kept."""
    run.mkdir(mode=0o755, parents=True, exist_ok=True)
    token = atomic_files.read_object(run / LEAD).get("token") or secrets.token_hex(32)
    part = run / f"{LEAD}.part"
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"host": host, "port": port, "token": token}, file)
    part.replace(run / LEAD)


def _announced(run: Path, signals: list[int], *, is_by_file: bool) -> str:
    """Return the first pod's address. With is_by_file, wait until it accepts connections: the file may be outdated."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s and not signals:
        lead = atomic_files.read_object(run / LEAD)
        if lead and (not is_by_file or _answers(str(lead["host"]), int(lead["port"]))):
            return str(lead["host"])
        time.sleep(POLL_S)
    print(f"the first pod has not written its address into {run} within {WAIT_S:.0f} s", flush=True)
    sys.exit(RETRYABLE if not signals else exit_code_of(-signals[0]))


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


def _run(words: list[str], run: Path, signals: list[int]) -> int:
    """Run one runner and return its exit code; as PID 1, this process also reaps orphans of the container."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OPERATORS)}
    own = {TOKEN: _token(run), "RUNSTOP_NODE": os.environ.get("RUNSTOP_NODE_NAME", "")}
    argv = [sys.executable, "-m", "bench.driver", str(run), *words]
    child = os.posix_spawn(sys.executable, argv, kept | own)
    num_forwarded = 0
    while True:
        for signum in signals[num_forwarded:]:
            os.kill(child, signum)
        num_forwarded = len(signals)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = exit_code_of(os.waitstatus_to_exitcode(status))
            return exit_code_of(-signals[0]) if signals and code == RESTART_EXIT_CODE else code
        if pid == 0:
            time.sleep(0.1)


def _token(run: Path) -> str:
    return str(atomic_files.read_object(run / LEAD).get("token", ""))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.backends.kubernetes.entry", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--node", type=int, required=True, help="the node number of this pod in the run, from 0")
    parser.add_argument(
        "--lead", required=True, help="HOST:PORT of the first pod; file:PORT to read the host from the run folder"
    )
    parser.add_argument("--limit-s", type=float, required=True, help="time limit of the run in seconds")
    parser.add_argument("--trial-min", type=int, metavar="MIN", help="time limit per trial; replaces the plan's limit")
    return parser


if __name__ == "__main__":
    main()
