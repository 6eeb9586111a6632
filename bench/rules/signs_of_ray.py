"""Patterns of Ray's own messages. Sources: ray/exceptions.py, job_manager.py, raylet and GCS of Ray 2.60."""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "RAY-01": (
        rb"Failed to connect to Ray at address",
        rb"ray\.exceptions\.RaySystemError: .{0,60}(?:GCS|connect)",
    ),
    "RAY-02": (
        rb"Version mismatch: The (?:cluster|process)",
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
        rb"cannot be scheduled right now|No available node types can fulfill resource request",
        rb"Cannot schedule .{0,60} with the placement group",
    ),
    "RAY-04": (
        rb"has been marked dead because the detector has missed too many heartbeats",
        rb"actor (?:died|is dead) because its node has died",
        rb"\bNodeDiedError\b",
    ),
    "RAY-06": (
        rb"(?:actor|task) died (?:unexpectedly|because)|worker (?:process )?(?:has )?died|Worker unexpectedly exits",
        rb"\b(?:WorkerCrashedError|ActorDiedError|RayActorError)\b",
    ),
}
