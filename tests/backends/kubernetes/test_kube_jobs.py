"""A run's objects are created (all or none), found and deleted, for every answer of the API server."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="pip install 'runstop[kubernetes]'")

from bench.backends.kubernetes import backend, client, names
from bench.backends.kubernetes.backend import KubernetesBackend
from bench.backends.kubernetes.client import NoServerError
from bench.backends.protocol import Queue, SharesNodes
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, KUBERNETES_MANIFEST, PLAN, SUBMISSION
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from bench.rules.finding import broken
from helpers.api_server import ApiServer, refusal

NAMESPACE, BATCH = "/api/v1/namespaces/default", "/apis/batch/v1/namespaces/default/jobs"
LOST = NoServerError("the API server does not respond: timed out", where="https://here", fix="try again", rule="KUB-12")
BACKEND = KubernetesBackend()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    fake = ApiServer({f"GET {place}": {"items": []} for place in (BATCH, f"{NAMESPACE}/pods", f"{NAMESPACE}/events")})
    monkeypatch.setattr(client, "request", fake.request)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / PLAN).write_text(plan_kinds.dumps(planned()))
    return tmp_path / "a run"


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=kubernetes_test", "trials=3", *overrides])


def held(folder: Path, name: str = JOB) -> Any:
    return json.loads((folder / name).read_text())


def listed(name: str, *runs: str, **status: Any) -> dict[str, Any]:
    """Return a list answer with one object or pod per run."""
    items = [{"metadata": {"name": f"{run}-{name}", "labels": {names.RUN: run}}, "status": status} for run in runs]
    return {"items": items}


def test_a_run_is_submitted_and_resumed_by_jobs_with_different_names(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    first, second = names.of_folder(folder, 1), names.of_folder(folder, 2)
    assert BACKEND.submit(planned(), folder) == f"job/default/{first}"
    common = {"backend": "kubernetes", "image": {"name": "localhost/runstop:test"}}
    entry = {"id": f"job/default/{first}", "submitted": 1234.5}
    assert held(folder) == common | {"jobs": [entry]} and not (folder / SUBMISSION).exists()
    requests = [f"POST {NAMESPACE}/configmaps", f"POST {BATCH}", f"POST {BATCH}"]
    assert api.requests == requests
    assert [one["metadata"]["name"] for one in api.sent] == [first, f"{first}-0", f"{first}-1"]
    assert {one["metadata"]["annotations"][names.FOLDER] for one in api.sent} == {str(folder)}
    assert BACKEND.resume(folder, trials_left=2, walltime_min=None) == f"job/default/{second}"
    assert [one["id"] for one in held(folder)["jobs"]] == [f"job/default/{first}", f"job/default/{second}"]
    assert f"name: {second}" in (folder / KUBERNETES_MANIFEST).read_text() and len(api.requests) == 6
    as_planned = api.sent[1]["spec"]["template"]["spec"]["activeDeadlineSeconds"]
    assert api.sent[4]["spec"]["template"]["spec"]["activeDeadlineSeconds"] == as_planned


def test_forced_findings_are_recorded_in_job_json(api: ApiServer, folder: Path) -> None:
    BACKEND.submit(planned(), folder, forced=[broken("KUB-02", "no room", "there")])
    assert held(folder)["forced"] == ["KUB-02: no room"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_workload_owns_the_other_objects(kind: str, api: ApiServer, folder: Path) -> None:
    """So its end, by its TTL or by `cancel`, deletes them; a user without the right to patch them keeps them."""
    words = ("cluster.kubernetes.version='1.31'", f"cluster.kubernetes.object={kind}")
    plan, name = planned(*words, "cluster.kubernetes.discovery=service"), names.of_folder(folder, 1)
    group, version = {"job": (BATCH, "batch/v1"), "trainjob": (
        "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs", "trainer.kubeflow.org/v1alpha1"
    )}[kind]  # fmt: skip
    api.answers[f"POST {group}"] = {"metadata": {"name": name, "uid": "7"}}
    BACKEND.submit(plan, folder)
    owned = {"job": ["configmaps", "services"], "trainjob": ["configmaps", "trainingruntimes"]}[kind]
    patched = [one for one in api.requests if one.startswith("PATCH")]
    assert [one.rpartition("/")[0].rpartition("/")[2] for one in patched] == owned
    body = {"apiVersion": version, "kind": {"job": "Job", "trainjob": "TrainJob"}[kind], "name": name, "uid": "7"}
    assert api.sent[-2:] == [{"metadata": {"ownerReferences": [body]}}] * 2
    api.answers |= {f"PATCH {NAMESPACE}/configmaps/{name}-2": refusal(403, "Forbidden", "no")}
    assert BACKEND.resume(folder, trials_left=1).endswith(names.of_folder(folder, 2))


def test_options_for_sbatch_are_refused_before_any_request(api: ApiServer, folder: Path) -> None:
    with pytest.raises(ConfigError, match="--qos=gold -n1 is an option of sbatch, but this run uses Kubernetes"):
        BACKEND.resume(folder, trials_left=1, arguments=["--qos=gold", "-n1"])
    assert not api.requests


def test_if_one_object_is_refused_all_are_deleted(api: ApiServer, folder: Path) -> None:
    name = names.of_folder(folder, 1)
    api.answers[f"POST {BATCH} {name}-1"] = refusal(422, "Invalid", "spec.x: no such field")
    api.answers[f"DELETE {BATCH}/{name}-0"] = LOST
    with pytest.raises(SubmitError, match="spec.x: no such field") as refused:
        BACKEND.submit(planned(), folder)
    assert (refused.value.where, refused.value.rule) == (f"Job {name}-1", None)
    left = f"; then delete the remaining objects: kubectl -n default delete job/{name}-0"
    assert refused.value.fix == f"correct the field named in this message, under cluster.kubernetes{left}"
    gone = [
        f"DELETE {place}?propagationPolicy=Background"
        for place in (f"{BATCH}/{name}-0", f"{NAMESPACE}/configmaps/{name}")
    ]
    assert api.requests[-2:] == gone
    assert held(folder)["jobs"] == [] and not (folder / SUBMISSION).exists()
    assert not (folder / KUBERNETES_MANIFEST).exists()


def test_a_quota_of_objects_is_not_a_missing_permission(api: ApiServer, folder: Path) -> None:
    what = 'configmaps "a" is forbidden: exceeded quota: small, requested: configmaps=1, used: configmaps=1'
    api.answers[f"POST {NAMESPACE}/configmaps"] = refusal(403, "Forbidden", what)
    with pytest.raises(SubmitError, match="KUB-11: configmaps") as refused:
        BACKEND.submit(planned(), folder)
    assert refused.value.fix.startswith("delete objects of ended runs")


@pytest.mark.parametrize(
    ("status", "message", "rule"), [(404, "404 page not found", "KUB-06"), (404, 'namespaces "a" not found', None)]
)
def test_a_missing_kind_is_distinguished_from_a_missing_namespace(
    status: int, message: str, rule: str | None, api: ApiServer, folder: Path
) -> None:
    api.answers[f"POST {BATCH}"] = refusal(status, "NotFound", message)
    with pytest.raises(SubmitError) as refused:
        BACKEND.submit(planned(), folder)
    assert refused.value.rule == rule
    assert refused.value.what == (
        "the Kubernetes cluster does not support the kind Job (batch/v1)" if rule else message
    )
    assert ("to install the operator that provides" in refused.value.fix) is (rule is not None)


def test_after_a_lost_answer_the_note_is_kept_until_the_job_is_seen(api: ApiServer, folder: Path) -> None:
    name = names.of_folder(folder, 1)
    api.answers[f"POST {BATCH} {name}-1"] = LOST
    with pytest.raises(SubmitError, match="timed out; the job may exist anyway") as lost:
        BACKEND.submit(planned(), folder)
    assert (lost.value.rule, lost.value.where) == ("KUB-12", "https://here")
    assert lost.value.fix.endswith(f"if the job does not exist: runstop resume '{folder}'")
    assert held(folder, SUBMISSION)["job"] == f"job/default/{name}" and held(folder)["jobs"] == []
    assert not any(one.startswith("DELETE") for one in api.requests), "the job may run"
    assert list(BACKEND.submitted(folder)) == []
    api.answers[f"GET {BATCH}"] = listed("0", name)
    assert list(BACKEND.submitted(folder)) == [f"job/default/{name}"]
    there = refusal(409, "AlreadyExists", "it is there")
    api.answers |= {f"POST {NAMESPACE}/configmaps": there, f"POST {BATCH} {name}-0": there}
    del api.answers[f"POST {BATCH} {name}-1"]
    assert BACKEND.resume(folder, trials_left=3) == f"job/default/{name}"
    assert [one["id"] for one in held(folder)["jobs"]] == [f"job/default/{name}"] and not (folder / SUBMISSION).exists()
    assert list(BACKEND.submitted(folder)) == [], "it is in job.json now"
    with pytest.raises(SubmitError, match="it is there"):
        BACKEND.resume(folder, trials_left=3)  # no second job was requested before


def test_a_lost_answer_does_not_matter_if_the_job_is_seen(api: ApiServer, folder: Path) -> None:
    name = names.of_folder(folder, 1)
    api.answers |= {f"POST {BATCH}": LOST, f"GET {BATCH}": listed("0", name)}
    assert BACKEND.submit(planned(), folder) == f"job/default/{name}" == held(folder)["jobs"][0]["id"]
    other = f"POST {BATCH} {names.of_folder(folder, 2)}-0"
    api.answers |= {other: LOST, f"GET {BATCH}": LOST}
    with pytest.raises(SubmitError, match="may exist anyway"):
        BACKEND.resume(folder, trials_left=3)


def test_all_kinds_of_a_job_are_deleted_owners_first(api: ApiServer) -> None:
    places = {kind: client.path_of(kind, "lab") for kind in backend.DELETED}
    owned = {"JobSet": ["a-x"], "Job": ["a-y", "a-z"], "TrainJob": []}
    api.answers = {
        f"GET {places[kind]}": {"items": [{"metadata": {"name": name}} for name in object_names]}
        for kind, object_names in owned.items()
    }
    api.answers[f"DELETE {places['Job']}/a-y"] = refusal(404, "NotFound", "it is gone")
    BACKEND.cancel("jobset/lab/a@far")
    gone = [one.partition("?")[0] for one in api.requests if one.startswith("DELETE")]
    assert gone == [f"DELETE {places['JobSet']}/a-x", *(f"DELETE {places['Job']}/{name}" for name in ("a-y", "a-z"))]
    requests = [f"GET {places[kind]}?labelSelector={names.RUN}=a" for kind in backend.DELETED]
    assert [one for one in api.requests if one.startswith("GET")] == requests and api.contexts == {"far"}
    for question in (f"GET {places['JobSet']}", f"DELETE {places['JobSet']}/a-x"):
        api.answers[question] = refusal(403, "Forbidden", "you may not")
        with pytest.raises(SubmitError, match="KUB-07: you may not"):
            BACKEND.cancel("jobset/lab/a")
        api.answers[question] = {"items": [{"metadata": {"name": "a-x"}}]}


def test_logs_are_read_from_pods_that_have_started(api: ApiServer) -> None:
    pods = f"{NAMESPACE}/pods"
    api.answers = {
        f"GET {pods}": {"items": [{"metadata": {"name": f"a-{name}"}} for name in ("3", "2", "1", "0")]},
        f"GET {pods}/a-3/log": refusal(400, "BadRequest", "waiting for its image"),
        f"GET {pods}/a-1/log": "lines\n",
        f"GET {pods}/a-0/log": {"level": "info"},
    }
    assert [*BACKEND.output("job/default/a").items()] == [("a-0", '{"level": "info"}'), ("a-1", "lines\n")]
    api.answers[f"GET {pods}/a-2/log"] = refusal(500, "InternalError", "broken")
    with pytest.raises(SubmitError, match="broken"):
        BACKEND.output("job/default/a")


def test_runs_on_kubernetes_have_one_job_each() -> None:
    plan = planned("+cluster.kubernetes.exclude_nodes=[a]")
    assert isinstance(BACKEND, Queue) and not isinstance(BACKEND, SharesNodes)
    assert BACKEND.exclude_nodes(plan, ["c", "b"]) == "cluster.kubernetes.exclude_nodes=[a,c,b]"
    rendered = BACKEND.render(plan)
    assert [*BACKEND.differences(rendered, plan_kinds.dumps(plan))] == []
    assert [*BACKEND.differences(rendered, plan_kinds.dumps(planned()))] == [
        "the plan in the manifest differs from the plan.json of the run"
    ]
    assert BACKEND.rank_environment(plan) == plan.environment
    assert BACKEND.subject(plan, "laptop").script == rendered and not BACKEND.subject(plan, "laptop").answers


def kubeconfig(path: Path, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    parts = {"cluster": {"server": server}, "user": {"token": "b"}, "context": {"cluster": "a", "user": "a"}}
    config = {f"{part}s": [{"name": "a", part: content}] for part, content in parts.items()}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "a", **config}))
    monkeypatch.setenv("KUBECONFIG", str(path))


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    client._client.cache_clear()
    return client._client.cache_clear


def test_a_server_that_does_not_answer_is_reported_with_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    kubeconfig(tmp_path / "config", monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(NoServerError, match="KUB-12: the API server does not respond: .*refused") as lost:
        client.request("GET", "/version", context="a")
    assert lost.value.where == "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="KUB-12: the kubeconfig cannot be used: .*lab"):
        client.request("GET", "/version", context="lab")
    assert client.is_available()
    monkeypatch.setenv("KUBECONFIG", f":{tmp_path}/none")
    assert not client.is_available()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert client.is_available()
    monkeypatch.setenv("KUBECONFIG", "")
    forgotten()
    with pytest.raises(ConfigError, match="the kubeconfig cannot be used: Service host/port is not set"):
        client.request("GET", "/version")
    forgotten()
