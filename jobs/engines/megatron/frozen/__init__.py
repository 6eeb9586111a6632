"""A transformer layer whose linears are frozen (FP8, BF16 or NF4): its passes, its GPU kernels, and both in torch."""
