"""KubeRay's objects: a real API server takes them by the definitions that KubeRay publishes. No operator runs them."""

import gzip
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import definitions
import pytest
import yaml
from kube_cluster import Cluster, until

from helpers.paths import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]
KINDS = ("rayclusters", "rayjobs")
MANIFESTS = ("lora70b_kuberay", "lora70b_kuberay_working_head", "raycluster")


@pytest.fixture(scope="module")
def kuberay(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not definitions.FOLDER.is_dir():
        pytest.skip(f"the definitions are not in {definitions.FOLDER}")
    folder = tmp_path_factory.mktemp("kuberay")
    try:
        for kind in KINDS:
            path: Path = definitions.FOLDER / f"ray.io_{kind}.yaml.gz"
            definition = yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)
            (folder / f"{kind}.json").write_text(json.dumps(definitions.fitted(definition)))
            cluster.kubectl("create", "--validate=false", "--filename", folder / f"{kind}.json")
        until(lambda: all(create(cluster, shown(kind)).returncode == 0 for kind in MANIFESTS), 60)
        yield cluster
    finally:
        cluster.kubectl("delete", "customresourcedefinitions", *(f"{kind}.ray.io" for kind in KINDS))


def shown(name: str) -> dict[str, Any]:
    """Return the last object of a manifest, which is KubeRay's."""
    return dict([*yaml.safe_load_all((ROOT / f"manifests/ray/{name}.yaml").read_text())][-1])


def create(cluster: Cluster, item: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    argv = ["kubectl", "create", "--dry-run=server", "--output", "json", "--filename", "-"]
    return subprocess.run(argv, input=json.dumps(item), env=cluster.env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_api_server_accepts_an_object_with_all_fields(kuberay: Cluster, name: str) -> None:
    item = shown(name)
    done = create(kuberay, item)
    assert done.returncode == 0, done.stderr
    assert list(missing(item["spec"], json.loads(done.stdout)["spec"], "spec")) == []


def missing(sent: object, stored: object, where: str) -> Iterator[str]:
    """Yield the fields that the server's object lacks: the server silently prunes unknown fields."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        yield from (f"{where}.{key}" for key in sent.keys() - stored.keys())
        for key in sent.keys() & stored.keys():
            yield from missing(sent[key], stored[key], f"{where}.{key}")
    elif isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        for number, (one, other) in enumerate(zip(sent, stored, strict=True)):
            yield from missing(one, other, f"{where}[{number}]")
    elif sent != stored:
        yield where


def test_the_api_server_refuses_or_prunes_fields_outside_the_definition(kuberay: Cluster) -> None:
    """Otherwise the test above would show nothing."""
    job = shown("lora70b_kuberay")
    wrong = job | {"spec": job["spec"] | {"backoffLimit": "none"}}
    assert "backoffLimit" in create(kuberay, wrong).stderr
    unknown = job | {"spec": job["spec"] | {"shutDownAfterJobFinishes": True}}
    kept = json.loads(create(kuberay, unknown).stdout)["spec"]
    assert list(missing(unknown["spec"], kept, "spec")) == ["spec.shutDownAfterJobFinishes"]
