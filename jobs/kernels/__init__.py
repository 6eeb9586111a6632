"""Benchmarks of kernels and interconnects: the measured calls (one file per family), and how they are timed."""
