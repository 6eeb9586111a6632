"""What comes from Hugging Face and goes back there: weights, rows, adapters; nothing here needs megatron-core or a GPU."""
