"""The sweep of `runstop calibrate`: which models it trains for a moment, and the rates that follow from their times.

Each point is a model of two layers of a size that no shipped task has. The estimate of its step says how much work its
kernels do: `step_time` with rates of 1 gives TFLOP and GB instead of seconds. Work divided by measured time is a rate.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config, Precision, Rates
from bench.errors import ConfigError
from bench.planning.estimates import step_time
from bench.planning.estimates.parameters import linear_weights
from bench.planning.parallelism import tokens

NUM_LAYERS = 2
VOCABULARY = 2048
"""Small, so that embedding, head and loss take a small share of a step."""
LAUNCH_LAYERS = (4, 20)
"""Two models whose steps wait for the host; they differ by the launches of so many layers."""
FP8_GRADIENTS = "fp8 gradients"


@dataclass(frozen=True, slots=True)
class Point:
    """One model of the sweep and how it is trained."""

    name: str
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    seq_length: int
    rows: int
    trains: str
    precision: str
    num_layers: int = NUM_LAYERS

    def overrides(self) -> list[str]:
        """Return the overrides that plan this point on one GPU of this machine."""
        adapters = ["task.training.lora=null"] if self.trains == "all" else ["task.training.lora.rank=8"]
        return [
            "task=lora_7b",
            "cluster=local",
            "cluster.ranks_per_node=1",
            f"task.training.trains={self.trains}",
            *adapters,
            "model.weights=random",
            f"model.num_layers={self.num_layers}",
            f"model.hidden_size={self.hidden_size}",
            f"model.ffn_hidden_size={self.ffn_hidden_size}",
            f"model.num_attention_heads={self.num_heads}",
            f"model.num_query_groups={self.num_heads}",
            f"model.vocab_size={VOCABULARY}",
            f"data.seq_length={self.seq_length}",
            f"recipe.global_batch_size={self.rows}",
            f"recipe.micro_batch_size={self.rows}",
            "recipe.recompute=none",
            f"precision={self.precision}",
        ]


def _points() -> tuple[Point, ...]:
    widths = (  # hidden, MLP, heads of 128, rows of 8192
        (640, 1792, 5, 8),
        (1280, 3456, 10, 4),
        (2560, 6912, 20, 2),
        (4608, 12288, 36, 1),
        (6144, 16384, 48, 1),
        (7680, 20480, 60, 1),
    )
    trained = [Point(f"bf16 {h}", h, f, n, 8192, rows, "all", "bf16") for h, f, n, rows in widths]
    frozen = [Point(f"fp8 {h}", h, f, n, 8192, rows, "lora", "fp8") for h, f, n, rows in widths[1:]]
    return (
        *trained,
        *frozen,
        Point(FP8_GRADIENTS, 4608, 12288, 36, 8192, 1, "all", "fp8"),
        Point("elementwise bf16", 4608, 12288, 36, 8192, 1, "lora", "bf16"),
        Point("rows of 4096", 4608, 12288, 36, 4096, 2, "lora", "bf16"),
        Point("narrow heads", 2560, 6912, 40, 4096, 4, "all", "bf16"),
        *(Point(f"launch {n}", 1024, 2816, 8, 256, 1, "lora", "fp8", n) for n in LAUNCH_LAYERS),
    )


POINTS = _points()


def unit_work(plan: TrainingPlan) -> Mapping[str, float]:
    """Return the work of a step: TFLOP of GEMMs in FP8, of all others, and of attention forward; GB of element-wise
    kernels and of updates.

    A rate of 1 in everything makes the estimate's seconds equal to TFLOP or GB.
    """
    config, huge = plan.config, 1e15

    def cost(**rates: float) -> Any:
        values = {"bf16": huge, "fp8": huge, "attention": huge, "elementwise": huge, "copy": huge} | rates
        ones = Rates(
            source="",
            layer_tflop=[1.0],
            bf16_tflops=[values["bf16"]],
            fp8_tflops=[values["fp8"]],
            attention_forward_tflops=values["attention"],
            attention_backward_tflops=values["attention"],
            copy_gbs=values["copy"],
            elementwise_gbs=values["elementwise"],
            busbw_mib=[],
            busbw_gbs=[],
            launch_us=0.0,
        )
        gpu = dataclasses.replace(_gpu(config), rates=ones)
        estimated = step_time.estimate(
            dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, gpu=gpu)),
            plan.world,
            plan.recompute,
        )
        assert estimated is not None
        return estimated

    attention_tflop = cost(attention=1.0).attention_s / (1 + 2.5)  # the backward pass has 2.5 times the operations
    return {
        "fp8_tflop": cost(fp8=1.0).gemm_s,
        "bf16_tflop": cost(bf16=1.0).gemm_s,
        "attention_tflop": attention_tflop,
        "elementwise_gb": cost(elementwise=1.0).elementwise_s,
        "update_gb": cost(copy=1.0).elementwise_s,
    }


def _gpu(config: Config) -> Any:
    if config.cluster.gpu is None:
        raise ConfigError(
            "cluster.gpu is null, so there is no GPU to calibrate",
            where="cluster.gpu",
            fix="run `runstop calibrate` on a machine with a GPU",
        )
    return config.cluster.gpu


def rates(plans: Mapping[str, TrainingPlan], measured: Mapping[str, Any], *, source: str) -> Rates:
    """Return the rates of a GPU from the sweep's times; `measured` is what jobs.engines.megatron.calibrate writes.

    Points that did not fit in the GPU's memory are missing in both.
    """
    points: Mapping[str, Mapping[str, float]] = measured["points"]
    work = {name: unit_work(plan) for name, plan in plans.items()}
    bf16 = {
        layer_tflop(plans[name]): work[name]["bf16_tflop"] / gemm_s(point)
        for name, point in points.items()
        if name.startswith("bf16 ")
    }
    fp8 = {
        layer_tflop(plans[name]): _fp8_rate(layer_tflop(plans[name]), work[name], point, bf16)
        for name, point in points.items()
        if name.startswith("fp8 ") and name != FP8_GRADIENTS
    }
    sizes = sorted({*bf16, *fp8})
    forward, backward = _attention("elementwise bf16", points, work)
    forward_4096, backward_4096 = _attention("rows of 4096", points, work)
    narrow = _attention("narrow heads", points, work)
    copy_gbs = float(measured["copy_gbs"])
    busbw = measured.get("busbw_gbs") or {}
    return Rates(
        source=source,
        layer_tflop=[round(size, 3) for size in sizes],
        bf16_tflops=_at(sizes, bf16),
        fp8_tflops=_at(sizes, fp8) if fp8 else _at(sizes, bf16),
        attention_forward_tflops=round(forward, 1),
        attention_backward_tflops=round(backward, 1),
        attention_forward_4096_tflops=round(forward_4096, 1),
        attention_backward_4096_tflops=round(backward_4096, 1),
        narrow_heads_forward=round(narrow[0] / forward_4096, 3),
        narrow_heads_backward=round(narrow[1] / backward_4096, 3),
        fp8_weight_gradient_tflops=_gradient_rate(plans, points, work, fp8, bf16),
        copy_gbs=round(copy_gbs, 1),
        elementwise_gbs=round(_elementwise(points, work, copy_gbs), 1),
        busbw_mib=[float(mib) for mib in busbw],
        busbw_gbs=[round(float(rate), 1) for rate in busbw.values()],
        launch_us=round(_launch_us(plans, points), 2),
        host_gbs=round(float(measured["host_gbs"]), 1),
    )


def layer_tflop(plan: TrainingPlan) -> float:
    """Return the TFLOP of all GEMMs of one layer in a forward pass, by which `Rates` orders its GEMM rates."""
    return 2 * tokens(plan.config, plan.world) * linear_weights(plan.config.model) / 1e12


def gemm_s(point: Mapping[str, float]) -> float:
    """Return the seconds that a step leaves for GEMMs: without a profiler, and with the gaps between kernels."""
    others = ("attention_forward_s", "attention_backward_s", "elementwise_s")
    return point["step_s"] - sum(point[name] for name in others)


def _fp8_rate(size: float, work: Mapping[str, float], point: Mapping[str, float], bf16: Mapping[float, float]) -> float:
    """Return TFLOP/s of the FP8 GEMMs of a point, which also has some in BF16: head and adapters."""
    return work["fp8_tflop"] / (gemm_s(point) - work["bf16_tflop"] / _nearest(bf16, size))


def _nearest(measured: Mapping[float, float], size: float) -> float:
    return measured[min(measured, key=lambda other: abs(other - size))]


def _at(sizes: Sequence[float], measured: Mapping[float, float]) -> list[float]:
    """Return the rate at each size: the measured one, or that of the nearest measured size."""
    return [round(_nearest(measured, size), 1) for size in sizes]


def _attention(
    name: str, points: Mapping[str, Mapping[str, float]], work: Mapping[str, Mapping[str, float]]
) -> tuple[float, float]:
    """Return TFLOP/s of attention, forward and backward."""
    tflop, point = work[name]["attention_tflop"], points[name]
    return tflop / point["attention_forward_s"], 2.5 * tflop / point["attention_backward_s"]


def _elementwise(
    points: Mapping[str, Mapping[str, float]], work: Mapping[str, Mapping[str, float]], copy_gbs: float
) -> float:
    """Return the bandwidth of element-wise kernels: the mean of trained layers and of layers with adapters."""
    names = [name for name in ("bf16 4608", "elementwise bf16", "fp8 4608") if name in points]
    bandwidths = [
        work[name]["elementwise_gb"] / (points[name]["elementwise_s"] - work[name]["update_gb"] / copy_gbs)
        for name in names
    ]
    return sum(bandwidths) / len(bandwidths)


def _gradient_rate(
    plans: Mapping[str, TrainingPlan],
    points: Mapping[str, Mapping[str, float]],
    work: Mapping[str, Mapping[str, float]],
    fp8: Mapping[float, float],
    bf16: Mapping[float, float],
) -> float | None:
    """Return TFLOP/s of the GEMMs of FP8 weight gradients: what a trained layer takes beyond its other GEMMs."""
    if FP8_GRADIENTS not in points or not fp8:
        return None
    plan, point, counted = plans[FP8_GRADIENTS], points[FP8_GRADIENTS], work[FP8_GRADIENTS]
    gradient_tflop = NUM_LAYERS * layer_tflop(plan)
    other_s = 2 * gradient_tflop / _nearest(fp8, layer_tflop(plan))
    head_tflop = counted["bf16_tflop"]
    head_s = head_tflop / _nearest(bf16, layer_tflop(plan))
    return round(gradient_tflop / (gemm_s(point) - other_s - head_s), 1)


def _launch_us(plans: Mapping[str, TrainingPlan], points: Mapping[str, Mapping[str, float]]) -> float:
    """Return the microseconds of a launch: what the steps of the two models differ by, per kernel."""
    few, many = (f"launch {count}" for count in LAUNCH_LAYERS)
    kernels = step_time.layer_launches(plans[many].config, plans[many].world) * (LAUNCH_LAYERS[1] - LAUNCH_LAYERS[0])
    return (points[many]["step_s"] - points[few]["step_s"]) / kernels * 1e6


def has_fp8(config: Config) -> bool:
    """Return whether the GPU of a config multiplies matrices in FP8."""
    return bool(_gpu(config).has_fp8)


def chosen(points: Sequence[Point], *, with_fp8: bool) -> list[Point]:
    """Return the points for a GPU; without FP8, launches are measured in BF16."""
    if with_fp8:
        return list(points)
    bf16 = Precision.bf16.name
    kept = [point for point in points if point.precision == bf16 or point.name.startswith("launch")]
    return [dataclasses.replace(point, precision=bf16) for point in kept]
