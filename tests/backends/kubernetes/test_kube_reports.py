"""How objects, pods and logs are reported: states of jobs, lines of a pod's output, and a TrainJob's progress."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bench.backends.kubernetes import client, entry, states, trainer_status
from bench.backends.kubernetes.trainer_status import FollowedRun, FollowedTrial
from bench.backends.protocol import Job, JobState
from bench.contract.plan import Plan
from bench.contract.run_files import RANK_LOGS, RUNNER_OUTPUT
from bench.mlperf.reader import Follower
from bench.planning import compose
from helpers import checked
from helpers.types import MakeLog

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC).timestamp()
STARTED = "2026-11-21T11:58:20Z"


def item(
    run: str = "a", *, kind: str = "a-0", conditions: Any = (), spec: Any = None, start: str | None = STARTED
) -> Any:
    metadata = {"name": kind, "labels": {"runstop/run": run}, "creationTimestamp": "2026-11-21T11:50:00Z"}
    return {"metadata": metadata, "spec": spec, "status": {"startTime": start, "conditions": list(conditions)}}


def pod(node: str | None = None, *, run: str = "a", deleted: str | None = None, **status: Any) -> Any:
    metadata = {"name": "p", "labels": {"runstop/run": run}, "deletionTimestamp": deleted}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": status}


def ended(type: str, at: str = "2026-11-21T11:59:10Z", **more: str) -> dict[str, str]:
    return {"type": type, "status": "True", "lastTransitionTime": at, **more}


def state(reason: str, message: str = "", *, kind: str = "waiting", when: str = "state") -> Any:
    return {"containerStatuses": [{when: {kind: {"reason": reason, "message": message}}}]}


def known(native: str, is_state: JobState, **more: Any) -> Job:
    usual = {"id": "job/team/a", "start": STARTED, "elapsed_s": 100}
    return Job(state=is_state, native_state=native, **{**usual, **more})


QUEUED, RUNNING, FAILED = JobState.queued, JobState.running, JobState.failed
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
CASES: dict[str, tuple[list[Any], list[Any], list[Any], Job]] = {
    "no pods": ([item()], [], [], known("Pending", QUEUED)),
    "suspended": ([item(spec={"suspend": True})], [], [], known("Suspended", QUEUED)),
    "not started": ([item(start=None)], [], [], known("Pending", QUEUED, start="2026-11-21T11:50:00Z", elapsed_s=600)),
    "refused": (
        [item()],
        [],
        [{"involvedObject": {"name": "a-0"}, "message": "exceeded\n quota"}],
        known("FailedCreate", QUEUED, reason="exceeded quota", rule="KUB-11"),
    ),
    "another is refused": (
        [item()],
        [],
        [{"involvedObject": {"name": "b-0"}, "message": "x"}],
        known("Pending", QUEUED),
    ),
    "enough pods": (
        [item(spec={"parallelism": 2})],
        [pod("n2"), pod("n1")],
        [{"involvedObject": {"name": "a-0"}, "message": "old"}],
        known("Pending", QUEUED, nodes="n1,n2"),
    ),
    "too few pods": (
        [item(spec={"parallelism": 2})],
        [pod("n2")],
        [{"involvedObject": {"name": "a-0"}, "message": "new"}],
        known("FailedCreate", QUEUED, nodes="n2", reason="new", rule="KUB-11"),
    ),
    "unschedulable": (
        [item()],
        [pod(conditions=[{**UNSCHEDULED, "message": "0/2 nodes"}])],
        [],
        known("Unschedulable", QUEUED, reason="0/2 nodes", rule="KUB-02"),
    ),
    "an unbound claim": (
        [item()],
        [pod(conditions=[{**UNSCHEDULED, "message": 'persistentvolumeclaim "x" not found'}])],
        [],
        known("Unschedulable", QUEUED, reason='persistentvolumeclaim "x" not found', rule="KUB-08"),
    ),
    "creating": ([item()], [pod("n1", **state("ContainerCreating"))], [], known("Pending", QUEUED, nodes="n1")),
    "an image that is missing": (
        [item()],
        [pod("n1", **state("Odd")), pod("n1", **state("ErrImagePull", "m" * 500))],
        [],
        known("ErrImagePull", QUEUED, nodes="n1", reason="m" * 400, rule="KUB-01"),
    ),
    "running": ([item()], [pod("n1", phase="Running")], [], known("Running", RUNNING, nodes="n1")),
    "running with an odd state": (
        [item()],
        [pod("n1", phase="Running", **state("Odd", "x"))],
        [],
        known("Running", RUNNING, nodes="n1", reason="x"),
    ),
    "running after a crash": (
        [item()],
        [pod("n1", phase="Running", **state("OOMKilled", kind="terminated", when="lastState"))],
        [],
        known("OOMKilled", RUNNING, nodes="n1", rule="KUB-03"),
    ),
    "a completed container": (
        [item()],
        [pod("n1", phase="Running", **state("Completed", "y", kind="terminated"))],
        [],
        known("Running", RUNNING, nodes="n1"),
    ),
    "evicted": (
        [item()],
        [pod("n1", phase="Failed", reason="Evicted", message="low on disk")],
        [],
        known("Evicted", RUNNING, nodes="n1", reason="low on disk", rule="KUB-04"),
    ),
    "a lost node": (
        [item()],
        [pod("n1", phase="Running", deleted="2026-11-21T11:59:49Z")],
        [],
        known("NodeLost", RUNNING, nodes="n1", reason="node n1 does not terminate pod p", rule="KUB-13"),
    ),
    "a pod that terminates": (
        [item()],
        [pod("n1", phase="Running", deleted="2026-11-21T11:59:50Z")],
        [],
        known("Running", RUNNING, nodes="n1"),
    ),
    "failed": (
        [item(conditions=[ended("Failed", reason="BackoffLimit", message="too  often")])],
        [pod("n1")],
        [],
        known("BackoffLimit", FAILED, nodes="n1", reason="too often", elapsed_s=50),
    ),
    "failed with a reason of its pods": (
        [item(conditions=[ended("Failed", message="too often")])],
        [pod("n1", **state("OOMKilled", "killed", kind="terminated"))],
        [],
        known("OOMKilled", FAILED, nodes="n1", reason="killed", rule="KUB-03", elapsed_s=50),
    ),
    "one of two failed": (
        [item(conditions=[ended("Failed")]), item(kind="a-1", conditions=[ended("Complete", "2026-11-21T11:59:20Z")])],
        [pod("n1")],
        [],
        known("Failed", FAILED, nodes="n1", elapsed_s=60),
    ),
    "one of two completed": (
        [item(), item(kind="a-1", conditions=[ended("Complete")])],
        [pod("n1", phase="Succeeded"), pod("n2", phase="Running")],
        [],
        known("Running", RUNNING, nodes="n1,n2"),
    ),
    "completed": ([item(conditions=[ended("Complete")])], [], [], known("Complete", JobState.completed, elapsed_s=50)),
    "a condition that is false": (
        [item(conditions=[{**ended("Failed"), "status": "False"}])],
        [],
        [],
        known("Pending", QUEUED),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_whole_job_follows_from_objects_pods_and_events(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, pods, events, expected = CASES[case]
    monkeypatch.setattr(time, "time", lambda: NOW)
    lists = {"Job": [*objects, item("other")], "Pod": [*pods, pod("n9", run="other", phase="Running")]}
    monkeypatch.setattr(client, "listed", lambda kind, *args, **options: lists[kind])
    monkeypatch.setattr(client, "request", lambda *args, **options: {"items": events})
    assert states.states(["job/team/a", "job/team/none"]) == {"job/team/a": expected}


def test_new_complete_lines_of_a_runs_files_are_printed_once(tmp_path: Path) -> None:
    (tmp_path / RANK_LOGS).mkdir()
    out, log = tmp_path / RANK_LOGS / "trial_0.out", tmp_path / "result_0.txt"
    out.write_bytes(b"one\ntwo")
    log.write_bytes(b"\xffrecord\n")
    (tmp_path / RUNNER_OUTPUT).write_text("own\n")
    (tmp_path / RANK_LOGS / "other.json").write_text("{}\n")
    places = dict[Path, int]()
    assert list(entry.added(tmp_path, places)) == [
        b"trial_0.out: one\n",
        "result_0.txt: \N{REPLACEMENT CHARACTER}record\n".encode(),
    ]
    assert places[out] == 4 and list(entry.added(tmp_path, places)) == []
    out.write_bytes(b"one\ntwo\nthree\n")
    assert list(entry.added(tmp_path, places)) == [b"trial_0.out: two\n", b"trial_0.out: three\n"]
    out.write_bytes(b"new\n")
    assert list(entry.added(tmp_path, places)) == [b"trial_0.out: new\n"], "a new attempt's file is shorter"


@pytest.fixture
def plan() -> Plan:
    """Return a plan of two trials of 4,608 samples each, which ends after its steps."""
    plan = compose.compose(["task=lora_tiny", "cluster=local", "trials=2", "task.training.max_steps=576"])
    return checked.changed(plan, {"config.task.training.target_eval_loss": None})


def test_the_progress_of_a_run_has_a_share_metrics_and_the_remaining_time(
    plan: Plan, written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial is half of the run. A trial that ended early is complete."""
    monkeypatch.setattr(trainer_status.time, "time", lambda: NOW)
    whole = written_log(evals=(0.95, 0.9300000001)).read_text()
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    trials = [FollowedTrial(Follower(path)) for path in (first, second)]
    run = FollowedRun(plan, trials)
    updated = {"lastUpdatedTime": "2026-11-21T12:00:00Z"}
    assert run.read() == {"progressPercentage": 0, "metrics": []} | updated
    first.write_text(whole.partition('"run_stop"')[0].rpartition("\n")[0] + "\n")
    status = run.read()
    assert status["progressPercentage"] == 20, "1,920 of 2 x 4,608 samples are 20.8 %"
    assert {one["name"]: one["value"] for one in status["metrics"]} == {
        "train_loss": "1.03",
        "eval_loss": "0.9300000001",
        "trial": "0",
        "samples_count": "1920",
    }
    trials[0].training_s = 960.0
    assert run.read()["estimatedRemainingSeconds"] == 3648, "7,296 samples are left, at 2 a second"
    with_target = FollowedRun(checked.changed(plan, {"config.task.training.target_eval_loss": 0.9}), trials)
    assert "estimatedRemainingSeconds" not in with_target.read()
    first.write_text(whole)
    status = run.read()
    assert status["progressPercentage"] == 50 and trials[0].is_over
    second.write_text(whole.partition('"eval_start"')[0].rpartition("\n")[0] + "\n")
    status = run.read()
    assert status["progressPercentage"] == 66, "half of the run, and 1,536 of 9,216 samples"
    assert json.loads(json.dumps(status))["metrics"][-2:] == [
        {"name": "trial", "value": "1"},
        {"name": "samples_count", "value": "1536"},
    ]
