"""Whether FP8 learns as BF16 does by the recipe of llama31_8b: a tiny Llama from random weights, pairs of runs.

    python experiments/fp8_llama31.py [--json FILE] [--seeds N] [--steps N]
    python experiments/fp8_llama31.py --report FILE    print the report of a file again, or of the complete pairs in it

The task is llama31_tiny: optimizer, schedule, warm-up, loss and evaluation are those of llama31_8b, in small, and it
trains for a fixed number of steps. The two runs of a pair have the same seed, so they have the same initial weights and
the same rows in the same order. The criterion is fixed in advance: the 95 % interval of the difference of the last
evaluation loss, FP8 relative to BF16, is within ±0.5 % (`MARGIN`). On CPUs FP8 is emulated: values are rounded to FP8,
and products are summed in FP32. The report goes to stdout and progress to stderr; FILE has all numbers so far. Only
the report needs scipy.
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fp8_learning import (
    PRECISIONS,
    Record,
    Size,
    begin,
    compared_evaluations,
    curve_table,
    one_rank,
    schedule,
    setting,
    table,
    trained,
)

from bench.contract.plan import Plan
from bench.planning import compose
from bench.planning.commands import ENVIRONMENT
from jobs.engines.megatron.groups import end_ranks

if TYPE_CHECKING:
    from bench.results.comparison import Comparison

MARGIN = 0.005
"""The largest difference of the last evaluation loss, as a share."""


def main() -> None:
    start = time.perf_counter()
    given = arguments()
    if given.report is not None:
        print(report(json.loads(given.report.read_text())))
        return
    size, seeds = size_of(given.steps), range(1, given.seeds + 1)
    record = Record(given.json, start)
    with TemporaryDirectory() as folder:
        plans = {name: composed(size, name, Path(folder)) for name in PRECISIONS}
        begin(plans["bf16"])
        record.spent("set up", start)
        for seed in seeds:
            for name in PRECISIONS:
                weights = trained(plans[name], seed, record)
                if "setting" not in record.content:
                    seq_length = plans[name].config.training_data.seq_length
                    record.keep(setting=setting(size, plans[name], weights) | {"seq_length": seq_length})
    record.spent("all", start)
    print(report(record.content))
    end_ranks()


def arguments() -> argparse.Namespace:
    """Return what the command line asks for; a rank's environment is set before torch looks at it."""
    os.environ.update(ENVIRONMENT | os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="pairs of runs (3)")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps of each run (500)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="train nothing: print the report of such a file")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: an interval needs two pairs or more")
    return given


def size_of(steps: int) -> Size:
    every = max(1, steps // 5)
    return Size(model={}, batch=16, base_steps=0, base_lr=0.0, steps=steps, lr=2.0e-3, eval_every=every)


def composed(size: Size, precision: str, folder: Path) -> Plan:
    """Return the plan of llama31_tiny in a precision; all plans read the same rows."""
    return compose.compose(
        [
            *one_rank(folder),
            "task=llama31_tiny",
            f"precision={precision}",
            f"recipe.global_batch_size={size.batch}",
            "recipe.eval_skip=0",
            "task.training.target_eval_loss=null",
            *schedule(size, size.steps, size.lr, size.eval_every),
        ]
    )


def last(curves: dict[str, dict[str, dict[int, float]]], precision: str) -> list[float]:
    """Return the last evaluation loss of each seed."""
    return [list(curve.values())[-1] for curve in curves[precision].values()]


def judged(curves: dict[str, dict[str, dict[int, float]]]) -> "Comparison":
    from bench.results.comparison import compare

    return compare(
        last(curves, "fp8"),
        last(curves, "bf16"),
        names=("FP8", "BF16"),
        measurement="evaluation loss",
        unit="nats",
        higher_is_better=False,
        margin=MARGIN,
    )


def verdict(result: "Comparison") -> str:
    """Return the difference, its interval and what they show."""
    assert result.ratio is not None and result.low is not None and result.high is not None
    low, high = (100 * (bound - 1) for bound in (result.low, result.high))
    limit = 100 * MARGIN
    if max(abs(low), abs(high)) <= limit:
        shown = f"the interval is within ±{limit:g} %, so FP8 learns as BF16 does"
    elif low > limit or high < -limit:
        shown = f"the interval is outside of ±{limit:g} %, so FP8 does not learn as BF16 does"
    else:
        shown = f"the interval is not within ±{limit:g} %, so nothing is shown with this number of runs"
    return (
        f"**Verdict: {shown}.** The last evaluation loss of FP8 differs from that of BF16 by {result.percent:+.2f} % "
        f"(95 % interval {low:+.2f} % to {high:+.2f} %, paired by seed, n = {len(result.first)} pairs)."
    )


def complete(curves: dict[str, dict[str, dict[int, float]]], last_step: int) -> dict[str, dict[str, dict[int, float]]]:
    """Return the curves of the seeds whose runs in both precisions have reached the last step."""
    by_seed = {
        name: {seed: {int(step): loss for step, loss in curve.items()} for seed, curve in curves[name].items()}
        for name in PRECISIONS
    }  # the steps of a file are texts
    seeds = [seed for seed in by_seed["bf16"] if all(last_step in by_seed[name].get(seed, {}) for name in PRECISIONS)]
    return {name: {seed: by_seed[name][seed] for seed in seeds} for name in PRECISIONS}


def report(content: dict[str, Any]) -> str:
    """Return the report in Markdown of what a record has."""
    s = content["setting"]
    curves = complete(content["curves"], s["steps"])
    result = judged(curves)
    rows = [
        [seed, f"{bf16:.5f}", f"{fp8:.5f}", f"{100 * (fp8 / bf16 - 1):+.2f}"]
        for seed, fp8, bf16 in zip(curves["bf16"], result.first, result.second, strict=True)
    ]
    tokens = s["steps"] * s["batch"] * s["seq_length"]
    return "\n\n".join(
        [
            f"# FP8 against BF16 by llama31_8b's recipe: {s['num_parameters']:,} parameters",
            f"{s['hardware']}; torch {s['torch']}, megatron-core {s['megatron_core']}, Python {s['python']}; "
            f"{s['date']}; `{s['command']}`",
            "Model: " + ", ".join(f"{name} {value}" for name, value in s["model"].items()) + ".",
            f"{s['steps']} steps of {s['batch']} rows: {tokens / 1e6:.2f} million tokens a run, at learning rate "
            f"{s['lr']:g}.",
            table(["phase", "s"], [[name, f"{seconds:.1f}"] for name, seconds in content["elapsed_s"].items()]),
            "## Last evaluation loss, nats",
            table(["seed", "BF16", "FP8", "FP8 to BF16 (%)"], rows),
            verdict(result),
            "## Curves",
            curve_table(compared_evaluations(curves)),
        ]
    )


if __name__ == "__main__":
    main()
