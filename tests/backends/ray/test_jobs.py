"""Requests to a Ray cluster and its answers, with a fake client that counts requests."""

import json
import shlex
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.backends.protocol import JobState
from bench.backends.ray import backend, client, driver, placement_group, request
from bench.backends.ray.backend import RayBackend
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, RAY_JOB, SUBMISSION
from bench.diagnosis import run_reports
from bench.driver import __main__ as runner
from bench.errors import ConfigError, SubmitError
from bench.launch import resume
from bench.planning import compose
from bench.runs import folder as folders
from bench.runs import run as runs

ADDRESS = "http://head:8265"


@dataclass
class Details:
    """Like ray.job_submission.JobDetails."""

    submission_id: str
    status: str = "RUNNING"
    message: str | None = None
    error_type: str | None = None
    start_time: int | None = 1_000
    end_time: int | None = None
    driver_exit_code: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    entrypoint: str = ""


@dataclass
class Clusters:
    """Fake Ray clusters by address; other addresses do not answer."""

    jobs: dict[str, list[Details]]
    requests: list[str] = field(default_factory=list)
    fails: Exception | None = None
    is_down: Exception | None = None

    def connect(self, address: str) -> Any:
        if address not in self.jobs:
            raise client.unreachable(address, "Connection refused")
        return Connected(self, address)


@dataclass
class Connected:
    clusters: Clusters
    address: str

    def list_jobs(self) -> list[Details]:
        self.clusters.requests.append(f"list {self.address}")
        if self.clusters.is_down:
            raise self.clusters.is_down
        return self.clusters.jobs[self.address]

    def stop_job(self, submission: str) -> bool:
        if self.clusters.is_down:
            raise self.clusters.is_down
        return True

    def submit_job(self, **body: Any) -> str:
        self.clusters.requests.append(f"submit {body['submission_id']}")
        known = self.clusters.jobs[self.address]
        if any(body["submission_id"] == details.submission_id for details in known):
            raise RuntimeError(f"Request failed: Job with submission_id {body['submission_id']} already exists.")
        if not isinstance(self.clusters.fails, RuntimeError):
            taken = Details(body["submission_id"], "PENDING", metadata=body["metadata"])
            known.append(replace(taken, entrypoint=body["entrypoint"]))
        if self.clusters.fails is not None:
            raise self.clusters.fails
        return str(body["submission_id"])


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clusters:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path / "runs"))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ADDRESS)
    fake = Clusters({ADDRESS: []})
    monkeypatch.setattr(client, "connect", fake.connect)
    monkeypatch.setattr(client, "is_available", lambda: True)
    return fake


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=ray_test", *overrides])


@pytest.mark.long
def test_two_hundred_runs_cost_one_request_per_cluster(clusters: Clusters, tmp_path: Path) -> None:
    other = "http://other:8265"
    clusters.jobs |= {other: []}
    for number in range(200):
        address, folder = (ADDRESS, other)[number % 2], tmp_path / "many" / f"run{number}"
        folder.mkdir(parents=True)
        details = Details(f"job-{number}", "RUNNING" if number else "FAILED", driver_exit_code=None if number else -9)
        clusters.jobs[address].append(details)
        job = {"backend": "ray", "jobs": [{"id": f"job-{number}@{address}", "submitted": 1.0}], "address": address}
        job["inode"] = folder.stat().st_ino
        (folder / JOB).write_text(json.dumps(job))
    known = runs.below(tmp_path / "many")
    assert clusters.requests == [f"list {ADDRESS}", f"list {other}"]
    states = [run.state.state for run in known if run.state is not None]
    assert states.count(JobState.running) == 199 and states.count(JobState.failed) == 1


def test_an_unreachable_cluster_does_not_hide_the_jobs_of_others(
    clusters: Clusters, caplog: pytest.LogCaptureFixture
) -> None:
    clusters.jobs[ADDRESS] = [Details("a", "STOPPED")]
    known = RayBackend().states([f"a@{ADDRESS}", "b@http://gone:1"])
    assert [(job.id, job.state) for job in known.values()] == [(f"a@{ADDRESS}", JobState.cancelled)]
    assert "http://gone:1" in caplog.text


DOWN = {
    "it answers 500": RuntimeError("Request failed with status code 500: GCS is not available."),
    "no answer in time": TimeoutError("read timed out"),
    "no JSON": json.JSONDecodeError("Expecting value", "<html>", 0),
}


@pytest.mark.parametrize("how", DOWN)
def test_jobs_of_a_cluster_that_cannot_list_them_are_not_reported_as_ended(
    how: str, clusters: Clusters, tmp_path: Path
) -> None:
    """It accepts connections, so its jobs may be running; they must not be submitted again."""
    clusters.is_down = DOWN[how]
    job = {"backend": "ray", "jobs": [{"id": f"a@{ADDRESS}"}], "address": ADDRESS}
    (tmp_path / JOB).write_text(json.dumps(job))
    for query in (runs.find, RayBackend().submitted, resume.cancel):
        with pytest.raises(SubmitError, match=f"RAY-01: no Ray cluster accepts jobs at {ADDRESS}: "):
            query(tmp_path)
    with pytest.raises(SubmitError):
        RayBackend().cancel(f"a@{ADDRESS}")


@pytest.mark.long
def test_another_server_at_the_address_is_refused() -> None:
    """Ray's own client, with a server that answers 500 or JSON in another format."""
    pytest.importorskip("ray.job_submission")
    for status, body in ((500, b"{}"), (200, b"{}"), (200, b"[]")):

        class Other(BaseHTTPRequestHandler):
            def do_GET(self, status: int = status, body: bytes = body) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            with pytest.raises(SubmitError, match="no Ray cluster accepts jobs"):
                client.connect(f"http://127.0.0.1:{server.server_port}")
            server.shutdown()


def test_the_reason_of_a_failure_has_its_type_the_message_and_the_end_of_the_log() -> None:
    message = "Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\n"
    failed = Details("a", "FAILED", f"{message}{'x' * 999}\nNo module named bench", "JOB_ENTRYPOINT_COMMAND_ERROR")
    job = client.as_job("a", failed)
    assert job.reason.startswith("JOB_ENTRYPOINT_COMMAND_ERROR: Job entrypoint command failed with exit code 1: …")
    assert job.reason.endswith("No module named bench") and len(job.reason) < 2 * client.MAX_REASON + 100
    assert client.as_job("a", Details("a", "FAILED", driver_exit_code=-9)).exit_code == "0:9"


@pytest.mark.parametrize(
    ("kind", "message", "rule"),
    [
        ("JOB_ENTRYPOINT_COMMAND_ERROR", "Job entrypoint command failed with exit code 137, last …", "RAY-08"),
        (
            "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
            "Unexpected error occurred: 1 worker(s) were killed due to the node running low on memory.\nMemory on the "
            "node (IP: 192.0.2.2) was 2.51GB used / 23.54GB limit (0.106426)",
            "RAY-05",
        ),
        (
            "RUNTIME_ENV_SETUP_FAILURE",
            f"runtime_env setup failed: Failed to set up runtime environment.\n{'Traceback ' * 99}\n"
            "OSError: Failed to download runtime_env file package gcs://_ray_pkg_0.zip from the GCS",
            "RAY-07",
        ),
    ],
    ids=["driver killed", "out of memory", "package lost"],
)
def test_rays_messages_about_failed_jobs_match_rules(kind: str, message: str, rule: str) -> None:
    """The messages are those of Ray 2.60."""
    job = client.as_job("a", Details("a", "FAILED", message, kind))
    (scan,) = run_reports.queue_report(job, JOB)
    assert scan.clues[0].rule == rule
    assert job.reason[-20:] in " ".join(message.split())


def test_a_lost_answer_creates_no_second_job(clusters: Clusters, tmp_path: Path) -> None:
    """The first submission succeeds, but its answer is lost; Ray refuses the second one as a duplicate."""
    plan = planned()
    folder = folders.make(plan, "")
    clusters.fails = ConnectionError("reset by peer")
    with pytest.raises(SubmitError, match="the job may exist anyway"):
        backend.submit(plan, folder)
    assert (folder / SUBMISSION).exists() and runs.find(folder).is_active
    clusters.fails = None
    job = backend.resume(folder, trials_left=1, walltime_min=None, arguments=())
    assert len(clusters.jobs[ADDRESS]) == 1 and not (folder / SUBMISSION).exists()
    assert [entry["id"] for entry in json.loads((folder / JOB).read_text())["jobs"]] == [job]


def test_a_resumed_run_keeps_its_new_time_limit(clusters: Clusters) -> None:
    """The job's limit covers the remaining trials; every node's runner gets the limit of each trial."""
    plan = planned("walltime=3", "trials=2")
    folder = folders.make(plan, "")
    backend.submit(plan, folder)
    for walltime in (20, None):
        backend.resume(folder, trials_left=1, walltime_min=walltime, arguments=())
    entrypoints = [shlex.split(details.entrypoint) for details in clusters.jobs[ADDRESS]]
    args = [driver._parser().parse_args(words[3:]) for words in entrypoints]
    assert [(one.walltime, one.limit_min) for one in args] == [(None, 19.0), (20, 28.0), (20, 28.0)]
    job = driver.DriverJob("j", None, 28.0, 20, folder)
    words = ["run", "--node", "0", *driver._arguments(job, 1, is_last=False)]
    assert runner._parser().parse_args(words).trial_min == 20


def test_a_refused_job_leaves_the_folder_unchanged(clusters: Clusters) -> None:
    plan = planned()
    folder = folders.make(plan, "")
    clusters.fails = RuntimeError("Request failed with status code 500: no")
    with pytest.raises(SubmitError, match="Ray refuses the job: Request failed with status code 500: no"):
        backend.submit(plan, folder)
    assert not (folder / SUBMISSION).exists() and not (folder / RAY_JOB).exists()


def test_secrets_are_neither_passed_nor_written(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a1B2" * 8
    monkeypatch.setenv("HARMLESS", token)
    plan = planned("cluster.ray.environment=[HARMLESS]")
    folder = folders.make(plan, "")
    with pytest.raises(ConfigError, match="the file would contain a secret"):
        backend.submit(plan, folder)
    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert token not in written and not clusters.requests
    from bench import preflight

    assert "CFG-07" in [finding.rule for finding in preflight.inspect(plan)]


def test_a_folder_name_with_special_characters_is_quoted_in_the_entrypoint(clusters: Clusters, tmp_path: Path) -> None:
    folder = tmp_path / "it's $(touch here); `x`\n"
    body = request.body(planned(), folder, [folder], 1)
    assert shlex.split(body["entrypoint"])[-1] == str(folder)
    assert set(body["submission_id"]) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    assert request.submission_id(folder, 1) != request.submission_id(tmp_path / "other" / folder.name, 1)


def test_a_cluster_without_an_address_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(
        ConfigError, match="RAY-01: the address of the Ray cluster is not set(.|\n)*RAY_API_SERVER_ADDRESS"
    ):
        request.address(planned())


@pytest.mark.long
def test_a_bundle_has_the_resources_of_a_nodes_ranks() -> None:
    plan = compose.compose(["task=lora70b", "cluster=ray", "+cluster.ray.resources.rdma=1"])
    assert placement_group.bundle(plan) == {"CPU": 16.0, "GPU": 8.0, "rdma": 1.0}
    nodes = [{"CPU": 64.0, "GPU": 8.0, "rdma": 4.0}, {"CPU": 64.0, "GPU": 4.0}, {"CPU": 64.0}]
    assert placement_group.num_large(nodes, placement_group.bundle(plan)) == 1


def test_ranks_do_not_inherit_the_variables_that_ray_sets_for_workers() -> None:
    worker = {"RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/h"}
    assert placement_group.inherited(worker, frozenset()) == {"CUDA_VISIBLE_DEVICES": "2,3", "HOME": "/h"}
    assert placement_group.inherited(worker, frozenset(["OMP_NUM_THREADS"]))["OMP_NUM_THREADS"] == "1"
