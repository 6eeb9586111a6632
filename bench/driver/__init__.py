"""The driver of runs without srun, and the steps between commands that Slurm's batch script shares with it."""
