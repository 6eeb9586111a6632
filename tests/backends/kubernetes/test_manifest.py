"""Manifests: those in manifests/ are as render writes them, fit the schemas of Kubernetes and of the operators."""

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import backends
from bench.backends.kubernetes import checks, manifest, pod_security
from bench.contract import plan_kinds
from bench.contract.cluster import ObjectKind, Toleration, Volume
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from bench.preflight import secrets
from bench.rules.check import Subject, run
from helpers.examples import in_proportion
from helpers.hostile_configs import hostile
from helpers.paths import ROOT

IMAGE = f"cluster.kubernetes.image=registry.example.com/runstop@sha256:{'5' * 64}"
SHOWN = {
    **{f"lora70b_{kind.name}": ("task=lora70b", f"cluster.kubernetes.object={kind.name}") for kind in ObjectKind},
    "lora70b_kueue": ("task=lora70b", "cluster.kubernetes.queue=research", "cluster.kubernetes.priority_class=high"),
    "pretrain_7b": ("task=pretrain_7b",),
    "attention": ("task=attention",),
    "finetune_8b_mi300x": (
        *("task=finetune_8b_pubmedqa", "cluster=kubernetes_mi300x", "model.weights=random", "recipe.moments=fp32"),
        *("engine=huggingface", "engine.huggingface.strategy=deepspeed", "engine.huggingface.zero_stage=3"),
        *("engine.huggingface.deepspeed_json=llama31_8b", "recipe.micro_batch_size=24"),
        "+cluster.environment.NCCL_NET=IB",
    ),
    "lora_tiny_kubernetes_test": ("task=lora_tiny", "cluster=kubernetes_test"),
}
"""What people would run: every kind of object, and every kind of task."""
MADE = {"pretrain_7b": ("/data",), "lora_tiny_kubernetes_test": ("/data", "/model")}
"""Runs that prepare their rows or base checkpoint, and the paths; other runs only read them."""
CRDS = ROOT.parent / "shared/crds"
OF_OPERATORS = {
    "JobSet": "jobset.x-k8s.io_jobsets",
    "PyTorchJob": "kubeflow.org_pytorchjobs",
    "TrainJob": "trainer.kubeflow.org_trainjobs",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes",
}


def shown(name: str) -> Plan:
    words = SHOWN[name]
    cluster = () if any(override.startswith("cluster=") for override in words) else ("cluster=kubernetes",)
    image = () if "cluster=kubernetes_test" in words else (IMAGE,)
    return compose.compose([*cluster, *words, *image])


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
def test_the_manifests_are_those_that_render_writes() -> None:
    """To regenerate them: WRITE_MANIFESTS=1 pytest tests/backends/kubernetes/test_manifest.py"""
    folder = ROOT / "manifests"
    if os.environ.get("WRITE_MANIFESTS"):
        for old in folder.glob("*.yaml"):
            old.unlink()
        for name in SHOWN:
            (folder / f"{name}.yaml").write_text(manifest.text(shown(name)))
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(SHOWN)
    for name in SHOWN:
        assert (folder / f"{name}.yaml").read_text() == manifest.text(shown(name)), f"{name}: not what render writes"


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / f"manifests/{name}.yaml").read_text()))


@pytest.mark.parametrize("name", SHOWN)
def test_kubernetes_objects_match_the_schema_without_unknown_fields(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'runstop[dev]'").validate
    for item in objects(name):
        if item["kind"] not in OF_OPERATORS:
            validate(item, "1.31", strict=True)


def strict(schema: Any) -> Any:
    """Return a schema in which an unknown field is an error, as it is for `kubectl apply`."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    item = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        item.setdefault("additionalProperties", False)
    return item


@pytest.mark.parametrize("name", [f"lora70b_{kind.name}" for kind in ObjectKind if kind is not ObjectKind.job])
def test_operator_objects_match_the_published_crds(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if not CRDS.is_dir():
        pytest.skip(f"the definitions are not in {CRDS}")
    checked = 0
    for item in objects(name):
        if (file := OF_OPERATORS.get(item["kind"])) is None:
            continue
        definition = yaml.load(gzip.decompress((CRDS / f"{file}.yaml.gz").read_bytes()), Loader=yaml.CSafeLoader)
        group, _, version = item["apiVersion"].partition("/")
        assert definition["spec"]["group"] == group
        (served,) = [v for v in definition["spec"]["versions"] if v["name"] == version]
        schema = strict(served["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        jsonschema.Draft202012Validator(schema).validate(item)
        checked += 1
    assert checked == (2 if "trainjob" in name else 1)


def pods(item: Any) -> list[dict[str, Any]]:
    """Return every pod spec in an object, at any depth."""
    if isinstance(item, list):
        return [pod for one in item for pod in pods(one)]
    if not isinstance(item, dict):
        return []
    return [item] if "containers" in item else [pod for one in item.values() for pod in pods(one)]


@pytest.mark.parametrize("name", SHOWN)
def test_every_pod_runs_without_root_and_requests_its_nodes_resources(name: str) -> None:
    plan = shown(name)
    all_pods = [pod for item in objects(name) for pod in pods(item)]
    assert all_pods
    for pod in all_pods:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"]["drop"] == ["ALL"]
        limits, gpus = container["resources"].get("limits", {}), plan.config.cluster.kubernetes
        assert gpus is not None and limits == container["resources"].get("requests", {})
        if gpus.gpu_resource:
            assert limits[gpus.gpu_resource] == str(plan.world.ranks_per_node)
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert writable == {"/dev/shm", "/tmp", "/results", *MADE.get(name, ())}
        assert pod["activeDeadlineSeconds"] > 60 * (plan.walltime_min or 0)
    (held,) = [item for item in objects(name) if item["kind"] == "ConfigMap"]
    assert plan_kinds.loads(held["data"]["plan.json"]) == plan


@pytest.mark.parametrize("path", sorted((ROOT / "manifests").rglob("*.yaml")), ids=lambda path: path.stem)
def test_default_pods_fit_the_restricted_level(path: Path) -> None:
    """Those of the test cluster have host paths, which the level `baseline` refuses, too."""
    refused = [what for item in yaml.safe_load_all(path.read_text()) for pod in pods(item)
             for what in pod_security.violations(pod, "restricted")]  # fmt: skip
    is_of_test = path.stem == "lora_tiny_kubernetes_test"
    assert [what for what in refused if not (is_of_test and what.endswith("is a hostPath"))] == []


def test_an_old_server_gets_one_job_per_node_and_a_new_one_an_indexed_job() -> None:
    words = ["task=lora_tiny", "cluster=kubernetes_test"]
    old = [item for item in manifest.load_all(manifest.text(compose.compose(words))) if item["kind"] == "Job"]
    assert [item["spec"]["template"]["spec"]["hostname"][-2:] for item in old] == ["-0", "-1"]
    new = manifest.text(compose.compose([*words, "cluster.kubernetes.version='1.31'"]))
    (job,) = [item for item in manifest.load_all(new) if item["kind"] == "Job"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 2)


SITE = (
    *(
        "cluster.kubernetes.namespace=ml",
        "cluster.kubernetes.image_pull_secrets=[registry]",
        "cluster.kubernetes.env_from_secrets=[hub]",
        "cluster.kubernetes.run_as_group=7",
    ),
    *("cluster.kubernetes.priority_class=high", "cluster.kubernetes.queue=research", "cluster.kubernetes.shm_gib=9"),
    *("cluster.kubernetes.networks=[rail0,fabric/rail1]", "+cluster.kubernetes.node_selector={pool: h100}"),
    *("cluster.kubernetes.tolerations=[{taint: gpu, value: 'yes', effect: NoSchedule}]", "trials=2", "walltime=30"),
    *("cluster.kubernetes.exclude_nodes=[dgx-7]", "cluster.kubernetes.host_network=true"),
    *("cluster.kubernetes.service_account=bench", "cluster.kubernetes.results={claim: a, sub_path: me}"),
    *("cluster.kubernetes.capabilities=[IPC_LOCK]", "cluster.kubernetes.workload_priority_class=urgent"),
)


@pytest.mark.long
def test_each_setting_of_a_site_is_in_its_kubernetes_field() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'runstop[dev]'").validate
    plan = compose.compose(["task=lora70b", "cluster=kubernetes", IMAGE, *SITE])
    *_, job = yaml.safe_load_all(manifest.text(plan))
    validate(job, "1.31", strict=True)
    assert job["metadata"]["namespace"] == "ml"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    template = job["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rail0, fabric/rail1"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}] and pod["priorityClassName"] == "high"
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"pool": "h100"}, "bench")
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["dgx-7"]}]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["activeDeadlineSeconds"] == 60 * (5 + 2 * (30 + 5)) + 120, (
        "the limit of all trials, and two minutes to shut down"
    )
    user = pod["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["fsGroup"]) == (1000, 7, 7)
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert [*secrets.secrets(Subject(plan, manifest.text(plan)))] == [], "names of Secrets are not secrets"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["rdma/rdma_shared_device_a"] == "1"
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "9Gi"}
    assert volumes[mounts["/results"]["name"]]["persistentVolumeClaim"] == {"claimName": "a", "readOnly": False}
    assert mounts["/results"]["subPath"] == "me" and mounts["/data"]["readOnly"]


FURTHER = """
run_as_user: null
exclude_nodes: [dgx-7]
labels: {team: ml}
annotations: {kueue.x-k8s.io/podset-required-topology: rack}
pod:
  runtimeClassName: nvidia
  schedulerName: volcano
  securityContext: {supplementalGroups: [44]}
  tolerations: [{key: a, operator: Exists}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: full}]
  topologySpreadConstraints: [{maxSkew: 1, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
        - matchExpressions: [{key: pool, operator: In, values: [a]}]
        - matchFields: [{key: metadata.name, operator: In, values: [b]}]
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
      - {weight: 1, podAffinityTerm: {topologyKey: rack, labelSelector: {matchLabels: {team: other}}}}
  volumes: [{name: scratch, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce],
    resources: {requests: {storage: 1Ti}}}}}}]
  initContainers: [{name: warm, image: warm, restartPolicy: Always}]
container:
  resources: {claims: [{name: gpu}]}
  volumeMounts: [{name: scratch, mountPath: /scratch}]
  env: [{name: NCCL_DEBUG, value: INFO}]
"""
"""Settings that runstop passes on to the pods."""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "cluster"), [*((kind.name, "kubernetes") for kind in ObjectKind), ("job", "kuberay")])
def test_further_fields_of_a_site_are_passed_to_the_pods_of_every_object(kind: str, cluster: str) -> None:
    further = json.dumps(yaml.safe_load(FURTHER))
    k = "cluster.kubernetes"
    words = [
        f"{'' if name in ('run_as_user', 'exclude_nodes') else '+'}{k}.{name}={hydra(value)}"
        for name, value in json.loads(further).items()
    ]
    plan = compose.compose(["task=lora70b", f"cluster={cluster}", IMAGE, f"{k}.object={kind}",
                            f"+{k}.resources={{ephemeral-storage: 100Gi}}", *words])  # fmt: skip
    plan = plan_kinds.loads(plan_kinds.dumps(plan))
    text = backends.for_plan(plan).render(plan)
    checked = run(checks.CONFIG_CHECKS, Subject(plan, text), tier="laptop")
    assert [(f.what, f.where) for one in checked for f in one.findings] == []
    assert "Kubernetes 1.31" in [one.seen for one in checked]
    items = list(yaml.safe_load_all(text))
    assert all(item["metadata"]["labels"]["team"] == "ml" for item in items)
    all_pods = [pod for item in items for pod in pods(item)]
    assert all_pods and "kueue.x-k8s.io/podset-required-topology: rack" in text
    for pod in all_pods:
        (container,) = pod["containers"]
        assert (pod["runtimeClassName"], pod["schedulerName"]) == ("nvidia", "volcano")
        assert (
            pod["resourceClaims"]
            and container["resources"].get("claims")
            or pod is all_pods[0]
            and cluster == "kuberay"
        )
        assert pod["securityContext"] == {
            "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, "supplementalGroups": [44]
        }  # fmt: skip
        assert pod["tolerations"] == [{"key": "a", "operator": "Exists"}] and pod["topologySpreadConstraints"]
        node = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [[one["values"] for one in term["matchExpressions"]] for term in node] == [
            [["dgx-7"], ["a"]],
            [["dgx-7"]],
        ]
        assert node[1]["matchFields"] and len(pod["initContainers"]) == 1
        assert pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert {"scratch", "shm", "tmp"} <= {one["name"] for one in pod["volumes"]}
        assert "/scratch" in [one["mountPath"] for one in container["volumeMounts"]]
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]


def hydra(value: Any) -> str:
    """Return a value as Hydra's grammar writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {hydra(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(hydra, value)) + "]"
    return "null" if value is None else str(value)


@cache
def pickled_plan() -> bytes:
    return pickle.dumps(
        compose.compose(["task=lora_tiny", "cluster=kubernetes_test", "cluster.kubernetes.version='1.31'"])
    )


@pytest.mark.long
@settings(max_examples=in_proportion(20))
@given(text=hostile, other=hostile, kind=st.sampled_from(ObjectKind))
def test_hostile_values_stay_values(text: str, other: str, kind: ObjectKind) -> None:
    """Every object has the same structure as with harmless values, and each value is unchanged."""

    def rendered(one: str, two: str) -> list[Any]:
        plan = pickle.loads(pickled_plan())
        k = plan.config.cluster.kubernetes
        assert k is not None
        k.object, k.image, k.namespace, k.image_pull_secrets, k.priority_class, k.queue = (
            kind,
            one,
            two,
            [one],
            two,
            one,
        )
        k.env_from_secrets = [two]
        k.node_selector, k.networks, k.exclude_nodes = {"key": one}, [two], [one, two]
        k.tolerations = [Toleration(taint=one, value=two, effect=one)]
        k.resources, k.service_account, k.results = {"cpu": two}, one, Volume(claim=one, sub_path=two)
        plan.config.cluster.paths.logs, plan.config.cluster.environment = f"/results/{one}", {"A": two}
        return list(yaml.load_all(manifest.text(plan), Loader=yaml.CSafeLoader))

    text, other = ("".join(c for c in one if c.isprintable() or c in "\n\t") or "x" for one in (text, other))
    tame, wild = rendered("a", "b"), rendered(text, other)
    assert shape(tame) == shape(wild)
    (pod, *_) = [pod for one in wild for pod in pods(one)]
    assert pod["containers"][0]["image"] == text and pod["affinity"]["nodeAffinity"]
    assert expanded(pod["containers"][0]["args"][0]).startswith(f"/results/{text}/")


def shape(value: Any) -> Any:
    """Return an object without its values: keys, lengths of lists, types."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items() if key != "plan.json"}
    return [shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def expanded(text: str) -> str:
    """Return an argument as Kubernetes gives it to the program: $(NAME) is expanded, and $$ is a dollar sign.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    return re.sub(r"\$(\$|\([^)]*\))", lambda match: "$" if match[1] == "$" else f"<expanded {match[1]}>", text)


def test_kubernetes_parser_reads_the_same_values(tmp_path: Path) -> None:
    """PyYAML would write 1e3 and 0o17 without quotes, but Go's parser reads them as numbers."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; the test needs its parser")
    values = ["1e3", "0o17", "y", "on", "NO", "~", "0x1f", "1_000", "12:30:00", "=", "<<", ".5", "null", "a: b", "- a"]
    data = {f"k{number}": value for number, value in enumerate(values)}
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}
    (tmp_path / "a.yaml").write_text(manifest.dump_all([item]))
    argv = ["kubectl", "annotate", "--local", "--filename", str(tmp_path / "a.yaml"), "x=y", "--output", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["data"] == data


@pytest.mark.parametrize(
    ("words", "rule", "what"),
    [
        (["cluster.kubernetes.image=null"], "KUB-15", "the container image of the pods is not set"),
        (["cluster.kubernetes.image=Bad Image"], "KUB-15", "is not a valid image name"),
        (["cluster.kubernetes.image=a/b:latest"], "KUB-15", "may refer to a different image later"),
        (["cluster.kubernetes.namespace=My_Team"], "KUB-15", "which Kubernetes does not accept"),
        (["cluster.kubernetes.resources.memory=lots"], "KUB-15", "which Kubernetes does not accept"),
        (["cluster.kubernetes.results=null"], "KUB-15", "the pods have no volume for cluster.paths.logs"),
        (
            ["cluster.kubernetes.data={claim: a, host_path: /b}"],
            "KUB-15",
            "must have exactly one of the keys claim and host_path",
        ),
        (["cluster.paths.logs=$LOGDIR"], "KUB-15", "pods cannot use the path $LOGDIR"),
        (
            ["cluster.kubernetes.run_as_user=0"],
            "KUB-15",
            "run_as_user is 0, but must be 1 or more: pods may not run as root",
        ),
        (["launch.array=true"], "KUB-15", "does not support job arrays"),
        (
            ["cluster.paths.data=/results"],
            "KUB-15",
            "the volumes results and data are different, but have the same mount path /results",
        ),
        (
            ["cluster.paths.data=/results/"],
            "KUB-15",
            "the volumes results and data are different, but have the same mount path /results",
        ),
        (
            ["cluster.paths.logs=/tmp"],
            "KUB-15",
            "the volume results cannot be mounted at /tmp, because runstop mounts another volume at this path",
        ),
        (
            ["+cluster.kubernetes.resources={nvidia.com/gpu: '1'}"],
            "KUB-15",
            "but cluster.ranks_per_node already sets the number of GPUs",
        ),
        (
            ["cluster.kubernetes.data={claim: a, sub_path: ../../x}"],
            "KUB-15",
            "which is not a folder inside the volume",
        ),
        (["cluster.kubernetes.data={claim: a, sub_path: /x}"], "KUB-15", "which is not a folder inside the volume"),
        (["cluster.kubernetes.resources.cpu='0'"], "KUB-15", "cpu is 0, but must be above 0"),
        (["cluster.kubernetes.resources.memory=1Gi"], "KUB-15", "but /dev/shm alone may use 64Gi of this memory"),
        (["cluster.kubernetes.resources.memory=64Gi"], "KUB-15", "but /dev/shm alone may use 64Gi of this memory"),
        (["cluster.kubernetes.workload_priority_class=a"], "KUB-15", "is set without a queue"),
        (["+cluster.kubernetes.labels={a: b c}"], "KUB-15", "labels.a is 'b c', which Kubernetes does not accept"),
        (
            ["+cluster.kubernetes.pod={containers: [{name: a}]}"],
            "KUB-15",
            "pod sets containers, but runstop sets this field",
        ),
        (
            ["+cluster.kubernetes.pod={securityContext: {runAsUser: 0}}"],
            "KUB-15",
            "pod sets securityContext.runAsUser, but",
        ),
        (
            ["+cluster.kubernetes.pod={volumes: [{name: shm, emptyDir: {}}]}"],
            "KUB-15",
            "pod sets volumes: shm, but runstop",
        ),
        (
            ["+cluster.kubernetes.container={env: [{name: HOME, value: /}]}"],
            "KUB-15",
            "container sets env: HOME, but runstop",
        ),
        (["+cluster.kubernetes.container={command: [sh]}"], "KUB-15", "container sets command, but runstop"),
        (["+cluster.kubernetes.pod={runtimeclass: a}"], "KUB-15", "'runtimeclass' was unexpected"),
        (["+cluster.kubernetes.pod={schedulerName: 5}"], "KUB-15", "schedulerName: 5 is not of type 'string'"),
        (["cluster.kubernetes.version='1.20'", "cluster.kubernetes.object=jobset"], "KUB-16", "needs Kubernetes 1.27"),
        (
            ["cluster.kubernetes.version='1.20'", "cluster.kubernetes.queue=a"],
            "KUB-16",
            "Kueue would start each node separately",
        ),
        (["container=pyxis", "container.image=/a.sqsh"], "KUB-15", "a pod already runs in containers"),
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(words: list[str], rule: str, what: str) -> None:
    plan = compose.compose(["task=lora70b", "cluster=kubernetes", IMAGE, *words])
    checked = run(checks.CONFIG_CHECKS, Subject(plan, ""), tier="laptop")
    assert any(f.rule == rule and what in f.what for one in checked for f in one.findings), checked


@pytest.mark.long
def test_a_program_in_the_current_folder_must_be_on_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = ["task=my_program", "cluster=kubernetes", IMAGE, "engine.command.argv=[python,train.py]"]
    volume = f"volumeMounts: [{{name: code, mountPath: {tmp_path}}}]"
    mount = f"+cluster.kubernetes.container={{{volume}}}"
    for more, expected in (([], [f"the file {tmp_path}/train.py is on this machine"]), ([mount], [])):
        checked = run(checks.CONFIG_CHECKS, Subject(compose.compose([*words, *more]), ""), tier="laptop")
        problems = [f.what for one in checked for f in one.findings if f.where.startswith("engine.command")]
        assert [what.partition(", but")[0] for what in problems] == expected


@pytest.mark.parametrize("name", SHOWN)
def test_the_shipped_manifests_have_no_problems(name: str) -> None:
    checked = run(checks.CONFIG_CHECKS, Subject(shown(name), ""), tier="laptop")
    assert [f for one in checked for f in one.findings if f.severity == "error"] == []


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="nodeselector"):
        compose.compose(["task=lora70b", "cluster=kubernetes", "+cluster.kubernetes.nodeselector={a: b}"])
