"""One call of `bench study`: the study, its arms as planned, its folder, and where its runs stand."""

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
from bench.studies import folder as folders
from bench.studies import library, plans
from bench.studies.arms import Arm
from bench.studies.folder import Kept, RunName
from bench.studies.plans import Request

OUT_OF_MEMORY = ("RUN-01", "RUN-03")
"""Rules that say that a GPU, or the host, had too little memory."""


class State(StrEnum):
    """Where a run stands."""

    not_run = "not run"
    active = "active"
    interrupted = "interrupted"
    failed = "failed"
    out_of_memory = "out of memory"
    not_proven = "not proven"
    proven = "proven"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One run, and where it stands."""

    name: RunName
    folder: Path
    state: State
    reason: str = ""
    """Why it failed, waits or was not started."""
    has_job: bool = False
    """A job is queued or at work that has this run among its own; another call leaves it alone."""
    is_closed: bool = True
    """Its last word is written; a proven run without one is opened once more to write it."""

    @property
    def is_done(self) -> bool:
        """Whether it has a result, good or bad, that another call leaves as it is."""
        return self.state in (State.proven, State.not_proven) and self.is_closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """All runs of a study."""

    runs: Mapping[tuple[str, int], Standing]
    """By arm and block; where the largest batch is searched, of the batch that the arm's runs take now."""
    too_large: Mapping[str, tuple[int, ...]]
    """By arm: the micro-batches with which a run was out of memory."""

    def of(self, state: State) -> list[Standing]:
        return [run for run in self.runs.values() if run.state is state]


def of(folder: Path, arms: Iterable[tuple[Arm, PlannedArm]], *, num_runs: int, ask: bool = True) -> Standings:
    """Return where all runs of a study stand, less those of arms that do not run.

    Raises:
        BenchError: the queue cannot be asked, and `ask` says that it must be.
    """
    known = {run.folder: run for run in _known(folder, ask=ask)}
    why = folders.not_started(folder)
    found: dict[tuple[str, int], Standing] = {}
    too_large: dict[str, tuple[int, ...]] = {}
    for arm, planned in arms:
        if not planned.runs:
            continue
        for size in planned.batches or (None,):  # the first batch with which no run is out of memory
            names = [RunName(arm=arm, block=block, batch=size) for block in range(num_runs)]
            of_arm = [_standing(name, name.within(folder), known, why) for name in names]
            found |= {(arm.name, one.name.block): one for one in of_arm}
            if size is None or all(one.state is not State.out_of_memory for one in of_arm):
                break
            too_large[arm.name] = (*too_large.get(arm.name, ()), size)
    return Standings(runs=found, too_large=too_large)


def _known(folder: Path, *, ask: bool) -> list[Run]:
    return runs.below(folder, must_answer=ask) if folder.is_dir() else []


def _standing(name: RunName, folder: Path, known: Mapping[Path, Run], why: Mapping[str, str]) -> Standing:
    run = known.get(folder)
    if run is None:
        return Standing(name=name, folder=folder, state=State.not_run, reason=why.get(folder.name, ""))
    state, reason = _state(run)
    is_closed = run.status is not None
    return Standing(name=name, folder=folder, state=state, reason=reason, has_job=run.is_active, is_closed=is_closed)


def _state(run: Run) -> tuple[State, str]:
    """Return where a run stands, and why."""
    if run.is_active and run.status is None:  # with a last word, its job works on other runs
        reason = run.state.reason if run.state else ""
        return State.active, f"{run.word}{f', {reason}' if reason else ''}"
    if run.outcomes and all(outcome is Outcome.proven for outcome in run.outcomes):
        return State.proven, ""
    if run.outcomes and all(outcome.is_result for outcome in run.outcomes):
        return State.not_proven, _explained(run)[1]
    if run.status is None or run.status.outcome is Ending.interrupted:
        return State.interrupted, run.status.what or "" if run.status else ""
    rule, reason = _explained(run)
    return (State.out_of_memory if rule in OUT_OF_MEMORY else State.failed), reason


def _explained(run: Run) -> tuple[str | None, str]:
    """Return the rule that explains a failure, and its words: the run's own last word, or what its logs say."""
    status = run.status
    if status is not None and status.rule is not None:
        return status.rule, with_rule(status.rule, status.what or "")
    with suppress(BenchError):
        found = diagnosis.explain([run.folder])
        if found.rule not in (None, diagnosis.UNKNOWN):
            return found.rule, with_rule(
                found.rule, f"{found.title}: {found.evidence}" if found.evidence else found.title
            )
    words = (status.what or "").strip().splitlines() if status else []  # of a traceback the last line
    return None, words[-1] if words else f"see python -m bench why {short(run.folder)}"


WAIT = "launch.wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one call works with."""

    request: Request
    kept: Kept
    folder: Path
    planned: Sequence[PlannedArm]
    max_walltime_min: int | None
    """Of a job on this cluster."""
    waits: bool
    """Whether jobs in a queue are followed to their end."""

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The arms of each block in their order."""
        return arms_of.blocks(self.planned, runs=self.request.study.runs, seed=self.request.study.seed)

    @property
    def arms(self) -> list[tuple[Arm, PlannedArm]]:
        return list(zip(self.request.arms, self.planned, strict=True))

    def standings(self, *, ask: bool = True) -> Standings:
        return of(self.folder, self.arms, num_runs=self.request.study.runs, ask=ask)

    def blocks_left(self, standings: Standings) -> list[tuple[str, ...]]:
        """Return the arms of each block that lack a result there, in their order."""
        done = {key for key, run in standings.runs.items() if run.is_done}
        return [tuple(name for name in names if (name, block) not in done) for block, names in enumerate(self.blocks)]

    @property
    def backends(self) -> list[BackendName]:
        """Who starts the ranks of the arms: one for most studies. Queues come first, since they need no waiting."""
        names = {BackendName[arm.backend] for arm in self.planned if arm.runs}
        return sorted(names, key=lambda name: (not name.has_queue, name.name))

    def backend_of(self, run: Standing) -> BackendName:
        """Return who starts the ranks of a run."""
        return BackendName[next(arm.backend for arm in self.planned if arm.name == run.name.arm.name)]

    def left(self, standings: Standings, backend: BackendName | None = None) -> list[Standing]:
        """Return the runs that a backend, or all of them, are to begin or to go on with, in order."""
        mine = {arm.name for arm in self.planned if backend is None or arm.backend == backend.name}
        ordered = ((name, block) for block, names in enumerate(self.blocks) for name in names if name in mine)
        found = [standings.runs[key] for key in ordered if key in standings.runs]
        return [run for run in found if not run.is_done and not run.has_job]

    def batch_of(self, run: Standing) -> list[str]:
        """Return the overrides of a run's micro-batch, where the study searches the largest one."""
        return plans.batch_overrides(self.request, run.name.arm, run.name.batch)


def begin(name: str, words: Sequence[str], *, config_dir: Path | None = None, runs: int | None = None) -> Session:
    """Return the session of a study, with every arm planned; nothing is written or started.

    Raises:
        ConfigError: the study, or a word of the command line, has a mistake.
    """
    request, waits = _request(name, words, config_dir=config_dir, runs=runs)
    config = plans.check_words(request)
    kept = Kept(
        name=name,
        cluster=config.cluster.name,
        words=tuple(request.words),
        config_dir=str(config_dir.resolve()) if config_dir else None,
        runs=runs,
        study=request.study,
        publications=library.publications(request.study, config_dir=config_dir),
    )
    return Session(
        request=request,
        kept=kept,
        folder=folders.path(_logs(config), name=name, cluster=config.cluster.name),
        planned=plans.plan_arms(request),
        max_walltime_min=config.cluster.slurm.max_walltime_min if config.cluster.slurm else None,
        waits=waits,
    )


def folder_of(name: str, words: Sequence[str], *, config_dir: Path | None = None) -> Path:
    """Return where a study on a cluster is kept, whether or not it is there yet."""
    config = plans.check_words(_request(name, words, config_dir=config_dir)[0])
    return folders.path(_logs(config), name=name, cluster=config.cluster.name)


def _request(
    name: str, words: Sequence[str], *, config_dir: Path | None = None, runs: int | None = None
) -> tuple[Request, bool]:
    """Return what is to be run, and whether it is to be followed to its end."""
    study = library.load(name, config_dir=config_dir)
    study = library.with_runs(study, runs) if runs is not None else study
    of_runs, waits = _without_wait(words)
    arms = arms_of.of(study, where=name)
    return Request(study=study, arms=arms, words=of_runs, config_dir=config_dir), waits


def _logs(config: Config) -> Path:
    logs = expanded(config.cluster.paths.logs)
    if logs is None:
        raise ConfigError(
            f"{config.cluster.paths.logs} is not set", where="cluster.paths.logs", fix="set LOGDIR", rule="CFG-06"
        )
    return Path(logs).absolute()


def _without_wait(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the overrides of runs, and whether the study is to be followed to its end: no single run is."""
    waiting = [word for word in words if word.partition("=")[0] == WAIT]
    return [word for word in words if word not in waiting], bool(waiting) and waiting[-1].lower() == f"{WAIT}=true"
