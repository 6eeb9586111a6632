"""Start the ranks of a run on several nodes without srun: one process per node starts them as its children.

The process on the lead node (`lead`) sends commands to the other nodes (`member`) over a connection (`channel`). They
report exit codes and, if the run folder is not shared, send files. When a node is lost, all other nodes stop their
ranks.
"""
