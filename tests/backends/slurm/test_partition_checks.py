"""The partition check compares the job with the output of sinfo."""

from concurrent.futures import Future

import pytest

from bench.backends.slurm import checks
from bench.planning import compose
from bench.rules.check import Answer, Subject
from bench.rules.finding import Finding

UP = "batch*|up|1:00:00|{nodes}|gpu:h100:8|64|1024000|idle|{size}|1"


def findings(sinfo: str, *overrides: str) -> list[tuple[str, str, str, str]]:
    answer: Future[Answer] = Future()
    answer.set_result(Answer(0, sinfo, ""))
    plan = compose.compose(["task=lora70b", "cluster=dgx2", "cluster.slurm.partition=batch", "walltime=20", *overrides])
    results = checks.partition(Subject(plan, "", (), {"sinfo": answer}))
    return [(one.rule, one.severity, one.what, one.where) for one in results if isinstance(one, Finding)]


NODES = "cluster.num_nodes"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (UP.format(nodes=2, size="1-infinite"), []),
        (
            UP.format(nodes=1, size="1-infinite"),
            [("SLU-02", "error", "the job requests 2 nodes, but partition batch has 1", NODES)],
        ),
        (
            UP.format(nodes=8, size="4-infinite"),
            [("SLU-02", "error", "the job requests 2 nodes, but partition batch requires at least 4", NODES)],
        ),
        (
            UP.format(nodes=2, size="1-infinite").replace("idle", "down"),
            [
                (
                    "SLU-09",
                    "warning",
                    "the job requests 2 nodes and would wait: only 0 of 2 nodes in partition batch are up",
                    NODES,
                )
            ],
        ),
    ],
)
def test_the_partition_must_have_enough_nodes(line: str, expected: list[tuple[str, str, str, str]]) -> None:
    assert findings(line) == expected


def test_the_time_limit_of_the_partition_applies_to_the_whole_job() -> None:
    """Two trials of 30 minutes are 5 + 2 x (30 + 5) = 75 minutes, and the partition allows 60."""
    (finding,) = findings(UP.format(nodes=2, size="1-infinite"), "walltime=30", "trials=2")
    assert finding == (
        "SLU-02",
        "error",
        "the job requests 75 min, but partition batch allows at most 60 min",
        "walltime, trials",
    )
