"""Show how fast a set of trials trained, beside the published systems."""

from bench.console.sheet import Sheet
from bench.report.rows import value_text
from bench.report.sets import TrialSet
from bench.report.throughput import RATIO, compared


def sheets(trials: TrialSet) -> list[Sheet]:
    """Return the speed of a set, and the published systems beside it, as tables."""
    speed = compared(trials)
    caption = f"{trials.hardware or 'hardware not logged'}, n = {speed.measured.num_runs}"
    own = Sheet(f"{trials.name}: throughput", speed.rows, caption=caption)
    if speed.no_peers:
        return [own, Sheet("published systems", [("not compared", "", speed.no_peers)])]
    rates = ("samples/s", "tokens/s/GPU", "TFLOP/s/GPU")
    columns = ("system", "batch", "mean step time (ms)", *rates, "official min", "ratio")
    cells = [
        (
            line.name,
            str(line.global_batch_size),
            f"{line.step_time_ms:,.0f}",
            f"{line.samples_s:.3f}",
            f"{line.tokens_s_gpu:,.0f}",
            value_text(line.tflops_gpu, "{:,.0f}"),
            value_text(line.official_minutes, "{:.2f}"),
            f"{line.ratio:.3f}",
        )
        for line in speed.lines
    ]
    title = f"beside published systems with {speed.measured.num_gpus} GPUs"
    return [own, Sheet(title, cells, columns=columns, caption=RATIO)]
