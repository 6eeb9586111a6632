"""The known names of measurements, to detect a misspelt one before anything runs.

A kind may have further measurements, such as one for each size of a GEMM.
"""

from bench.results import cost
from bench.results.kind import KINDS
from bench.results.measurement import HARDWARE
from bench.results.modules import NAMES as MODULES
from bench.texts import nearest

MEASURED_BATCH = ("micro_batch_size", "global_batch_size")
"""Columns of a study with the batch sizes of its plan, for valid runs."""
ESTIMATED = {
    "estimated_step_time": "ms",
    "estimated_throughput_per_gpu": "tokens/s/GPU",
    "estimated_memory": "GiB",
    "estimated_weights": "GB",
    "estimated_states": "GiB",
    "estimated_gpus_of_40_gb": "",
}
"""Columns of a study with estimates of its plan, with their units."""
UNITS = {name: unit for kind in KINDS.values() for name, unit in kind.units.items()} | ESTIMATED
KNOWN = (*UNITS, *HARDWARE, *MODULES, *MEASURED_BATCH, *cost.NAMES)
_ALIKE = 0.85


def misspelt(name: str) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if it is known, or similar to none."""
    return None if name in KNOWN else nearest(name, KNOWN, likeness=_ALIKE)
