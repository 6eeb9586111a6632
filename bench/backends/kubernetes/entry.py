"""What a pod starts: `python -m bench.backends.kubernetes.entry RUN --node K --lead HOST:PORT`, then `bench.driver`.

It is the first process of its container. It finds the first pod where the cluster has no DNS, shares the run's token
through the run folder, which only this user can read, and hands signals on. A runner that was cut short because another
node is gone is started again in the same pod, while the other node's pod is being replaced. A pod of a run that has its
last word ends at once, as the first one did: older Jobs start pods again whatever their exit code was.
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
from bench.backends.nodes.interruption import START_AGAIN
from bench.contract import atomic_files, run_files
from bench.contract.cluster import Discovery
from bench.errors import exit_code_of

EVERY_S = 2.0
PATTERNS = (run_files.PREPARE_LOG, run_files.RESULTS, *(f"{run_files.RANK_LOGS}/*.{kind}" for kind in ("out", "err")))


@contextmanager
def printed(run: Path) -> Iterator[None]:
    """Print lines of the run's files for as long as the block takes, and what came last at its end."""
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
    """Yield the whole lines that files have got since, but the runner's, which it prints by itself.

    `places` keeps how far each was read.
    """
    files = sorted(path for pattern in PATTERNS for path in run.glob(pattern))
    for path in (path for path in files if path != run / run_files.RUNNER_OUTPUT):
        with suppress(OSError), path.open("rb") as file:  # it may be set aside by the next attempt
            start = places.get(path, 0)
            start = 0 if os.fstat(file.fileno()).st_size < start else start  # that attempt's own is shorter
            file.seek(start)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            places[path] = start + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield f"{path.name}: {masking.masked(line)}\n".encode()


RETRYABLE = 138
"""What stands for the runner's START_AGAIN here: Kubeflow's training operator starts pods again from 128 on."""
STARTS = 10
"""How often a runner is started in one pod, at most; attempts at a trial are counted by the run's ledger."""
LEAD, TOKEN = ".lead", "RUNSTOP_TOKEN"
"""The file in a run folder by which pods find the first one; the environment variable of the runner."""
WAIT_S = 900.0
"""How long the first pod may take to be there: its image may have to be pulled."""
JOIN_S = 120.0
"""How long a pod tries to join a first pod that it has found, before it looks for it again."""
POLL_S = 0.5
BEGUN_S = time.monotonic()
FROM_OPERATORS = ("MASTER_", "PET_", "TORCHELASTIC_", "KUBEFLOW_")
"""What operators set for torchrun and for callbacks of trainers; the runner says by itself who its ranks are."""


def main() -> None:
    args = _parser().parse_args()
    run, job = args.run.absolute(), os.environ.get("RUNSTOP_JOB", "")
    told: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, frame: told.append(number))
    if args.node == 0:
        with trainer_status.told(run), printed(run):
            code = _work(args, run, job, told)
    else:
        code = _work(args, run, job, told)
    sys.exit(RETRYABLE if code == START_AGAIN else code)


def _work(args: argparse.Namespace, run: Path, job: str, told: list[int]) -> int:
    """Return the exit code of the last runner that this pod has started."""
    for number in range(STARTS):
        if (ended := exit_code_of_ended(run, job)) is not None:
            print(f"this job has given the run its last word: exit code {ended}", flush=True)
            return ended
        code = _run([*_words(args, run, job, told), "--attempt", str(number)], run, told)
        if code != START_AGAIN:
            return code
    return START_AGAIN


def _words(args: argparse.Namespace, run: Path, job: str, told: list[int]) -> list[str]:
    """Return the arguments of the runner, once the first pod is known."""
    host, _, port = args.lead.rpartition(":")
    is_by_file = host == Discovery.file.name
    if args.node == 0:
        host = _own_address() if is_by_file else host
        _wait_for_predecessor(run, told)
        _announce(run, host, int(port))
    else:
        found = _announced(run, told, is_by_file=is_by_file)
        host = found if is_by_file else host
    words = ["--node", str(args.node), "--lead", f"{host}:{port}", "--job", job, "--restarts"]
    if args.node:
        return [*words, "--join-s", f"{JOIN_S:.0f}"]
    left_s = max(60.0, args.limit_s - (time.monotonic() - BEGUN_S))
    words += [] if args.trial_min is None else ["--trial-min", f"{args.trial_min:d}"]
    return [*words, "--plan", plan_file(), "--limit-min", f"{left_s / 60:.2f}"]


def exit_code_of_ended(run: Path, job: str) -> int | None:
    """Return the exit code of a run to which this very job has given its last word; None if there is something to do.

    A run that was interrupted goes on.
    """
    jobs = atomic_files.read_object(run / run_files.JOB).get("jobs") or [{}]
    status = atomic_files.read_object(run / run_files.STATUS)
    if jobs[-1].get("id") != job or status.get("outcome") in (None, "interrupted"):
        return None
    return int(status["exit_code"])


def _own_address() -> str:
    return os.environ.get("RUNSTOP_POD_IP") or socket.gethostbyname(socket.gethostname())


def _wait_for_predecessor(run: Path, told: list[int]) -> None:
    """Wait while an earlier pod, which has been told to end, still works in the run folder."""
    until_s = time.monotonic() + WAIT_S
    while run.exists() and run_lock.driver(run) is not None and time.monotonic() < until_s and not told:
        time.sleep(POLL_S)


def _announce(run: Path, host: str, port: int) -> None:
    """Write down where the first pod is, and what the others must know to be let in; that stays as it once was."""
    run.mkdir(mode=0o755, parents=True, exist_ok=True)
    token = atomic_files.read_object(run / LEAD).get("token") or secrets.token_hex(32)
    part = run / f"{LEAD}.part"
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"host": host, "port": port, "token": token}, file)
    part.replace(run / LEAD)


def _announced(run: Path, told: list[int], *, is_by_file: bool) -> str:
    """Return the first pod's address; where a file names it, once somebody answers: it may be of an earlier start."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s and not told:
        said = atomic_files.read_object(run / LEAD)
        if said and (not is_by_file or _answers(str(said["host"]), int(said["port"]))):
            return str(said["host"])
        time.sleep(POLL_S)
    print(f"the first pod has not written its address into {run} within {WAIT_S:.0f} s", flush=True)
    sys.exit(RETRYABLE if not told else exit_code_of(-told[0]))


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=2.0):
        return True
    return False


def _run(words: list[str], run: Path, told: list[int]) -> int:
    """Return the exit code of a runner; this process reaps whatever loses its parent in the container."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OPERATORS)}
    known = {TOKEN: _token(run), "RUNSTOP_NODE": os.environ.get("RUNSTOP_NODE_NAME", "")}
    argv = [sys.executable, "-m", "bench.driver", str(run), *words]
    child = os.posix_spawn(sys.executable, argv, kept | known)
    said = 0
    while True:
        for signum in told[said:]:
            os.kill(child, signum)
        said = len(told)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = exit_code_of(os.waitstatus_to_exitcode(status))
            return exit_code_of(-told[0]) if told and code == START_AGAIN else code
        if pid == 0:
            time.sleep(0.1)


def _token(run: Path) -> str:
    return str(atomic_files.read_object(run / LEAD).get("token", ""))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.backends.kubernetes.entry", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--node", type=int, required=True, help="which node of the run this pod is, from 0")
    parser.add_argument("--lead", required=True, help="host:port of the first pod; file:port where a file names it")
    parser.add_argument("--limit-s", type=float, required=True, help="how long the run may take")
    parser.add_argument("--trial-min", type=int, metavar="MIN", help="of each trial, in place of its plan's limit")
    return parser


if __name__ == "__main__":
    main()
