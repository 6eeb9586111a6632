"""Ray: jobs on a cluster that is there, and manifests for KubeRay.

A job's driver (`driver`) takes the nodes of a run as one placement group, with one actor each (`node`), which starts
`bench.driver` under a keeper (`keeper`): whatever ends the driver, the actor or the keeper ends the ranks.
"""
