"""Forecasts, bands and curves of some runs, as numbers: a golden file."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.mlperf import published
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.forecast import band, forecast, latest_outside, outside_band
from bench.mlperf.forecast.curve import reference
from helpers import golden, user_tables

FORECASTS = Path(__file__).with_name("forecasts.json")
LORA, LLAMA8B = "llama2_70b_lora", "llama31_8b"
RUNS: dict[str, tuple[str, int, list[float]]] = {
    "no evaluation": (LORA, 8, []),
    "one evaluation": (LORA, 8, [0.9405]),
    "four evaluations": (LORA, 8, [0.9405, 0.9372, 0.9330, 0.9285]),
    "a run that switches its precision": (LORA, 8, [0.9560, 0.9490, 0.9470]),
    "a slow run": (LORA, 16, [0.9499, 0.9542, 0.9718, 0.9382, 0.9351, 0.9326, 0.9364]),
    "a run that has converged": (LORA, 8, [0.94, 0.925, 0.924]),
    "another model": (LORA, 8, [1.3]),
    "a batch size without published runs": (LORA, 24, [0.94]),
    "a large batch": (LORA, 128, [0.94, 0.93]),
    "pretraining": (LLAMA8B, 32, [4.1, 3.72, 3.55, 3.45]),
    "pretraining without evaluations": (LLAMA8B, 16, []),
    "a benchmark without a curve": ("llama31_405b", 1152, [5.8]),
}


def numbers(benchmark: str, batch: int, losses: list[float]) -> dict[str, Any]:
    """Return the forecast and the band after these losses, which are at the evaluations of the rules."""
    schedule = BENCHMARKS[benchmark].schedule
    first, every = (schedule.first(batch), schedule.interval(batch)) if schedule else (46_080, 46_080)
    past = [(float(first + every * place), loss) for place, loss in enumerate(losses)]
    target = BENCHMARKS[benchmark].goals[0].value
    result = forecast(past, benchmark=benchmark, global_batch_size=batch, target=target)
    outside = latest_outside(past, benchmark=benchmark, global_batch_size=batch)
    known = reference(benchmark, batch)
    plain = golden.significant(result) if result else None
    if result and plain:
        plain["chances"] = [
            [one.samples, *golden.significant([one.probability, one.cumulative])]
            for one in result.chances
            if one.probability > 1e-4
        ]
    return {
        "forecast": plain,
        "is_outside": outside_band(past, benchmark=benchmark, global_batch_size=batch),
        "outside": golden.significant(outside) if outside else None,
        "band": golden.significant(band(benchmark, batch)),
        "progress": [golden.significant(known.progress(at)) for at, _ in past] if known else None,
    }


@pytest.mark.long
def test_forecasts_are_those_of_the_golden_file(monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    texts = {name: numbers(*run) for name, run in RUNS.items()}
    means = {
        f"{name} at {batch}": published.reference_mean(name, batch)
        for name, batches in ((LORA, (8, 12, 24, 1000)), (LLAMA8B, (8, 16, 24, 32)))
        for batch in batches
    }
    text = json.dumps(texts | {"reference means": golden.significant(means)}, indent=1, ensure_ascii=False)
    golden.require(f"{text}\n", FORECASTS, variable="WRITE_FORECASTS")
