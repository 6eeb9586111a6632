"""What drives a run where there is no srun: one driver in Python, and what a batch script asks between its commands."""
