"""Hand a run's script to sbatch, the first time and again, with what job.json keeps of it."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends.slurm import client, script
from bench.backends.slurm.checks import REFUSALS, last_line
from bench.backends.slurm.script import sbatch_arguments
from bench.contract import atomic_files
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, SCRIPT, SUBMISSION
from bench.contract.schema import BackendName, Runtime
from bench.errors import BenchError, ConfigError, SubmitError
from bench.images import store
from bench.planning import commands
from bench.rules.check import Answer, Finding
from bench.texts import strings

SBATCH_S = 300.0
"""How long sbatch may take. One that is killed may have submitted its job all the same, so this is long."""
_LOST = "timed out"
"""In sbatch's words where the controller took a request and did not answer: the job may be queued all the same."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Return the id of the job that now runs the plan's script in its folder; `forced` findings are kept beside it.

    Raises:
        SubmitError: Slurm refuses it, in its own words.
    """
    job = note(plan, folder, forced=forced)
    return _submitted(folder, job)


def note(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> dict[str, Any]:
    """Write a run's script and job.json into its folder, and return the latter; no job has it yet."""
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
        job["environment"] = site | {"BENCH_PYTHON": sys.executable}
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    _require_no_secret(job)
    with (folder / SCRIPT).open("x") as file:
        file.write(text)
    masked_json.write(folder / JOB, job)
    return job


def submit_shared(runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
    """Return the id of one job that runs several runs one after another, each by the script in its folder.

    `folder` is the job's own, beside theirs. Its job.json lists the runs, whose own get the job's id.

    Raises:
        SubmitError: Slurm refuses it; or its answer is lost.
    """
    plans, names = [plan for plan, _ in runs], [run.name for _, run in runs]
    with (folder / SCRIPT).open("x") as file:
        file.write(script.together(plans, names, name=name))
    environment: dict[str, str] = {}
    for _, run in runs:
        environment |= atomic_files.read_object(run / JOB).get("environment") or {}
    job: dict[str, Any] = {"backend": BackendName.slurm.name, "jobs": [], "runs": names}
    job |= {"arguments": sbatch_arguments(plans[0], folder), "environment": environment}
    masked_json.write(folder / JOB, job)
    number = _submitted(folder, job)
    note_shared(folder)
    return number


def note_shared(folder: Path) -> None:
    """Enter the jobs of a shared job's folder into job.json of its runs; each once, whatever was cut short before."""
    shared = atomic_files.read_object(folder / JOB)
    known = [str(entry["id"]) for entry in shared.get("jobs") or []]
    if (folder / SUBMISSION).exists():
        known += [job for job in client.submitted(folder) if job not in known]
    for run in (folder.parent / name for name in shared.get("runs") or []):
        held = atomic_files.read_object(run / JOB)
        entries = held.get("jobs") or []
        new = [job for job in known if job not in [str(entry["id"]) for entry in entries]]
        if held and new:
            added = [{"id": job, "submitted": time.time(), "shared": folder.name} for job in new]
            masked_json.write(run / JOB, held | {"jobs": [*entries, *added]})


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Return the id of a job that goes on with a run.

    Raises:
        ConfigError: the folder has no script.
        SubmitError: Slurm refuses the job; nothing in the folder has changed then.
    """
    if not (folder / SCRIPT).exists():
        raise ConfigError(f"the run has no {SCRIPT}", where=str(folder), fix="start a new one with bench.launch")
    job = atomic_files.read_object(folder / JOB)
    if walltime_min is not None:
        job["environment"] = (job.get("environment") or {}) | {"BENCH_WALLTIME": str(walltime_min)}
        arguments = [f"--time={commands.job_min(trials_left, walltime_min)}", *arguments]
    return _submitted(folder, job | {"arguments": [*(job.get("arguments") or []), *arguments]})


def _submitted(folder: Path, job: Mapping[str, Any]) -> str:
    """Submit the script of a run folder as `job` says, and keep `job` with the new job's id once Slurm has taken it.

    Before sbatch is asked, a note says that it will be. The note goes with a refusal or with the id. It stays where the
    answer is lost, or the id cannot be written down: `client.submitted` then finds the job.
    """
    _require_no_secret(job)
    folder = folder.resolve() if folder.is_symlink() else folder  # the script takes no link
    argv = ["sbatch", "--parsable", *(job.get("arguments") or []), str(folder / SCRIPT), str(folder.absolute())]
    known = [str(entry["id"]) for entry in job.get("jobs") or []]
    note = folder / SUBMISSION
    is_first = not note.exists()  # one that is there is of an earlier answer that was lost, and still holds
    if is_first:
        masked_json.write(note, {"since": time.time(), "command": argv})
    try:
        number = _accepted(argv, folder, known, environment=job.get("environment") or {})
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
        what = f"job {number} is submitted, and its id cannot be written down: {error.strerror}"
        fix = f"make room; `python -m bench runs` finds the job all the same, and scancel {number} ends it"
        raise _LostError(what, where=str(folder / JOB), fix=fix, rule="CFG-08") from error
    with suppress(OSError):
        note.unlink()
    return number


def _accepted(argv: Sequence[str], folder: Path, known: Sequence[str], *, environment: Mapping[str, str]) -> str:
    """Return the id of the job that sbatch has submitted; where sbatch does not say so, the queue is asked for it.

    Raises:
        _LostError: nobody can say whether there is a job.
        SubmitError: there is none.
    """
    answer = None
    try:
        answer = client.ask(argv, timeout_s=SBATCH_S, more=environment)
        refusal = _refused(answer, folder)
        number = answer.out.strip().partition(";")[0]
        if answer.exit_code == 0 and number.isdecimal():
            return number
    except client.NoAnswerError as error:
        refusal = error
    is_lost = answer is None or answer.exit_code == 0 or _LOST in answer.err
    found: list[str] = []
    with suppress(SubmitError):
        found = [job for job in client.submitted(folder) if job not in known]
    if found:
        return found[-1]
    if is_lost:
        what = f"{refusal.what}; the job may have been submitted all the same"
        fix = f"`python -m bench runs` shows its job if there is one; else python -m bench resume {folder}"
        raise _LostError(what, where=refusal.where, fix=fix) from refusal
    raise refusal


class _LostError(SubmitError):
    """Slurm may have a job, or has one, that does not stand in job.json."""


def _require_no_secret(job: Mapping[str, Any]) -> None:
    """Refuse what Slurm shows to every user of the cluster, and job.json keeps."""
    for place, _, text in strings(dict(job), JOB):
        masking.refuse([text], where=place)


def _refused(answer: Answer, folder: Path) -> SubmitError:
    """Return what Slurm said, where that was asked for, and what to change."""
    said = last_line(answer.err or answer.out).removeprefix("Batch job submission failed: ")
    known = next(((where, fix) for sign, where, fix in REFUSALS if re.search(sign, answer.err)), None)
    where, fix = known or (f"sbatch {folder / SCRIPT}", None)
    usual = "`sinfo`, `scontrol show partition` and `sacctmgr show associations user=$USER` show what this site takes"
    return SubmitError(said, where=where, fix=fix or usual)
