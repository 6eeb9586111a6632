"""What a backend is: who starts the ranks, and what can be asked of it."""

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
    """Where a job stands, whatever its backend calls that."""

    queued = "queued"
    running = "running"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def is_active(self) -> bool:
        """Whether the job uses its nodes, or waits for them."""
        return self in (JobState.queued, JobState.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its backend knows it; texts are empty where the backend says nothing."""

    id: str
    state: JobState
    word: str
    """The backend's own word for the state, such as PENDING, TIMEOUT or NODE_FAIL."""
    reason: str = ""
    nodes: str = ""
    exit_code: str = ""
    """Exit code and signal, as 3:0; of a job that still runs it says nothing."""
    elapsed_s: int | None = None
    limit_s: int | None = None
    start: str = ""
    """When it started, or is expected to."""
    rule: str = ""
    """The rule that explains the state, where the backend itself knows one."""


class Backend(Protocol):
    """What can be asked of every backend."""

    tiers: tuple[Tier, ...]
    """How far the doctor can look."""
    files_tier: Tier
    """On which of these data, checkpoint and results lie where the ranks will find them."""

    def is_here(self) -> bool:
        """Return whether jobs can be started from this machine."""

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        """Return what this backend checks of a plan, by tier."""

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        """Return what the checks of a tier look at; the site is asked for it where the tier needs that."""

    def render(self, plan: Plan) -> str:
        """Return the file that is the whole run. Pure: no clock, user name, file or live cluster.

        Raises:
            ConfigError: this backend runs a plan without such a file.
        """

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        """Yield where a plan.json is not the plan in the file that was rendered of it, which a job may fill in."""

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        """Return what is set for every rank beside what the submitter's environment holds."""

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        """Return where jobs stand, by id, with as few questions as it takes; unknown ones are left out."""

    def cancel(self, job: str) -> None:
        """End a job.

        Raises:
            SubmitError: the backend refuses.
        """


@runtime_checkable
class Here(Backend, Protocol):
    """A backend whose runs are driven by the process that asks for them."""

    def nodes(self, plan: Plan, folder: Path) -> AbstractContextManager[Nodes]:
        """Hold the nodes that run a plan's commands; at the end of the block nothing of the run is left on them."""


@runtime_checkable
class Printed(Backend, Protocol):
    """A backend that keeps what a job has printed, for runs whose files lie where only the job sees them."""

    def printed(self, job: str) -> Mapping[str, str]:
        """Return what each process of a job has printed so far, by the process's name.

        Raises:
            SubmitError: the backend cannot be asked.
        """


@runtime_checkable
class Queue(Backend, Protocol):
    """A backend that takes a job and lets go of it; the others run it in the process that asks for it."""

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        """Return the id of the job that now runs the plan in its folder, `forced` findings kept beside it.

        Raises:
            SubmitError: the backend refuses it, in its own words, and `folder` is as it was; or its answer is lost.
        """

    def submitted(self, folder: Path) -> Sequence[str]:
        """Return the ids of jobs that are queued or running for a run folder, whether or not anybody has noted them.

        Raises:
            SubmitError: the queue cannot be asked.
        """

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        """Return the id of a job that goes on with a run; one that is refused leaves the folder as it was.

        `walltime_min` is what each trial may take from now on; `arguments` are more for the backend's command.

        Raises:
            SubmitError: the backend refuses it, in its own words.
        """

    def without(self, plan: Plan, nodes: Sequence[str]) -> str:
        """Return the override, as one would paste it, that leaves nodes out beside those that are left out already."""


@runtime_checkable
class SharesNodes(Queue, Protocol):
    """A queue one of whose jobs may run several runs, one after another on the same nodes."""

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        """Return whether runs of these plans can follow each other on the same nodes, in one job."""

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        """Write into a run's folder what a job needs that it shares with other runs."""

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        """Return the id of one job that now runs several prepared runs, one after another; `folder` is the job's own.

        Raises:
            SubmitError: as `submit`.
        """

    def note_shared(self, folder: Path) -> None:
        """Enter the jobs of a shared job's folder into its runs', where that has not been done."""
