"""What is asked of a Ray cluster for a run: the body of POST /api/jobs/. Pure, but for values of named variables."""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contract.cluster import Ray, RayCode
from bench.contract.plan import Plan
from bench.errors import ConfigError

PACKAGES = Path(__file__).parents[3]
DRIVER = ("python", "-m", "bench.backends.ray.driver")
FOLDER = "runstop_folder"
"""Metadata of a job: the folder that it was submitted for."""
STOP_WAIT_S = 180
"""How long Ray waits for a driver that it has told to end, before it kills it."""
LIMIT_MARGIN_MIN = 2.0
"""So long before the limit of a job its runner is told, as Slurm's scripts are."""
SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # ranks print the same lines, and none of them may be left out
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
}


def settings(plan: Plan) -> Ray:
    """Return the block of the plan's cluster.

    Raises:
        ConfigError: it has none.
    """
    if plan.config.cluster.ray is None:
        what, fix = "nothing says where the Ray cluster is", "choose cluster=ray, or set cluster.ray.address"
        raise ConfigError(what, where="cluster.ray", fix=fix, rule="RAY-01")
    return plan.config.cluster.ray


def submission_id(folder: Path, number: int) -> str:
    """Return the name of a run's job, from 1: the same each time, so that Ray refuses to have it twice."""
    place = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.name)[:80]}-{place}-{number}"


def job_id(submission: str, address: str) -> str:
    """Return by what runstop knows a job: Ray's name for it, and where that is asked."""
    return f"{submission}@{address.rstrip('/')}"


def split(job: str) -> tuple[str, str]:
    """Return Ray's name for a job, and the address of its cluster."""
    submission, _, address = job.partition("@")
    return submission, address


def page(job: str) -> str:
    """Return where Ray's dashboard shows a job."""
    submission, address = split(job)
    return f"{address}/#/jobs/{submission}"


def body(plan: Plan, folder: Path, runs: Sequence[Path], number: int, *, walltime: int | None = None) -> dict[str, Any]:
    """Return the request for a job of a folder, its number from 1, that runs the plans in the folders of `runs`.

    `walltime` is what each trial may take, where that is not the plan's; `plan` has the limit of the job then.

    Raises:
        ConfigError: the cluster has no address, or a variable that it names is not set.
    """
    submission = submission_id(folder.absolute(), number)
    own = [] if walltime is None else ["--walltime", str(walltime)]
    words = ["--job", job_id(submission, address(plan)), *limit(plan), *own, *(str(run.absolute()) for run in runs)]
    return {
        "entrypoint": shlex.join([*DRIVER, *words]),
        "submission_id": submission,
        "runtime_env": _runtime_env(settings(plan)),
        "metadata": {FOLDER: str(folder.absolute())},
    }


def limit(plan: Plan) -> list[str]:
    """Return the words that tell a driver how long a run may take, all of its trials together."""
    if plan.walltime_min is None:
        return []
    return ["--limit-min", f"{max(1.0, plan.walltime_min - LIMIT_MARGIN_MIN):g}"]


def address(plan: Plan) -> str:
    """Return where the cluster takes jobs.

    Raises:
        ConfigError: nobody says it.
    """
    ray = settings(plan)
    if ray.address is None:
        raise ConfigError(
            "no address of a Ray cluster",
            where="cluster.ray.address",
            fix="set cluster.ray.address=http://HEAD:8265, or export RAY_API_SERVER_ADDRESS",
            rule="RAY-01",
        )
    if not re.match(r"https?://[^/]", ray.address):
        what, fix = f"{ray.address!r:.80} is not the address of a dashboard", "write it as http://HEAD:8265"
        raise ConfigError(what, where="cluster.ray.address", fix=fix, rule="RAY-01")
    return ray.address.rstrip("/")


def _runtime_env(ray: Ray) -> dict[str, Any]:
    """Return what Ray sets up for the job on every node."""
    if missing := [name for name in ray.environment if name not in os.environ]:
        what, fix = f"{', '.join(missing)} is not set", "export it, or leave it out of cluster.ray.environment"
        raise ConfigError(what, where="cluster.ray.environment", fix=fix, rule="CFG-06")
    environment = {name: os.environ[name] for name in ray.environment} | SETTINGS
    if ray.code is RayCode.installed:
        return {"env_vars": environment}
    packages = [str(PACKAGES / name) for name in ("bench", "jobs")]
    return {"env_vars": environment, "py_modules": packages, "excludes": ["__pycache__"]}
