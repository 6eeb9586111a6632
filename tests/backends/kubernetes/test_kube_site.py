"""What a cluster that answers says of a run: what is seen where all is well, and each thing that is not."""

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
DOWN = NoServerError("the API server does not answer: refused", where="https://here", fix="try again", rule="KUB-12")


def planned(*overrides: str) -> Plan:
    settings = ("cluster.kubernetes.namespace=team", "cluster.kubernetes.context=lab")
    return compose.compose(["task=lora70b", "cluster=kubernetes", *settings, *overrides])


def node(name: str = "n", *, taints: Any = None, labels: Any = None, lying: bool = False, **allocatable: Any) -> Any:
    """Return a node with all that a pod asks for; `lying` ones say nothing of that."""
    has = {name.replace("_", "/"): quantity for name, quantity in allocatable.items()}
    status = {} if lying else {"allocatable": {**ALLOCATABLE, **has}}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}, "status": status}


def claim(phase: str, *modes: str, storage: str | None = "nfs") -> Any:
    return {"status": {"phase": phase}, "spec": {"accessModes": modes, "storageClassName": storage}}


def server(**answers: Any) -> ApiServer:
    """Return a cluster on which the plan runs."""
    made = {
        "GET /version": {"gitVersion": "v1.31.4-eks"},
        "GET /api/v1/nodes": {"items": [node("a"), node("b")]},
        f"GET {NAMESPACE}/resourcequotas": {"items": []},
        "GET /api/v1": {"resources": [{"kind": "ConfigMap"}, {"kind": "Service"}, {"kind": "Job"}]},
        "GET /apis/batch/v1": {"resources": [{"kind": "CronJob"}, {"kind": "Job"}]},
    }
    made |= {f"{CLAIM}{name}": claim("Bound", "ReadWriteMany") for name in ("results", "data", "model")}
    return ApiServer(made | answers)


Look = Callable[..., dict[str, Checked]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Ask a cluster about a plan; return what came of each check."""

    def ask(api: ApiServer, plan: Plan) -> dict[str, Checked]:
        monkeypatch.setattr(client, "request", api.request)
        subject = checks.ask_all(plan, manifest.text(plan))
        return {one.what: one for one in run(checks.SITE_CHECKS, subject, tier="login")}

    return ask


def test_a_cluster_that_fits_is_seen_to(look: Look) -> None:
    api = server()
    found = look(api, planned())
    assert {name: one.seen for name, one in found.items()} == {
        "API server": "v1.31.4-eks",
        "kinds of objects": "ConfigMap v1; Service v1; Job batch/v1",
        "rights": "10 rights",
        "server-side dry run": "3 objects",
        "nodes": "2 of 2 nodes",
        "quota": "none",
        "claims": "; ".join(f"runstop-{name} Bound ReadWriteMany (nfs)" for name in ("results", "data", "model")),
    }
    assert [(one.findings, one.unknown, one.tier) for one in found.values()] == [((), "", "login")] * 7
    rights = [f"{verb}  {kind} in team" for verb in checks.VERBS for kind in ("configmaps", "services")]
    rights += [f"{verb} batch jobs in team" for verb in checks.VERBS] + ["list  pods in team"]
    dry = [f"POST {place}?dryRun=All" for place in (f"{NAMESPACE}/configmaps", f"{NAMESPACE}/services", JOBS)]
    assert sorted(api.asked) == sorted([*api.answers, "GET /api/v1", *rights, *dry, *[f"POST {REVIEWS}"] * 10])
    assert [made["kind"] for made in sorted(api.sent, key=lambda made: str(made["kind"]))] == [
        *("ConfigMap", "Job", "Service")
    ]
    assert api.contexts == {"lab"}
    without_claims = compose.compose(["task=lora_tiny", "cluster=kubernetes_test"])
    assert list(look(server(), without_claims)) == list(found)[:-1]


WHERE = "cluster.kubernetes"
WANTED = f"{WHERE}.resources, gpu_resource, node_selector"
QUOTAS = {"pods": "1", "requests.nvidia.com/gpu": "20", "limits.cpu": "127", "memory": "2Ti", "secrets": "0"}
quota = partial(broken, "KUB-11")
CASES: dict[str, tuple[dict[str, Any], str, str, list[Finding]]] = {
    "no server": (
        {"GET /version": DOWN},
        "API server",
        "",
        [broken("KUB-12", "the API server does not answer: refused", "https://here", fix="try again")],
    ),
    "an older server": (
        {"GET /version": {"gitVersion": "v1.30.9"}},
        "API server",
        "v1.30.9",
        [broken("KUB-16", "the API server is v1.30.9", f"{WHERE}.version=1.31", fix="set it to 1.30")],
    ),
    "a server that does not say its version": ({"GET /version": "ok"}, "API server", "", []),
    "a kind that is not there": (
        {"GET /apis/batch/v1": refusal(404, "NotFound", "404 page not found")},
        "kinds of objects",
        "ConfigMap v1; Service v1",
        [
            broken(
                *("KUB-06", "this cluster has no Job of batch/v1", f"{WHERE}.object"),
                fix="have its operator installed, or choose object=job, which needs none",
            )
        ],
    ),
    "a group without the kind": (
        {"GET /api/v1": {"resources": [{"kind": "Service"}]}},
        "kinds of objects",
        "Service v1; Job batch/v1",
        [
            broken(
                *("KUB-06", "this cluster has no ConfigMap of v1", f"{WHERE}.object"),
                fix="have its operator installed, or choose object=job, which needs none",
            )
        ],
    ),
    "a right for each verb and kind": (
        {"refused": {"create batch jobs", "delete  services", "list  pods"}},
        "rights",
        "",
        [broken("KUB-07", "this user may not create Job, delete Service, list Pod", "namespace team")],
    ),
    "a dry run by somebody who is not logged in": (
        {f"POST {JOBS}": refusal(401, "Unauthorized", "Unauthorized")},
        "server-side dry run",
        "3 objects",
        [broken("KUB-07", "refused: Unauthorized", "dry run of Job NAME")],
    ),
    "one node": (
        {"GET /api/v1/nodes": {"items": [node("a")]}},
        "nodes",
        "1 of 1 nodes",
        [broken("KUB-02", "1 nodes have room for a pod, and the run wants 2", WANTED)],
    ),
    "small nodes": (
        {"GET /api/v1/nodes": {"items": [node("a"), node("b", cpu="63999m"), node("c", memory="1000G")]}},
        "nodes",
        "1 of 3 nodes",
        [broken("KUB-02", "1 nodes have room for a pod, and the run wants 2; others lack cpu, memory", WANTED)],
    ),
    "nodes that nothing is known of": (
        {"GET /api/v1/nodes": {"items": [node("a", lying=True), node("b", cpu="1")]}},
        "nodes",
        "0 of 2 nodes",
        [
            broken(
                "KUB-02",
                "0 nodes have room for a pod, and the run wants 2; others lack cpu, memory, nvidia.com/gpu, "
                "rdma/rdma_shared_device_a",
                WANTED,
            )
        ],
    ),
    "no node has a GPU": (
        {"GET /api/v1/nodes": {"items": [{**node(), "status": {"allocatable": {"cpu": "1"}}}]}},
        "nodes",
        "0 of 1 nodes",
        [broken("KUB-17", "no node offers memory, nvidia.com/gpu, rdma/rdma_shared_device_a", WANTED)],
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
            quota("pods: 1 left of 1, and the run asks for 2", "quota all"),
            quota("requests.nvidia.com/gpu: 15 left of 20, and the run asks for 16", "quota all"),
            quota("limits.cpu: 127 left of 127, and the run asks for 128", "quota all"),
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
                "claim runstop-results is Pending: it is bound once a pod uses it, or never",
                "storage class None",
                severity="warning",
            ),
            broken(
                "KUB-08",
                "claim runstop-data can be mounted by one node only (ReadWriteOnce)",
                f"{WHERE}: results, data, model",
            ),
            broken("KUB-08", "there is no claim runstop-model", "namespace team"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_found_and_nothing_else(case: str, look: Look) -> None:
    answers, check, seen, expected = CASES[case]
    api = server(**{key: value for key, value in answers.items() if key != "refused"})
    api.refused_rights = set(answers.get("refused", ()))
    found = look(api, planned())
    assert (found[check].seen, found[check].unknown) == (seen, "")
    said = json.loads(
        json.dumps([(one.rule, one.severity, one.what, one.where, one.fix) for one in found[check].findings])
    )
    names = {f"dry run of Job {made['metadata']['name']}" for made in api.sent if made["kind"] == "Job"}
    places = [one[3].replace(name, "dry run of Job NAME") for one in said for name in names]
    assert [(*one[:3], place, one[4]) for one, place in zip(said, places, strict=True)] == [
        (one.rule, one.severity, one.what, one.where, one.fix) for one in expected
    ]
    assert [one for name, one in found.items() if name != check and one.findings] == []


UNKNOWN = {
    "GET /api/v1/nodes": (refusal(403, "Forbidden", "may not list nodes"), "nodes", "nodes: may not list nodes"),
    "GET /apis/batch/v1": (refusal(401, "Unauthorized", "who?"), "kinds of objects", "kind Job: who?"),
    f"GET {NAMESPACE}/resourcequotas": (refusal(500, "", ""), "quota", "quota: HTTP 500"),
    f"{CLAIM}data": (DOWN, "claims", "the API server does not answer: refused"),
}


@pytest.mark.parametrize("question", UNKNOWN)
def test_a_question_that_is_not_answered_leaves_its_check_open(question: str, look: Look) -> None:
    answer, check, why = UNKNOWN[question]
    found = look(server(**{question: answer}), planned())
    assert [(name, one.unknown) for name, one in found.items() if one.unknown] == [(check, why)]
    assert not any(one.findings for one in found.values())


TAINT = {"key": "gpu", "value": "team", "effect": "NoSchedule"}
NODES: dict[str, tuple[Any, bool]] = {
    "as it is": (node(labels={"pool": "gpu", "zone": "1"}), True),
    "another label": (node(labels={"pool": "cpu"}), False),
    "no labels": (node(), False),
    "left out": (node("n7", labels={"pool": "gpu"}), False),
    "cordoned": ({**node(labels={"pool": "gpu"}), "spec": {"unschedulable": True}}, False),
    "no spec": ({**node(labels={"pool": "gpu"}), "spec": None}, True),
    "a taint that pods put up with": (node(labels={"pool": "gpu"}, taints=[TAINT]), True),
    "another value of it": (node(labels={"pool": "gpu"}, taints=[{**TAINT, "value": "other"}]), False),
    "any value of another": (node(labels={"pool": "gpu"}, taints=[TAINT, {**TAINT, "key": "spot"}]), True),
    "an unknown one": (node(labels={"pool": "gpu"}, taints=[TAINT, {**TAINT, "key": "disk"}]), False),
    "a mild one": (node(labels={"pool": "gpu"}, taints=[{"key": "disk", "effect": "PreferNoSchedule"}]), True),
}


@pytest.mark.parametrize("case", NODES)
def test_only_nodes_onto_which_pods_may_go_are_counted(case: str, look: Look) -> None:
    one, counts = NODES[case]
    words = {"node_selector": "{pool: gpu}", "exclude_nodes": "[n7]"}
    words["tolerations"] = "[{taint: gpu, value: team}, {taint: spot}]"
    plan = planned(*(f"+{WHERE}.{key}={value}" for key, value in words.items()))
    found = look(server(**{"GET /api/v1/nodes": {"items": [one]}}), plan)
    assert found["nodes"].seen == f"{counts:d} of {counts:d} nodes"
    assert [finding.what for finding in found["nodes"].findings] == [
        f"{counts:d} nodes have room for a pod, and the run wants 2"
    ]


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("8", 8), ("500m", 0.5), ("1.5k", 1500), ("2Ki", 2048), ("3M", 3e6), ("1Gi", 2**30), ("1T", 1e12), ("2Ti", 2**41)]
    + [("1P", 1e15), ("1Pi", 2**50), ("1E", 1e18), ("1Ei", 2**60), ("1e3", 1000), ("7u", 7e-6), ("9n", 9e-9)],
)
def test_quantities_are_read_as_kubernetes_does(quantity: str, number: float) -> None:
    assert checks.amount(quantity) == pytest.approx(number, rel=1e-12)


def test_a_run_on_one_node_can_use_a_claim_for_one(look: Look) -> None:
    answers = {f"{CLAIM}{name}": claim("Bound", "ReadWriteOnce") for name in ("results", "data", "model")}
    plan = planned("cluster.num_nodes=1", "recipe.global_batch_size=8")
    found = look(server(**answers, **{"GET /api/v1/nodes": {"items": [node()]}}), plan)
    assert [one.findings for one in found.values()] == [()] * 7
