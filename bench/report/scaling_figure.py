"""Draw the predicted speed over the number of GPUs."""

from pathlib import Path

from bench.errors import ConfigError
from bench.prediction.scale import Scaling
from bench.report.canvas import EVAL_COLOR, FAINT_INK, INK, QUIET_COLOR, TRAIN_COLOR, canvas, save


def draw(scaling: Scaling, path: Path, *, heading: str) -> None:
    """Draw tokens/s of all GPUs with intervals, and the ideal line through the smallest scale, on logarithmic axes.

    Raises:
        ConfigError: there is nothing to draw, or the file cannot be written.
    """
    points = [(one.num_gpus, speed) for one in scaling.points if (speed := one.tokens_s_gpu) is not None]
    if not points:
        reason = scaling.points[0].why_not
        what = f"the figure is empty, because runstop cannot estimate the speed on any number of nodes: {reason}"
        raise ConfigError(what, where="plan --scale --figure", fix="choose more nodes, or another task")
    gpus = [count for count, _ in points]
    values = [count * speed.value for count, speed in points]
    rows = "; ".join(f"{one.num_rows} {one.rows}" for one in scaling.intervals)
    note = f"Estimated, not measured. Bars: where nine of ten measured steps would be, by {rows}."
    if scaling.not_calibrated:
        note = f"Estimated, not measured. Not calibrated, so without bars: {scaling.not_calibrated}."
    figure, (axes,) = canvas(4.6, f"{heading}: estimated speed ({scaling.stack.name})", note)
    axes.plot(gpus, [values[0] / gpus[0] * count for count in gpus], "--", color=QUIET_COLOR, label="ideal")
    known = [(value, count, speed) for value, (count, speed) in zip(values, points, strict=True)]
    low = [value - count * (speed.value if speed.low is None else speed.low) for value, count, speed in known]
    high = [count * (speed.value if speed.high is None else speed.high) - value for value, count, speed in known]
    spread = [[max(0.0, each) for each in side] for side in (low, high)]  # an interval may leave its estimate out
    axes.errorbar(
        gpus, values, yerr=spread, fmt="o-", color=TRAIN_COLOR, ecolor=EVAL_COLOR, capsize=3, label="estimated"
    )
    shown = [one for one in scaling.published if gpus[0] <= one.num_gpus <= gpus[-1]]
    if shown:
        speeds = [one.num_gpus * one.tokens_s_gpu for one in shown]
        counts = [one.num_gpus for one in shown]
        axes.plot(counts, speeds, "x", color=INK, label="published, with their batches", zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(gpus, [f"{count:,}" for count in gpus], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s of all GPUs")
    axes.legend(frameon=False, fontsize=8, labelcolor=FAINT_INK)
    try:
        save(figure, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the figure cannot be written: {error}",
            where="plan --figure",
            fix="name a .png file in a folder that exists",
        ) from error
