"""Names of measurements that several kinds of tasks have, to find a misspelt one before anything runs.

A kind may measure more, under names of its own, such as one for every size of a matrix product.
"""

import difflib

from bench.results.modules import NAMES as MODULES

TRAINING = {
    "time_to_train": "min",
    "run_time": "min",
    "samples_to_target": "samples",
    "step_time": "ms",
    "evaluation_time": "s",
    "epoch_time": "s",
    "time_of_steps": "s",
    "initialization_time": "s",
    "throughput": "samples/s",
    "throughput_per_gpu": "tokens/s/GPU",
    "real_throughput_per_gpu": "tokens/s/GPU",
    "arithmetic_per_gpu": "TFLOP/s/GPU",
    "mfu": "",
    "peak_memory": "GiB",
    "inner_step_time": "ms",
    "merge_time": "s",
    "merge_bytes": "B",
    "efficiency_apart": "",
    "training_loss": "",
    "evaluation_loss": "",
}
"""Of `bench.results.training`, with their units."""
GENERATION = {
    "generation_time": "s",
    "time_per_token": "s",
    "generation_throughput": "tokens/s",
    "time_to_first_token": "s",
    "answer_time": "s",
    "time_per_output_token": "s",
    "bandwidth_share": "",
}
"""Of `bench.results.generation`, with their units, besides those that a training has too."""
SERVING = {
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "goodput": "requests/s",
    **{f"latency_p{share}": "s" for share in (50, 60, 90, 99, 100)},
    **{f"{name}_p{share}": "s" for name in ("ttft", "tpot") for share in (50, 99)},
    "knee": "requests/s",
    "time_to_healthy": "s",
    "server_memory": "GiB",
}
"""Of `bench.results.serving`, with their units, of a trial with one load."""
HARDWARE = (
    *("gpu_power", "sm_clock", "memory_clock", "gpu_temperature", "peak_gpu_power", "peak_sm_clock"),
    *("peak_gpu_temperature", "peak_gpu_memory_used", "energy", "energy_per_step", "energy_per_token"),
)
"""Of `bench.results.hardware`."""
PROVEN_BATCH = ("micro_batch_size", "global_batch_size")
"""Of a study: the batch of its plan, which proven runs have trained with."""
ESTIMATED = {
    "estimated_step_time": "ms",
    "estimated_throughput_per_gpu": "tokens/s/GPU",
    "estimated_memory": "GiB",
}
"""Of a study, with their units: by the plan, before anything runs."""
UNITS = {**TRAINING, **GENERATION, **SERVING, **ESTIMATED}
KNOWN = (*TRAINING, *GENERATION, *SERVING, *HARDWARE, *MODULES, *PROVEN_BATCH, *ESTIMATED)
_ALIKE = 0.85


def misspelt(name: str) -> str | None:
    """Return the known name that is meant; None for one that is known, or that is like none of them."""
    near = () if name in KNOWN else difflib.get_close_matches(name, KNOWN, n=1, cutoff=_ALIKE)
    return near[0] if near else None
