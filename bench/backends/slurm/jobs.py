"""Hand a run's script to Slurm, through submitit, and know its job: state, end, cancel, resume."""

import contextlib
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.backends.slurm import client, script
from bench.backends.slurm.arguments import sbatch_arguments
from bench.backends.slurm.client import JobState
from bench.contract.plan import Plan
from bench.contract.schema import Runtime
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning import validate
from bench.preflight import Finding
from bench.runs import folder as folders
from bench.runs import ledger
from bench.runs.folder import JOB, LEDGER, SCRIPT, STATUS

ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""Slurm's states of jobs that use nothing any more; a requeued one comes back as PENDING."""
POLL_S = 5.0
LAG_S = 60.0
"""How long accounting may take to hear of a job that the controller has forgotten."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, and where its job stands."""

    folder: Path
    jobs: tuple[str, ...]
    """Every job that worked on it, the last one last; none for a run on the machine it was started from."""
    state: JobState | None
    elements: tuple[JobState, ...]
    """Of an array, one per trial that Slurm knows."""
    outcomes: tuple[str, ...]
    """Of each trial, by the ledger."""
    status: dict[str, Any]
    """What the job wrote last; empty until then."""

    @property
    def states(self) -> tuple[JobState, ...]:
        """Of the job, or of each element of an array."""
        return self.elements or ((self.state,) if self.state else ())

    @property
    def is_active(self) -> bool:
        """Whether Slurm has work of it queued or running."""
        return any(state.state not in ENDED for state in self.states)

    @property
    def word(self) -> str:
        """Where it stands, in one word: Slurm's for what it still has, else ours."""
        words = [state.state for state in self.states]
        if self.is_active:
            counts = Counter(words)
            return ", ".join(f"{counts[word]} {word}" for word in counts) if self.elements else words[0]
        if outcome := self.status.get("outcome"):
            return str(outcome)
        words.sort(key=lambda word: word == "COMPLETED")  # of an array the element that did not
        return words[0] if words else "running" if self.outcomes else "unknown"


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Return the id of the job that now runs the plan's script in its folder; `forced` findings are kept beside it.

    Raises:
        SubmitError: Slurm refuses it, in its own words.
    """
    (folder / SCRIPT).write_text(script.script(plan))
    site = {name: value for name in script.variables(plan) if (value := os.environ.get(name))}
    arguments = sbatch_arguments(plan, folder)
    job = {"jobs": [], "arguments": arguments, "environment": site}
    if plan.config.container.runtime is Runtime.none:
        job["environment"] = site | {"BENCH_PYTHON": sys.executable}
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    folders.write(folder / JOB, job)
    return _sbatch(folder)


def resume(folder: Path, *, walltime_min: int | None = None, arguments: Sequence[str] = ()) -> str:
    """Return the id of a job that goes on with a run: trials that are done stay, those cut short get another attempt.

    `walltime_min` is what each of these may take from now on; `arguments` are more for sbatch, such as --exclude=dgx-7.

    Raises:
        ConfigError: it is not a Slurm run, still has a job, or nothing is left to do.
        SubmitError: Slurm refuses the job.
    """
    run = find(folder)
    if not run.jobs or not (folder / SCRIPT).exists():
        raise ConfigError(
            "this run was not made by a Slurm job", where=str(folder), fix="start a new one with bench.launch"
        )
    if run.is_active:
        raise ConfigError(
            f"job {run.jobs[-1]} is {run.word}",
            where=str(folder),
            fix=f"wait for it, or python -m bench cancel {folder}",
        )
    if run.outcomes and all(outcome in (ledger.PROVEN, ledger.NOT_PROVEN) for outcome in run.outcomes):
        raise ConfigError(
            "every trial has its result, good or bad: there is nothing to go on with",
            where=str(folder / LEDGER),
            fix=f"python -m bench score {folder}",
        )
    ledger.reopen(folder)
    job = folders.read_object(folder / JOB)
    if walltime_min is not None:
        left = 1 if run.elements else sum(outcome in ledger.OPEN for outcome in _outcomes(folder)) or 1
        job["environment"] = (job.get("environment") or {}) | {"BENCH_WALLTIME": str(walltime_min)}
        arguments = [f"--time={validate.job_min(left, walltime_min)}", *arguments]
    folders.write(folder / JOB, job | {"arguments": [*(job.get("arguments") or []), *arguments]})
    return _sbatch(folder)


def cancel(folder: Path) -> str:
    """Return the id of the job that is cancelled; what it finished is kept.

    Raises:
        ConfigError: the run has no job that could be cancelled.
    """
    run = find(folder)
    if not run.jobs or not run.is_active:
        raise ConfigError(
            f"nothing to cancel: the run is {run.word}",
            where=str(folder),
            fix="python -m bench runs lists what goes on",
        )
    job = run.jobs[-1]
    answer = client.ask(["scancel", job])
    if answer.exit_code:
        raise SubmitError(answer.err.strip() or "scancel failed", where=f"job {job}", fix=f"scancel {job}")
    if all(state.state == "PENDING" for state in run.states):  # it has not started, so its script cannot say so
        reason = {"rule": "SLU-08", "what": "the job was cancelled before it started"}
        fix = f"python -m bench resume {folders.short(folder)}"
        folders.write(folder / STATUS, {"outcome": ledger.INTERRUPTED, "exit_code": 143, **reason, "fix": fix})
    return job


def find(folder: Path) -> Run:
    """Return one run.

    Raises:
        ConfigError: the folder is not a run's.
    """
    if not (folder / JOB).exists() and not (folder / LEDGER).exists():
        raise ConfigError("no run in this folder", where=str(folder), fix="python -m bench runs lists the runs")
    return _runs([folder])[0]


def runs(root: Path) -> list[Run]:
    """Return the runs below a folder, the oldest first; Slurm is asked twice at most, however many there are.

    Raises:
        ConfigError: no such folder.
    """
    if not root.is_dir():
        raise ConfigError("no such folder", where=str(root), fix="name the folder of runs, or set LOGDIR")
    return _runs([path.parent for name in (JOB, LEDGER) for path in root.glob(f"*/{name}")])


def wait(folder: Path, *, started: bool = False) -> Iterator[JobState]:
    """Yield where a run's job stands, whenever that changes, until it runs (`started`) or has ended."""
    last, missing_since = None, time.monotonic()
    while True:
        state = find(folder).state
        if state is not None:
            missing_since = time.monotonic()
            if last is None or (state.state, state.reason) != (last.state, last.reason):
                yield state
            last = state
        if (folder / STATUS).exists() or (state and (state.state in ENDED or (started and state.state == "RUNNING"))):
            return
        if time.monotonic() - missing_since > LAG_S:
            raise SubmitError(
                "Slurm no longer knows the job", where=str(folder), fix="python -m bench why " + str(folder)
            )
        time.sleep(POLL_S)


def exit_code(folder: Path) -> int:
    """Return what came of a run that has ended, as its job said, or as Slurm does."""
    run = find(folder)
    if isinstance(code := run.status.get("exit_code"), int):
        return code
    return 0 if run.states and all(state.state == "COMPLETED" for state in run.states) else 1


def probe(plan: Plan, num_nodes: int, *, health: bool) -> tuple[Path, int]:
    """Run the plan's script without its trials and wait for it; return its folder and exit code."""
    looking = script.probe(plan, num_nodes=num_nodes, health=health)
    folder = folders.make(looking, "")
    submit(looking, folder)
    try:
        for _ in wait(folder):
            pass
    except BaseException:  # nobody waits for it any more
        with contextlib.suppress(BenchError):
            cancel(folder)
        raise
    return folder, exit_code(folder)


def _runs(found: Sequence[Path]) -> list[Run]:
    parts = {
        path: (folders.read_object(path / JOB), folders.read_object(path / STATUS), _outcomes(path))
        for path in dict.fromkeys(sorted(found))
    }
    ids = {path: tuple(str(entry["id"]) for entry in job.get("jobs", [])) for path, (job, _, _) in parts.items()}
    asked = [jobs[-1] for path, jobs in ids.items() if jobs]
    states = client.states(asked) if asked and client.is_here() else {}
    return [
        Run(path, ids[path], *_states(states, ids[path]), outcomes, status)
        for path, (_, status, outcomes) in parts.items()
    ]


def _states(known: Mapping[str, JobState], jobs: Sequence[str]) -> tuple[JobState | None, tuple[JobState, ...]]:
    """Return the state of the last job, and of its elements if it is an array; the first still active one stands for it."""
    if not jobs:
        return None, ()
    elements = tuple(state for job, state in known.items() if job.startswith(f"{jobs[-1]}_"))
    active = next((state for state in elements if state.state not in ENDED), elements[-1] if elements else None)
    return known.get(jobs[-1]) or active, elements


def _sbatch(folder: Path) -> str:
    """Submit the script of a run folder, as job.json says, and enter the job there."""
    os.environ["SUBMITIT_LOG_LEVEL"] = "NOCONFIG"
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    job = folders.read_object(folder / JOB)
    said = io.StringIO()
    try:
        with (
            _environment(job.get("environment") or {}),
            TemporaryDirectory() as scratch,
            contextlib.redirect_stderr(said),
        ):
            number = str(_executor(scratch, folder, job.get("arguments") or [])._submit_command("").job_id)
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        lines = [line for line in (said.getvalue() or str(error)).splitlines() if line.strip()]
        raise SubmitError(
            lines[-1].removeprefix("sbatch: error: ") if lines else "sbatch failed",
            where=f"sbatch {folders.short(folder / SCRIPT)}",
            fix="python -m bench doctor, with the same KEY=VALUE, says what this site wants",
        ) from error
    job["jobs"] = [*job["jobs"], {"id": number, "submitted": time.time()}]
    folders.write(folder / JOB, job)
    return number


def _executor(scratch: str, folder: Path, arguments: Sequence[str]) -> Any:
    """Return submitit's executor with our script in the place of its own."""
    import submitit

    class Script(submitit.SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return (folder / SCRIPT).read_text()

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return ["sbatch", *arguments, str(folder / SCRIPT), str(folder)]

    return Script(folder=scratch)


@contextlib.contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """What the job inherits: this environment without options of sbatch, without those of a job it is started in, and the run's paths."""
    before, inherited = dict(os.environ), client.environment("sbatch") | dict(more)
    try:
        os.environ.clear()
        os.environ.update(inherited)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _outcomes(folder: Path) -> tuple[str, ...]:
    with contextlib.suppress(BenchError):
        return tuple(entry["outcome"] for entry in ledger.read(folder))
    return ()
