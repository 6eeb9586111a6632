"""Plan every arm of a study before the first run starts, and record why an arm cannot run.

A config that cannot be composed is a mistake in the study or on the command line, such as a misspelt key, and raises an
error. There are two exceptions, whose arms have `-` in their cells: a choice of a group that a later version may have
(an engine, a cluster, a container, a kind, a task with a name like no other), and a config that cannot be planned,
since it does not fit into memory or cannot be split over the ranks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from bench import preflight
from bench.contract.plan import Plan, World, fingerprint
from bench.contract.plan_kinds import TrainingPlan, training_plan
from bench.contract.schema import Config, Device, Precision
from bench.errors import ConfigError
from bench.history.avoid import bad_nodes
from bench.planning import compose, layouts
from bench.planning.compose_errors import InvalidValueError, UnknownChoiceError
from bench.planning.estimates.parameters import parameters
from bench.preflight import Finding
from bench.results.study import Mark, PlannedArm
from bench.rules.finding import errors
from bench.studies import checks, labels
from bench.studies.arms import Arm
from bench.studies.spec import Study
from bench.texts import hydra_value


def candidates(config: Config, *, limit: int) -> tuple[int, ...]:
    """Return the micro-batches to try, largest first: the largest that fits by the estimate, then each 1/8 smaller.

    The first one is 1 if none fits by the estimate; planning then refuses it with the reason.
    """
    world = _world(config)
    sizes = range(1, limit + 1)
    first = max(1, bisect_left(sizes, True, key=lambda size: not _fits(config, world, size)))
    sizes_tried = [first]
    while sizes_tried[-1] > 1:
        sizes_tried.append(sizes_tried[-1] - max(1, sizes_tried[-1] // 8))
    return tuple(sizes_tried)


def micro_batch_overrides(config: Config, size: int) -> list[str]:
    """Return the overrides for this micro-batch; each replica computes one micro-batch per pipeline stage and step."""
    w = _world(config)
    split = [f"parallel.{axis}={getattr(w, axis)}" for axis in ("tp", "pp", "cp")] + [
        f"parallel.sp={str(w.sp).lower()}"
    ]
    return [*split, f"recipe.micro_batch_size={size}", f"recipe.global_batch_size={_global(w, size)}"]


def _global(world: World, size: int) -> int:
    return size * world.dp * world.pp


def _world(config: Config) -> World:
    """Return the parallelism; what the config leaves open is chosen for micro-batches of 1."""
    num_ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    recipe = replace(config.training_recipe, micro_batch_size=1, global_batch_size=num_ranks)
    return layouts.choose(replace(config, recipe=recipe)).world


def _fits(config: Config, world: World, size: int) -> bool:
    recipe = replace(config.training_recipe, micro_batch_size=size, global_batch_size=_global(world, size))
    split = replace(config.parallel, tp=world.tp, pp=world.pp, cp=world.cp, sp=world.sp)
    return layouts.choose(replace(config, recipe=recipe, parallel=split)).memory.fits is not False


OPTIONAL_GROUPS = ("engine", "cluster", "container")
"""Config groups whose choices differ between versions and sites."""
OPTIONAL_KEYS = ("engine.name", "task.kind", "cluster.backend", "container.runtime")
"""Keys with a fixed set of values that grows with versions."""
CLUSTER = "cluster="
OF_THE_STUDY = {
    "trials": "set the number of runs instead: runs in the study, or --runs",
    "launch.folder": "remove this override: every run has its own folder below LOGDIR/studies",
    "launch.array": "remove this override: every run of a study has one trial",
    "launch.dry_run": "use --dry-run instead",
}
"""Overrides that a study sets itself, with the alternative for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A study from conf/, with the overrides of the command line."""

    study: Study
    arms: Sequence[Arm]
    cli_overrides: Sequence[str]
    """Overrides of the command line, applied after those of the arms."""
    config_dir: Path | None = None

    def overrides(self, arm: Arm, batch: Sequence[str] = ()) -> list[str]:
        """Return all overrides of an arm's runs except folder and seed; `batch` are those of its micro-batch.

        An arm that names a cluster runs there; the cluster of the command line is used for the other arms.
        """
        has_own = any(override.startswith(CLUSTER) for override in arm.overrides)
        of_call = [one for one in self.cli_overrides if not (has_own and one.startswith(CLUSTER))]
        return [*arm.overrides, *of_call, *batch, *_length(self.study, arm), "trials=1"]


def check_overrides(request: Request) -> Config:
    """Return the config composed of the study's overrides and those of the command line.

    Raises:
        ConfigError: an override is wrong, a study sets it itself, or one of its axes varies it.
    """
    for override in request.cli_overrides:
        key = compose.override_key(override)
        if key in OF_THE_STUDY:
            raise ConfigError(
                f"{key} cannot be overridden, because the study sets this key itself",
                where=override,
                fix=OF_THE_STUDY[key],
            )
        if axis := _axis_of(key, request.study):
            choices = ", ".join(request.study.axes[axis])
            raise ConfigError(
                f"{key} cannot be overridden, because the axis {axis} of this study sets {key} for each of the choices "
                f"{choices}",
                where=override,
                fix=f"remove this override, or copy the study and remove the axis {axis} from the copy",
            )
    return compose.unplanned([*request.study.overrides, *request.cli_overrides], config_dir=request.config_dir)


def _axis_of(key: str, study: Study) -> str | None:
    """Return the axis whose choices all set a key, to different values; None if there is none.

    An override of the cluster is for the arms that name none.
    """
    if key == CLUSTER.removesuffix("="):
        return None
    for axis, choices in study.axes.items():
        values = [[one for one in overrides if compose.override_key(one) == key] for overrides in choices.values()]
        if all(values) and len({value[-1] for value in values}) > 1:
            return axis
    return None


def plan_arms(request: Request, *, inspects: bool = False) -> list[PlannedArm]:
    """Return the planned arms; an arm without a plan has the reason.

    With `inspects`, as in a dry run, an arm that a launch would refuse has the reason, too.

    Raises:
        ConfigError: the study or the command line has a mistake.
    """
    planned = [_planned(request, arm, inspects=inspects) for arm in request.arms]
    return [
        replace(one, note="; ".join(filter(None, (arm.note, one.note))), **_replaced(request, arm))
        for arm, one in zip(request.arms, planned, strict=True)
    ]


SAME_WORK = ("cluster", "gpu@cluster", "container", "launch", "walltime", "seed_base", "hydra")
SAME_WORK_KEYS = ("model.weights", "data.files", "data.tokenizer")
"""Groups and keys of overrides that keep the work of an arm; a key that the arm sets itself does not."""


def _replaced(request: Request, arm: Arm) -> dict[str, Any]:
    """Return the overrides of the command line that change the work of an arm, and the model that they give it.

    Overrides without an effect do not count.
    """
    of_arm = {compose.override_key(override) for override in arm.overrides} - set(SAME_WORK_KEYS)
    others = [one for one in request.cli_overrides if _changes_work(compose.override_key(one), of_arm)]
    if not others:
        return {}
    own = replace(request, cli_overrides=[one for one in request.cli_overrides if one not in others])
    try:
        new, old = (compose.unplanned(one.overrides(arm), config_dir=request.config_dir) for one in (request, own))
    except ConfigError:
        return {"changed": tuple(others)}
    if _work(new) == _work(old):
        return {}
    return {"changed": tuple(others), "model": labels.of_replacement(new.model, old.model)}


def _changes_work(key: str, of_arm: set[str]) -> bool:
    if key == CLUSTER.rstrip("="):  # of the arm itself, it wins
        return False
    is_kept = key in SAME_WORK_KEYS or key.partition(".")[0] in SAME_WORK
    return not is_kept or (key in of_arm and key.startswith("cluster."))


def _work(config: Config) -> object:
    """Return the parts of a config by which two arms do the same work on the same number of ranks."""
    c = config.cluster
    parts = (config.task, config.model, config.data, config.recipe, config.parallel, config.engine, config.precision)
    return parts, c.num_nodes, c.ranks_per_node, c.environment


def for_run(request: Request, arm: Arm, batch: Sequence[str], *, folder: Path, block: int) -> tuple[Plan, str]:
    """Return the plan of one run, and its config.yaml; all arms of a block have the same seed."""
    overrides = request.overrides(arm, batch)
    seed = compose.unplanned(overrides, config_dir=request.config_dir).seed_base + block
    own = [f"seed_base={seed}", f"launch.folder={hydra_value(str(folder))}"]
    plan, config_yaml = compose.for_run([*overrides, *own], config_dir=request.config_dir, bad_nodes=bad_nodes)
    return plan, config_yaml


def batch_overrides(request: Request, arm: Arm, size: int | None) -> list[str]:
    """Return the overrides of a micro-batch; empty if the study does not search the largest one."""
    if size is None:
        return []
    return micro_batch_overrides(compose.unplanned(request.overrides(arm), config_dir=request.config_dir), size)


def _length(study: Study, arm: Arm) -> list[str]:
    """Return the overrides that set the number of steps of an arm's runs."""
    steps = arm.calculated.steps if arm.calculated else None
    if study.window is not None:
        steps = study.window.skip_steps + study.window.steps
    return [] if steps is None else [f"task.training.max_steps={steps}", "task.training.epochs=null"]


def _planned(request: Request, arm: Arm, *, inspects: bool) -> PlannedArm:
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
            batch = micro_batch_overrides(config, sizes[0])
        words = request.overrides(arm, batch)
        plan = compose.compose(words, config_dir=request.config_dir, bad_nodes=bad_nodes)
    except ConfigError as error:
        return PlannedArm(name=arm.name, mark=Mark.no_result, reason=error.what, runs=False, **_sizes(config))
    device, cluster = request.study.device, plan.config.cluster
    if device not in (None, cluster.device.name):
        reason = f"the study measures {device}, but cluster={cluster.name} has device {cluster.device.name}: "
        reason += f"choose a cluster {'with' if device == Device.cuda.name else 'without'} GPUs, or set cluster.device"
        return PlannedArm(name=arm.name, mark=Mark.no_result, reason=reason, runs=False, **_sizes(config))
    planned = replace(of_plan(arm.name, plan), batches=sizes, **_sizes(config))
    return _inspected(planned, preflight.inspect(plan)) if inspects and not config.launch.force else planned


OF_THE_SITE = ("CFG-06", "CFG-08", "SRV-01")
"""Rules about paths, files, disk space and programs, which the site provides before a launch."""
IMAGE = ".image"
"""The end of the keys that name an image, which the site provides, too."""
TOO_SHORT = "CFG-13"
"""A warning that the study shows: its runs would end at their time limit."""


def _inspected(planned: PlannedArm, findings: Sequence[Finding]) -> PlannedArm:
    """Return an arm as a launch would treat it: it does not run if a check of its plan has an error.

    An error that the site removes by a path, a file or an image is listed, and the arm can run.
    """
    failed = errors(findings)
    of_site = [one for one in failed if one.rule in OF_THE_SITE or one.where.endswith(IMAGE)]
    if refused := [one for one in failed if one not in of_site]:
        reason = "; ".join(map(_with_fix, refused))
        return PlannedArm(name=planned.name, mark=Mark.no_result, reason=reason, runs=False)
    short = "; ".join(_with_fix(one) for one in findings if one.rule == TOO_SHORT)
    return replace(planned, note=short, before_launch=tuple(map(_with_fix, of_site)))


def _with_fix(finding: Finding) -> str:
    return f"{finding.titled}; {finding.fix}"


GIB = 2**30
STATE_BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 1}
STATES = 4
"""Copies of the weights that training needs if all have one precision: weights, gradients and both moments of Adam."""


def _sizes(config: Config) -> dict[str, Any]:
    """Return the sizes of a model whose states all have the precision of the config; empty for kernels."""
    if config.task.kernels is not None:
        return {}
    weights = parameters(config.model) * STATE_BYTES[config.precision]
    states = STATES * weights
    return {"weights_gb": weights / 1e9, "states_gib": states / GIB, "gpus_of_40_gb": _gpus(states, 40 * GIB)}


def _gpus(states: float, capacity: float) -> int:
    """Return the smallest power of two of GPUs that hold the states."""
    return 1 << (ceil(states / capacity) - 1).bit_length()


def _missing(error: ConfigError) -> str | None:
    """Return that a choice does not exist in this version or site; None if the error is a mistake."""
    if isinstance(error, UnknownChoiceError):
        group = error.group.split("@")[0]
        is_new_task = group == "task" and not checks.alike(error.name, error.known)
        return f"{group} {error.name} does not exist" if group in OPTIONAL_GROUPS or is_new_task else None
    if isinstance(error, InvalidValueError) and error.key in OPTIONAL_KEYS and error.value is not None:
        return f"{error.key.partition('.')[0]} {error.value} does not exist"
    return None


def _of_arm(error: ConfigError, arm: Arm) -> ConfigError:
    return ConfigError(error.what, where=f"arm {arm.name!r}: {error.where}", fix=error.fix, rule=error.rule)


def of_plan(name: str, plan: Plan) -> PlannedArm:
    """Return the values of an arm's plan that the study stores."""
    w, config = plan.world, plan.config
    split = {"groups": w.groups or 1, "dp": w.dp, "tp": w.tp, "pp": w.pp, "cp": w.cp}
    split |= {"ep": w.ep} if w.ep > 1 else {}
    gpu = config.cluster.gpu
    memory_gib, capacity_gib = plan.estimated_memory_gib
    return PlannedArm(
        name=name,
        backend=config.cluster.backend.name,
        fingerprint=_fingerprint(plan),
        num_ranks=w.num_ranks,
        num_nodes=w.num_nodes,
        device=gpu.name if gpu and config.cluster.device.name == "cuda" else config.cluster.device.name,
        environment={k: v for k, v in config.cluster.environment.items() if k.startswith("NCCL_")},
        layout=" ".join(f"{axis} {size}" for axis, size in split.items() if size > 1) or "1 rank",
        memory_gib=memory_gib,
        capacity_gib=capacity_gib,
        walltime_min=plan.walltime_min,
        price_per_gpu_hour=config.cluster.price_per_gpu_hour,
        currency=config.cluster.currency if config.cluster.price_per_gpu_hour else "",
        **(_of_training(trained) if (trained := training_plan(plan)) is not None else {}),
    )


def _of_training(plan: TrainingPlan) -> dict[str, Any]:
    """Return the stored values that only training plans have."""
    step_s = plan.local_sgd.mean_step_s if plan.local_sgd else plan.cost and plan.cost.step_s
    return {
        "micro_batch_size": plan.batch.micro_batch_size,
        "global_batch_size": plan.batch.global_batch_size,
        "steps": plan.max_steps,
        "step_time_ms": 1000 * step_s if step_s else None,
        "tokens_s_gpu": plan.batch.tokens_per_step / step_s / plan.world.num_ranks if step_s else None,
    }


def _fingerprint(plan: Plan) -> str:
    """Return a checksum of all that affects an arm's measurements, without paths, account and folders."""
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
