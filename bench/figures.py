"""Figures of results, each one function: matplotlib draws, this says what."""

from pathlib import Path
from typing import TYPE_CHECKING

from bench.mllog import printable
from bench.parse import UNVERIFIED, Result, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN_COLOR, EVAL_COLOR, TARGET_COLOR = "#9db4c8", "#1f5a8c", "#c0392b"


def loss_figure(result: Result, path: Path) -> None:
    """Draw training and evaluation loss over samples as a PNG; what has no number in the log is not drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_losses(axes, result)
    axes.set_xlabel("samples")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(result), loc="left", fontweight="bold", fontsize=11, pad=24, parse_math=False)
    axes.text(0, 1.03, _subtitle(result), transform=axes.transAxes, fontsize=9, color="#444444")
    footer = f"{UNVERIFIED} {printable(result.platform or 'platform not logged')}, n = 1 run"
    figure.supxlabel(footer, x=0.01, ha="left", fontsize=7.5, color="#666666", parse_math=False)
    figure.savefig(path, format="png")


def _draw_losses(axes: "Axes", result: Result) -> None:
    train = [(samples, loss) for samples, loss in result.train_losses if samples is not None]
    evals = [(e.samples, e.value) for e in result.evaluations if e.samples is not None]
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN_COLOR, linewidth=1.3, label="training")
    if evals:
        axes.plot(*zip(*evals, strict=True), color=EVAL_COLOR, marker="o", markersize=5, label="evaluation")
        samples, loss = evals[-1]
        axes.annotate(
            f"{loss:.4f}", (samples, loss), (0, -9), textcoords="offset points", ha="center", va="top", color=EVAL_COLOR
        )
        axes.margins(x=0.05, y=0.12)
    if result.target is not None:
        axes.axhline(
            result.target, color=TARGET_COLOR, linestyle="--", linewidth=1.2, label=f"target {result.target:g}"
        )
    if train or evals:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no losses in this log", transform=axes.transAxes, ha="center", color="#666666")


def _subtitle(result: Result) -> str:
    time = f"{result.minutes:.2f} min from run_start to run_stop" if result.minutes is not None else "no time"
    if not result.valid:
        time = f"not a valid trial: {time}"
    if result.target is None:
        return f"{time}, no target"
    if not result.converged:
        return f"{time}, target not reached"
    at = f" at {result.samples_to_target:,} samples" if result.samples_to_target is not None else ""
    return f"{time}, target reached{at}"
