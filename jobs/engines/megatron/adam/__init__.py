"""AdamW on megatron-core's flat buffers: one kernel per bucket; moments in FP32 or BF16, in device or host memory."""

from jobs.engines.megatron.adam.optimizer import Adam, State
from jobs.engines.megatron.adam.shards import Place

__all__ = ["Adam", "Place", "State"]
