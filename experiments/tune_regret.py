"""Regret of choosing a layout by the model: how much longer its step is than that of the best layout.

    python experiments/tune_regret.py             groups of vTrain's rows with equal work, and the time of a ranking
    python experiments/tune_regret.py --groups    every group

A group has one model, batch and number of GPUs; its rows differ in the layout and the micro-batch. The rows are shipped
(bench/prediction/data), so that no file, network or GPU is needed. `runstop tune` measures the best few of the ranking,
4 by default, so that its regret is that of the best among these.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from bench.planning import compose
from bench.prediction import candidates, grade, published, search
from bench.prediction.published import Measured

GOAL = (0.05, 0.15)
"""Median and worst regret that the project tries to reach."""
MEASURED = (1, 2, 3, 4)
"""How many of the best layouts of the ranking are measured."""
FEW = 5
"""Groups with fewer layouts are left out of the second table."""
TABLES = {"vtrain_one_node": "vTrain, A100, one node", "vtrain_many_nodes": "vTrain, A100, 8 to 64 nodes"}
RANKED = 1000


def groups(name: str) -> dict[str, list[Measured]]:
    """Return the rows of a table by their work, those that the model predicts to be fastest first."""
    by_work = defaultdict(list)
    for row in published.measured(name):
        layout = row.layout
        by_work[f"{row.model.name}, batch {layout.global_batch_size}, {layout.num_gpus} GPUs"].append(row)
    return {work: sorted(rows, key=predicted_s) for work, rows in by_work.items()}


def predicted_s(row: Measured) -> float:
    return (1 + grade.error_on_a100(row)) * row.step_s


def regret(rows: Sequence[Measured], num_measured: int) -> float:
    """Return by which share the best of the first rows takes longer than the best of all."""
    return min(row.step_s for row in rows[:num_measured]) / min(row.step_s for row in rows) - 1


def median_layout(rows: Sequence[Measured]) -> float:
    """Return the seconds of the median layout relative to the best: a choice without any knowledge."""
    return median(row.step_s for row in rows) / min(row.step_s for row in rows)


def table(of_work: dict[str, list[Measured]]) -> None:
    """Print the regrets of groups."""
    worst_layout = fmean(max(row.step_s for row in rows) / min(row.step_s for row in rows) for rows in of_work.values())
    baseline = fmean(map(median_layout, of_work.values())), median(map(median_layout, of_work.values()))
    print(f"{len(of_work)} groups; the median layout takes {baseline[0]:.2f} times the best on average")
    print(f"(median {baseline[1]:.2f}), the worst {worst_layout:.1f} times on average")
    print("measured  median regret  mean  worst  above 5 %  above 15 %")
    for count in MEASURED:
        every = [regret(rows, count) for rows in of_work.values()]
        above = [sum(one > limit for one in every) for limit in GOAL]
        shares = "  ".join(f"{100 * one:.1f} %" for one in (median(every), fmean(every), max(every)))
        print(f"best {count}  {shares}  {above[0]}  {above[1]}")


def composed_rows() -> tuple[int, float]:
    """Return how many rows are linear in micro-batches and layers, and by how much the median row differs from this.

    For each hidden size, tp, pp, dp and micro-batch, four numbers are fitted to the seconds of all models and batches.
    """
    alike = defaultdict(list)
    for row in published.measured("vtrain_one_node"):
        layout = row.layout
        alike[row.model.hidden_size, layout.tp, layout.pp, layout.dp, layout.micro_batch_size].append(row)
    errors: list[float] = []
    for rows in alike.values():
        if len(rows) < 6:
            continue
        sizes = [(row.layout.num_microbatches, row.model.num_layers) for row in rows]
        terms = np.array([[count * layers, count, layers, 1] for count, layers in sizes], dtype=float)
        seconds = np.array([row.step_s for row in rows])
        fitted = terms @ np.linalg.lstsq(terms, seconds, rcond=None)[0]
        errors += list(np.abs(fitted / seconds - 1))
    return len(errors), median(errors)


def timed(what: str, rank: Callable[[], int]) -> None:
    """Print the CPU seconds of a ranking."""
    began = time.process_time()
    count = rank()
    seconds = time.process_time() - began
    print(f"- {what}: {count:,} in {seconds:.2f} s, {RANKED:,} in {seconds * RANKED / count:.2f} s")


def of_reference() -> int:
    """Rank layouts of Llama 3.1 405B on 8,192 H100 for the stack reference."""
    work = grade.work("h100", "llama31_405b", gpus_per_node=8)
    sizes = {"num_gpus": 8192, "largest_tp": 8, "seq_length": 8192}
    every = [
        layout
        for batch in (1536, 3072, 6144)
        for layout in search.layouts(work.model, global_batch_size=batch, **sizes)
    ]
    return len(search.rank(work, every, memory_gib=1e9))


def of_runstop() -> int:
    """Rank the settings of `runstop tune` for Llama 3.1 405B on 8,064 H200.

    Stages of runstop's engine have equally many of the 126 layers, so that 8,192 GPUs have no split that fits.
    """
    overrides = ["task=pretrain_7b", "cluster=dgxh200", "model=llama31_405b", "model.weights=random", "precision=fp8"]
    overrides += ["cluster.num_nodes=1008", "recipe.global_batch_size=4032", "data.seq_length=8192"]
    return len(candidates.ranked(compose.as_planned(compose.unplanned(overrides))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", action="store_true", help="print every group")
    args = parser.parse_args()
    for name, title in TABLES.items():
        every = groups(name)
        print(f"\n{title}: all groups\n")
        table(every)
        if name == "vtrain_one_node":
            print(f"\n{title}: groups with at least {FEW} layouts\n")
            table({work: rows for work, rows in every.items() if len(rows) >= FEW})
            print("\nThe constants of A100 were fitted to 240 of these rows (docs/prediction.md).")
            count, error = composed_rows()
            print(f"{count:,} of these rows are linear in micro-batches and layers: the median differs by {error:.0e}.")
            print("Steps that were measured one by one would differ more: the rows have one time of a layer for each")
            print("hidden size, TP and micro-batch.")
        for work, rows in every.items() if args.groups else ():
            shares = " and ".join(f"{100 * regret(rows, count):.1f} %" for count in (1, 4))
            print(f"{work}: {len(rows)} layouts, regret of the best 1 and 4: {shares}")
    print(f"\nGoal: median {100 * GOAL[0]:.0f} %, worst {100 * GOAL[1]:.0f} %")
    print("\nCPU seconds on one core, Llama 3.1 405B\n")
    timed("layouts of the stack reference on 8,192 H100", of_reference)
    timed("settings of runstop's engine on 8,064 H200", of_runstop)


if __name__ == "__main__":
    main()
