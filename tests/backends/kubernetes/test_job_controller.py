"""Runs under a model of the controllers of a current cluster: what ends a Job, and what replaces a pod."""

import pytest
import yaml
from job_controller import End, Ends, Outcome, of_job, of_jobset

from bench.backends.kubernetes import entry
from helpers.paths import ROOT

KILLED, DISRUPTED, AGAIN = End(137), End(143, is_disrupted=True), End(entry.RETRYABLE)


def run(kind: str, ends: Ends) -> Outcome:
    """Run the workload of a shipped manifest: two nodes, at most three attempts."""
    *_, work = yaml.safe_load_all((ROOT / f"manifests/lora70b_{kind}.yaml").read_text())
    return {"job": of_job, "jobset": of_jobset}[kind](work["spec"], ends)


@pytest.mark.parametrize(
    ("kind", "ends", "reason", "pods"),
    [
        ("job", lambda index, number: End(0), "Complete", 2),
        ("job", lambda index, number: End(1), "PodFailurePolicy", 1),
        ("job", lambda index, number: End(2), "PodFailurePolicy", 1),
        ("job", lambda index, number: DISRUPTED if index == 1 and number < 20 else End(0), "Complete", 22),
        ("job", lambda index, number: AGAIN if index == 1 and number < 3 else End(0), "Complete", 5),
        ("job", lambda index, number: KILLED, "BackoffLimitExceeded", 7),
        ("jobset", lambda index, number: End(0), "Complete", 2),
        ("jobset", lambda index, number: End(1), "FailJobSet", 1),
        ("jobset", lambda index, number: KILLED if index == 0 and number < 2 else End(0), "Complete", 4),
        ("jobset", lambda index, number: KILLED, "ReachedMaxRestarts", 4),
    ],
    ids=["valid", "failed", "refused", "node lost, disrupted 20 times", "another node lost", "always killed",
         "valid set", "failed set", "set killed twice", "set always killed"],
)  # fmt: skip
def test_a_failed_run_ends_its_job_once_and_a_lost_pod_is_replaced(
    kind: str, ends: Ends, reason: str, pods: int
) -> None:
    outcome = run(kind, ends)
    assert (outcome.reason, outcome.pods) == (reason, pods)


def test_a_run_whose_rank_was_killed_starts_no_pod_again() -> None:
    """The pods' exit codes follow from the run's, whatever those of its runners are."""
    codes = {0: entry._pod_exit_code(0, 137, 1), 1: entry._pod_exit_code(1, 137, 1)}
    assert run("job", lambda index, number: End(codes[index])).pods == 1
