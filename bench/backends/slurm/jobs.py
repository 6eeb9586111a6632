"""Hand a run's script to sbatch, the first time and again, with what job.json keeps of it."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backends.slurm import client, script
from bench.backends.slurm.arguments import sbatch_arguments
from bench.backends.slurm.site_checks import REFUSALS, last_line
from bench.contract import json_files
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, SCRIPT
from bench.contract.schema import BackendName, Runtime
from bench.errors import ConfigError, SubmitError
from bench.images import identity
from bench.planning import validate
from bench.rules.check import Answer, Finding

SBATCH_S = 300.0
"""How long sbatch may take. One that is killed may have submitted its job all the same, so this is long."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Return the id of the job that now runs the plan's script in its folder; `forced` findings are kept beside it.

    Raises:
        SubmitError: Slurm refuses it, in its own words.
    """
    (folder / SCRIPT).write_text(script.script(plan))
    site = {name: value for name in script.variables(plan) if (value := os.environ.get(name))}
    job: dict[str, Any] = {
        "backend": BackendName.slurm.name,
        "jobs": [],
        "arguments": sbatch_arguments(plan, folder),
        "environment": site,
    }
    if plan.config.container.runtime is not Runtime.none:
        job["image"] = identity.of(plan.config.container.image or "")
    else:
        job["environment"] = site | {"BENCH_PYTHON": sys.executable}
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    json_files.write(folder / JOB, job)
    return _submitted(folder, job)


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Return the id of a job that goes on with a run.

    Raises:
        ConfigError: the folder has no script.
        SubmitError: Slurm refuses the job; nothing in the folder has changed then.
    """
    if not (folder / SCRIPT).exists():
        raise ConfigError(f"the run has no {SCRIPT}", where=str(folder), fix="start a new one with bench.launch")
    job = json_files.read_object(folder / JOB)
    if walltime_min is not None:
        job["environment"] = (job.get("environment") or {}) | {"BENCH_WALLTIME": str(walltime_min)}
        arguments = [f"--time={validate.job_min(trials_left, walltime_min)}", *arguments]
    return _submitted(folder, job | {"arguments": [*(job.get("arguments") or []), *arguments]})


def _submitted(folder: Path, job: Mapping[str, Any]) -> str:
    """Submit the script of a run folder as `job` says, and keep `job` with the new job's id once Slurm has taken it."""
    argv = ["sbatch", "--parsable", *(job.get("arguments") or []), str(folder / SCRIPT), str(folder)]
    answer = client.ask(argv, timeout_s=SBATCH_S, more=job.get("environment") or {})
    number = answer.out.strip().partition(";")[0]
    if answer.exit_code or not number.isdecimal():
        raise _refused(answer, folder)
    entry = {"id": number, "submitted": time.time()}
    json_files.write(folder / JOB, dict(job) | {"jobs": [*(job.get("jobs") or []), entry]})
    return number


def _refused(answer: Answer, folder: Path) -> SubmitError:
    """Return what Slurm said, where that was asked for, and what to change."""
    said = last_line(answer.err or answer.out).removeprefix("Batch job submission failed: ")
    known = next(((where, fix) for sign, where, fix in REFUSALS if re.search(sign, answer.err)), None)
    where, fix = known or (f"sbatch {folder / SCRIPT}", None)
    usual = "`sinfo`, `scontrol show partition` and `sacctmgr show associations user=$USER` show what this site takes"
    return SubmitError(said, where=where, fix=fix or usual)
