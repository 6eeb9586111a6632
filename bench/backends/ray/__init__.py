"""The Ray backend: jobs on an existing Ray cluster, and manifests for KubeRay.

A job's driver (`driver`) reserves the nodes of a run as one placement group (`placement_group`). One actor per node
starts `bench.driver` below a supervisor process (`supervisor`): when the driver, the actor or the supervisor ends, the
ranks end too.
"""
