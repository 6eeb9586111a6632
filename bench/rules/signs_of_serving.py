"""Patterns of inference servers.

Sources: their code: vLLM's v1/core/kv_cache_utils.py, v1/worker and v1/engine/exceptions.py, and the engine before V1
(worker/worker.py, engine/async_llm_engine.py, entrypoints/openai/api_server.py); SGLang's
model_executor/model_runner.py; text-generation-inference's warmup (models/flash_causal_lm.py).
"""

CAUSES: dict[str, tuple[bytes, ...]] = {
    "SRV-08": (
        rb"No available memory for the cache blocks|KV cache is needed, which is larger than the available KV cache",
        rb"max seq len .{0,80}is larger than the maximum number of tokens that can be stored in KV cache",
        rb"less than desired GPU memory utilization",
        rb"Not enough memory\. Please try to increase --mem-fraction-static",
        rb"Not enough memory to handle \d{1,9} prefill tokens",
    ),
}

ECHOES: dict[str, tuple[bytes, ...]] = {
    "SRV-01": (rb"Engine core initialization failed|Engine process failed to start",),
    "SRV-03": (rb"\bEngineDeadError\b|EngineCore encountered an issue|AsyncEngineDeadError",),
}
