"""How often nodes fail, and what a failure costs, for predictions of the training time."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Failures:
    """Failures of nodes, which are independent of each other and of age."""

    source: str
    node_mtbf_hours: float
    """Mean time between failures of one node. A run on n nodes is interrupted n times as often."""
    restart_s: float
    """From a failure until the run trains again: detection, queue, start, loading the checkpoint."""
    checkpoint_s: float
    """How long training stops for a checkpoint; of an asynchronous one this is the copy to host memory."""
