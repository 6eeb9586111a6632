"""The size of the buckets in which replicas exchange gradients and weights, for the engine and for the estimates."""

MOST_WEIGHTS = 40_000_000
"""A bucket ends with the first weight that makes it this large; more with many replicas, one million for each.

Source: megatron-core 0.16.1, DistributedDataParallel.
"""
FEWEST_BUCKETS = 4
"""Small models and adapters are cut, too: nothing hides the exchange of the last bucket of a backward pass."""


def bucket_size(num_trained: int, replicas: int) -> int:
    """Return with how many weights a bucket ends, of so many that a rank trains."""
    return min(max(MOST_WEIGHTS, 1_000_000 * replicas), -(-num_trained // FEWEST_BUCKETS))
