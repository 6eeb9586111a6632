"""What finished runs measured, on what, and how two sets of them compare: read from their logs, kept in one store.

`proven` reads a run folder, `facts` says on what it ran, `sides` compares two sets of runs, `store` keeps what all runs
below a folder measured, and `regressions` compares a task's newest runs with its past.
"""
