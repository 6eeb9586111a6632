"""Split the measured steps of runstop's own engine on eight H200 into kernels, NCCL and the rest, layout by layout.

    python experiments/own_layouts.py

It shows which part of a step the estimate misses. The steps and the sums of kernels are those of
docs/results/2026-11-22-eight-gpus.md (70B LoRA in FP8, eight rows of 8,192 tokens, 80 layers). NCCL's times alone are
from AIConfigurator's table of an H200 (github.com/ai-dynamo/aiconfigurator, Apache-2.0, commit 095f58a5, NCCL 2.26.2),
by collective, number of GPUs and size.
"""

from dataclasses import dataclass

from bench.planning.estimates.network import rate_at
from bench.planning.estimates.step_time import SHARED_LAUNCH_US

LAYERS, ROWS = 80, 8
"""Layers, and rows of a step."""
GATHER_US = {
    2: {0.0625: 6.3, 1: 11.2, 16: 54.1, 64: 156.6, 256: 546.7},
    4: {0.0625: 8.8, 1: 13.5, 16: 64.2, 64: 186.1, 256: 658.0},
    8: {0.0625: 14.4, 1: 17.0, 16: 66.4, 64: 205.1, 256: 719.8},
}
SCATTER_US = {
    2: {0.0625: 6.5, 1: 10.8, 16: 52.6, 64: 174.6, 256: 617.4},
    4: {0.0625: 8.2, 1: 12.1, 16: 61.2, 64: 195.4, 256: 690.6},
    8: {0.0625: 13.2, 1: 17.0, 16: 67.3, 64: 205.4, 256: 730.3},
}
"""Microseconds of an all-gather and of a reduce-scatter, by GPUs and MiB of the whole tensor."""
TP_GATHERS = (64.0, 64.0, 64.0, 64.0, 0.03, 0.03, 0.03, 0.03, 0.25, 0.25)
TP_SCATTERS = (128.0, 128.0, 128.0, 128.0, 0.25, 0.25)
"""MiB of the collectives of a layer and row with TP and SP, forward and backward, by
jobs/engines/megatron/frozen/layer.py: hidden states in FP8 and their scales, partial sums in BF16, adapters of rank 16.
"""
CP_GATHERS, CP_SCATTERS = (32.0, 32.0), (32.0,)
"""With CP: keys and values twice, and their gradients, in BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A measured layout: seconds of a step, and of the kernels of rank 0."""

    name: str
    group: int
    """Ranks that hold one replica."""
    launches: int
    """The host's time of a layer and row in launches, with the collectives (bench/planning/estimates/step_time.py)."""
    step_s: float
    sum_s: float
    nccl_s: float
    gathers: tuple[float, ...] = ()
    scatters: tuple[float, ...] = ()

    @property
    def layer_rows(self) -> int:
        """How often a rank runs a layer in a step."""
        return LAYERS * ROWS * self.group // 8

    @property
    def nccl_alone_s(self) -> float:
        """NCCL's seconds by the table, if no rank waits for another one."""
        us = sum(at(GATHER_US[self.group], size) for size in self.gathers)
        us += sum(at(SCATTER_US[self.group], size) for size in self.scatters)
        return self.layer_rows * us / 1e6


def at(by_size: dict[float, float], size: float) -> float:
    """Return the microseconds of a size, interpolated on logarithmic axes; below the smallest one, those of it."""
    return rate_at(max(size, min(by_size)), list(by_size), list(by_size.values()))


TP = {"gathers": TP_GATHERS, "scatters": TP_SCATTERS, "launches": 102}
CP = {"gathers": CP_GATHERS, "scatters": CP_SCATTERS, "launches": 87}
LAYOUTS = (
    Layout(name="DP 4 CP 2", group=2, step_s=2.969, sum_s=3.007, nccl_s=0.161, **CP),
    Layout(name="DP 4 TP 2", group=2, step_s=3.023, sum_s=2.975, nccl_s=0.334, **TP),
    Layout(name="DP 2 TP 4", group=4, step_s=3.389, sum_s=3.324, nccl_s=0.761, **TP),
    Layout(name="CP 8", group=8, step_s=4.90, sum_s=3.386, nccl_s=0.444, **CP),
    Layout(name="TP 8", group=8, step_s=5.26, sum_s=4.156, nccl_s=1.611, **TP),
)


def main() -> None:
    print(f"layout     step  kernels  of these NCCL  NCCL alone  no kernel  launches at {SHARED_LAUNCH_US:.0f} us")
    for one in LAYOUTS:
        launched_s = one.layer_rows * one.launches * SHARED_LAUNCH_US / 1e6
        seconds = (one.step_s, one.sum_s, one.nccl_s, one.nccl_alone_s, one.step_s - one.sum_s, launched_s)
        print(one.name.ljust(9), *(f"{each:.2f}".rjust(8) for each in seconds))
    print("Seconds. 'No kernel': the step less the kernels of rank 0; below 0 where kernels run at the same time.")


if __name__ == "__main__":
    main()
