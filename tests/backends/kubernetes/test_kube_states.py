"""The states of jobs on Kubernetes, with a fake API server that records requests."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("kubernetes", reason="pip install 'runstop[kubernetes]'")

from bench import diagnosis
from bench.backends.kubernetes import backend, client, names, states
from bench.backends.protocol import JobState
from bench.console import logs
from bench.contract import plan_kinds
from bench.errors import SubmitError
from bench.launch import resume
from bench.planning import compose
from bench.runs import ledger


@dataclass
class Server:
    """A fake API server; `objects` are by the path that lists them."""

    objects: dict[str, list[Any] | str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    created: list[Any] = field(default_factory=list)

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        self.requests.append(f"{method} {path}")
        plain = urlsplit(path).path
        if method == "DELETE":
            return 200, {"kind": "Status", "status": "Success"}
        if plain not in self.objects:
            return 404, "404 page not found"
        content = self.objects[plain]
        return 200, content if isinstance(content, str) else {"kind": "List", "items": content}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    fake = Server()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            if sent := self.rfile.read(int(self.headers.get("Content-Length") or 0)):
                fake.created.append(json.loads(sent))
            status, body = fake.answer(self.command, self.path)
            text = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if isinstance(body, dict) else "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_DELETE = do_POST = _reply

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{http.server_port}"}}],
            "users": [{"name": "a", "user": {"token": "b"}}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
            "current-context": "a",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        client._client.cache_clear()
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield fake
        client._client.cache_clear()
        http.shutdown()
        thread.join()


JOBS, PODS = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"


def job(run: str, node: int, *conditions: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": f"{run}-{node}", "labels": {"runstop/run": run}, "creationTimestamp": "2026-11-22T20:00:00Z"}
    return {"metadata": metadata, "spec": {"parallelism": 1}, "status": {"conditions": list(conditions)}}


def pod(run: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"{run}-x", "labels": {"runstop/run": run}}, "spec": {}, "status": status}


def ended(type: str, **more: str) -> dict[str, str]:
    return {"type": type, "status": "True", "lastTransitionTime": "2026-11-22T20:01:00Z", **more}


def waiting(reason: str) -> list[dict[str, Any]]:
    return [{"state": {"waiting": {"reason": reason, "message": "the registry refuses"}}}]


def terminated(reason: str) -> list[dict[str, Any]]:
    return [{"state": {"terminated": {"reason": reason, "exitCode": 137, "message": "the end of its output"}}}]


UNSCHEDULABLE = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2: Insufficient"}]
CLAIMED = [{**UNSCHEDULABLE[0], "message": "pod has unbound immediate PersistentVolumeClaims"}]


@pytest.mark.parametrize(
    ("conditions", "pods", "state", "native_state", "rule"),
    [
        ([ended("Complete")], [], JobState.completed, "Complete", ""),
        ([], [pod("a", phase="Pending")], JobState.queued, "Pending", ""),
        ([], [pod("a", phase="Running")], JobState.running, "Running", ""),
        ([], [pod("a", phase="Pending", conditions=UNSCHEDULABLE)], JobState.queued, "Unschedulable", "KUB-02"),
        ([], [pod("a", phase="Pending", conditions=CLAIMED)], JobState.queued, "Unschedulable", "KUB-08"),
        *(
            ([], [pod("a", phase="Pending", containerStatuses=waiting(reason))], JobState.queued, reason, rule)
            for reason, rule in (("ImagePullBackOff", "KUB-01"), ("CreateContainerConfigError", "KUB-10"))
        ),
        ([ended("Failed", reason="BackoffLimitExceeded")], [], JobState.failed, "BackoffLimitExceeded", ""),
        (
            [ended("Failed", reason="BackoffLimitExceeded")],
            [pod("a", phase="Failed", containerStatuses=terminated("OOMKilled"))],
            *(JobState.failed, "OOMKilled", "KUB-03"),
        ),
        ([], [pod("a", phase="Failed", reason="Evicted", message="low")], JobState.running, "Evicted", "KUB-04"),
        ([], [pod("a", phase="Failed", reason="DeadlineExceeded")], JobState.running, "DeadlineExceeded", "KUB-09"),
    ],
)  # fmt: skip
def test_the_state_of_a_job_follows_from_its_objects_and_pods(
    server: Server, conditions: Any, pods: Any, state: JobState, native_state: str, rule: str
) -> None:
    server.objects = {JOBS: [job("a", 0, *conditions)], PODS: pods, EVENTS: []}
    known = states.states(["job/default/a"])["job/default/a"]
    assert (known.state, known.native_state, known.rule) == (state, native_state, rule)


@pytest.mark.parametrize(("seconds", "native_state", "rule"), [(2.0, "Running", ""), (60.0, "NodeLost", "KUB-13")])
def test_a_pod_that_its_node_does_not_terminate_shows_a_lost_node(
    server: Server, seconds: float, native_state: str, rule: str
) -> None:
    """A kubelet needs some seconds after the grace period, which the deletion's time includes, to remove a pod."""
    due = datetime.fromtimestamp(time.time() - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    deleted = pod("a", phase="Running")
    deleted["metadata"]["deletionTimestamp"] = due
    server.objects = {JOBS: [job("a", 0)], PODS: [deleted], EVENTS: []}
    known = states.states(["job/default/a"])["job/default/a"]
    assert (known.native_state, known.rule) == (native_state, rule)


def test_a_run_ends_with_its_last_job_and_fails_with_the_first_failed_one(server: Server) -> None:
    server.objects = {
        JOBS: [job("a", 0, ended("Complete")), job("a", 1)],
        PODS: [pod("a", phase="Running")],
        EVENTS: [],
    }
    assert states.states(["job/default/a"])["job/default/a"].state is JobState.running
    server.objects[JOBS] = [job("a", 0, ended("Failed", reason="DeadlineExceeded")), job("a", 1)]
    assert states.states(["job/default/a"])["job/default/a"].state is JobState.failed


def test_two_hundred_runs_need_one_list_of_objects_and_one_of_pods(server: Server) -> None:
    runs = [f"r{number}" for number in range(200)]
    server.objects = {JOBS: [job(run, 0) for run in runs], PODS: [pod(run, phase="Running") for run in runs]}
    assert len(states.states([f"job/default/{run}" for run in runs])) == 200
    assert [one.partition("?")[0] for one in server.requests] == [f"GET {JOBS}", f"GET {PODS}"]


def test_a_run_is_resumed_with_other_limits_and_the_same_plan(server: Server, tmp_path: Path) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes_test", "trials=3"])
    server.objects = {JOBS: [], "/api/v1/namespaces/default/configmaps": []}
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    backend.resume(tmp_path, trials_left=2, walltime_min=7, arguments=())
    held, *work = server.created
    assert plan_kinds.loads(held["data"]["plan.json"]) == plan
    pods = [one["spec"]["template"]["spec"] for one in work]
    assert [pod["activeDeadlineSeconds"] for pod in pods] == [60 * (5 + 2 * (7 + 5)) + 120] * 2
    assert [pod["containers"][0]["args"][-4:] for pod in pods] == [["--limit-s", "1740", "--trial-min", "7"]] * 2


def test_logs_of_pods_are_shown_if_the_run_folder_has_none(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.objects = {JOBS: [job("a", 0, ended("Complete"))], PODS: [pod("a", phase="Succeeded")]}
    server.objects[f"{PODS}/a-x/log"] = "job a\nresult_0.txt: \x1b[2J:::MLLOG\nhalf"
    (tmp_path / "job.json").write_text(json.dumps({"backend": "kubernetes", "jobs": [{"id": "job/default/a"}]}))
    logs.show(tmp_path, num_lines=None, follow=True)
    assert capsys.readouterr().out == "==> a-x <==\njob a\nresult_0.txt: ?[2J:::MLLOG\n"


def test_why_reads_the_logs_of_pods_if_the_run_folder_has_none(server: Server, tmp_path: Path) -> None:
    server.objects = {JOBS: [job("a", 0, ended("Failed"))], PODS: [pod("a", phase="Failed")], EVENTS: []}
    server.objects[f"{PODS}/a-x/log"] = "job a\nrank_1.err: torch.OutOfMemoryError: CUDA out of memory.\n"
    (tmp_path / "job.json").write_text(json.dumps({"backend": "kubernetes", "jobs": [{"id": "job/default/a"}]}))
    cause = diagnosis.explain([tmp_path], ask=True)
    assert cause.rule == "RUN-01" and cause.file is not None and Path(cause.file).name == "rank_1.err"


@pytest.mark.parametrize(("ask", "rule"), [(True, "KUB-02"), (False, "unknown")])
def test_why_queries_the_cluster_only_if_requested(server: Server, tmp_path: Path, ask: bool, rule: str) -> None:
    folder, plan = tmp_path / "run", compose.compose(["task=lora_tiny", "cluster=kubernetes_test"])
    folder.mkdir()
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(folder, plan)
    server.objects = {JOBS: [job("a", 0)], PODS: [pod("a", phase="Pending", conditions=UNSCHEDULABLE)], EVENTS: []}
    (folder / "job.json").write_text(json.dumps({"backend": "kubernetes", "jobs": [{"id": "job/default/a"}]}))
    assert diagnosis.explain([folder], ask=ask).rule == rule


def test_a_cancelled_job_is_noted_in_job_json_before_its_pods_get_their_signals(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = job("a", 0)
    ours["metadata"]["annotations"] = {names.FOLDER: str(tmp_path)}
    server.objects = {JOBS: [ours], PODS: [pod("a", phase="Running")], EVENTS: []}
    file, submitted = tmp_path / "job.json", {"backend": "kubernetes", "jobs": [{"id": "job/default/a"}]}
    file.write_text(json.dumps(submitted))
    at_deletion, answer, refusal = list[Any](), Server.answer, (403, {"reason": "Forbidden", "message": "no"})

    def answered(self: Server, method: str, path: str) -> tuple[int, Any]:
        if method != "DELETE":
            return answer(self, method, path)
        at_deletion.append(json.loads(file.read_text()))
        return refusal if len(at_deletion) > 1 else answer(self, method, path)

    monkeypatch.setattr(Server, "answer", answered)
    assert resume.cancel(tmp_path) == "job/default/a"
    noted = submitted | {"cancelled": "job/default/a"}
    assert at_deletion == [noted] and json.loads(file.read_text()) == noted
    file.write_text(json.dumps(submitted))
    with pytest.raises(SubmitError, match="KUB-07"):
        resume.cancel(tmp_path)
    assert at_deletion == [noted] * 2 and json.loads(file.read_text()) == submitted, "it still runs"


def test_only_the_objects_of_a_job_are_deleted(server: Server) -> None:
    server.objects = {JOBS: [job("a", 0), job("a", 1)]}
    backend.cancel(names.read_id("job/default/a"))
    assert unquote(server.requests[0]) == f"GET {JOBS}?labelSelector=runstop/run=a"
    assert {one.partition("?")[0] for one in server.requests[1:]} == {f"DELETE {JOBS}/a-0", f"DELETE {JOBS}/a-1"}


@pytest.mark.parametrize("id", ["12", "pod/default/a", "job/default", "job/Default/a", "job/../a", "job/default/a b"])
def test_the_id_of_another_backend_is_refused(id: str) -> None:
    with pytest.raises(SubmitError, match="is not the id of a Kubernetes job"):
        states.states([id])


def test_a_kind_that_the_cluster_does_not_support_is_an_error(server: Server) -> None:
    with pytest.raises(client.ApiError, match="404 page not found"):
        states.states(["jobset/default/a"])
