"""Convert between Hugging Face and megatron-core: weights and adapters; nothing here needs a GPU."""
