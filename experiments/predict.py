"""Predict every published step that is shipped with runstop, and print the errors; none is left out.

    python experiments/predict.py               all rows, the summary of each block, and every constant with its source
    python experiments/predict.py --a100        with each of the 1,557 rows of A100, too
    python experiments/predict.py --markdown    the tables of docs/prediction.md

No file, network or GPU is needed. Constants come from measurements on one node; a row that set one is marked.
"""

import argparse
import re
from collections.abc import Sequence
from statistics import fmean

from bench.prediction import grade, published, uncertainty
from bench.prediction.grade import Graded, Summary
from bench.prediction.stacks import CALIBRATION_GPUS, MEGATRON, REFERENCE, SPREAD, Stack

GOAL = (0.03, 0.08)
"""Median and maximum that the project tries to reach."""
A100 = {
    "vtrain_one_node": "vTrain, A100, one node (240 of the rows, drawn by chance, set six constants)",
    "vtrain_many_nodes": "vTrain, A100, 8 to 64 nodes",
    "selene": "Megatron-LM on Selene, A100 (the eight rows of Calculon)",
}


def blocks(rows: Sequence[Graded]) -> dict[str, list[Graded]]:
    """Return the published rows by block; each is in exactly one."""
    lora = [one for one in rows if one.row.is_lora and not one.row.is_seen]
    return {
        "Pre-training, v4.1 and v5.0": [one for one in rows if not one.row.is_lora],
        "LoRA on one node, v4.0 to v5.0": [one for one in lora if one.row.is_one_node],
        "LoRA on several nodes, v4.0 to v5.0": [one for one in lora if not one.row.is_one_node],
        "LoRA, v5.1 (seen)": [one for one in rows if one.row.is_seen],
    }


def cells(one: Graded) -> list[str]:
    """Return the columns of a row."""
    row, layout = one.row, one.row.layout
    split = f"{layout.tp}/{layout.pp}/{layout.vpp}/{layout.cp}/{layout.dp}" if layout else "-"
    return [
        row.round,
        row.benchmark.removeprefix("llama2_70b_").removeprefix("llama31_"),
        f"{row.submitter} {row.system}",
        row.gpu.upper(),
        f"{row.num_gpus:,}",
        str(row.global_batch_size),
        split + {"config": "", "unknown": ""}.get(row.layout_source, " ?"),
        f"{one.terms.step_s:.3f}" if one.terms else "-",
        f"{row.step_s:.3f}" if row.step_s is not None else "-",
        _verdict(one),
    ]


HEADER = (
    ("round", "benchmark", "system", "GPU", "GPUs", "GBS")
    + ("TP/PP/VPP/CP/DP", "predicted (s)", "published (s)", "error")
)  # fmt: skip
IMAGE = re.compile(r"_ngc\d+\.\d+(_\w+)?$")
NARROW_HEADER = ("system", "GPUs", "GBS", "layout", "predicted (s)", "published (s)", "error")


def _verdict(one: Graded) -> str:
    if one.error is None:
        return one.why_not
    return signed(one.error) + (", sets a constant" if one.sets else "")


def short(one: Graded) -> list[str]:
    """Return the columns of a row for a page, which are narrower."""
    round_, benchmark, system, gpu, gpus, batch, *rest = cells(one)
    prefix = "" if benchmark == "lora" else f"{benchmark} "
    return [f"{prefix}{round_} {re.sub(IMAGE, '', system)}", f"{gpus} {gpu}", batch, *rest]


def line(summary: Summary | None) -> str:
    """Return the summary of a block in one line."""
    if summary is None:
        return "no row with an error"
    return f"n = {summary.num_rows}: median {100 * summary.median:.1f} %, maximum {100 * summary.maximum:.1f} %"


def constants(stack: Stack) -> list[str]:
    """Return the constants that rows set, and where all others are from."""
    lines = [f"{one.value:g}  {name}: set by {one.row or '- (assumed)'}" for name, one in stack.constants().items()]
    lines.append(f"{stack.kernels}  kernels of a layer without CUDA graphs: assumed, about as runstop's engine")
    lines.append(f"{stack.update_bytes}  bytes of Adam per parameter: assumed, as runstop's engine")
    lines.append(f"{SPREAD:g}  spread of GPUs: docs/results/2026-11-22-eight-gpus.md, relative to {CALIBRATION_GPUS}")
    for gpu in published.PREDICTED_GPUS:
        start_us = published.gemm_start_us(gpu)
        lines.append(f"{gpu}: {_one_line(published.rates(gpu).source)}; start of a GEMM {start_us} us")
        lines.append(f"{gpu}: links: {_one_line(published.network(gpu).source)}")
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def plain(rows: Sequence[Graded]) -> None:
    """Print all rows as columns."""
    widths = (5, 9, 56, 8, 6, 4, 16, 13, 13, 0)
    for name, block in blocks(rows).items():
        print(f"\n{name}\n" + "  ".join(text.ljust(width) for text, width in zip(HEADER, widths, strict=True)))
        for one in block:
            print("  ".join(text.ljust(width) for text, width in zip(cells(one), widths, strict=True)).rstrip())
        print(f"{name}: {line(grade.summary(block))}")


def markdown(rows: Sequence[Graded]) -> None:
    """Print all rows as tables of Markdown."""
    for name, block in blocks(rows).items():
        print(f"\n### {name}\n\n{line(grade.summary(block))}.\n\n| {' | '.join(NARROW_HEADER)} |")
        print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
        for one in block:
            print(f"| {' | '.join(short(one))} |")


def on_a100() -> dict[str, list[float]]:
    """Return the errors of the tables of A100, by title."""
    return {title: [grade.error_on_a100(row) for row in published.measured(name)] for name, title in A100.items()}


def plain_a100() -> None:
    """Print all rows of A100."""
    for name, title in A100.items():
        print(f"\n{title}\nmodel  GPUs  GBS  micro-batch  TP/PP/VPP/DP  predicted (s)  measured (s)  error")
        for row in published.measured(name):
            layout, error = row.layout, grade.error_on_a100(row)
            sizes = f"{layout.num_gpus}  {layout.global_batch_size}  {layout.micro_batch_size}"
            split = f"{layout.tp}/{layout.pp}/{layout.vpp}/{layout.dp}"
            seconds = f"{(1 + error) * row.step_s:.3f}  {row.step_s:.3f}"
            print(f"{row.model.name}  {sizes}  {split}  {seconds}  {signed(error)}")


def own_error(own: uncertainty.OwnStep) -> str:
    return signed(own.predicted_s / own.measured_s - 1)


def signed(error: float) -> str:
    return f"{error:+.1%}".replace("%", " %").replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/prediction.md")
    parser.add_argument("--a100", action="store_true", help="also print each of the 1,557 rows of A100")
    args = parser.parse_args()
    rows = grade.graded()
    markdown(rows) if args.markdown else plain(rows)
    if args.a100:
        plain_a100()
    print("\nrunstop's own engine: 70B LoRA on eight H200 of one node (they set no constant, but give its interval)\n")
    for own in uncertainty.own_steps():
        print(f"- {own.layout}: predicted {own.predicted_s:.2f} s, measured {own.measured_s:.2f} s, {own_error(own)}")
    print("\nSummary of all blocks, without the published rows that set a constant; errors without their signs\n")
    unseen = [one for one in rows if not one.row.is_seen]
    print(f"- All of v4.0 to v5.0: {line(grade.summary(unseen))}; goal: {100 * GOAL[0]:.0f} and {100 * GOAL[1]:.0f} %")
    for name, block in blocks(rows).items():
        print(f"- {name}: {line(grade.summary(block))}")
    for title, errors in on_a100().items():
        print(f"- {title}: {line(grade.summary_of(errors))}, mean {100 * fmean(map(abs, errors)):.1f} %")
    print(f"\nConstants of the stack {REFERENCE.name} ({REFERENCE.summary})\n")
    print("\n".join(f"- {each}" for each in constants(REFERENCE)))
    print(f"\nConstants of the stack {MEGATRON.name} ({MEGATRON.summary})\n")
    print(f"- {MEGATRON.kernels}  kernels of a layer: assumed; only its product with the fitted launch time matters")
    print(f"- a100: {_one_line(published.rates('a100').source)}\n- a100: {_one_line(published.network('a100').source)}")


if __name__ == "__main__":
    main()
