"""A transformer layer with frozen linears (FP8, BF16 or NF4): its passes, its GPU kernels, and the same in torch."""
