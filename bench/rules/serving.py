"""Texts of the rules about servers and the load on them."""

SERVING: dict[str, tuple[str, str]] = {
    "SRV-01": (
        "the server did not start, or exited before it was healthy",
        "read the output of the server, rank_logs/trial_K.server.out; run the command line in the log's `server` "
        "record by hand",
    ),
    "SRV-02": (
        "the server did not become healthy in time",
        "read the output of the server, rank_logs/trial_K.server.out. The server may still load weights or "
        "compile: then raise task.serving.server.startup_timeout_s. Or correct task.serving.server.health",
    ),
    "SRV-03": (
        "the server exited under load",
        "read the output of the server, rank_logs/trial_K.server.out; if the server ran out of memory, limit its "
        "concurrent requests",
    ),
    "SRV-04": (
        "requests failed",
        "the rows of the requests show how each request ended, and the output of the server shows why; failed "
        "requests count as the slowest",
    ),
    "SRV-05": (
        "answers or prompts did not have the requested number of tokens",
        "make the server ignore the end-of-sequence token (task.serving.server.request or removes_eos), and use "
        "the server's tokenizer in the client; speeds of shorter answers are not comparable",
    ),
    "SRV-06": (
        "the client was the bottleneck",
        "give the client its own CPUs, or lower the rate; the measured times include the client's own delay",
    ),
    "SRV-07": (
        "loadgen reports the result as INVALID",
        "the message shows loadgen's reason: send more requests for its percentile, lower the rate, or set a latency "
        "limit that the server can meet",
    ),
    "SRV-08": (
        "the server has too little GPU memory left for its KV cache",
        "lower the longest request (task.serving.server.max_model_len, or shorter loads), raise the share of "
        "memory that the server uses, use more GPUs (parallel.tp), or end other processes that use the GPU "
        "(`nvidia-smi`)",
    ),
}
