"""The state of one `runstop study` call: the study, its planned arms, its folder, and the states of its runs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench import diagnosis
from bench.contract.plan_paths import expanded
from bench.contract.schema import BackendName, Config
from bench.errors import BenchError, ConfigError, with_rule
from bench.results.study import PlannedArm
from bench.runs import run as runs
from bench.runs.folder import short
from bench.runs.ledger import Outcome
from bench.runs.run import Run
from bench.runs.status import Ending
from bench.studies import arms as arms_of
from bench.studies import fits, library, plans
from bench.studies import folder as folders
from bench.studies.arms import Arm
from bench.studies.folder import RunName, StoredStudy
from bench.studies.plans import Request
from bench.studies.spec import Study

OUT_OF_MEMORY = ("RUN-01", "RUN-03")
"""Rules that say that a GPU, or the host, had too little memory."""


class State(StrEnum):
    """The state of a run."""

    not_run = "not run"
    active = "active"
    interrupted = "interrupted"
    failed = "failed"
    out_of_memory = "out of memory"
    invalid = "invalid"
    valid = "valid"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run and its state."""

    name: RunName
    folder: Path
    state: State
    reason: str = ""
    """Why it failed, waits or was not started."""
    has_job: bool = False
    """A queued or running job has this run; another call does not start it."""
    has_final_status: bool = True
    """Its status.json is written; a valid run without one is resumed once more to write it."""

    @property
    def is_done(self) -> bool:
        """Whether it has a result, valid or not, so that another call does not run it."""
        return self.state in (State.valid, State.invalid) and self.has_final_status


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatuses:
    """The states of all runs of a study."""

    runs: Mapping[tuple[str, int], RunStatus]
    """By arm and block; where the study searches the largest micro-batch, the runs with the current one."""
    too_large: Mapping[str, tuple[int, ...]]
    """By arm: the micro-batches that ran out of memory."""

    def in_state(self, state: State) -> list[RunStatus]:
        return [run for run in self.runs.values() if run.state is state]


def run_statuses(
    folder: Path, arms: Iterable[tuple[Arm, PlannedArm]], *, num_runs: int, must_query: bool = True
) -> RunStatuses:
    """Return the states of all runs of a study, without arms that do not run.

    Raises:
        BenchError: a queue cannot be queried, and `must_query` is set.
    """
    known = {run.folder: run for run in _known(folder, must_query=must_query)}
    why = folders.not_started_reasons(folder)
    by_key: dict[tuple[str, int], RunStatus] = {}
    too_large: dict[str, tuple[int, ...]] = {}
    for arm, planned in arms:
        if not planned.runs:
            continue
        for size in planned.batches or (None,):  # the first batch with which no run is out of memory
            names = [RunName(arm=arm, block=block, batch=size) for block in range(num_runs)]
            of_arm = [_run_status(name, name.within(folder), known, why) for name in names]
            by_key |= {(arm.name, one.name.block): one for one in of_arm}
            if size is None or all(one.state is not State.out_of_memory for one in of_arm):
                break
            too_large[arm.name] = (*too_large.get(arm.name, ()), size)
    return RunStatuses(runs=by_key, too_large=too_large)


def _known(folder: Path, *, must_query: bool) -> list[Run]:
    return runs.below(folder, must_answer=must_query) if folder.is_dir() else []


def _run_status(name: RunName, folder: Path, known: Mapping[Path, Run], why: Mapping[str, str]) -> RunStatus:
    run = known.get(folder)
    if run is None:
        return RunStatus(name=name, folder=folder, state=State.not_run, reason=why.get(folder.name, ""))
    state, reason = _state(run)
    has_final_status = run.status is not None
    return RunStatus(
        name=name, folder=folder, state=state, reason=reason, has_job=run.is_active, has_final_status=has_final_status
    )


def _state(run: Run) -> tuple[State, str]:
    """Return the state of a run, and the reason."""
    if run.is_active and run.status is None:  # with a final status, its job works on other runs
        reason = run.state.reason if run.state else ""
        return State.active, f"{run.state_name}{f', {reason}' if reason else ''}"
    if run.outcomes and all(outcome is Outcome.valid for outcome in run.outcomes):
        return State.valid, ""
    if run.outcomes and all(outcome.is_result for outcome in run.outcomes):
        return State.invalid, _explained(run)[1]
    if run.status is None or run.status.outcome is Ending.interrupted:
        return State.interrupted, run.status.what or "" if run.status else ""
    rule, reason = _explained(run)
    return (State.out_of_memory if rule in OUT_OF_MEMORY else State.failed), reason


def _explained(run: Run) -> tuple[str | None, str]:
    """Return the rule that explains a failure, and its text: from status.json, else from the logs."""
    status = run.status
    if status is not None and status.rule is not None:
        return status.rule, with_rule(status.rule, status.what or "")
    with suppress(BenchError):
        cause = diagnosis.explain([run.folder])
        if cause.rule not in (None, diagnosis.UNKNOWN):
            return cause.rule, with_rule(
                cause.rule, f"{cause.title}: {cause.evidence}" if cause.evidence else cause.title
            )
    lines = (status.what or "").strip().splitlines() if status else []  # of a traceback the last line
    return None, lines[-1] if lines else f"to see why: runstop why {short(run.folder)}"


WAIT = "launch.wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The study, plans and settings of one call."""

    request: Request
    stored: StoredStudy
    folder: Path
    planned: Sequence[PlannedArm]
    max_walltime_min: int | None
    """The longest walltime of a job on this cluster."""
    waits: bool
    """Whether the call waits until queued jobs have ended."""
    left_out: frozenset[str] = frozenset()
    """Arms of which no further run starts."""

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The arms of each block in run order."""
        return arms_of.blocks(self.planned, runs=self.request.study.runs, seed=self.request.study.seed)

    @property
    def arms(self) -> list[tuple[Arm, PlannedArm]]:
        return list(zip(self.request.arms, self.planned, strict=True))

    def statuses(self, *, must_query: bool = True) -> RunStatuses:
        return run_statuses(self.folder, self.arms, num_runs=self.request.study.runs, must_query=must_query)

    def blocks_left(self, statuses: RunStatuses) -> list[tuple[str, ...]]:
        """Return the arms of each block that have no result in it, in run order."""
        done = {key for key, run in statuses.runs.items() if run.is_done}
        return [tuple(name for name in names if (name, block) not in done) for block, names in enumerate(self.blocks)]

    @property
    def backends(self) -> list[BackendName]:
        """The backends of the arms, one for most studies. Queues come first: submitting does not block."""
        names = {BackendName[arm.backend] for arm in self.planned if arm.runs}
        return sorted(names, key=lambda name: (not name.has_queue, name.name))

    def backend_of(self, run: RunStatus) -> BackendName:
        """Return the backend of a run."""
        return BackendName[next(arm.backend for arm in self.planned if arm.name == run.name.arm.name)]

    def left(self, statuses: RunStatuses, backend: BackendName | None = None) -> list[RunStatus]:
        """Return the runs that a backend, or every backend, has to start or resume, in run order."""
        mine = {arm.name for arm in self.planned if backend is None or arm.backend == backend.name} - self.left_out
        ordered = ((name, block) for block, names in enumerate(self.blocks) for name in names if name in mine)
        known = [statuses.runs[key] for key in ordered if key in statuses.runs]
        return [run for run in known if not run.is_done and not run.has_job]

    def batch_of(self, run: RunStatus) -> list[str]:
        """Return the overrides of a run's micro-batch; empty if the study does not search the largest one."""
        return plans.batch_overrides(self.request, run.name.arm, run.name.batch)


def begin(
    name: str,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    runs: int | None = None,
    inspects: bool = False,
) -> Session:
    """Return the session of a study, with every arm planned; nothing is written or started.

    With `inspects`, as in a dry run, arms that a launch would refuse do not run.

    Raises:
        ConfigError: the study or the command line has a mistake.
    """
    study = library.load(name, config_dir=config_dir)
    study = library.with_runs(study, runs) if runs is not None else study
    return of_study(study, name, overrides, config_dir=config_dir, runs=runs, inspects=inspects)


def of_study(
    study: Study,
    name: str,
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    runs: int | None = None,
    inspects: bool = False,
    tune: Sequence[str] = (),
) -> Session:
    """Return the session of a study; `tune` are the arguments of `runstop tune` if that has made the study.

    Raises:
        ConfigError: as `begin`.
    """
    request, waits = _request(study, name, overrides, config_dir=config_dir)
    config = plans.check_overrides(request)
    stored = StoredStudy(
        name=name,
        cluster=config.cluster.name,
        overrides=tuple(request.cli_overrides),
        config_dir=str(config_dir.resolve()) if config_dir else None,
        runs=runs,
        tune=tuple(tune),
        study=request.study,
        publications=library.publications(request.study, config_dir=config_dir),
    )
    return Session(
        request=request,
        stored=stored,
        folder=folders.path(_logs(config), name=name, cluster=config.cluster.name),
        planned=fits.with_fits(request, plans.plan_arms(request, inspects=inspects)),
        max_walltime_min=config.cluster.slurm.max_walltime_min if config.cluster.slurm else None,
        waits=waits,
    )


def folder_of(name: str, overrides: Sequence[str], *, config_dir: Path | None = None) -> Path:
    """Return the folder of a study on a cluster, which may not exist yet."""
    study = library.load(name, config_dir=config_dir)
    config = plans.check_overrides(_request(study, name, overrides, config_dir=config_dir)[0])
    return folders.path(_logs(config), name=name, cluster=config.cluster.name)


def _request(
    study: Study, name: str, overrides: Sequence[str], *, config_dir: Path | None = None
) -> tuple[Request, bool]:
    """Return the request, and whether the call waits for queued jobs."""
    of_runs, waits = _without_wait(overrides)
    arms = arms_of.build(study, where=name)
    return Request(study=study, arms=arms, cli_overrides=of_runs, config_dir=config_dir), waits


def _logs(config: Config) -> Path:
    logs = expanded(config.cluster.paths.logs)
    if logs is None:
        raise ConfigError(
            f"{config.cluster.paths.logs} contains an environment variable that is not set",
            where="cluster.paths.logs",
            fix="export LOGDIR=FOLDER",
            rule="CFG-06",
        )
    return Path(logs).absolute()


def _without_wait(overrides: Sequence[str]) -> tuple[list[str], bool]:
    """Return the overrides of the runs, and whether the call waits for queued jobs (launch.wait)."""
    waits = [override for override in overrides if override.partition("=")[0] == WAIT]
    others = [override for override in overrides if override not in waits]
    return others, bool(waits) and waits[-1].lower() == f"{WAIT}=true"
