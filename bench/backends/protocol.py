"""The protocols of backends: what starts ranks, and what runstop can request of it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

from bench.backends.nodes.lead import Nodes
from bench.contract.plan import Plan
from bench.rules.check import Check, Finding, Subject, Tier


class JobState(Enum):
    """The state of a job in terms that all backends share."""

    queued = "queued"
    running = "running"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def is_active(self) -> bool:
        """Whether the job is running or queued."""
        return self in (JobState.queued, JobState.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its backend reports it; texts are empty where the backend reports nothing."""

    id: str
    state: JobState
    native_state: str
    """The backend's own name for the state, such as PENDING, TIMEOUT or NODE_FAIL."""
    reason: str = ""
    nodes: str = ""
    exit_code: str = ""
    """Exit code and signal, such as 3:0; meaningless for a running job."""
    elapsed_s: int | None = None
    limit_s: int | None = None
    start: str = ""
    """When it started, or its expected start time."""
    rule: str = ""
    """The rule that explains the state, if the backend knows one."""


class Backend(Protocol):
    """The methods of every backend."""

    tiers: tuple[Tier, ...]
    """The tiers of checks that the doctor can run."""
    files_tier: Tier
    """The tier that sees data, checkpoint and results at the ranks' paths."""

    def is_available(self) -> bool:
        """Return whether jobs can be started from this machine."""

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        """Return this backend's checks of a plan, by tier."""

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        """Return the input of a tier's checks; this queries the site if the tier needs it."""

    def render(self, plan: Plan) -> str:
        """Return the self-contained file of a run. It depends on the plan only: no clock, user name, file or cluster.

        Raises:
            ConfigError: this backend needs no such file.
        """

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        """Yield where plan.json differs from the plan in the rendered file, variables aside."""

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        """Return the variables that are set for every rank in addition to the submitter's environment."""

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return the states of jobs by id, with as few queries as possible; unknown jobs are left out."""

    def is_of(self, job: str, folder: Path) -> bool:
        """Return whether this user started a job for a run folder, by what the backend knows; job.json is not evidence.

        Raises:
            SubmitError: the backend cannot be queried.
        """

    def cancel(self, job: str) -> None:
        """End a job.

        Raises:
            SubmitError: the backend refuses.
        """


@runtime_checkable
class InProcess(Backend, Protocol):
    """A backend whose runs are driven by the process that launched them."""

    def nodes(self, plan: Plan, folder: Path) -> AbstractContextManager[Nodes]:
        """Hold the nodes that run a plan's commands; at the end of the block no process of the run is left on them."""


@runtime_checkable
class NamesServers(Backend, Protocol):
    """A backend whose job.json names the server that has the jobs, so that it is not queried for any folder."""

    def is_own_server(self, folder: Path) -> bool:
        """Return whether this user chose the server that the job.json of a folder names; the user owns the folder."""


@runtime_checkable
class KeepsOutput(Backend, Protocol):
    """A backend that keeps a job's output, for runs whose files only the job can see."""

    def output(self, job: str) -> Mapping[str, str]:
        """Return the output of each process of a job so far, by the process's name.

        Raises:
            SubmitError: the backend cannot be reached.
        """


@runtime_checkable
class Queue(Backend, Protocol):
    """A backend to which runstop submits a job and then returns; other backends run it in the launching process."""

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        """Submit a job that runs the plan in its folder, and return its id; `forced` findings are recorded in job.json.

        Raises:
            SubmitError: the backend refuses it, and `folder` is unchanged; or its answer is lost.
        """

    def submitted(self, folder: Path) -> Sequence[str]:
        """Return the ids of jobs that are queued or running for a run folder, whether or not job.json has them.

        Raises:
            SubmitError: the queue cannot be reached.
        """

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        """Submit a job that continues a run, and return its id; if it is refused, the folder is unchanged.

        `walltime_min` is the new time limit of each trial; `arguments` are added to the backend's command.

        Raises:
            SubmitError: the backend refuses it, with the backend's message.
        """

    def exclude_nodes(self, plan: Plan, nodes: Sequence[str]) -> str:
        """Return the override, quoted for a shell, that excludes these nodes in addition to those excluded already."""


@runtime_checkable
class SharesNodes(Queue, Protocol):
    """A queue that can run several runs in one job, one after another on the same nodes."""

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        """Return whether runs of these plans can share one job."""

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        """Write the files that a shared job needs into a run's folder."""

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        """Submit one job that runs several prepared runs one after another; return its id. `folder` is the job's.

        Raises:
            SubmitError: as `submit`.
        """

    def record_shared_jobs(self, folder: Path) -> None:
        """Record the jobs of a shared job's or an array's folder in job.json of its runs, if they are not recorded."""


@runtime_checkable
class SubmitsArrays(SharesNodes, Protocol):
    """A queue that can run several runs as the tasks of one job array."""

    def arrays(self, plans: Sequence[Plan]) -> list[list[int]]:
        """Return the positions of plans, grouped into those that one job array can run, each as one task."""

    def submit_array(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        """Submit one job array with a task for each prepared run; return the array's id. `folder` is the array's.

        Raises:
            SubmitError: as `submit`.
        """
