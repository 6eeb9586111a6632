"""One call of `bench study`: the study, its arms as planned, its folder, and where its runs stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract.plan_paths import expanded
from bench.contract.schema import BackendName, Config
from bench.errors import ConfigError
from bench.results.study import PlannedArm
from bench.studies import arms as arms_of
from bench.studies import folder as folders
from bench.studies import library, order, plans, standing
from bench.studies.arms import Arm
from bench.studies.folder import Kept
from bench.studies.plans import Request
from bench.studies.standing import Standing, Standings

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
        return order.blocks(self.planned, runs=self.request.study.runs, seed=self.request.study.seed)

    @property
    def arms(self) -> list[tuple[Arm, PlannedArm]]:
        return list(zip(self.request.arms, self.planned, strict=True))

    def standings(self, *, ask: bool = True) -> Standings:
        return standing.of(self.folder, self.arms, num_runs=self.request.study.runs, ask=ask)

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
