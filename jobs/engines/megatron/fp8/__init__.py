"""A transformer layer with frozen FP8 linears: its passes, its GPU kernels, and the same operations in torch."""
