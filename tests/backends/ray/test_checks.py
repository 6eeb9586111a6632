"""Checks of a Ray plan and of the cluster's answers, and jobs that several runs share."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.kubernetes import checks as kubernetes_checks
from bench.backends.ray import backend, client, request
from bench.backends.ray.backend import RayBackend
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, RAY_JOB, SUBMISSION
from bench.contract.schema import Runtime
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from bench.rules.check import Checked, Tier, run
from bench.rules.finding import Finding, broken

ADDRESS = "http://head:8265"
BACKEND = RayBackend()
IMAGE = "cluster.kubernetes.image=registry.example/runstop@sha256:" + "0" * 64


def node(state: str = "ALIVE", **resources: float) -> dict[str, Any]:
    return {"state": state, "resources_total": resources}


@dataclass
class Dashboard:
    """A fake dashboard: its pages, and the jobs that it accepts."""

    version: str = "2.60.0"
    nodes: list[dict[str, Any]] = field(default_factory=lambda: [node(CPU=2.0), node(CPU=4.0)])
    is_down: bool = False
    requests: list[str] = field(default_factory=list)
    accepted: list[dict[str, Any]] = field(default_factory=list)
    stops: bool | Exception = True
    """The answer to a request to stop a job."""

    def get(self, address: str, page: str) -> Any:
        self.requests.append(f"{address}{page}")
        if self.is_down:
            raise client.unreachable(address, "refused")
        listed = {"data": {"result": {"result": self.nodes}}}
        return {"ray_version": self.version} if page.endswith("version") else listed

    def submit_job(self, **body: Any) -> None:
        self.accepted.append(body)

    def stop_job(self, submission: str) -> bool:
        self.requests.append(f"stop {submission}")
        if isinstance(self.stops, Exception):
            raise self.stops
        return self.stops


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dashboard:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"{ADDRESS}/")
    fake = Dashboard()
    monkeypatch.setattr(client, "get", fake.get)
    monkeypatch.setattr(client, "connect", lambda address: fake)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.60.1"))
    return fake


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=ray_test", *overrides])


def looked(plan: Plan, tier: Tier) -> dict[str, Checked]:
    subject = BACKEND.subject(plan, tier)
    return {one.what: one for one in run(BACKEND.checks(plan)[tier], subject, tier=tier)}


def findings(results: dict[str, Checked]) -> dict[str, list[Finding]]:
    """Return the findings by check, without a tier."""
    return {
        name: [broken(f.rule, f.what, f.where, fix=f.fix, severity=f.severity) for f in one.findings]
        for name, one in results.items()
        if one.findings
    }


@pytest.mark.long
def test_a_suitable_cluster_has_no_problems(dashboard: Dashboard) -> None:
    laptop, login = looked(planned("cluster.ray.environment=[LOGDIR]"), "laptop"), looked(planned(), "login")
    seen = {"cluster address": ADDRESS, "passed environment variables": "LOGDIR"}
    assert {name: one.seen for name, one in laptop.items()} == seen | {"no container": "", "no job array": ""}
    assert {name: one.seen for name, one in login.items()} == {
        "cluster": f"dashboard {ADDRESS}",
        "version": "Ray 2.60.0",
        "nodes": "2 nodes, 2 of them with CPU: 2",
    }
    assert findings(laptop | login) == {} and not any(one.unknown for one in (laptop | login).values())
    assert dashboard.requests == [f"{ADDRESS}/api/version", f"{ADDRESS}/api/v0/nodes?detail=1&limit=10000"]


def test_an_old_version_and_small_nodes_are_found(dashboard: Dashboard) -> None:
    dashboard.version = "2.9.0"
    dashboard.nodes = [node(CPU=2.0), node("DEAD", CPU=2.0), node(CPU=1.0)]
    results = looked(planned(), "login")
    assert results["nodes"].seen == "2 nodes, 1 of them with CPU: 2"
    fix = (
        "add nodes, or lower cluster.num_nodes, cluster.ranks_per_node or cluster.ray.cpus_per_node; "
        "if an autoscaler adds nodes on demand, set launch.force=true"
    )
    ray = "if Ray refuses jobs, run on this machine: pip install 'ray[default]==2.9.0'"
    what = "the cluster has Ray 2.9.0, but this machine has Ray 2.60.1"
    assert findings(results) == {
        "version": [broken("RAY-02", what, ADDRESS, fix=ray, severity="warning")],
        "nodes": [
            broken("RAY-03", "only 1 of 2 Ray nodes have CPU: 2, but the run needs 2 such nodes", ADDRESS, fix=fix)
        ],
    }
    dashboard.is_down = True
    results = looked(planned(), "login")
    what = f"no Ray cluster accepts jobs at {ADDRESS}: refused"
    assert findings(results) == {"cluster": [broken("RAY-01", what, "cluster.ray.address")]}
    assert [one.unknown for one in results.values()] == ["", what, what]


def test_without_an_address_no_cluster_is_queried(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = planned("cluster.ray.address=null")
    assert [one.unknown for one in looked(nowhere, "login").values()] == [
        "the address of the Ray cluster is not set"
    ] * 3
    (results,) = findings(looked(nowhere, "laptop"))["cluster address"]
    assert (results.rule, results.what, results.where) == (
        "RAY-01",
        "the address of the Ray cluster is not set",
        "cluster.ray.address",
    )
    assert results.fix.startswith("set cluster.ray.address=http://HEAD:8265, or export")
    (odd,) = findings(looked(planned("cluster.ray.address=head:8265"), "laptop"))["cluster address"]
    assert (odd.what, odd.fix) == (
        "'head:8265' is not a valid address of a Ray dashboard",
        "set cluster.ray.address=http://HEAD:8265",
    )
    assert dashboard.requests == []


def test_unsupported_settings_are_refused(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    plan = planned("launch.array=true", "cluster.ray.environment=[MY_PASSWORD,A,LOGDIR]")
    plan.config.container.runtime = Runtime.pyxis
    results = findings(looked(plan, "laptop"))
    assert results["no container"] == [
        broken(
            *("PYX-04", "the Ray backend cannot start containers", "container=none"),
            fix="set container=none, and install torch and the engine on the Ray nodes",
        )
    ]
    secret, unset = results["passed environment variables"]
    assert (secret.rule, secret.where) == ("CFG-07", "cluster.ray.environment")
    assert (
        "which Ray's dashboard would show" in secret.what
        and "MY_PASSWORD" in secret.what
        and "horse" not in str(secret)
    )
    assert unset == broken(
        "CFG-06",
        "the environment variable A is not set",
        secret.where,
        fix="export A=…, or remove A from cluster.ray.environment",
    )
    assert results["no job array"] == [
        broken(
            *("CFG-09", "the Ray backend does not support job arrays", "launch.array"),
            fix="set launch.array=false, so that the trials run one after another on the same nodes",
        )
    ]
    with pytest.raises(ConfigError, match="CFG-06: the environment variable A is not set"):
        request.body(plan, Path("/a"), [Path("/a")], 1)


@pytest.mark.long
def test_a_kuberay_cluster_has_a_manifest_and_is_not_queried(dashboard: Dashboard) -> None:
    plan = planned("cluster=kuberay", "cluster.device=cpu", IMAGE)
    subject = BACKEND.subject(plan, "login")
    assert subject.script == BACKEND.render(plan)
    assert looked(plan, "login") == {} and dashboard.requests == []
    results = looked(plan, "laptop")
    assert [name for name in results if name not in {one.what for one in kubernetes_checks.CONFIG_CHECKS}] == [
        *("passed environment variables", "no job array", "manifest")
    ]
    (finding,) = findings(results)["manifest"]
    assert (finding.rule, finding.where) == ("RAY-10", "cluster.ray.kuberay")
    assert finding.what == "`runstop launch` cannot submit a run to KubeRay"
    assert [*BACKEND.differences(subject.script, plan_kinds.dumps(plan))] == []
    assert [*BACKEND.differences(subject.script, "{}")] == [
        "the plan in the manifest differs from the plan.json of the run"
    ]
    assert not BACKEND.subject(plan, "laptop").answers
    assert BACKEND.subject(planned(), "laptop").script == ""


def test_runs_of_the_same_size_share_one_job(dashboard: Dashboard, tmp_path: Path) -> None:
    two, other = planned(), planned("cluster.ray.cpus_per_node=3")
    assert BACKEND.shares_nodes([two, two]) and not BACKEND.shares_nodes([two, other])
    study, runs = tmp_path / "study", [(two, tmp_path / name) for name in ("a", "b", "c")]
    for folder in (study, *(folder for _, folder in runs)):
        folder.mkdir()
    for plan, folder in runs[:2]:
        BACKEND.prepare_shared(plan, folder, forced=[broken("RAY-03", "few", "there")])
    prepared = {"backend": "ray", "jobs": [], "address": ADDRESS, "forced": ["RAY-03: few"]}
    prepared["inode"] = runs[0][1].stat().st_ino
    assert json.loads((runs[0][1] / JOB).read_text()) == prepared
    job = BACKEND.submit_shared(runs, study, name="study")
    (body,) = dashboard.accepted
    assert job == f"{body['submission_id']}@{ADDRESS}" and body["submission_id"].startswith("study-")
    assert body["entrypoint"].endswith(" ".join(str(folder) for _, folder in runs))
    shared = json.loads((study / JOB).read_text())
    assert shared["runs"] == ["a", "b", "c"] and [one["id"] for one in shared["jobs"]] == [job]
    assert shared["page"] == f"{ADDRESS}/#/jobs/{body['submission_id']}"
    entry = shared["jobs"][0] | {"shared": "study"}
    BACKEND.record_shared_jobs(study)  # idempotent
    for _, folder in runs[:2]:
        own = {"inode": folder.stat().st_ino, "jobs": [entry]}
        assert json.loads((folder / JOB).read_text()) == prepared | own
    assert not (runs[2][1] / JOB).exists(), "it was not prepared"
    assert not (study / SUBMISSION).exists() and json.loads((study / RAY_JOB).read_text()) == body


def test_options_for_sbatch_are_refused(dashboard: Dashboard, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--qos=a -n1 is an option of sbatch, but this run uses Ray"):
        BACKEND.resume(tmp_path, trials_left=1, arguments=["--qos=a", "-n1"])
    assert list(BACKEND.submitted(tmp_path)) == [], "it has never had a job"
    assert backend.WALLTIME == "walltime" and not dashboard.accepted


@pytest.mark.parametrize(
    ("stops", "message", "fix"),
    [
        (False, "the job has already ended", "run `runstop runs` to see how the job ended"),
        (RuntimeError("\n no such job\nTraceback"), "Ray cannot stop the job: no such job", "ray job stop a"),
    ],
)
def test_a_job_that_cannot_be_stopped_is_an_error(
    stops: bool | Exception, message: str, fix: str, dashboard: Dashboard
) -> None:
    BACKEND.cancel(f"a@{ADDRESS}")
    assert dashboard.requests == ["stop a"]
    dashboard.stops = stops
    with pytest.raises(SubmitError) as refused:
        BACKEND.cancel(f"a@{ADDRESS}")
    assert (refused.value.what, refused.value.where, refused.value.fix) == (message, f"job a@{ADDRESS}", fix)


def test_a_job_uploads_this_program_unless_the_nodes_have_it(dashboard: Dashboard) -> None:
    bodies = [
        request.body(planned(*words), Path("/a"), [Path("/b")], 2) for words in ((), ("cluster.ray.code=installed",))
    ]
    uploaded, installed = (one["runtime_env"] for one in bodies)
    packages = Path(request.__file__).parents[3]
    settings = {"RAY_DEDUP_LOGS": "0", "RAY_JOB_STOP_WAIT_TIME_S": "180"}
    assert installed == {"env_vars": settings}
    names = [f"{packages}/bench", f"{packages}/jobs", f"{packages}/conf"]
    assert uploaded == {"env_vars": settings, "py_modules": names, "excludes": ["__pycache__"]}
    assert bodies[0]["submission_id"].endswith("-2") and bodies[0]["metadata"] == {request.FOLDER: "/a"}
    assert bodies[0]["entrypoint"].endswith(" /b")
    assert BACKEND.exclude_nodes(planned(), ["a", "b"]) == ("remove a, b from the Ray cluster with `ray drain-node`")


@pytest.mark.long
def test_uploaded_folders_hold_all_that_a_node_needs(tmp_path: Path, dashboard: Dashboard) -> None:
    """Ray unpacks each folder into one of its own, and puts these on the path; `why` composes the plan's config."""
    folders = request.body(planned(), Path("/a"), [Path("/b")], 1)["runtime_env"]["py_modules"]
    for number, folder in enumerate(map(Path, folders)):
        shutil.copytree(folder, tmp_path / str(number) / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = os.pathsep.join(str(place) for place in tmp_path.iterdir())
    text = "from bench.driver import between_commands; from bench import diagnosis\n"
    text += "from bench.planning import compose; print(compose.compose(['task=lora_tiny', 'cluster=local']).name)"
    argv = [sys.executable, "-c", text]
    done = subprocess.run(
        argv, env=os.environ | {"PYTHONPATH": path}, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.stdout == "lora_tiny-local\n", done.stderr


def test_an_address_without_listener_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = list[object]()

    def refused(place: object, timeout: float) -> None:
        attempts.append((place, timeout))
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(client.socket, "create_connection", refused)
    for address in ("http://head:8265", "https://head", "http://head", "http://head:x"):
        with pytest.raises(client.UnreachableError, match=f"RAY-01: no Ray cluster accepts jobs at {address}: "):
            client.require_listening(address)
    assert attempts == [(("head", port), 10.0) for port in (8265, 443, 80)]
    monkeypatch.setattr(client.importlib.util, "find_spec", lambda name: None)
    assert not BACKEND.is_available()
    with pytest.raises(ConfigError, match="Ray is not installed on this machine"):
        client.connect(ADDRESS)


def test_a_page_is_requested_by_rays_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"a": 1})
    own = SimpleNamespace(_do_request=lambda method, page: answer if (method, page) == ("GET", "/p") else None)
    monkeypatch.setattr(client, "connect", lambda address: own)
    assert client.get(ADDRESS, "/p") == {"a": 1}

    def fails() -> None:
        raise OSError("404 Not Found")

    answer.raise_for_status = fails
    with pytest.raises(client.UnreachableError, match="404 Not Found"):
        client.get(ADDRESS, "/p")
