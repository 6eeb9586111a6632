"""Names of measurements, to find a misspelt one before anything runs.

A kind may measure more, under names of its own, such as one for every size of a matrix product.
"""

import difflib

from bench.results.kind import KINDS
from bench.results.measurement import HARDWARE
from bench.results.modules import NAMES as MODULES

PROVEN_BATCH = ("micro_batch_size", "global_batch_size")
"""Of a study: the batch of its plan, which proven runs have trained with."""
ESTIMATED = {
    "estimated_step_time": "ms",
    "estimated_throughput_per_gpu": "tokens/s/GPU",
    "estimated_memory": "GiB",
}
"""Of a study, with their units: by the plan, before anything runs."""
UNITS = {name: unit for kind in KINDS.values() for name, unit in kind.units.items()} | ESTIMATED
KNOWN = (*UNITS, *HARDWARE, *MODULES, *PROVEN_BATCH)
_ALIKE = 0.85


def misspelt(name: str) -> str | None:
    """Return the known name that is meant; None for one that is known, or that is like none of them."""
    near = () if name in KNOWN else difflib.get_close_matches(name, KNOWN, n=1, cutoff=_ALIKE)
    return near[0] if near else None
