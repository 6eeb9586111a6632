"""Submit a run's script with sbatch, at first and on resume, and record its jobs in job.json."""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends import executors
from bench.backends.slurm import client, script
from bench.backends.slurm.checks import REFUSALS, last_line
from bench.backends.slurm.script import sbatch_arguments
from bench.contract import atomic_files, regular_files, run_files
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, SCRIPT, SUBMISSION
from bench.contract.schema import BackendName, Runtime
from bench.errors import BenchError, ConfigError, SubmitError
from bench.images import store
from bench.planning import commands
from bench.rules.check import Answer, Finding
from bench.texts import strings

SBATCH_S = 300.0
"""Time limit of sbatch. It is long, since an sbatch that is killed may have submitted its job anyway."""
_LOST = "timed out"
"""Part of sbatch's message if the controller took a request and did not answer: the job may be queued anyway."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Submit the plan's script and return the job id; job.json also gets the `forced` findings.

    Raises:
        SubmitError: Slurm refuses it; the message is Slurm's.
    """
    job = prepare(plan, folder, forced=forced)
    return _submitted(folder, job)


def prepare(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> dict[str, Any]:
    """Write a run's script and job.json into its folder before it has a job; return the content of job.json."""
    text = script.script(plan)
    masking.refuse([text], where=SCRIPT)
    site = {name: value for name in script.variables(plan) if (value := os.environ.get(name))}
    job: dict[str, Any] = {
        "backend": BackendName.slurm.name,
        "jobs": [],
        "arguments": sbatch_arguments(plan, folder),
        "environment": site,
    }
    if plan.config.container.runtime is not Runtime.none:
        job["image"] = store.identity(plan.config.container.image or "")
    else:
        job["environment"] = site | {"RUNSTOP_PYTHON": sys.executable}
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    _require_no_secret(job)
    with atomic_files.create(folder / SCRIPT) as file:
        file.write(text)
    masked_json.write(folder / JOB, job)
    return job


def submit_shared(runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
    """Submit one job that runs several runs one after another, each by the script in its folder; return the job id.

    Raises:
        SubmitError: Slurm refuses it, or its answer is lost.
    """
    plans, names = [plan for plan, _ in runs], [run.name for _, run in runs]
    return _submit_together(runs, folder, script.shared_job(plans, names, name=name), is_array=False)


def submit_array(runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
    """Submit one array with a task for each run; its script holds every plan. Return the id of the array.

    Raises:
        SubmitError: Slurm refuses it, or its answer is lost.
    """
    plans, names = [plan for plan, _ in runs], [run.name for _, run in runs]
    return _submit_together(runs, folder, script.array_job(plans, names, name=name), is_array=True)


def _submit_together(runs: Sequence[tuple[Plan, Path]], folder: Path, text: str, *, is_array: bool) -> str:
    """Submit the script of a folder next to the runs' folders. Its job.json lists the runs; theirs get the job's id."""
    masking.refuse([text], where=SCRIPT)
    with atomic_files.create(folder / SCRIPT) as file:
        file.write(text)
    environment: dict[str, str] = {}
    held = {run: atomic_files.read_object(run / JOB) for _, run in runs}
    for job in held.values():
        environment |= job.get("environment") or {}
    job = {"backend": BackendName.slurm.name, "jobs": [], "runs": [run.name for _, run in runs], "is_array": is_array}
    job |= {"arguments": sbatch_arguments(runs[0][0], folder, is_array=is_array), "environment": environment}
    masked_json.write(folder / JOB, job)
    for run, known in held.items():  # `submitted` finds the job by it if sbatch's answer is lost
        masked_json.write(run / JOB, known | {"shared": folder.name})
        masked_json.write(run / SUBMISSION, {"since": time.time(), "shared": folder.name})
    try:
        number = _submitted(folder, job)
    except _LostError:
        raise
    except BenchError:
        for run, known in held.items():
            masked_json.write(run / JOB, known)
            (run / SUBMISSION).unlink(missing_ok=True)
        raise
    record_shared_jobs(folder)
    return number


def record_shared_jobs(folder: Path) -> None:
    """Record the jobs of a shared job's or an array's folder in job.json of its runs; each job once."""
    shared = atomic_files.read_object(folder / JOB)
    known = [str(entry["id"]) for entry in shared.get("jobs") or []]
    is_lost = (folder / SUBMISSION).exists()
    if is_lost:
        known += [job for job in client.submitted(folder) if job not in known]
    for task, run in enumerate(folder.parent / name for name in run_files.runs_in(shared)):
        held = atomic_files.read_object(run / JOB)
        entries = held.get("jobs") or []
        ids = [_id_of_run(job, task, shared) for job in known]
        new = [job for job in ids if job not in [str(entry["id"]) for entry in entries]]
        if held and new:
            added = [{"id": job, "submitted": time.time(), "shared": folder.name} for job in new]
            masked_json.write(run / JOB, held | {"jobs": [*entries, *added]})
        if held and not is_lost:
            (run / SUBMISSION).unlink(missing_ok=True)


def submitted(folder: Path) -> list[str]:
    """Return the ids of queued and running jobs of a run folder: its own, and those that it shares with other runs.

    Raises:
        SubmitError: the controller cannot be reached.
    """
    own = client.submitted(folder)
    name = atomic_files.read_object(folder / JOB).get("shared")
    if not isinstance(name, str) or Path(name).name != name:
        return own
    shared = atomic_files.read_object(folder.parent / name / JOB)
    runs = run_files.runs_in(shared)
    if folder.name not in runs:
        return own
    task = runs.index(folder.name)
    return [*own, *(_id_of_run(job, task, shared) for job in client.submitted(folder.parent / name))]


def _id_of_run(job: str, task: int, shared: Mapping[str, Any]) -> str:
    """Return the id of a run's job: of an array, that of the run's task."""
    return f"{job}_{task}" if shared.get("is_array") else job


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Submit a job that continues a run; return the job id.

    Raises:
        ConfigError: the folder has no script.
        SubmitError: Slurm refuses the job; the folder is then unchanged.
    """
    if not (folder / SCRIPT).exists():
        raise ConfigError(
            f"the run folder has no {SCRIPT}", where=str(folder), fix="start a new run with `runstop launch`"
        )
    job = atomic_files.read_object(folder / JOB)
    if walltime_min is not None:
        job["environment"] = (job.get("environment") or {}) | {_walltime_variable(folder): str(walltime_min)}
        arguments = [f"--time={commands.job_min(trials_left, walltime_min)}", *arguments]
    return _submitted(folder, job | {"arguments": [*(job.get("arguments") or []), *arguments]})


def _walltime_variable(folder: Path) -> str:
    """Return the variable that a run's script reads; scripts of earlier versions read only the old name."""
    name = "RUNSTOP_WALLTIME"
    return name if name in regular_files.read_text(folder / SCRIPT) else "BENCH_WALLTIME"


def _submitted(folder: Path, job: Mapping[str, Any]) -> str:
    """Submit the script of a run folder as `job` describes; write `job` with the new id once Slurm has accepted it.

    The file SUBMISSION is written before sbatch starts. It is removed when sbatch refuses or the id is recorded. It
    stays if the answer is lost or the id cannot be written: `client.submitted` then finds the job.
    """
    _require_no_secret(job)
    folder = folder.resolve() if folder.is_symlink() else folder  # the script takes no link
    submission = executors.Script(
        path=folder / SCRIPT,
        folder=folder,
        arguments=tuple(job.get("arguments") or []),
        environment=job.get("environment") or {},
    )
    known = [str(entry["id"]) for entry in job.get("jobs") or []]
    note = folder / SUBMISSION
    is_first = not note.exists()  # else an earlier answer was lost, and the file is still needed
    if is_first:
        masked_json.write(note, {"since": time.time(), "command": submission.command})
    try:
        number = _executor(folder, known).submit(submission).job_id
    except _LostError:
        raise
    except BenchError:
        if is_first:
            note.unlink(missing_ok=True)
        raise
    entry = {"id": number, "submitted": time.time()}
    try:
        masked_json.write(folder / JOB, dict(job) | {"jobs": [*(job.get("jobs") or []), entry]})
    except OSError as error:
        what = f"job {number} was submitted, but its id could not be recorded: {error.strerror}"
        fix = f"free disk space; `runstop runs` still finds the job, and `scancel {number}` cancels the job"
        raise _LostError(what, where=str(folder / JOB), fix=fix, rule="CFG-08") from error
    with suppress(OSError):
        note.unlink()
    return number


def _executor(folder: Path, known: Sequence[str]) -> executors.ScriptExecutor:
    def no_result(folder: Path) -> Any:
        raise AssertionError("this executor cannot read results; to read them, use a job that bench.submit returns")

    return executors.ScriptExecutor(
        folder, sbatch=lambda submission: _accepted(submission, known), states=client.states, read=no_result
    )


def _accepted(submission: executors.Script, known: Sequence[str]) -> str:
    """Return the id of the submitted job; if sbatch does not print it, query the queue.

    Raises:
        _LostError: it is unknown whether there is a job.
        SubmitError: no job was submitted.
    """
    folder, answer = submission.folder, None
    try:
        answer = client.run(submission.command, timeout_s=SBATCH_S, more=submission.environment)
        refusal = _refused(answer, folder)
        number = answer.out.strip().partition(";")[0]
        if answer.exit_code == 0 and number.isdecimal():
            return number
    except client.NoAnswerError as error:
        refusal = error
    is_lost = answer is None or answer.exit_code == 0 or _LOST in answer.err
    queued: list[str] = []
    with suppress(SubmitError):
        queued = [job for job in client.submitted(folder) if job not in known]
    if queued:
        return queued[-1]
    if is_lost:
        what = f"{refusal.what}; the job may exist anyway"
        fix = "run `runstop runs` to see whether the job exists; if the job does not exist: runstop resume "
        fix += shlex.quote(str(folder))
        raise _LostError(what, where=refusal.where, fix=fix) from refusal
    raise refusal


class _LostError(SubmitError):
    """Slurm has, or may have, a job that is not in job.json."""


def _require_no_secret(job: Mapping[str, Any]) -> None:
    """Refuse secrets in the job: Slurm shows it to every user of the cluster, and job.json keeps it."""
    for place, _, text in strings(dict(job), JOB):
        masking.refuse([text], where=place)


def _refused(answer: Answer, folder: Path) -> SubmitError:
    """Return Slurm's message with the config key that caused it, and what to change."""
    message = last_line(answer.err or answer.out).removeprefix("Batch job submission failed: ")
    known = next(((where, fix) for sign, where, fix in REFUSALS if re.search(sign, answer.err)), None)
    where, fix = known or (f"sbatch {folder / SCRIPT}", None)
    usual = "`sinfo`, `scontrol show partition` and `sacctmgr show associations user=$USER` show what this site accepts"
    return SubmitError(message, where=where, fix=fix or usual)
