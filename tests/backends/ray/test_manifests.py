"""KubeRay's manifests: manifests/ray is what render writes, matches KubeRay's CRDs, and contains the run."""

import gzip
import os
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from bench.backends.ray import driver, manifest
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from helpers.paths import ROOT

DEFINITIONS = ROOT.parent / "shared" / "crds"
IMAGE = "cluster.kubernetes.image=registry.example/runstop@sha256:" + "0" * 64
WORKING_HEAD = ("cluster.ray.kuberay.head_works=true", "cluster.ray.kuberay.submission=k8s_job")
SHOWN = {
    "lora70b_kuberay": ("task=lora70b", "cluster=kuberay"),
    "lora70b_kuberay_working_head": ("task=lora70b", "cluster=kuberay", *WORKING_HEAD),
    "raycluster": ("task=lora70b", "cluster=kuberay", "cluster.ray.kuberay.object=raycluster"),
}
"""Manifests that users apply."""


def shown(name: str) -> Plan:
    return compose.compose([*SHOWN[name], IMAGE])


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.text(shown(name))))


@pytest.mark.long
def test_the_manifests_are_those_that_render_writes() -> None:
    """To regenerate them: WRITE_MANIFESTS=1 pytest tests/backends/ray/test_manifests.py"""
    folder = ROOT / "manifests" / "ray"
    texts = {f"{name}.yaml": manifest.text(shown(name)) for name in SHOWN}
    if os.environ.get("WRITE_MANIFESTS"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    assert {path.name: path.read_text() for path in folder.glob("*.yaml")} == texts


@cache
def definition(kind: str) -> dict[str, Any]:
    """Return KubeRay's schema of a kind of object."""
    path = DEFINITIONS / f"ray.io_{kind.lower()}s.yaml.gz"
    if not path.exists():
        pytest.skip(f"KubeRay's CRDs are missing: put {path.name} into {DEFINITIONS}")
    crd = yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == "v1")
    return dict(schema)


@pytest.mark.parametrize("name", SHOWN)
def test_every_field_is_in_kuberays_definitions(name: str) -> None:
    """An API server silently drops fields that are not in a CRD."""
    item = objects(name)[-1]
    schema = definition(item["kind"])
    assert list(misfits(schema, item, "")) == []
    broken = item | {"spec": item["spec"] | {"shutDownAfterJobFinishes": True, "headGroupSpec": 5}}
    assert any("shutDownAfterJobFinishes" in misfit for misfit in misfits(schema, broken, ""))


def misfits(schema: dict[str, Any], value: Any, place: str) -> Iterator[str]:
    """Yield fields that a CRD does not have or has with another type."""
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    if schema.get("x-kubernetes-int-or-string"):
        return
    if not isinstance(value, types[schema["type"]]) or schema["type"] == "integer" and isinstance(value, bool):
        yield f"{place} is not of type {schema['type']}"
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from misfits(schema["items"], item, f"{place}[{number}]")
    elif isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or place in ("", ".metadata")
        yield from (f"{place}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, item in value.items():
            if key in known:
                yield from misfits(known[key], item, f"{place}.{key}")
            elif isinstance(rest, dict):
                yield from misfits(rest, item, f"{place}.{key}")
            elif not is_open and not rest:
                yield f"{place}.{key} is unknown"


@pytest.mark.long
def test_a_rayjob_contains_the_plan_and_starts_its_driver() -> None:
    held, job = objects("lora70b_kuberay")
    plan = plan_kinds.loads(held["data"]["plan.json"])
    assert plan_kinds.dumps(plan) == plan_kinds.dumps(shown("lora70b_kuberay"))
    python, dash_m, module, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", "bench.backends.ray.driver")
    args = driver._parser().parse_args(words)
    assert str(args.plan) == "/etc/runstop/plan.json" and str(args.runs[0]) == f"/results/{job['metadata']['name']}"
    for pod in pods(job["spec"]["rayClusterSpec"]):
        (container,) = pod["spec"]["containers"]
        assert {"name": "plan", "mountPath": "/etc/runstop", "readOnly": True} in container["volumeMounts"]
        assert "command" not in container and "args" not in container, "KubeRay writes them"


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


@pytest.mark.parametrize(
    ("name", "head_gpus", "workers"),
    [(n, g, w) for n, g, w in (("lora70b_kuberay", "0", 2), ("lora70b_kuberay_working_head", "8", 1))],
)
def test_a_run_has_all_its_gpus_with_and_without_a_working_head(name: str, head_gpus: str, workers: int) -> None:
    """Ray's node sizes match the driver's placement group, and the pods request the same GPUs from Kubernetes."""
    cluster = objects(name)[1]["spec"]["rayClusterSpec"]
    (group,), head = cluster["workerGroupSpecs"], cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == head_gpus and group["replicas"] == workers
    assert group["rayStartParams"] == {"num-cpus": "64", "num-gpus": "8"}
    limits = [pod["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods(cluster)]
    assert limits == [None if head_gpus == "0" else "8", "8"]
    keep_away = [("podAntiAffinity" in pod["spec"].get("affinity", {})) for pod in pods(cluster)]
    assert keep_away == [head_gpus != "0", True], "a head without GPUs may share a machine with a worker pod"


def test_an_existing_cluster_has_no_manifest() -> None:
    with pytest.raises(ConfigError, match="set cluster=kuberay"):
        manifest.text(compose.compose(["task=lora_tiny", "cluster=ray_test"]))


@pytest.mark.long
def test_hostile_texts_do_not_change_the_manifests_structure() -> None:
    """Each text is one unchanged value of the manifest."""
    hostile = 'x"}\n---\nkind: Pod # $(touch pwned) `x`'
    plan = compose.compose(["task=lora_tiny", "cluster=kuberay", "cluster.device=cpu", IMAGE])
    kubernetes = plan.config.cluster.kubernetes
    assert kubernetes is not None
    kubernetes.image = kubernetes.namespace = hostile
    kubernetes.image_pull_secrets = [hostile]
    plan.config.cluster.paths.logs = f"/a b;{hostile}"
    _, job = yaml.safe_load_all(manifest.text(plan))
    spec = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert (
        spec["containers"][0]["image"] == spec["imagePullSecrets"][0]["name"] == job["metadata"]["namespace"] == hostile
    )
    assert shlex.split(job["spec"]["entrypoint"])[-1].startswith(f"/a b;{hostile}/")
