"""The doctor on a real cluster: version, kinds, permissions, dry run of the manifest, nodes, quota."""

import pytest
from kube_cluster import Cluster, User

from helpers import answers

pytestmark = [pytest.mark.trains, pytest.mark.kubernetes]


def findings(user: User, *words: str, tier: str = "login") -> dict[str, str]:
    report = answers.one(user.types("doctor", *user.overrides, *words, "--tier", tier, "--json", code=None).stdout)
    assert report["tier"] == tier
    return {one["rule"]: one["what"] for one in report["findings"] if one["severity"] == "error"}


def test_problems_of_a_request_are_found_before_it_is_sent(user: User, cluster: Cluster) -> None:
    assert findings(user) == {}
    assert (
        "no node has the resource nvidia.com/gpu"
        in findings(user, "+cluster.kubernetes.resources={nvidia.com/gpu: '8'}")["KUB-17"]
    )
    newer = findings(user, "cluster.kubernetes.version='1.31'", "cluster.kubernetes.object=jobset",
                     "cluster.kubernetes.discovery=service")  # fmt: skip
    assert "v1.20.2" in newer["KUB-16"] and "the kind JobSet" in newer["KUB-06"]
    cluster.kubectl("create", "quota", "small", "--hard=pods=1")
    missing = findings(user, "cluster.kubernetes.results={claim: nowhere}")
    assert "PersistentVolumeClaim nowhere does not exist" in missing["KUB-08"]
    assert "2 pods, but the quota has only 1 left (limit: 1)" in missing["KUB-11"]
    assert cluster.get("jobs") == []


@pytest.mark.slow
def test_a_canary_pod_finds_problems_in_the_ranks_environment(user: User, cluster: Cluster) -> None:
    assert findings(user, tier="canary") == {}
    (pod,) = cluster.get("pods")
    assert pod["status"]["phase"] == "Succeeded"
    assert "encodings" in findings(user, "+cluster.environment.PYTHONHOME=/nowhere", tier="canary")["RUN-08"]
    image = findings(user, "cluster.kubernetes.image=localhost:1/absent:1", tier="canary")
    assert "localhost:1/absent:1" in image["KUB-01"]
