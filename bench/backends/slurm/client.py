"""Run Slurm's commands and read the states of jobs from squeue and sacct."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.backends.protocol import Job, JobState
from bench.contract.run_files import SCRIPT
from bench.errors import SubmitError
from bench.rules.check import Answer

TIMEOUT_S = 20.0
IDS_PER_QUERY = 2000
"""Job ids on one command line, far below the system's limit for its length."""
QUEUE_FIELDS = ("JobArrayID", "State", "Reason", "NodeList", "exit_code", "TimeUsed", "TimeLimit", "StartTime")
ACCOUNTING_FIELDS = ("JobID", "State", "Reason", "NodeList", "ExitCode", "ElapsedRaw", "TimelimitRaw", "Start")
NOTHING = ("", "N/A", "n/a", "None", "None assigned", "Unknown", "(null)")
"""How Slurm prints that there is no value."""
_OPTIONS = re.compile(r"(?:SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SINFO|SCONTROL)_")
_OF_A_JOB = re.compile(r"SLURM_(?!CONF|CLUSTERS|JWT|DEBUG_FLAGS)")
_PLAIN = {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
"""Times in one format, and lists of array tasks in full."""
_AGAIN = "try again; `scontrol ping` shows whether Slurm's controller is up"
_ID = re.compile(r"[0-9]+(?:_[0-9]+)?")
_RANGE = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")


class NoAnswerError(SubmitError):
    """A command timed out: its work may have been done, or may still be done."""


STARTED = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED")
ENDED: dict[str, JobState] = {
    "COMPLETED": JobState.completed,
    "CANCELLED": JobState.cancelled,
    "REVOKED": JobState.cancelled,
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"), JobState.failed),
    "TIMEOUT": JobState.failed,
}
"""Slurm's states of jobs that have ended; a requeued job is PENDING again."""


def is_available() -> bool:
    """Return whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def run(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, more: Mapping[str, str] | None = None) -> Answer:
    """Run one Slurm command without options from environment variables; `more` is added to its environment.

    Raises:
        SubmitError: the command is missing, or times out.
    """
    return _run(argv, timeout_s, environment(argv[0]) | dict(more or {}))


def environment(command: str) -> dict[str, str]:
    """Return this process's environment without the variables that set options of a Slurm command."""
    kept = {name: value for name, value in os.environ.items() if not _OPTIONS.match(name)}
    if command in ("sbatch", "srun"):  # inside an allocation, these would set sizes and start a step instead of a job
        kept = {name: value for name, value in kept.items() if not _OF_A_JOB.match(name)}
    return kept


def states(jobs: Sequence[str]) -> dict[str, Job]:
    """Return the states of jobs by id; jobs that Slurm does not know are left out.

    An id is a job's or an array task's (12_3); the id of a whole array gives all its tasks, each under its own id.
    Accounting lags behind the controller, so it is queried only for jobs that the controller has forgotten.

    Raises:
        SubmitError: the controller cannot be queried.
    """
    ids = sorted({job for job in jobs if _ID.fullmatch(job)})  # no option, and no text that Slurm would print
    known: dict[str, Job] = {}
    for first in range(0, len(ids), IDS_PER_QUERY):
        some = ids[first : first + IDS_PER_QUERY]
        queued = _queued(some)
        gone = [job for job in some if job not in queued]
        known |= (_accounted(gone) if gone else {}) | queued
    requested = set(ids)
    return {job: state for job, state in known.items() if job in requested or job.split("_")[0] in requested}


def submitted(folder: Path) -> list[str]:
    """Return the ids of this user's queued and running jobs whose script got a run folder as its argument.

    Raises:
        SubmitError: the controller cannot be queried.
    """
    answer = run(["squeue", "--noheader", "--me", "--Format=ArrayJobID:|,Command:|"])
    if answer.exit_code:
        raise SubmitError(_last_line(answer), where="squeue", fix=_AGAIN)
    rows = (line.rstrip().removesuffix("|").partition("|") for line in answer.out.splitlines())
    return sorted({job.strip() for job, _, command in rows if _is_for(command.rstrip(), folder)})


def _is_for(command: str, folder: Path) -> bool:
    """Return whether a job's command is a script with this folder, by any of its paths, as its argument."""
    if command.endswith(f" {folder.absolute()}"):
        return True
    place = command[: max(0, len(command) - 1 - len(SCRIPT) - 1) // 2]  # FOLDER/job.sbatch FOLDER
    if not place or command != f"{place}/{SCRIPT} {place}":
        return False
    with suppress(OSError):
        return Path(place).samefile(folder)
    return False


def seconds(text: str) -> int | None:
    """Return the seconds of Slurm's [days-]hours:minutes:seconds, or None for UNLIMITED and no value."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if parts is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def minutes(text: str) -> float | None:
    """Return the minutes of a --time: minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if parts is None:
        return None
    days, *rest = parts.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, min, s = (*numbers, 0, 0)[:3]
    return (int(days or 0) * 24 + hours) * 60 + min + s / 60


def _run(argv: Sequence[str], timeout_s: float, environment: dict[str, str]) -> Answer:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=environment, check=False
        )
    except OSError as error:
        raise SubmitError(
            f"the program {argv[0]} cannot be started: {error.strerror}",
            where="PATH",
            fix="run runstop on the cluster's login node, with Slurm's commands on PATH",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(
            f"{argv[0]} did not answer within {timeout_s:g} s",
            where=" ".join(argv[:2]),
            fix=_AGAIN,
        ) from error
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def _queued(jobs: Sequence[str]) -> dict[str, Job]:
    fields = ",".join(f"{field}:|" for field in QUEUE_FIELDS)
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", f"--Format={fields}"]
    answer = _run(argv, TIMEOUT_S, environment("squeue") | _PLAIN)
    if answer.exit_code and "Invalid job id" not in answer.err:
        raise SubmitError(_last_line(answer), where="squeue", fix=_AGAIN)
    return _states(line.split("|")[: len(QUEUE_FIELDS)] for line in answer.out.splitlines())


def _last_line(answer: Answer) -> str:
    return f"squeue: {(answer.err.strip() or 'no answer').splitlines()[-1]}"


def _accounted(jobs: Sequence[str]) -> dict[str, Job]:
    """Return the states that sacct reports; none if it fails."""
    fields = f"--format={','.join(ACCOUNTING_FIELDS)}"
    argv = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(jobs)}", fields]
    try:
        answer = _run(argv, TIMEOUT_S, environment("sacct") | _PLAIN)
    except SubmitError:
        return {}
    return _states(line.split("|") for line in answer.out.splitlines()) if answer.exit_code == 0 else {}


def _states(rows: Iterable[Sequence[str]]) -> dict[str, Job]:
    """Return one state for each job of the rows; a row of one array task overrides the row of its array."""
    jobs: dict[str, Job] = {}
    for row in sorted((row for row in rows if len(row) == len(QUEUE_FIELDS)), key=lambda row: "[" not in row[0]):
        job, state, reason, nodes, code, elapsed, limit, start = ("" if cell in NOTHING else cell for cell in row)
        for one in _array_tasks(job):
            native_state = state.split(" ")[0].rstrip("+")  # sacct prints CANCELLED by 1000
            jobs[one] = Job(
                id=one,
                state=ENDED.get(native_state) or (JobState.running if native_state in STARTED else JobState.queued),
                native_state=native_state,
                reason=reason,
                nodes=nodes,
                exit_code=_exit_code(code),
                elapsed_s=int(elapsed) if elapsed.isdecimal() else seconds(elapsed),
                limit_s=int(limit) * 60 if limit.isdecimal() else seconds(limit),
                start=start,
            )
    return jobs


def _array_tasks(job: str) -> list[str]:
    """Return the ids of 12_[0-3,8-16:4], or the one id."""
    if (array := _RANGE.fullmatch(job)) is None:
        return [job]
    tasks = []
    for part in array[2].split(","):
        first, _, last = part.partition("-")
        last, _, step = last.partition(":")
        tasks += [f"{array[1]}_{k}" for k in range(int(first), int(last or first) + 1, int(step or 1))]
    return tasks


def _exit_code(code: str) -> str:
    """Return exit code and signal; squeue of some versions gives both in one number, as wait(2) does."""
    return f"{int(code) >> 8}:{int(code) & 0x7F}" if code.isdecimal() else code
