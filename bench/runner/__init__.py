"""Where there is no srun: `python -m bench.runner`, once on each node, does what a batch script does with it.

Node 0 leads (`lead`): it asks what `bench.launch.in_job` asks between the commands of a plan, in job.sh's order.
"""
