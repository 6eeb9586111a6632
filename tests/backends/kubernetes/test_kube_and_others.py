"""The study kubernetes_overhead_tiny on four backends: local, and the test clusters of Slurm, Kubernetes and Ray."""

import json
import sys

import pytest
from kube_cluster import Cluster

from helpers import answers, places

pytestmark = [pytest.mark.slow, pytest.mark.trains, pytest.mark.kubernetes]
ARMS = {"runner", "Slurm", "Kubernetes", "Ray"}


@pytest.mark.timeout(1800)
def test_one_command_runs_it_on_four_backends_one_after_another(cluster: Cluster) -> None:
    if lacks := places.missing():
        pytest.skip(f"not here: {'; '.join(lacks)}")
    with places.running(kube=cluster) as there:
        words = ["study", "kubernetes_overhead_tiny", "cluster=local", "--runs", "2", "--json"]
        done = there.types([sys.executable, "-m", "bench", *words], capture_output=True, timeout=1500)
        assert done.returncode == 0, done.stderr
        result = answers.one(done.stdout)
        folder = there.home / "runs/studies/kubernetes_overhead_tiny-local"
        clocks = {path.parent.name: clock(path.read_text()) for path in folder.glob("*/result_0.txt")}
    assert {row["arm"] for row in result["rows"]} == ARMS
    cells = [cell for row in result["rows"] for cell in row["cells"].values()]
    assert all(len(cell["values"]) == 2 and "a demonstration" in cell["reason"] for cell in cells)
    verdicts = [one["comparison"]["verdict"] for one in result["differences"]]
    assert len(verdicts) == 4 and "not compared" not in verdicts
    times = sorted(clocks.values())
    assert all(end < begin for (_, end), (begin, _) in zip(times, times[1:], strict=False)), "one after another"
    order = [f"{arm}.{block}" for block, arms in enumerate(result["order"], 1) for arm in arms]
    assert sorted(clocks, key=lambda name: clocks[name]) == order


def clock(log: str) -> tuple[int, int]:
    """Return the first and last time of a log, in ms."""
    times = [json.loads(line.partition(":::MLLOG ")[2])["time_ms"] for line in log.splitlines() if ":::MLLOG" in line]
    return min(times), max(times)
