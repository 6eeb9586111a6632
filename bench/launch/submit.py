"""`bench.submit`: start runs from Python, and get submitit jobs for them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, overload

from bench import backends
from bench.backends import executors
from bench.backends.protocol import InProcess, SubmitsArrays
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.errors import ConfigError, Stopped, stopped_by_signals
from bench.history.avoid import bad_nodes
from bench.launch import run_here, start
from bench.planning import compose, to_prepare
from bench.runs import command_line, result
from bench.runs import run as runs
from bench.runs.result import RunResult

if TYPE_CHECKING:
    from submitit import Job

SUBMITIT = "submitit"
"""The folder in a run folder in which submitit's local executor keeps the pickled function, its result and output."""


@overload
def submit(overrides: list[str], *, config_dir: Path | None = None, in_process: bool = False) -> "Job[RunResult]": ...


@overload
def submit(
    overrides: list[list[str]], *, config_dir: Path | None = None, in_process: bool = False
) -> "list[Job[RunResult]]": ...


def submit(
    overrides: list[str] | list[list[str]], *, config_dir: Path | None = None, in_process: bool = False
) -> "Job[RunResult] | list[Job[RunResult]]":
    """Check and start one run, or one for each list of overrides; return its submitit job, or the list of them.

    `cluster.backend=slurm` submits sbatch scripts; several runs become one array for each set of nodes, partition and
    time limit. `local` and `ssh` drive the run in a background process, or with `in_process` in this process when
    `job.result()` is called. All runs are planned and checked before the first one starts.

    Raises:
        ConfigError: a run cannot be planned or fails a check, or its backend has no submitit executor.
        SubmitError: Slurm refuses a job.
    """
    lists = [words for words in overrides if isinstance(words, list)]
    is_one = len(lists) < len(overrides) or not overrides
    if is_one:
        lists = [[override for override in overrides if isinstance(override, str)]]
    planned = [_planned(words, config_dir) for words in lists]
    for plan, _ in planned:
        _require_executor(plan)
    words = [[*one, *to_prepare.site_words(config_dir)] for one in lists]
    checked = [(plan, text, start.check(plan, own)) for (plan, text), own in zip(planned, words, strict=True)]
    prepared = [start.prepare(plan, text, findings) for plan, text, findings in checked]
    jobs = _jobs(prepared, in_process=in_process)
    return jobs[0] if is_one else jobs


def job(folder: Path) -> "Job[RunResult]":
    """Return the submitit job of a run that is in Slurm's queue, running or ended, by its folder.

    Raises:
        ConfigError: the folder is not that of a run on Slurm.
    """
    run = runs.find(folder)
    queue = backends.get(run.backend)
    if not isinstance(queue, SubmitsArrays) or not run.jobs:
        what = f"this run uses {run.backend.name} and has no Slurm job"
        raise ConfigError(
            what, where=str(folder), fix="call bench.read_run, which returns the result of any run that has ended"
        )
    return executors.attach({folder: run.id}, states=queue.states, read=result.read)[0]


def _planned(overrides: list[str], config_dir: Path | None) -> tuple[Plan, str]:
    plan, config_yaml = compose.for_run(overrides, config_dir=config_dir, bad_nodes=bad_nodes)
    return plan, command_line.with_overrides(config_yaml, overrides, config_dir)


def _require_executor(plan: Plan) -> None:
    if plan.config.launch.dry_run:
        raise ConfigError(
            "bench.submit cannot start a run with launch.dry_run=true",
            where="launch.dry_run",
            fix="remove launch.dry_run=true, or call bench.plan instead",
        )
    if not isinstance(backends.for_plan(plan), InProcess | SubmitsArrays):
        backend = plan.config.cluster.backend.name
        what = f"bench.submit cannot start runs on {backend}, because submitit has no executor for this backend"
        fix = "use `runstop launch`, or a cluster with backend local, ssh or slurm"
        raise ConfigError(what, where="cluster.backend", fix=fix)


def _jobs(prepared: Sequence[start.Prepared], *, in_process: bool) -> "list[Job[RunResult]]":
    """Start the runs and return their jobs in order."""
    jobs: dict[Path, Job[RunResult]] = {}
    queued = [one for one in prepared if isinstance(backends.for_plan(one.plan), SubmitsArrays)]
    if queued:
        queue = backends.for_plan(queued[0].plan)
        assert isinstance(queue, SubmitsArrays), queue
        ids = {folder: id for folder, id in start.submit_runs(queue, queued).items() if isinstance(id, str)}
        attached = executors.attach(ids, states=queue.states, read=result.read)
        jobs |= dict(zip(ids, attached, strict=True))
    for one in prepared:
        if one.folder not in jobs:
            folder, files = one.folder.absolute(), one.folder.absolute() / SUBMITIT
            drive = DrivenRun(folder)
            if in_process:
                jobs[one.folder] = executors.in_this_process(drive, files=files)
            else:
                jobs[one.folder] = executors.in_background(drive, folder, files=files, read=result.read)
    return [jobs[one.folder] for one in prepared]


@dataclass(frozen=True, slots=True)
class DrivenRun:
    """The function that submitit's local and debug executors call: it drives a run and returns its result."""

    folder: Path
    visible_gpus: str | None = field(default_factory=lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    """submitit's local executor hides all GPUs; the driver gets the value of the submitting process back."""

    def __call__(self) -> RunResult:
        """Drive the run to its end.

        Raises:
            BenchError: a trial has no result.
        """
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.visible_gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.visible_gpus
        try:
            with stopped_by_signals():
                run_here.run(plan_kinds.load(self.folder / PLAN), self.folder)
        except Stopped:
            pass  # the run's status says that it was interrupted
        return result.read(self.folder)
