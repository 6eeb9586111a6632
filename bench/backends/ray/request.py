"""Build the request for a Ray job: the body of POST /api/jobs/. Pure, except for the values of passed variables."""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from bench.contract.cluster import Ray, RayCode
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning.conf_folder import CONF

PACKAGES = Path(__file__).parents[3]
DRIVER = ("python", "-m", "bench.backends.ray.driver")
FOLDER = "runstop_folder"
"""The metadata key of a job with the run folder that it was submitted for."""
STOP_WAIT_S = 180
"""How long Ray waits for a stopped driver to end before it kills it."""
LIMIT_MARGIN_MIN = 2.0
"""The runner is warned this long before the job's time limit, as with Slurm."""
SETTINGS = {
    "RAY_DEDUP_LOGS": "0",  # ranks print equal lines, and none of them may be dropped
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
}


def settings(plan: Plan) -> Ray:
    """Return the Ray settings of the plan's cluster.

    Raises:
        ConfigError: it has none.
    """
    if plan.config.cluster.ray is None:
        what, fix = "the configuration has no Ray cluster", "set cluster=ray, or set cluster.ray.address"
        raise ConfigError(what, where="cluster.ray", fix=fix, rule="RAY-01")
    return plan.config.cluster.ray


def submission_id(folder: Path, number: int) -> str:
    """Return Ray's name for the run's job `number`, from 1. It is deterministic, so Ray refuses a duplicate."""
    place = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', folder.name)[:80]}-{place}-{number}"


def job_id(submission: str, address: str) -> str:
    """Return runstop's id of a job: Ray's name and the address of the cluster."""
    return f"{submission}@{address.rstrip('/')}"


def split(job: str) -> tuple[str, str]:
    """Split runstop's id into Ray's name for the job and the address of its cluster."""
    submission, _, address = job.partition("@")
    return submission, address


def is_address(text: Any) -> TypeGuard[str]:
    """Return whether a text is the address of a dashboard; Ray's client imports a module for any other scheme."""
    return isinstance(text, str) and re.fullmatch(r"https?://[^/\s@\\?#][^\s@\\?#]*", text) is not None


def page(job: str) -> str:
    """Return the URL of a job on Ray's dashboard."""
    submission, address = split(job)
    return f"{address}/#/jobs/{submission}"


def body(plan: Plan, folder: Path, runs: Sequence[Path], number: int, *, walltime: int | None = None) -> dict[str, Any]:
    """Return the request for job `number` (from 1) of a folder, which runs the plans in the folders `runs`.

    `walltime` is the time limit per trial in minutes, if it is not the plan's; `plan` has the limit of the whole job.

    Raises:
        ConfigError: the cluster has no address, or a variable of `cluster.ray.environment` is not set.
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
    """Return the driver's arguments for the time limit of the whole run."""
    if plan.walltime_min is None:
        return []
    return ["--limit-min", f"{max(1.0, plan.walltime_min - LIMIT_MARGIN_MIN):g}"]


def address(plan: Plan) -> str:
    """Return the address of the Ray dashboard.

    Raises:
        ConfigError: it is not set, or not valid.
    """
    ray = settings(plan)
    if ray.address is None:
        raise ConfigError(
            "the address of the Ray cluster is not set",
            where="cluster.ray.address",
            fix="set cluster.ray.address=http://HEAD:8265, or export RAY_API_SERVER_ADDRESS",
            rule="RAY-01",
        )
    if not is_address(ray.address):
        what, fix = (
            f"{ray.address!r:.80} is not a valid address of a Ray dashboard",
            "set cluster.ray.address=http://HEAD:8265",
        )
        raise ConfigError(what, where="cluster.ray.address", fix=fix, rule="RAY-01")
    return ray.address.rstrip("/")


def _runtime_env(ray: Ray) -> dict[str, Any]:
    """Return the job's runtime_env, which Ray sets up on every node."""
    if missing := [name for name in ray.environment if name not in os.environ]:
        what, fix = (
            f"the environment variable {', '.join(missing)} is not set",
            f"export {missing[0]}=VALUE, or remove {missing[0]} from cluster.ray.environment",
        )
        raise ConfigError(what, where="cluster.ray.environment", fix=fix, rule="CFG-06")
    environment = {name: os.environ[name] for name in ray.environment} | SETTINGS
    if ray.code is RayCode.installed:
        return {"env_vars": environment}
    folders = [PACKAGES / "bench", PACKAGES / "jobs"]
    if not CONF.is_relative_to(folders[0]):  # in a checkout
        folders.append(CONF)
    return {"env_vars": environment, "py_modules": [*map(str, folders)], "excludes": ["__pycache__"]}
