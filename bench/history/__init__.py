"""Read the measurements of finished runs, compare two sets of runs, and detect regressions.

`measured_trials` reads a run folder, `facts` lists hardware, software and settings of a trial, `compare` compares two
sets of runs, `store` caches the measurements of all runs below a folder, and `regression` compares the newest runs of a
task with earlier ones.
"""
