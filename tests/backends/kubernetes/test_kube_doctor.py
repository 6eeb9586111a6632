"""What the doctor asks a real cluster: its version, its kinds, rights, a dry run of the very manifest, nodes, quota."""

import json

import pytest
from kube_cluster import Cluster, User

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


def findings(user: User, *words: str, tier: str = "login") -> dict[str, str]:
    said = json.loads(user.types("doctor", *user.overrides, *words, "--tier", tier, "--json", code=None).stdout)
    assert said["tier"] == tier
    return {one["rule"]: one["what"] for one in said["findings"] if one["severity"] == "error"}


def test_what_is_wrong_with_a_request_is_known_before_it_is_made(user: User, cluster: Cluster) -> None:
    assert findings(user) == {}
    assert (
        "no node offers nvidia.com/gpu"
        in findings(user, "+cluster.kubernetes.resources={nvidia.com/gpu: '8'}")["KUB-17"]
    )
    newer = findings(user, "cluster.kubernetes.version='1.31'", "cluster.kubernetes.object=jobset",
                     "cluster.kubernetes.discovery=service")  # fmt: skip
    assert "v1.20.2" in newer["KUB-16"] and "no JobSet" in newer["KUB-06"]
    cluster.kubectl("create", "quota", "small", "--hard=pods=1")
    missing = findings(user, "cluster.kubernetes.results={claim: nowhere}")
    assert "there is no claim nowhere" in missing["KUB-08"] and "pods: 1 left of 1" in missing["KUB-11"]
    assert cluster.get("jobs") == []


@pytest.mark.slow
def test_a_canary_pod_sees_what_is_wrong_where_the_ranks_run(user: User, cluster: Cluster) -> None:
    assert findings(user, tier="canary") == {}
    (pod,) = cluster.get("pods")
    assert pod["status"]["phase"] == "Succeeded"
    assert "encodings" in findings(user, "+cluster.environment.PYTHONHOME=/nowhere", tier="canary")["RUN-08"]
    image = findings(user, "cluster.kubernetes.image=localhost:1/absent:1", tier="canary")
    assert "localhost:1/absent:1" in image["KUB-01"]
