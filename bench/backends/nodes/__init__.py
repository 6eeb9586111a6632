"""The ranks of a run on nodes without srun: one process on each node starts them as its children.

One process leads (`nodes`). It tells the other nodes (`member`) over a connection (`channel`) which command comes next;
they report exit codes and, where the run folder is not shared, files. A node that is gone ends the ranks of all others.
"""
