"""Objects of operators on a real API server, with the CRDs that the operators' projects publish."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import definitions
import pytest
import small_operator
import yaml
from kube_cluster import Cluster, User, pods_of, until
from small_operator import InvalidError, SmallOperator
from status_server import StatusServer, audience, path

from helpers import answers
from helpers.paths import ROOT

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


@pytest.fixture(scope="module")
def defined(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not definitions.FOLDER.is_dir():
        pytest.skip(f"the definitions are not in {definitions.FOLDER}")
    folder = tmp_path_factory.mktemp("definitions")
    try:
        for name, text in definitions.all_of_them():
            (folder / f"{name}.yaml").write_text(text)
            cluster.kubectl("create", "--validate=false", "--filename", folder / f"{name}.yaml")
        until(lambda: all(is_established(one) for one in cluster.get("customresourcedefinitions")), 60)
        yield cluster
    finally:
        cluster.kubectl("delete", "customresourcedefinitions", "--all")


def is_established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def create(cluster: Cluster, text: str) -> "subprocess.CompletedProcess[str]":
    argv = ["kubectl", "create", "--dry-run=server", "--output", "json", "--filename", "-"]
    return subprocess.run(argv, input=text, env=cluster.env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_the_api_server_accepts_an_object_with_all_fields(defined: Cluster, kind: str) -> None:
    for item in yaml.safe_load_all((ROOT / f"manifests/lora70b_{kind}.yaml").read_text()):
        done = create(defined, yaml.safe_dump(item))
        assert done.returncode == 0, done.stderr
        assert missing(item, json.loads(done.stdout)) == []


def missing(sent: object, stored: object, where: str = "") -> list[str]:
    """Return the fields that the server's object lacks: the server silently prunes unknown fields."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        pruned = [f"{where}.{key}" for key in sent.keys() - stored.keys()]
        common = sent.keys() & stored.keys()
        return pruned + [m for key in common for m in missing(sent[key], stored[key], f"{where}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [m for n, v in enumerate(sent) for m in missing(v, stored[n], f"{where}[{n}]")]
    return [] if sent == stored else [where]


def test_the_api_server_refuses_values_that_the_crd_does_not_allow(defined: Cluster) -> None:
    """Otherwise the test above would show nothing."""
    *_, jobset = yaml.safe_load_all((ROOT / "manifests/lora70b_jobset.yaml").read_text())
    jobset["spec"]["failurePolicy"]["rules"][0]["action"] = "Panic"
    assert "Unsupported value" in create(defined, yaml.safe_dump(jobset)).stderr


def test_the_doctor_accepts_an_installed_kind(defined: Cluster, user: User) -> None:
    words = ["cluster.kubernetes.object=pytorchjob", "cluster.kubernetes.discovery=service"]
    output = user.types("doctor", *user.overrides, *words, "--tier", "login", "--json").stdout
    assert answers.one(output)["passed"] and "PyTorchJob kubeflow.org/v1" in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob", "trainjob"])
def test_an_object_of_an_operator_becomes_a_run(defined: Cluster, user: User, kind: str) -> None:
    """With the fake operator of these tests; the real ones need DNS, which this cluster does not have."""
    operator = SmallOperator(defined.kubectl)
    operator.start()
    try:
        run = user.launch(f"cluster.kubernetes.object={kind}", "launch.force=true")
        user.end(run, "valid")
        until(lambda: not user.state(run)["is_active"], 60)
    finally:
        operator.end()
    assert run.job.startswith(f"{kind}/default/")
    assert {pod["status"]["phase"] for pod in pods_of(defined, run)} == {"Succeeded"}
    if kind == "trainjob":
        assert set(operator.status_server.answered) == {200}
        (job,) = defined.get("trainjobs.trainer.kubeflow.org")
        posted = job["status"]["trainerStatus"]
        metrics = {one["name"]: float(one["value"]) for one in posted["metrics"]}
        assert (posted["progressPercentage"], posted["estimatedRemainingSeconds"]) == (100, 0)
        (evaluated,) = re.findall(r'"eval_accuracy", "value": ([\d.]+)', (run.folder / "result_0.txt").read_text())
        assert metrics["eval_loss"] == pytest.approx(float(evaluated)) and metrics["samples_count"] == 160


def test_the_status_server_authenticates_and_the_api_server_validates(defined: Cluster) -> None:
    """Otherwise the status of the TrainJob above would show little about a pod's posts."""
    runtime, job = [*yaml.safe_load_all((ROOT / "manifests/lora70b_trainjob.yaml").read_text())][1:]
    name, server = job["metadata"]["name"], StatusServer(defined.kubectl)
    place, body = path("default", name), b'{"trainerStatus": {"progressPercentage": %d, "lastUpdatedTime": "%s"}}'
    try:
        defined.kubectl("create", "--filename", "-", stdin=yaml.safe_dump_all([runtime, job]))
        spec = {"audiences": [audience(place)]}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        account = "/api/v1/namespaces/default/serviceaccounts/default/token"
        output = defined.kubectl("create", "--raw", account, "--filename", "-", stdin=json.dumps(request))
        token = f"Bearer {json.loads(output)['status']['token']}"
        fine = body % (7, b"2026-11-23T00:00:00Z")
        assert [server.answer(place, value, fine) for value in (token, "", "Bearer x")] == [200, 403, 403]
        assert server.answer(path("default", "another"), token, fine) == 403
        assert server.answer("/status", token, fine) == 404
        assert server.answer(place, token, body % (101, b"2026-11-23T00:00:00Z")) == 422
        assert server.answer(place, token, body % (8, b"today")) == 422 and server.answer(place, token, b"[]") == 422
        now = next(one for one in defined.get("trainjobs.trainer.kubeflow.org") if one["metadata"]["name"] == name)
        assert now["status"]["trainerStatus"]["progressPercentage"] == 7
    finally:
        server.end()
        defined.kubectl("delete", "trainjobs.trainer.kubeflow.org", name, "--ignore-not-found")


def test_the_fake_operator_refuses_what_the_real_ones_refuse() -> None:
    """Otherwise a run with it would show little about the object."""
    *_, pytorchjob = yaml.safe_load_all((ROOT / "manifests/lora70b_pytorchjob.yaml").read_text())
    pytorchjob["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2
    with pytest.raises(InvalidError, match="one Master"):
        list(small_operator.pods_of(pytorchjob, dict))
    *_, jobset = yaml.safe_load_all((ROOT / "manifests/lora70b_jobset.yaml").read_text())
    assert [item["metadata"]["name"][-4:] for item in small_operator.pods_of(jobset, dict)] == ["-0-0", "-0-1"]
    del jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMode"]
    with pytest.raises(InvalidError, match="Indexed"):
        list(small_operator.pods_of(jobset, dict))
