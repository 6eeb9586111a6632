"""Slurm, with or without Pyxis."""
