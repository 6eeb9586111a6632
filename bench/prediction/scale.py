"""Predict a training task on more and more nodes: step, speed, time to target and price. All numbers are estimates.

The layout is chosen anew at each number of nodes. The batch is that of the task, or one that is 2, 4, 8, … times as
large if this reaches the target earlier: MLPerf's runs tell how many samples a batch size needs. A task without such
runs keeps its batch until there are more replicas than samples; then it doubles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from bench.contract import families
from bench.contract.layers import layer_of
from bench.contract.network import Network
from bench.contract.plan import World
from bench.contract.schema import Config, Device, EngineName, Precision
from bench.errors import ConfigError
from bench.mlperf import published as mlperf
from bench.planning import compose, make_plan
from bench.planning import layouts as own_layouts
from bench.planning.checks import ranges, training
from bench.planning.estimates import step_time, transports
from bench.planning.estimates.parameters import lora_parameters
from bench.prediction import failures, power, published, search, uncertainty
from bench.prediction.network import links
from bench.prediction.stacks import REFERENCE
from bench.prediction.step import Layout, Work
from bench.prediction.uncertainty import Interval
from bench.texts import counted

LARGEST_BATCH = 2**16
"""The batch is not doubled beyond it."""
LEAST_GAIN = 0.5
"""Scaling pays as long as each added GPU shortens the run at least half as much as those at the smallest scale."""


class StackName(Enum):
    """Whose step is predicted: of runstop's own engine, or of NVIDIA's code for MLPerf, in FP8 or in NVFP4."""

    runstop = "runstop"
    reference = "reference"
    reference_fp4 = "reference-fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """An estimate, and between which values nine of ten measurements should be; None: no such row was published."""

    value: float
    low: float | None
    high: float | None

    def __mul__(self, factor: float) -> "Range":
        low, high = (None if end is None else factor * end for end in (self.low, self.high))
        return Range(value=factor * self.value, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The prediction on one number of nodes; fields are None if they are not known."""

    num_nodes: int
    num_gpus: int
    global_batch_size: int
    layout: str = ""
    terms: dict[str, float] | None = None
    """Seconds of the step, by what takes them."""
    step_s: Range | None = None
    tokens_s_gpu: Range | None = None
    efficiency: float | None = None
    """Tokens/s/GPU relative to the smallest number of nodes that has an estimate."""
    samples: float | None = None
    samples_low: float | None = None
    samples_high: float | None = None
    """The middle 90 % of published runs with this batch; None if the number of samples is fixed."""
    samples_source: str = ""
    minutes: Range | None = None
    """Of training steps alone: without start, evaluations and failures. Its interval is of step and samples."""
    lost_share: float | None = None
    """Share of the time that failures and checkpoints take; None without cluster.failures."""
    checkpoint_interval_s: float | None = None
    days: Range | None = None
    """With failures, restarts and checkpoints; None without cluster.failures."""
    gpu_hours: Range | None = None
    """With the time lost to failures, if it is known."""
    energy_kwh: Range | None = None
    """Of the GPU hours, by the power of a GPU; None if it is not known."""
    price: Range | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpeed:
    """A published system with the same benchmark and GPU."""

    system: str
    num_gpus: int
    tokens_s_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The predictions of a task, by number of nodes."""

    stack: StackName
    points: tuple[Point, ...]
    pays_until: int | None
    """The largest number of nodes at which added GPUs still bring at least LEAST_GAIN of what the first ones bring."""
    intervals: tuple[Interval, ...]
    not_calibrated: str
    """Why no published row is like these estimates, so that they have no interval; empty if there are such rows."""
    currency: str
    power_source: str
    """The source of the power of a GPU. Empty if the power is not known."""
    published: tuple[PublishedSpeed, ...]
    """Measured by others, with their batches and layouts."""


def numbers(text: str) -> list[int]:
    """Return the numbers of nodes in a list such as 1,2,4,...,64; the dots continue the doubling or the difference.

    Raises:
        ConfigError: it is not such a list.
    """
    parts = [part.strip() for part in text.replace("…", "...").split(",")]
    result: list[int] = []
    for place, part in enumerate(parts):
        if part == "..." and len(result) >= 2 and place + 2 == len(parts) and parts[-1].isdecimal():
            result += _continued(result[-2], result[-1], int(parts[-1]))
        elif part.isdecimal() and int(part) > 0:
            result.append(int(part))
        else:
            raise _refused(text)
    if result != sorted(set(result)):
        raise _refused(text)
    return result


def _continued(first: int, second: int, last: int) -> list[int]:
    """Return the numbers between `second` and `last`, without these two."""
    between, factor = [], second // first
    doubles = first < second and second == factor * first
    following = second * factor if doubles else 2 * second - first
    while second < following < last:
        between.append(following)
        following = following * factor if doubles else following + second - first
    return between


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not an ascending list of numbers of nodes",
        where="plan --scale",
        fix="write numbers with commas, such as 1,2,4,8 or 1,2,4,...,1024",
    )


def predict(config: Config, num_nodes: Sequence[int], *, stack: StackName) -> Scaling:
    """Return the predictions of a config on each number of nodes.

    Raises:
        ConfigError: a step of this task cannot be estimated on any number of nodes.
    """
    config = compose.as_planned(config)
    training.require_megatron(config, "plan --scale")
    _check_layers(config, stack)
    if stack is StackName.runstop or config.model.experts is None:
        make_plan.check(replace(config, walltime=config.walltime or 1))  # no job is submitted, so none needs a limit
    else:
        ranges.check(config)  # the other checks are of what runstop's own engine has
    _check(config, num_nodes, stack)
    points = [_point(config, count, stack) for count in num_nodes]
    first = next((one.tokens_s_gpu.value for one in points if one.tokens_s_gpu), None)
    relative = tuple(
        replace(one, efficiency=one.tokens_s_gpu.value / first) if one.tokens_s_gpu and first else one for one in points
    )
    return Scaling(
        stack=stack,
        points=relative,
        pays_until=pays_until(relative),
        intervals=tuple(dict.fromkeys(one for point in points if (one := _interval(config, stack, point)))),
        not_calibrated=_not_calibrated(config, stack),
        currency=config.cluster.currency,
        power_source=known.source if (known := power.of_gpu(config.cluster)) else "",
        published=_published(config),
    )


def _published(config: Config) -> tuple[PublishedSpeed, ...]:
    """Return the published steps of the config's benchmark, model and GPU."""
    benchmark, gpu = config.task.benchmark, config.cluster.gpu
    if benchmark is None or gpu is None or published.MODELS.get(benchmark) != config.model.name:
        return ()
    return tuple(
        PublishedSpeed(
            system=row.name,
            num_gpus=row.num_gpus,
            tokens_s_gpu=row.global_batch_size * published.TOKENS[benchmark] / row.num_gpus / row.step_s,
        )
        for row in published.rows()
        if row.benchmark == benchmark and row.step_s is not None and published.has_name(row.gpu, gpu.name)
    )


def _check_layers(config: Config, stack: StackName) -> None:
    """Raise ConfigError if runstop's own engine has no layers for the model, but another stack has."""
    m = config.model
    if stack is not StackName.runstop or m.experts is None or m.family not in families.FAMILIES:
        return
    if EngineName.megatron not in families.of_model(m).engines:
        raise ConfigError(
            f"runstop cannot predict steps of {m.name} with its own engine: the engine does not support this model",
            where="model, --stack",
            fix="add --stack reference and precision=fp8 to predict steps with NVIDIA's code, or choose another model",
        )


def _check(config: Config, num_nodes: Sequence[int], stack: StackName) -> None:
    """Raise ConfigError if no step of this config can be estimated."""
    cluster, gpu = config.cluster, config.cluster.gpu
    if cluster.device is not Device.cuda or gpu is None:
        what = "--scale predicts only steps on GPUs, but this cluster has no GPUs"
        raise ConfigError(what, where="cluster.device, cluster.gpu", fix="choose a cluster with GPUs, such as dgx8")
    if stack is StackName.runstop and gpu.rates is None:
        what = f"the speeds of {gpu.name} were not measured with runstop's own engine"
        fix = "run `runstop calibrate` on a machine with this GPU, or use --stack reference"
        raise ConfigError(what, where="cluster.gpu.rates", fix=fix)
    if max(num_nodes) > 1 and transports.gbs_between_nodes(cluster) is None:
        what = f"the bandwidth between the nodes of cluster {cluster.name} is not known"
        fix = "set cluster.network_gbs to the GB/s of one GPU's network card, such as 50 for 400 Gbit/s"
        raise ConfigError(what, where="cluster.network_gbs, cluster.network", fix=fix)
    if stack is not StackName.runstop:
        _check_reference(config, stack)


def _check_reference(config: Config, stack: StackName) -> None:
    """Raise ConfigError for what NVIDIA's code is not predicted for."""
    gpu = _reference_gpu(config)
    if config.precision is not Precision.fp8:
        what = f"all published step times of --stack {stack.value} are in FP8, but precision={config.precision.name}"
        raise ConfigError(what, where="precision, --stack", fix="set precision=fp8, or use --stack runstop")
    if stack is StackName.reference_fp4 and published.fp4(gpu) is None:
        assert config.cluster.gpu is not None
        what = f"{config.cluster.gpu.name} cannot multiply matrices in FP4, but --stack {stack.value} needs FP4"
        raise ConfigError(what, where="cluster.gpu, --stack", fix="use --stack reference, or a GPU such as b200")
    if config.model.experts is not None and config.training.lora is not None:
        what = "--stack reference trains all weights of a mixture of experts, but this task trains only adapters"
        fix = "choose a dense model, or a task that trains all weights, such as pretrain_8b"
        raise ConfigError(what, where="model, task", fix=fix)


def _not_calibrated(config: Config, stack: StackName) -> str:
    """Return why no published step on one node is like the steps of this config; empty if there is one."""
    if stack is StackName.runstop:
        return ""
    reasons = []
    if (gpu := _reference_gpu(config)) not in published.CALIBRATED_GPUS:
        reasons.append(f"no step on {published.gpu_name(gpu)} sets a constant")
    if stack is StackName.reference_fp4:
        reasons.append("no step in NVFP4 sets a constant")
    if config.model.experts is not None:
        reasons.append("no step of a mixture of experts is among the published rows")
    return "; ".join(reasons)


def _reference_gpu(config: Config) -> str:
    """Return the name of the config's GPU among those whose steps were graded."""
    assert config.cluster.gpu is not None
    known = {published.gpu_name(gpu): gpu for gpu in published.PREDICTED_GPUS if published.has_file(gpu)}
    if (name := config.cluster.gpu.name) not in known:
        what = f"runstop does not know the speeds of {name} with --stack reference"
        raise ConfigError(what, where="cluster.gpu, --stack", fix=f"choose one of the GPUs {', '.join(known)}")
    return known[name]


def _point(config: Config, num_nodes: int, stack: StackName) -> Point:
    """Return the prediction on so many nodes, with the batch that reaches the target first.

    Batches are the task's, doubled again and again. Without samples to target by batch, it is the smallest of them that
    has a layout.
    """
    recipe, num_gpus = config.training_recipe, num_nodes * config.cluster.ranks_per_node
    best, why_not, batch = None, "", recipe.global_batch_size
    while batch <= LARGEST_BATCH:
        scaled = replace(
            config,
            cluster=replace(config.cluster, num_nodes=num_nodes, hosts=None),
            recipe=replace(recipe, global_batch_size=batch),
        )
        if best is not None and not _is_published(scaled, batch):
            break
        fastest = _own(scaled) if stack is StackName.runstop else _reference(scaled, stack)
        if isinstance(fastest, str):
            why_not = why_not or fastest
        else:
            point = Point(num_nodes=num_nodes, num_gpus=num_gpus, global_batch_size=batch)
            timed = _with_time(scaled, point, fastest, stack)
            best = timed if best is None or _minutes(timed) < _minutes(best) else best
        batch *= 2
    unknown = Point(num_nodes=num_nodes, num_gpus=num_gpus, global_batch_size=recipe.global_batch_size, why_not=why_not)
    return best or unknown


def _minutes(point: Point) -> float:
    return point.minutes.value if point.minutes else math.inf


def _is_published(config: Config, batch: int) -> bool:
    """Return whether the samples to target at this batch are known, so that batches can be compared by minutes."""
    benchmark = config.task.benchmark
    return bool(config.training.has_target and benchmark and mlperf.samples_to_target(benchmark, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fastest:
    layout: str
    terms: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.terms.values())


def _own(config: Config) -> _Fastest | str:
    """Return the fastest layout of runstop's engine that fits, or why there is none."""
    try:
        best = own_layouts.choose(config)
    except ConfigError as error:
        return error.what
    if best.memory.fits is False:
        return f"no layout fits: the smallest needs {best.memory.total_gib:.0f} GiB of a GPU"
    if best.cost is None:
        return f"no step time is estimated for this GPU and the layer {layer_of(config).name}"
    w, cost = best.world, best.cost
    parts = {name: value for name in cost.__slots__ if name != "step_s" and (value := getattr(cost, name))}
    slowest = uncertainty.waiting(w.num_ranks, w.tp * w.pp * w.cp) - 1
    return _Fastest(
        layout=_named(w, best.micro_batch_size),
        terms=parts | {"wait_s": slowest * cost.step_s},
    )


def _reference(config: Config, stack: StackName) -> _Fastest | str:
    """Return the fastest layout of the stack reference that fits, or why there is none."""
    assert config.cluster.gpu is not None
    p, recipe, cluster = config.parallel, config.training_recipe, config.cluster
    work = reference_work(config, stack)
    layouts = search.layouts(
        config.model,
        num_gpus=cluster.num_nodes * cluster.ranks_per_node,
        largest_tp=min(8, cluster.ranks_per_node),
        global_batch_size=recipe.global_batch_size,
        seq_length=config.training_data.seq_length,
        fixed=search.Fixed(
            tp=p.tp,
            pp=p.pp,
            cp=p.cp,
            ep=p.ep if p.ep > 1 else None,
            vpp=p.vpp if p.vpp > 1 else None,
            micro_batch_size=recipe.micro_batch_size,
        ),
    )
    ranked = search.rank(work, layouts, memory_gib=config.cluster.gpu.memory_gib)
    if not ranked:
        return f"no layout for a batch of {recipe.global_batch_size} divides these GPUs and fits in their memory"
    best, terms = ranked[0].layout, ranked[0].terms
    return _Fastest(
        layout=_named(best, best.micro_batch_size),
        terms={name: value for name in terms.__slots__ if (value := getattr(terms, name))},
    )


def reference_work(config: Config, stack: StackName = StackName.reference) -> Work:
    """Return what the stack reference trains."""
    gpu, lora = _reference_gpu(config), config.training.lora
    fp4 = published.fp4(gpu) if stack is StackName.reference_fp4 else None
    is_narrow = config.model.experts is not None and config.model.head_size <= step_time.NARROW_HEAD
    return Work(
        model=config.model,
        rates=published.rates(gpu),
        gpu=gpu,
        links=links(network_of(config), config.cluster.ranks_per_node, published.smaller_groups(gpu)),
        stack=REFERENCE,
        gemm_start_s=(fp4.gemm_start_us if fp4 else published.gemm_start_us(gpu)) / 1e6,
        is_fp8=config.precision is Precision.fp8,
        fp4_tflops=fp4.tflops if fp4 else None,
        attention_of_kind=published.attention_of_64(gpu) if is_narrow else None,
        adapter_weights=lora_parameters(config.model, lora) if lora else 0,
    )


def network_of(config: Config) -> Network:
    """Return cluster.network; without it, the NVLink of a published node with this GPU, and cluster.network_gbs."""
    cluster = config.cluster
    if cluster.network is not None:
        return cluster.network
    like = published.network(_reference_gpu(config))
    gbs = cluster.network_gbs or like.nic_gbs  # on one node no data goes there
    return replace(like, nics_per_node=cluster.ranks_per_node, nic_gbs=gbs, nvlink_gpus=None)


def _named(split: World | Layout, micro_batch_size: int) -> str:
    sizes = {name: getattr(split, name) for name in ("dp", "tp", "pp", "vpp", "cp", "ep")}
    kept = [f"{name} {count}" for name, count in sizes.items() if count > 1 or name == "dp"]
    return f"{' '.join(kept)}, micro-batch {micro_batch_size}"


def _interval(config: Config, stack: StackName, point: Point) -> Interval | None:
    """Return the errors of rows like the step of this point; None if there are no such rows."""
    if _not_calibrated(config, stack):
        return None
    if stack is StackName.runstop:
        return uncertainty.of_runstop(waits_for_host=bool(point.terms and point.terms.get("host_s")))
    return uncertainty.of_reference(is_lora=config.training.lora is not None, is_one_node=point.num_nodes == 1)


def _with_time(config: Config, point: Point, fastest: _Fastest, stack: StackName) -> Point:
    """Return the point with everything that follows from its step."""
    point = replace(point, layout=fastest.layout, terms=fastest.terms)
    errors = _interval(config, stack, point)
    low, high = (errors.low, errors.high) if errors else (None, None)
    step = Range(value=1.0, low=low, high=high) * fastest.step_s
    tokens = point.global_batch_size * config.training_data.seq_length / point.num_gpus
    speed = Range(value=1.0, low=high and 1 / high, high=low and 1 / low) * (tokens / step.value)
    timed = replace(point, step_s=step, tokens_s_gpu=speed)
    needed = _samples(config, point.global_batch_size)
    if needed is None:
        return timed
    samples, spread, source = needed
    minutes = _product(step, samples.value / point.global_batch_size / 60, samples)
    hours, lost, interval_s, days = minutes * (point.num_gpus / 60), None, None, None
    if (failing := config.cluster.failures) is not None:
        planned, shortest, longest = (
            None if each is None else failures.schedule(60 * each, point.num_nodes, failing)
            for each in (minutes.value, minutes.low, minutes.high)
        )
        assert planned is not None
        lost, interval_s = 1 - planned.share, planned.interval_s
        days = Range(
            value=planned.total_s,
            low=None if shortest is None else shortest.low_s,
            high=None if longest is None else longest.high_s,
        ) * (1 / 86400)
        hours = days * (24 * point.num_gpus)
    price, watts = config.cluster.price_per_gpu_hour, power.of_gpu(config.cluster)
    return replace(
        timed,
        samples=samples.value,
        samples_low=samples.low if spread else None,
        samples_high=samples.high if spread else None,
        samples_source=source,
        minutes=minutes,
        lost_share=lost,
        checkpoint_interval_s=interval_s,
        days=days,
        gpu_hours=hours,
        energy_kwh=None if watts is None else _product(hours, watts.watts / 1000, _watts(watts)),
        price=None if price is None else hours * price,
    )


def _watts(known: power.Power) -> Range:
    return Range(value=known.watts, low=known.low, high=known.high)


def _product(first: Range, factor: float, second: Range) -> Range:
    """Return the first range times a factor, with the interval of the product of two independent quantities.

    Their relative deviations add up as the sides of a right triangle. `factor` is proportional to the second's value.
    """
    if second.low == second.high or first.low is None or first.high is None:
        return first * factor
    assert second.low is not None and second.high is not None
    ends = (first.value, first.low, first.high), (second.value, second.low, second.high)
    less = math.hypot(*(max(0.0, 1 - low / value) for value, low, _ in ends))
    more = math.hypot(*(max(0.0, high / value - 1) for value, _, high in ends))
    value = first.value * factor
    return Range(value=value, low=value * max(0.0, 1 - less), high=value * (1 + more))


def _samples(config: Config, batch: int) -> tuple[Range, bool, str] | None:
    """Return the samples to target at a batch size, or those of the task's steps; whether they spread; their source."""
    task, training = config.task, config.training
    known = mlperf.samples_to_target(task.benchmark, batch) if task.benchmark else None
    if known is not None and training.has_target:
        low, high = (_quantile(known.shares, share) for share in (0.05, 0.95))
        mean = known.mean_samples
        source = f"{known.kind}, {counted(known.num_runs, 'run')}"
        return Range(value=mean, low=min(low, mean), high=max(high, mean)), True, source
    if training.has_target or training.max_steps is None:
        return None
    fixed = float(training.max_steps * config.training_recipe.global_batch_size)
    return Range(value=fixed, low=fixed, high=fixed), False, "the task's number of steps"


def _quantile(shares: Sequence[tuple[int, float]], share: float) -> float:
    """Return the number of samples within which this share of the runs has reached the target."""
    total = 0.0
    for samples, each in sorted(shares):
        total += each
        if total >= share - 1e-9:
            return float(samples)
    return float(max(samples for samples, _ in shares))


def pays_until(points: Sequence[Point]) -> int | None:
    """Return the largest number of nodes at which scaling pays; None without two estimates."""
    rates = [(one.num_gpus, one.num_nodes, speed) for one in points if (speed := _speed(one)) is not None]
    if len(rates) < 2:
        return None
    gpus, best, speed = rates[0]
    per_gpu = speed / gpus
    for more_gpus, nodes, faster in rates[1:]:
        if (faster - speed) / (more_gpus - gpus) < LEAST_GAIN * per_gpu:
            break
        gpus, best, speed = more_gpus, nodes, faster
    return best


def _speed(point: Point) -> float | None:
    """Return runs per minute, or without samples to target tokens per second."""
    if point.minutes is not None:
        return 1 / point.minutes.value
    return point.num_gpus * point.tokens_s_gpu.value if point.tokens_s_gpu else None
