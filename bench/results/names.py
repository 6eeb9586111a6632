"""Names of measurements that several kinds of tasks have, to find a misspelt one before anything runs.

A kind may measure more, under names of its own, such as one for every size of a matrix product.
"""

import difflib

from bench.results.modules import NAMES as MODULES

TRAINING = (
    "time_to_train",
    "run_time",
    "samples_to_target",
    "step_time",
    "evaluation_time",
    "epoch_time",
    "time_of_steps",
    "initialization_time",
    "throughput",
    "throughput_per_gpu",
    "real_throughput_per_gpu",
    "arithmetic_per_gpu",
    "mfu",
    "peak_memory",
    "training_loss",
    "evaluation_loss",
)
"""Of `bench.results.training`."""
HARDWARE = (
    *("gpu_power", "sm_clock", "memory_clock", "gpu_temperature", "peak_gpu_power", "peak_sm_clock"),
    *("peak_gpu_temperature", "peak_gpu_memory_used", "energy", "energy_per_step", "energy_per_token"),
)
"""Of `bench.results.hardware`."""
PROVEN_BATCH = ("micro_batch_size", "global_batch_size")
"""Of a study: the batch of its plan, which proven runs have trained with."""
ESTIMATED = ("estimated_step_time", "estimated_throughput_per_gpu", "estimated_memory")
"""Of a study: by the plan, before anything runs."""
KNOWN = (*TRAINING, *HARDWARE, *MODULES, *PROVEN_BATCH, *ESTIMATED)
_ALIKE = 0.85


def misspelt(name: str) -> str | None:
    """Return the known name that is meant; None for one that is known, or that is like none of them."""
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=_ALIKE)
    return near[0] if name not in KNOWN and near else None
