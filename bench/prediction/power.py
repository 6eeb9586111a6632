"""The power of a GPU in training, with its interval and its source."""

from dataclasses import dataclass

from bench.contract.schema import Cluster
from bench.prediction import published


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Watts of a GPU: in a run like the measured ones, and the least and the most."""

    watts: float
    low: float
    high: float
    source: str


def of_gpu(cluster: Cluster) -> Power | None:
    """Return the power per GPU that the cluster's file states, else that of the GPU alone; None if it is not known."""
    if (own := cluster.power_per_gpu_w) is not None:
        return Power(watts=own, low=own, high=own, source="cluster.power_per_gpu_w")
    known = published.data("power.yaml")
    share, limit = known["share"], known["limits_w"].get(cluster.gpu.name) if cluster.gpu else None
    if limit is None:
        return None
    source = f"GPUs alone, {limit:,} W by the data sheet, times {share['low']:g} to {share['high']:g}"
    return Power(
        watts=limit * share["value"],
        low=limit * share["low"],
        high=limit * share["high"],
        source=f"{source} as measured on H200 (docs/results/2026-11-22-eight-gpus.md)",
    )
