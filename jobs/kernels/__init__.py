"""Measure kernels and links: what is called (one file a family), and how it is timed."""
