"""Checks of a cluster's answers: the texts for a suitable cluster, and each problem."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bench.backends.kubernetes import checks, client, manifest
from bench.backends.kubernetes.client import NoServerError
from bench.contract.plan import Plan
from bench.planning import compose
from bench.rules.check import Checked, run
from bench.rules.finding import Finding, broken
from helpers.api_server import REVIEWS, ApiServer, refusal

NAMESPACE = "/api/v1/namespaces/team"
JOBS = "/apis/batch/v1/namespaces/team/jobs"
CLAIM = f"GET {NAMESPACE}/persistentvolumeclaims/runstop-"
ALLOCATABLE = {"nvidia.com/gpu": "8", "cpu": "64", "memory": "1024Gi", "rdma/rdma_shared_device_a": "1k"}
DOWN = NoServerError("the API server does not respond: refused", where="https://here", fix="try again", rule="KUB-12")


def planned(*overrides: str) -> Plan:
    settings = ("cluster.kubernetes.namespace=team", "cluster.kubernetes.context=lab")
    return compose.compose(["task=lora70b", "cluster=kubernetes", *settings, *overrides])


def node(
    name: str = "n", *, taints: Any = None, labels: Any = None, is_silent: bool = False, **allocatable: Any
) -> Any:
    """Return a node with all resources that a pod requests; with `is_silent`, its kubelet has not reported yet."""
    has = {name.replace("_", "/"): quantity for name, quantity in allocatable.items()}
    status = {} if is_silent else {"allocatable": {**ALLOCATABLE, **has}}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}, "status": status}


def claim(phase: str, *modes: str, storage: str | None = "nfs") -> Any:
    return {"status": {"phase": phase}, "spec": {"accessModes": modes, "storageClassName": storage}}


def server(**answers: Any) -> ApiServer:
    """Return a fake cluster on which the plan can run."""
    defaults = {
        "GET /version": {"gitVersion": "v1.31.4-eks"},
        "GET /api/v1/nodes": {"items": [node("a"), node("b")]},
        f"GET {NAMESPACE}/resourcequotas": {"items": []},
        f"GET {NAMESPACE}": {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
        "GET /api/v1": {"resources": [{"kind": "ConfigMap"}, {"kind": "Service"}, {"kind": "Job"}]},
        "GET /apis/batch/v1": {"resources": [{"kind": "CronJob"}, {"kind": "Job"}]},
    }
    defaults |= {f"{CLAIM}{name}": claim("Bound", "ReadWriteMany") for name in ("results", "data", "model")}
    return ApiServer(defaults | answers)


Look = Callable[..., dict[str, Checked]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Check a plan against a fake cluster; return the outcome of each check."""

    def query(api: ApiServer, plan: Plan) -> dict[str, Checked]:
        monkeypatch.setattr(client, "request", api.request)
        subject = checks.query_all(plan, manifest.text(plan))
        return {one.what: one for one in run(checks.SITE_CHECKS, subject, tier="login")}

    return query


@pytest.mark.long
def test_a_suitable_cluster_has_no_problems(look: Look) -> None:
    api = server()
    results = look(api, planned())
    assert {name: one.seen for name, one in results.items()} == {
        "API server": "v1.31.4-eks",
        "object kinds": "ConfigMap v1; Service v1; Job batch/v1",
        "permissions": "10 permissions",
        "server-side dry run": "3 objects",
        "nodes": "2 of 2 nodes",
        "quota": "none",
        "Pod Security level": "restricted",
        "claims": "; ".join(f"runstop-{name} Bound ReadWriteMany (nfs)" for name in ("results", "data", "model")),
    }
    assert [(one.findings, one.unknown, one.tier) for one in results.values()] == [((), "", "login")] * 8
    rights = [f"{verb}  {kind} in team" for verb in checks.VERBS for kind in ("configmaps", "services")]
    rights += [f"{verb} batch jobs in team" for verb in checks.VERBS] + ["list  pods in team"]
    dry = [
        f"POST {place}?dryRun=All&fieldValidation=Strict"
        for place in (f"{NAMESPACE}/configmaps", f"{NAMESPACE}/services", JOBS)
    ]
    assert sorted(api.requests) == sorted([*api.answers, "GET /api/v1", *rights, *dry, *[f"POST {REVIEWS}"] * 10])
    assert [item["kind"] for item in sorted(api.sent, key=lambda item: str(item["kind"]))] == [
        *("ConfigMap", "Job", "Service")
    ]
    assert api.contexts == {"lab"}
    without_claims = compose.compose(["task=lora_tiny", "cluster=kubernetes_test"])
    assert list(look(server(), without_claims)) == list(results)[:-1]


WHERE = "cluster.kubernetes"
TOO_FEW = "nodes are large enough for a pod, but the run needs 2 nodes; the other nodes have too little"
NO_RESOURCES = "no node has the resource memory, nvidia.com/gpu, rdma/rdma_shared_device_a, which the pods request"
WANTED = f"{WHERE}.resources, gpu_resource, node_selector"
QUOTAS = {"pods": "1", "requests.nvidia.com/gpu": "20", "limits.cpu": "127", "memory": "2Ti", "secrets": "0"}
OBJECTS = {"configmaps": "1", "count/jobs.batch": "0", "requests.cpu": "128", "limits.memory": "2Ti"}
quota = partial(broken, "KUB-11")
CASES: dict[str, tuple[dict[str, Any], str, str, list[Finding]]] = {
    "no server": (
        {"GET /version": DOWN},
        "API server",
        "",
        [broken("KUB-12", "the API server does not respond: refused", "https://here", fix="try again")],
    ),
    "an older server": (
        {"GET /version": {"gitVersion": "v1.30.9"}},
        "API server",
        "v1.30.9",
        [
            broken(
                *("KUB-16", "the API server has version v1.30.9, which is older than cluster.kubernetes.version=1.31"),
                f"{WHERE}.version=1.31",
                fix="set cluster.kubernetes.version=1.30",
            )
        ],
    ),
    "a server that does not say its version": ({"GET /version": "ok"}, "API server", "", []),
    "a kind that is not there": (
        {"GET /apis/batch/v1": refusal(404, "NotFound", "404 page not results")},
        "object kinds",
        "ConfigMap v1; Service v1",
        [
            broken(
                *("KUB-06", "the Kubernetes cluster does not support the kind Job (batch/v1)", f"{WHERE}.object"),
                fix="ask the admins to install the operator that provides Job, or set cluster.kubernetes.object=job",
            )
        ],
    ),
    "a group without the kind": (
        {"GET /api/v1": {"resources": [{"kind": "Service"}]}},
        "object kinds",
        "Service v1; Job batch/v1",
        [
            broken(
                *("KUB-06", "the Kubernetes cluster does not support the kind ConfigMap (v1)", f"{WHERE}.object"),
                fix="ask the admins to install the operator that provides ConfigMap, or set "
                "cluster.kubernetes.object=job",
            )
        ],
    ),
    "a right for each verb and kind": (
        {"refused": {"create batch jobs", "delete  services", "list  pods"}},
        "permissions",
        "",
        [broken("KUB-07", "this user has no permission to create Job, delete Service, list Pod", "namespace team")],
    ),
    "a dry run by a user who is not logged in": (
        {f"POST {JOBS}": refusal(401, "Unauthorized", "Unauthorized")},
        "server-side dry run",
        "3 objects",
        [broken("KUB-07", "the API server refuses the object: Unauthorized", "dry run of Job NAME")],
    ),
    "one node": (
        {"GET /api/v1/nodes": {"items": [node("a")]}},
        "nodes",
        "1 of 1 nodes",
        [broken("KUB-02", "only 1 nodes are large enough for a pod, but the run needs 2 nodes", WANTED)],
    ),
    "small nodes": (
        {"GET /api/v1/nodes": {"items": [node("a"), node("b", cpu="63999m"), node("c", memory="1000G")]}},
        "nodes",
        "1 of 3 nodes",
        [broken("KUB-02", f"only 1 {TOO_FEW} cpu, memory", WANTED)],
    ),
    "nodes that nothing is known of": (
        {"GET /api/v1/nodes": {"items": [node("a", is_silent=True), node("b", cpu="1")]}},
        "nodes",
        "0 of 2 nodes",
        [
            broken(
                "KUB-02",
                f"only 0 {TOO_FEW} cpu, memory, nvidia.com/gpu, "
                "rdma/rdma_shared_device_a",
                WANTED,
            )
        ],
    ),
    "no node has a GPU": (
        {"GET /api/v1/nodes": {"items": [{**node(), "status": {"allocatable": {"cpu": "1"}}}]}},
        "nodes",
        "0 of 1 nodes",
        [broken("KUB-17", NO_RESOURCES, WANTED)],
    ),
    "small quotas": (
        {
            f"GET {NAMESPACE}/resourcequotas": {
                "items": [
                    {"metadata": {"name": "all"}, "status": {"hard": QUOTAS, "used": {"requests.nvidia.com/gpu": "5"}}},
                    {"metadata": {"name": "new"}, "status": {"hard": None}},
                ]
            }
        },
        "quota",
        "2 quotas",
        [
            quota("the run requests 2 pods, but the quota has only 1 left (limit: 1)", "quota all"),
            quota(
                "the run requests 16 requests.nvidia.com/gpu, but the quota has only 15 left (limit: 20)", "quota all"
            ),
            quota("the run requests 128 limits.cpu, but the quota has only 127 left (limit: 127)", "quota all"),
        ],
    ),
    "a quota of objects": (
        {
            f"GET {NAMESPACE}/resourcequotas": {
                "items": [{"metadata": {"name": "a"}, "status": {"hard": OBJECTS, "used": {"configmaps": "1"}}}]
            }
        },
        "quota",
        "1 quotas",
        [
            quota("the run requests 1 configmaps, but the quota has only 0 left (limit: 1)", "quota a"),
            quota("the run requests 1 count/jobs.batch, but the quota has only 0 left (limit: 0)", "quota a"),
        ],
    ),
    "claims": (
        {
            f"{CLAIM}results": claim("Pending", "ReadWriteOnce", "ReadOnlyMany", storage=None),
            f"{CLAIM}data": claim("Bound", "ReadWriteOnce"),
            f"{CLAIM}model": None,
        },
        "claims",
        "runstop-results Pending ReadWriteOnce,ReadOnlyMany (no storage class); runstop-data Bound ReadWriteOnce (nfs)",
        [
            broken(
                "KUB-08",
                "the claim runstop-results has the phase Pending, not Bound; "
"some storage classes bind only when a pod starts",
                "storage class None",
                severity="warning",
            ),
            broken(
                "KUB-08",
                "the run has several nodes, but only one node can mount the claim runstop-data (ReadWriteOnce)",
                f"{WHERE}: results, data, model",
            ),
            broken("KUB-08", "PersistentVolumeClaim runstop-model does not exist", "namespace team"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_the_only_finding(case: str, look: Look) -> None:
    answers, check, seen, expected = CASES[case]
    api = server(**{key: value for key, value in answers.items() if key != "refused"})
    api.refused_rights = set(answers.get("refused", ()))
    results = look(api, planned())
    assert (results[check].seen, results[check].unknown) == (seen, "")
    rows = json.loads(
        json.dumps([(one.rule, one.severity, one.what, one.where, one.fix) for one in results[check].findings])
    )
    names = {f"dry run of Job {item['metadata']['name']}" for item in api.sent if item["kind"] == "Job"}
    places = [one[3].replace(name, "dry run of Job NAME") for one in rows for name in names]
    assert [(*one[:3], place, one[4]) for one, place in zip(rows, places, strict=True)] == [
        (one.rule, one.severity, one.what, one.where, one.fix) for one in expected
    ]
    assert [one for name, one in results.items() if name != check and one.findings] == []


def test_a_quota_of_a_resource_that_pods_do_not_request_is_reported(look: Look) -> None:
    hard = {"metadata": {"name": "a"}, "status": {"hard": {"requests.cpu": "9", "limits.memory": "9Gi", "pods": "9"}}}
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes_test", "cluster.kubernetes.namespace=team"])
    results = look(server(**{f"GET {NAMESPACE}/resourcequotas": {"items": [hard]}}), plan)
    problems = [(one.severity, one.what, one.fix) for one in results["quota"].findings]
    what = "the pods do not set {0}: without a LimitRange, the quota of {1} refuses such pods"
    assert problems == [
        ("warning", what.format("memory", "limits.memory"), f"set {WHERE}.resources.memory"),
        ("warning", what.format("cpu", "requests.cpu"), f"set {WHERE}.resources.cpu"),
    ]


@pytest.mark.parametrize("level", ["privileged", "baseline", "restricted", None])
def test_the_pod_security_level_of_the_namespace_is_compared_with_the_pods(level: str | None, look: Look) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level} if level else None
    answers = {f"GET {NAMESPACE}": {"metadata": {"labels": labels}}}
    plan = planned("cluster.kubernetes.capabilities=[IPC_LOCK]", "cluster.kubernetes.host_network=true")
    result = look(server(**answers), plan)["Pod Security level"]
    refused = f"the namespace's Pod Security level {level} refuses hostNetwork; runstop: capability IPC_LOCK"
    assert [one.what for one in result.findings] == ([refused] if level in ("baseline", "restricted") else [])


UNKNOWN = {
    f"GET {NAMESPACE}": (
        refusal(403, "Forbidden", "no"),
        "Pod Security level",
        "the API server refuses the query 'namespace': no",
    ),
    "GET /api/v1/nodes": (
        refusal(403, "Forbidden", "may not list nodes"),
        "nodes",
        "the API server refuses the query 'nodes': may not list nodes",
    ),
    "GET /apis/batch/v1": (
        refusal(401, "Unauthorized", "who?"),
        "object kinds",
        "the API server refuses the query 'kind Job': who?",
    ),
    f"GET {NAMESPACE}/resourcequotas": (
        refusal(500, "", ""),
        "quota",
        "the API server refuses the query 'quota': HTTP 500",
    ),
    f"{CLAIM}data": (DOWN, "claims", "the API server does not respond: refused"),
}


@pytest.mark.parametrize("question", UNKNOWN)
def test_a_query_without_answer_leaves_its_check_undecided(question: str, look: Look) -> None:
    answer, check, why = UNKNOWN[question]
    results = look(server(**{question: answer}), planned())
    assert [(name, one.unknown) for name, one in results.items() if one.unknown] == [(check, why)]
    assert not any(one.findings for one in results.values())


TAINT = {"key": "gpu", "value": "team", "effect": "NoSchedule"}
NODES: dict[str, tuple[Any, bool]] = {
    "as it is": (node(labels={"pool": "gpu", "zone": "1"}), True),
    "another label": (node(labels={"pool": "cpu"}), False),
    "no labels": (node(), False),
    "left out": (node("n7", labels={"pool": "gpu"}), False),
    "cordoned": ({**node(labels={"pool": "gpu"}), "spec": {"unschedulable": True}}, False),
    "no spec": ({**node(labels={"pool": "gpu"}), "spec": None}, True),
    "a tolerated taint": (node(labels={"pool": "gpu"}, taints=[TAINT]), True),
    "another value of it": (node(labels={"pool": "gpu"}, taints=[{**TAINT, "value": "other"}]), False),
    "any value of another": (node(labels={"pool": "gpu"}, taints=[TAINT, {**TAINT, "key": "spot"}]), True),
    "an unknown one": (node(labels={"pool": "gpu"}, taints=[TAINT, {**TAINT, "key": "disk"}]), False),
    "a mild one": (node(labels={"pool": "gpu"}, taints=[{"key": "disk", "effect": "PreferNoSchedule"}]), True),
}


@pytest.mark.parametrize("case", NODES)
def test_only_nodes_that_may_run_pods_are_counted(case: str, look: Look) -> None:
    one, counts = NODES[case]
    words = {"node_selector": "{pool: gpu}", "exclude_nodes": "[n7]"}
    words["tolerations"] = "[{taint: gpu, value: team}, {taint: spot}]"
    plan = planned(*(f"+{WHERE}.{key}={value}" for key, value in words.items()))
    results = look(server(**{"GET /api/v1/nodes": {"items": [one]}}), plan)
    assert results["nodes"].seen == f"{counts:d} of {counts:d} nodes"
    assert [finding.what for finding in results["nodes"].findings] == [
        f"only {counts:d} nodes are large enough for a pod, but the run needs 2 nodes"
    ]


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("8", 8), ("500m", 0.5), ("1.5k", 1500), ("2Ki", 2048), ("3M", 3e6), ("1Gi", 2**30), ("1T", 1e12), ("2Ti", 2**41)]
    + [("1P", 1e15), ("1Pi", 2**50), ("1E", 1e18), ("1Ei", 2**60), ("1e3", 1000), ("7u", 7e-6), ("9n", 9e-9)],
)
def test_quantities_are_read_as_kubernetes_does(quantity: str, number: float) -> None:
    assert checks.amount(quantity) == pytest.approx(number, rel=1e-12)


def test_a_run_on_one_node_can_use_a_claim_for_one_node(look: Look) -> None:
    answers = {f"{CLAIM}{name}": claim("Bound", "ReadWriteOnce") for name in ("results", "data", "model")}
    plan = planned("cluster.num_nodes=1", "recipe.global_batch_size=8")
    results = look(server(**answers, **{"GET /api/v1/nodes": {"items": [node()]}}), plan)
    assert [one.findings for one in results.values()] == [()] * 8
