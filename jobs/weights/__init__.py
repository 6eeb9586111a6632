"""Convert between Hugging Face and megatron-core: weights and adapters; without a GPU."""
