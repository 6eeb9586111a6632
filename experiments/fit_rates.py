"""Fit the rates of bench/prediction/data/rates.yaml again, from tables of others.

    python experiments/fit_rates.py gemm FILE…   AIConfigurator's gemm_perf.parquet of one GPU each
    python experiments/fit_rates.py a100         vTrain's rows on one node, which are shipped

The files are in github.com/ai-dynamo/aiconfigurator (Apache-2.0), commit 095f58a5, folder
aic-core/src/aiconfigurator_core/systems/data/GPU/gemm/trtllm/1.3.0rc10, for GPU h100_sxm, h200_sxm, b200_sxm, gb200.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from bench.planning.estimates.memory_traffic import Traffic
from bench.prediction import published, step
from bench.prediction.grade import A100_PER_NODE
from bench.prediction.network import links
from bench.prediction.published import Measured
from bench.prediction.stacks import MEGATRON
from bench.prediction.step import Work

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
"""Rows of the GEMMs; their other sizes are at least 1,024, and they have at least LEAST products."""
LEAST = 3e10
NUM_ROWS = 240
PARAMETERS = {
    "share of the GEMM rates": (0.9, 0.7, 1.02),
    "attention TFLOP/s": (40.0, 8.0, 150.0),
    "launch us": (10.0, 1.0, 60.0),
    "element-wise GB/s": (1300.0, 1200.0, 1500.0),
    "NVLink GB/s": (150.0, 60.0, 250.0),
    "traffic": (1.0, 0.5, 4.0),
}
"""Start, least and largest value. Only the ratio of traffic and element-wise GB/s is determined. data/rates.yaml and
MEGATRON have both numbers, so that there the loss behind the head is not slowed by traffic, as it is here."""
GEMM_TFLOPS = [189.0, 223.0, 258.0, 279.0, 290.0]
"""Medians of AIConfigurator's table of an A100 (vllm 0.14.0), by operations of a GEMM."""

Errors = Callable[[np.ndarray], np.ndarray]
"""Errors of logarithms, by the logarithms of the parameters."""


def fitted(errors: Errors, ranges: Sequence[tuple[float, float, float]], scale: float) -> np.ndarray:
    """Return the parameters with the least errors; each has its start, least and largest value. Outliers count less."""
    start, low, high = np.log(np.array(ranges).T)
    return np.exp(least_squares(errors, start, loss="soft_l1", f_scale=scale, bounds=(low, high)).x)


def gemm(path: Path) -> None:
    """Print the rates of a GPU: seconds = operations / rate + inputs / quantizing + outputs / writing + start."""
    table = pd.read_parquet(path)
    table = table[table.m.isin(SIZES) & (table.n >= 1024) & (table.k >= 1024) & (table.m * table.n * table.k > LEAST)]
    for precision in ("bfloat16", "fp8"):
        rows = table[table.gemm_dtype == precision]
        m, n, k, measured = (rows[name].to_numpy(float) for name in ("m", "n", "k", "latency"))

        def error(logs: np.ndarray, m=m, n=n, k=k, measured=measured) -> np.ndarray:
            rate, quantized, written, start = np.exp(logs)
            seconds = 2 * m * n * k / rate / 1e12 + m * k / quantized / 1e12 + m * n / written / 1e12 + start / 1e6
            return np.log(seconds) - np.log(measured / 1e3)

        best = fitted(error, ((1400, 100, 9999), (1, 0.01, 1000), (3, 0.01, 1000), (1, 1e-3, 200)), 0.05)
        median = float(np.median(np.abs(error(np.log(best)))))
        print(f"{path.name} {precision}: {best[0]:.0f} TFLOP/s, start {best[3]:.1f} us; median error {median:.1%}")


def predicted_s(row: Measured, values: np.ndarray) -> float:
    """Return the predicted seconds of a row with these parameters."""
    share, attention, launch_us, elementwise, nvlink, traffic = values
    rates, network = published.rates("a100"), published.network("a100")
    rates = replace(
        rates,
        bf16_tflops=[share * rate for rate in GEMM_TFLOPS],
        attention_forward_tflops=attention,
        attention_backward_tflops=attention,
        elementwise_gbs=elementwise / traffic,
        launch_us=launch_us,
    )
    stack = replace(
        MEGATRON,
        forward=Traffic(residual=30, attention=0, qkv=4, fc1=6),
        backward=Traffic(residual=45, attention=0, qkv=6, fc1=10),
        gelu_fc1=(6.0, 10.0),
        head_bytes=6,  # as when the rates were fitted, times the traffic
    )
    fabric = links(replace(network, nvlink_gbs=nvlink), A100_PER_NODE)
    work = Work(model=row.model, rates=rates, gpu="a100", links=fabric, stack=stack, is_fp8=False)
    return step.predict(work, row.layout).step_s


def a100() -> None:
    """Print the parameters that fit rows of vTrain on one node, drawn by chance."""
    rows = random.Random(0).sample(list(published.measured("vtrain_one_node")), NUM_ROWS)

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log([predicted_s(row, np.exp(logs)) / row.step_s for row in rows])

    for name, value in zip(PARAMETERS, fitted(errors, list(PARAMETERS.values()), 0.1), strict=True):
        print(f"{name}: {value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gemm", "a100"))
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    if args.what == "a100":
        a100()
    for path in args.files:
        gemm(path)


if __name__ == "__main__":
    main()
