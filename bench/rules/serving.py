"""Texts of the rules about servers and their loads."""

SERVING: dict[str, tuple[str, str]] = {
    "SRV-01": (
        "the server could not be started, or ended before it was healthy",
        "read its output, rank_logs/trial_K.server.out; start the command line of the log's `server` record by hand",
    ),
    "SRV-02": (
        "the server did not become healthy in time",
        "read its output, rank_logs/trial_K.server.out: it may still load weights or compile; else raise "
        "task.serving.server.healthy_within_s, or correct task.serving.server.health",
    ),
    "SRV-03": (
        "the server ended under load",
        "read its output, rank_logs/trial_K.server.out; if it ran out of memory, let it hold fewer requests at a time",
    ),
    "SRV-04": (
        "requests failed",
        "the rows of the load say how each of them ended, and the server's output why; failures count as the slowest "
        "requests",
    ),
    "SRV-05": (
        "answers or prompts did not have as many tokens as was asked for",
        "let the server ignore the end of an answer (task.serving.server.request or removes_eos), and give the client "
        "the server's own tokenizer; speeds of shorter answers are not comparable",
    ),
    "SRV-06": (
        "the client was the bottleneck",
        "give it CPUs of its own, or lower the rate; what it measured is partly its own delay",
    ),
    "SRV-07": (
        "loadgen calls the load invalid",
        "its reason is beside it: more requests for its percentile, a lower rate, or a limit that the server can keep",
    ),
}
