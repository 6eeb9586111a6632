"""Patterns of Ray's own messages.

Sources: Ray 2.60: exceptions.py, util/placement_group.py, _private/{utils,worker,state}.py,
_private/runtime_env/dependency_utils.py, dashboard/modules/job/{common,job_manager,job_supervisor}.py,
dashboard/modules/dashboard_sdk.py, autoscaler, and the texts in its programs raylet and gcs_server.

An exception of an actor begins with a general line, such as "The actor died unexpectedly", and continues with the
reason: the general lines weigh less than a cause.
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "RAY-01": (
        rb"Failed to connect to (?:Ray at address|Ray cluster at|the default Ray cluster address)",
        rb"ray\.exceptions\.RaySystemError: .{0,60}(?:GCS|connect)",
    ),
    "RAY-02": (
        rb"Version mismatch: The cluster was started with",
        rb"Changing the ray version is not allowed",
    ),
    "RAY-05": (
        rb"\b(?:was|were) killed due to the node running low on memory",
        rb"[Ww]orkers \(tasks / actors\) killed due to memory pressure \(OOM\)",
    ),
    "RAY-07": (
        rb"\bRuntimeEnvSetupError\b|RUNTIME_ENV_SETUP_FAILURE",
        rb"runtime_env setup failed|Failed to set up runtime environment",
    ),
    "RAY-08": (
        rb"JOB_SUPERVISOR_ACTOR_(?:DIED|UNKNOWN_FAILURE|START_FAILURE|START_TIMEOUT)",
        rb"[Jj]ob supervisor actor (?:died|failed)",
        rb"Job entrypoint command failed with exit code (?:-(?:9|11|6)|137|139|134)\b",
    ),
    "RAY-03": (
        rb"No available node types can fulfill resource request|JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
        rb"Cannot schedule .{0,60} with the placement group|[Jj]ob supervisor actor could not be scheduled",
    ),
    "RAY-04": (
        rb"has been marked dead because the detector has missed too many heartbeats",
        rb"actor (?:died|is dead) because its node has died",
        rb"the actor's node was (?:terminated unexpectedly|preempted)|due to missing too many heartbeats",
        rb"\bNodeDiedError\b",
    ),
}

DEATHS: dict[str, tuple[bytes, ...]] = {
    "RAY-06": (
        rb"(?:actor|task) died (?:unexpectedly|because(?! of an error raised in its creation task))",
        rb"worker (?:process )?(?:has )?died|Worker unexpectedly exits",
        rb"\b(?:WorkerCrashedError|ActorDiedError|RayActorError)\b(?!.{0,80}raised in its creation task)",
    ),
    "RAY-03": (rb"cannot be scheduled right now",),
}
