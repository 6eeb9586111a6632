"""A model of the controllers of Indexed Jobs and JobSets: when pods are replaced, and when the object fails.

The tests have no current cluster. Sources: Kubernetes 1.31, concepts/workloads/
controllers/job (pod failure policy, backoff limit); JobSet 0.12 (failure policy).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class End:
    """How a pod ends; is_disrupted: by a preemption, an eviction, a deletion or a lost node."""

    exit_code: int
    is_disrupted: bool = False


Ends = Callable[[int, int], End]
"""The end of the pod of an index, by the number of its start."""


@dataclass
class Outcome:
    """The end of a Job: `Complete`, or the reason of its failure; and how many pods it has created."""

    reason: str = ""
    pods: int = 0
    starts: dict[int, int] = field(default_factory=dict)


def of_job(spec: Object, ends: Ends, outcome: Outcome | None = None) -> Outcome:
    """Run an Indexed Job: pods end in the order of their indexes, and failed ones are replaced."""
    if spec["completionMode"] != "Indexed" or spec["template"]["spec"]["restartPolicy"] != "Never":
        raise ValueError("a Job with a podFailurePolicy has pods that are never restarted")
    outcome, failures, left = outcome or Outcome(), 0, list(range(spec["completions"]))
    while left:
        index = left.pop(0)
        number = outcome.starts[index] = outcome.starts.get(index, -1) + 1
        outcome.pods += 1
        end = ends(index, number)
        if end.exit_code == 0 and not end.is_disrupted:
            continue
        action = action_of(spec, end)
        failures += action == "Count"
        if action == "FailJob" or failures > spec["backoffLimit"]:
            outcome.reason = "PodFailurePolicy" if action == "FailJob" else "BackoffLimitExceeded"
            return outcome
        left.append(index)
    outcome.reason = "Complete"
    return outcome


def action_of(spec: Object, end: End) -> str:
    """Return the action of the first rule that matches the end of a pod."""
    containers = [one["name"] for one in spec["template"]["spec"]["containers"]]
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        conditions = [one["type"] for one in rule.get("onPodConditions", []) if one["status"] == "True"]
        if end.is_disrupted and "DisruptionTarget" in conditions:
            return str(rule["action"])
        if (codes := rule.get("onExitCodes")) is not None:
            if codes["containerName"] not in containers or codes["operator"] != "In" or 0 in codes["values"]:
                raise ValueError(f"the API server refuses {codes}")
            if end.exit_code in codes["values"]:
                return str(rule["action"])
    return "Count"


def of_jobset(spec: Object, ends: Ends) -> Outcome:
    """Run a JobSet of one Job: a failed Job restarts all pods, unless a rule of the failure policy fails the JobSet."""
    (replicated,) = spec["replicatedJobs"]
    outcome = Outcome()
    for _ in range(spec["failurePolicy"]["maxRestarts"] + 1):
        of_job(replicated["template"]["spec"], ends, outcome)
        if outcome.reason == "Complete":
            return outcome
        for rule in spec["failurePolicy"]["rules"]:
            if outcome.reason in rule["onJobFailureReasons"] and rule["action"] == "FailJobSet":
                outcome.reason = "FailJobSet"
                return outcome
    outcome.reason = "ReachedMaxRestarts"
    return outcome
