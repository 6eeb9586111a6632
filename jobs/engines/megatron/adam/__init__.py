"""AdamW on megatron-core's flat buffers: one pass over each bucket, moments in FP32 or BF16, on the device or not."""

from jobs.engines.megatron.adam.optimizer import Adam, State
from jobs.engines.megatron.adam.shards import Place

__all__ = ["Adam", "Place", "State"]
