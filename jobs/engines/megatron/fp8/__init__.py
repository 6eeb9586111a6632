"""Frozen linears in FP8: the layer around them, its kernels, and the same in plain torch."""
