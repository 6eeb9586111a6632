"""Patterns of inference servers. Sources: vLLM 0.11 (v1/core/kv_cache_utils.py, v1/worker/gpu_worker.py, v1/engine),
SGLang 0.5 (model_executor/model_runner.py), text-generation-inference 3.3."""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "SRV-08": (
        rb"No available memory for the cache blocks|KV cache is needed, which is larger than the available KV cache",
        rb"max seq len .{0,80}is larger than the maximum number of tokens that can be stored in KV cache",
        rb"less than desired GPU memory utilization",
        rb"Not enough memory\. Please try to (?:increase|decrease) --mem-fraction-static",
        rb"Not enough memory to handle \d{1,9} (?:prefill )?tokens",
    ),
}

ECHOES: dict[str, tuple[bytes, ...]] = {
    "SRV-01": (rb"Engine core initialization failed|Engine process failed to start",),
    "SRV-03": (rb"\bEngineDeadError\b|EngineCore encountered an issue|AsyncEngineDeadError",),
}
