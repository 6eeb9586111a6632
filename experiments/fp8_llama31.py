"""Whether FP8 learns as BF16 does by the recipe of llama31_8b: a tiny Llama from random weights, pairs of runs.

    python experiments/fp8_llama31.py [--json FILE] [--seeds N] [--steps N]

The task is llama31_tiny: optimizer, schedule, warm-up, loss and evaluation are those of llama31_8b, in small, and it
trains for a fixed number of steps. The two runs of a pair have the same seed, so they have the same initial weights and
the same rows in the same order. The criterion is fixed in advance: the 95 % interval of the difference of the last
evaluation loss, FP8 relative to BF16, is within ±0.5 % (`MARGIN`). On CPUs FP8 is emulated: values are rounded to FP8,
and products are summed in FP32. The report goes to stdout and progress to stderr; FILE has all numbers so far.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fp8_learning import PRECISIONS, Record, Size, curve_table, has_gpu, held, learn, setting, table

from bench.contract.plan import Plan
from bench.planning import compose
from bench.planning.commands import ENVIRONMENT
from bench.results.comparison import Comparison, compare
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import Rank
from jobs.tasks.prepare import prepare_rows_of

MARGIN = 0.005
"""The largest difference of the last evaluation loss, as a share."""
BATCH = 16
LR = 2.0e-3


@dataclass(frozen=True, slots=True)
class Request:
    steps: int
    seeds: tuple[int, ...]
    path: Path | None


def main() -> None:
    start = time.perf_counter()
    request = arguments()
    record = Record(request.path, start)
    with TemporaryDirectory() as folder:
        plans = {name: composed(request, name, Path(folder)) for name in PRECISIONS}
        start_ranks(plans["bf16"], Rank(rank=0, local_rank=0, world_size=1, master_addr="127.0.0.1", master_port=0))
        prepare_rows_of(plans["bf16"])
        record.spent("set up", start)
        for seed in request.seeds:
            for name in PRECISIONS:
                train(plans[name], seed, record)
    record.spent("all", start)
    print(report(record, request, plans["bf16"]))
    end_ranks()


def arguments() -> Request:
    """Return what the command line asks for; a rank's environment is set before torch looks at it."""
    os.environ.update(ENVIRONMENT | os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all numbers go")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="pairs of runs (3)")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps of each run (500)")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("--seeds: an interval needs two pairs or more")
    return Request(given.steps, tuple(range(1, given.seeds + 1)), given.json)


def composed(request: Request, precision: str, folder: Path) -> Plan:
    """Return the plan of llama31_tiny in a precision; all plans read the same rows."""
    every = max(1, request.steps // 5)
    return compose.compose(
        [
            f"cluster.device={'cuda' if has_gpu() else 'cpu'}",
            "cluster.ranks_per_node=1",
            *(f"cluster.paths.{name}={folder}" for name in ("data", "model", "logs")),
            "task=llama31_tiny",
            f"precision={precision}",
            f"recipe.global_batch_size={BATCH}",
            f"recipe.lr={LR}",
            f"recipe.eval_every_samples={every * BATCH}",
            "recipe.eval_skip=0",
            "task.training.target_eval_loss=null",
            f"task.training.max_steps={request.steps}",
            f"data.train_rows={request.steps * BATCH}",
        ]
    )


def train(plan: Plan, seed: int, record: Record) -> None:
    """Train from random weights; the record gets the curve."""
    from jobs.engines.megatron import model

    precision = plan.config.precision.name
    name = f"{precision}, seed {seed}"
    curves = record.content["curves"][precision]
    with record.phase(name):
        engine = model.build(plan, seed)
        learn(engine, seed, record, name, lambda curve: curves.update({str(seed): curve}))
        if "setting" not in record.content:
            size = Size(model={}, batch=BATCH, base_steps=0, base_lr=0.0, steps=plan.max_steps, lr=LR, eval_every=0)
            record.keep(setting=setting(size, plan, held(engine)))


def last(curves: dict[str, dict[str, dict[int, float]]], precision: str) -> list[float]:
    """Return the last evaluation loss of each seed."""
    return [list(curve.values())[-1] for curve in curves[precision].values()]


def judged(curves: dict[str, dict[str, dict[int, float]]]) -> Comparison:
    return compare(
        last(curves, "fp8"),
        last(curves, "bf16"),
        names=("FP8", "BF16"),
        measurement="evaluation loss",
        unit="nats",
        higher_is_better=False,
        margin=MARGIN,
    )


def verdict(result: Comparison) -> str:
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


def report(record: Record, request: Request, plan: Plan) -> str:
    """Return the report in Markdown."""
    curves: dict[str, Any] = record.content["curves"]
    s, result = record.content["setting"], judged(record.content["curves"])
    rows = [
        [str(seed), f"{bf16:.5f}", f"{fp8:.5f}", f"{100 * (fp8 / bf16 - 1):+.2f}"]
        for seed, fp8, bf16 in zip(request.seeds, result.first, result.second, strict=True)
    ]
    tokens = request.steps * BATCH * plan.config.data.seq_length if plan.config.data else 0
    return "\n\n".join(
        [
            f"# FP8 against BF16 by llama31_8b's recipe: {s['num_parameters']:,} parameters",
            f"{s['hardware']}; torch {s['torch']}, megatron-core {s['megatron_core']}, Python {s['python']}; "
            f"{s['date']}; `{s['command']}`",
            "Model: " + ", ".join(f"{name} {value}" for name, value in s["model"].items()) + ".",
            f"{request.steps} steps of {BATCH} rows: {tokens / 1e6:.2f} million tokens a run, at learning rate {LR:g}.",
            table(["phase", "s"], [[name, f"{seconds:.1f}"] for name, seconds in record.content["elapsed_s"].items()]),
            "## Last evaluation loss, nats",
            table(["seed", "BF16", "FP8", "FP8 to BF16 (%)"], rows),
            verdict(result),
            "## Curves",
            curves_table(curves),
        ]
    )


def curves_table(curves: dict[str, dict[str, dict[int, float]]]) -> str:
    from fp8_learning import compared_evaluations

    return curve_table(compared_evaluations(curves))


if __name__ == "__main__":
    main()
