"""Plan every arm of a study before the first one starts, and say why one cannot run.

What cannot be composed is a mistake in the study or on the command line, such as a misspelt key, and is raised. There
are two exceptions, whose arms have `-` in their cells: a choice of a group that may come with a later version (an
engine, a cluster, a container, a kind, a task that is named like no other), and what composes and cannot be planned,
because it does not fit the memory or cannot be split over the ranks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contract.plan import Plan, World, fingerprint
from bench.contract.plan_kinds import TrainingPlan, training_plan
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning import compose, layouts
from bench.planning.compose_errors import InvalidValueError, UnknownChoiceError
from bench.results.study import Mark, PlannedArm
from bench.studies import checks
from bench.studies.arms import Arm
from bench.studies.spec import Study


def candidates(config: Config, *, limit: int) -> tuple[int, ...]:
    """Return the micro-batches to try, largest first: what the plan says fits, then each an eighth smaller.

    The first one is 1 if the plan says that nothing fits, which planning then refuses with its reason.
    """
    world = _world(config)
    sizes = range(1, limit + 1)
    first = max(1, bisect_left(sizes, True, key=lambda size: not _fits(config, world, size)))
    found = [first]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // 8))
    return tuple(found)


def overrides(config: Config, size: int) -> list[str]:
    """Return the overrides of runs with this micro-batch: every replica computes one for each pipeline stage."""
    w = _world(config)
    split = [f"parallel.{axis}={getattr(w, axis)}" for axis in ("tp", "pp", "cp")] + [
        f"parallel.sp={str(w.sp).lower()}"
    ]
    return [*split, f"recipe.micro_batch_size={size}", f"recipe.global_batch_size={_global(w, size)}"]


def _global(world: World, size: int) -> int:
    return size * world.dp * world.pp


def _world(config: Config) -> World:
    """Return how the ranks are split; where the config leaves that open, as is best for micro-batches of one."""
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    recipe = replace(config.training_recipe, micro_batch_size=1, global_batch_size=num_ranks)
    return layouts.choose(replace(config, recipe=recipe)).world


def _fits(config: Config, world: World, size: int) -> bool:
    recipe = replace(config.training_recipe, micro_batch_size=size, global_batch_size=_global(world, size))
    split = replace(config.parallel, tp=world.tp, pp=world.pp, cp=world.cp, sp=world.sp)
    return layouts.choose(replace(config, recipe=recipe, parallel=split)).memory.fits is not False


OPTIONAL_GROUPS = ("engine", "cluster", "container")
"""Groups whose choices differ between versions and sites."""
OPTIONAL_KEYS = ("engine.name", "task.kind", "cluster.backend", "container.runtime")
"""Keys with a fixed set of values that grows with versions."""
CLUSTER = "cluster="
OF_THE_STUDY = {
    "trials": "the study's runs are its trials: runs in the study, or --runs",
    "launch.folder": "each run has its own folder, below LOGDIR/studies",
    "launch.array": "each run is one trial",
    "launch.dry_run": "use --dry-run",
}
"""Overrides that a study sets by itself, and what to use in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A study as it is to be run: what stands in conf/, and what the command line adds."""

    study: Study
    arms: Sequence[Arm]
    words: Sequence[str]
    """Overrides of the command line; they count over those of the arms."""
    config_dir: Path | None = None

    def overrides(self, arm: Arm, batch: Sequence[str] = ()) -> list[str]:
        """Return all overrides of an arm's runs but the folder and the seed; `batch` are those of its micro-batch.

        An arm that names a cluster runs there: the command line's cluster is that of all others.
        """
        has_own = any(word.startswith(CLUSTER) for word in arm.overrides)
        words = [word for word in self.words if not (has_own and word.startswith(CLUSTER))]
        return [*arm.overrides, *words, *batch, *_length(self.study, arm), "trials=1"]


def check_words(request: Request) -> Config:
    """Return the config of the study's own overrides with those of the command line.

    Raises:
        ConfigError: one of these is wrong, or is not for a study.
    """
    for word in request.words:
        key = word.lstrip("+~").partition("=")[0]
        if key in OF_THE_STUDY:
            raise ConfigError(f"{key} is set by the study", where=word, fix=OF_THE_STUDY[key])
    return compose.unplanned([*request.study.overrides, *request.words], config_dir=request.config_dir)


def plan_arms(request: Request) -> list[PlannedArm]:
    """Return what the plan of each arm says, or why there is none.

    Raises:
        ConfigError: the study or the command line has a mistake.
    """
    return [replace(_planned(request, arm), note=arm.note or "") for arm in request.arms]


def for_run(request: Request, arm: Arm, batch: Sequence[str], *, folder: Path, block: int) -> tuple[Plan, str]:
    """Return the plan of one run, and its config.yaml; both arms of a block have the same seed."""
    words = request.overrides(arm, batch)
    seed = compose.unplanned(words, config_dir=request.config_dir).seed_base + block
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    own = [f"seed_base={seed}", f"launch.folder='{quoted}'"]
    plan, config_yaml = compose.for_run([*words, *own], config_dir=request.config_dir)
    return plan, config_yaml


def batch_overrides(request: Request, arm: Arm, size: int | None) -> list[str]:
    """Return the overrides of a micro-batch; none where the study does not search the largest one."""
    if size is None:
        return []
    return overrides(compose.unplanned(request.overrides(arm), config_dir=request.config_dir), size)


def _length(study: Study, arm: Arm) -> list[str]:
    """Return what makes the runs of an arm as long as the study says."""
    steps = arm.calculated.steps if arm.calculated else None
    if study.window is not None:
        steps = study.window.skip_steps + study.window.steps
    return [] if steps is None else [f"task.training.max_steps={steps}", "task.training.epochs=null"]


def _planned(request: Request, arm: Arm) -> PlannedArm:
    if arm.not_advisable:
        return PlannedArm(name=arm.name, mark=Mark.not_advisable, reason=arm.not_advisable, runs=False)
    try:
        config = compose.unplanned(request.overrides(arm), config_dir=request.config_dir)
    except ConfigError as error:
        reason = _missing(error)
        if reason is None:
            raise _of_arm(error, arm) from error
        return PlannedArm(name=arm.name, mark=Mark.no_result, reason=reason, runs=False, is_missing=True)
    try:
        sizes: tuple[int, ...] = ()
        batch: list[str] = []
        if request.study.max_batch is not None:
            sizes = candidates(config, limit=request.study.max_batch.limit)
            batch = overrides(config, sizes[0])
        plan = compose.compose(request.overrides(arm, batch), config_dir=request.config_dir)
    except ConfigError as error:
        return PlannedArm(name=arm.name, mark=Mark.no_result, reason=error.what, runs=False)
    return replace(of_plan(arm.name, plan), batches=sizes)


def _missing(error: ConfigError) -> str | None:
    """Return that a choice is not there yet; None for what is a mistake."""
    if isinstance(error, UnknownChoiceError):
        group = error.group.split("@")[0]
        is_new_task = group == "task" and not checks.alike(error.name, error.known)
        return f"{group} {error.name} is not there" if group in OPTIONAL_GROUPS or is_new_task else None
    if isinstance(error, InvalidValueError) and error.key in OPTIONAL_KEYS and error.value is not None:
        return f"{error.key.partition('.')[0]} {error.value} is not there"
    return None


def _of_arm(error: ConfigError, arm: Arm) -> ConfigError:
    return ConfigError(error.what, where=f"arm {arm.name!r}: {error.where}", fix=error.fix, rule=error.rule)


def of_plan(name: str, plan: Plan) -> PlannedArm:
    """Return what is kept of an arm's plan."""
    w, config = plan.world, plan.config
    split = {"groups": w.groups or 1, "dp": w.dp, "tp": w.tp, "pp": w.pp, "cp": w.cp}
    gpu = config.cluster.gpu
    return PlannedArm(
        name=name,
        backend=config.cluster.backend.name,
        fingerprint=_fingerprint(plan),
        num_ranks=w.num_ranks,
        num_nodes=w.num_nodes,
        device=gpu.name if gpu and config.cluster.device.name == "cuda" else config.cluster.device.name,
        layout=" ".join(f"{axis} {size}" for axis, size in split.items() if size > 1) or "1 rank",
        walltime_min=plan.walltime_min,
        **(_of_training(trained) if (trained := training_plan(plan)) is not None else {}),
    )


def _of_training(plan: TrainingPlan) -> dict[str, Any]:
    """Return what is kept of the plan of a training arm alone."""
    step_s = plan.apart.mean_step_s if plan.apart else plan.cost and plan.cost.step_s
    return {
        "micro_batch_size": plan.batch.micro_batch_size,
        "global_batch_size": plan.batch.global_batch_size,
        "steps": plan.max_steps,
        "step_time_ms": 1000 * step_s if step_s else None,
        "tokens_s_gpu": plan.batch.tokens_per_step / step_s / plan.world.num_ranks if step_s else None,
        "memory_gib": plan.memory.total_gib,
        "capacity_gib": plan.memory.capacity_gib,
    }


def _fingerprint(plan: Plan) -> str:
    """Return what differs whenever an arm measures something else; paths, account and folders are left out."""
    c = plan.config
    parts = (
        c.task,
        c.model,
        c.data,
        c.recipe,
        c.parallel,
        c.engine,
        c.container,
        c.precision.name,
        c.cluster.name,
    )
    return fingerprint(*parts, plan.world, *plan.work)
