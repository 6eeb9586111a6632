"""Settings of a Kubernetes cluster that cannot become pods are refused by what is wrong with each."""

import os
from collections.abc import Callable

import pytest

from bench.backends.kubernetes import checks
from bench.contract.cluster import Kubernetes, ObjectKind, Slurm, Volume
from bench.contract.schema import Runtime
from bench.planning import compose
from bench.rules.check import Subject
from bench.rules.finding import Finding

K = "cluster.kubernetes"
Check = Callable[[Subject], object]
Said = tuple[Check, str, str, str]
CASES: dict[str, tuple[dict[str, object], Said]] = {
    "image": ({"image": "Not An Image"}, (checks.image, "KUB-15", "'Not An Image' is not the name", "image")),
    "no image": ({"image": None}, (checks.image, "KUB-15", "pods need an image", "image")),
    "namespace": ({"namespace": "Team"}, (checks.texts, "KUB-15", "'Team' is not one that", "namespace")),
    "both": (
        {"data": Volume(claim="a", host_path="/b")},
        (checks.volumes_of_config, "KUB-15", "a volume is a claim or a host_path, one of the two", "data"),
    ),
    "claim": (
        {"model": Volume(claim="A b")},
        (checks.volumes_of_config, "KUB-15", "'A b' is not the name of a claim", "model.claim"),
    ),
    "host path": (
        {"results": Volume(host_path="b")},
        (checks.volumes_of_config, "KUB-15", "'b' is not a full path", "results.host_path"),
    ),
    "root": ({"run_as_user": 0}, (checks.shape, "KUB-15", "pods do not run as root", "run_as_user")),
    "low port": ({"port": 1023}, (checks.shape, "KUB-15", "1023 is no port for a user", "port")),
    "high port": ({"port": 65536}, (checks.shape, "KUB-15", "65536 is no port for a user", "port")),
    "queue": (
        {"queue": "a", "version": "1.23"},
        (checks.shape, "KUB-16", "before Kubernetes 1.24 a run is one Job a node", "queue"),
    ),
    "jobset": (
        {"object": ObjectKind.jobset, "version": "1.26"},
        (checks.shape, "KUB-16", "jobset needs Kubernetes 1.27", "version"),
    ),
}


def settled(changes: dict[str, object]) -> Subject:
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes_test"])
    assert plan.config.cluster.kubernetes is not None
    for name, value in changes.items():
        setattr(plan.config.cluster.kubernetes, name, value)
    return Subject(plan, "")


def found(check: Check, subject: Subject) -> list[Finding]:
    made = check(subject)
    assert hasattr(made, "__iter__")
    return list(made)


@pytest.mark.parametrize("case", CASES)
def test_a_setting_that_cannot_become_pods_is_named(case: str) -> None:
    changes, (check, rule, what, key) = CASES[case]
    (one,) = found(check, settled(changes))
    assert (one.rule, one.severity, one.where) == (rule, "error", f"{K}.{key}") and one.what.startswith(what)


@pytest.mark.parametrize("changes", [{"port": 1024}, {"port": 65535}, {"shm_gib": 1, "grace_s": 1, "keep_h": 0}])
def test_the_ends_of_each_range_are_in_it(changes: dict[str, object]) -> None:
    assert found(checks.shape, settled(changes)) == []


@pytest.mark.parametrize("changes", [{"shm_gib": 0}, {"grace_s": 0}, {"keep_h": -1}])
def test_numbers_out_of_range_are_named(changes: dict[str, object]) -> None:
    (one,) = found(checks.shape, settled(changes))
    assert (one.what, one.where) == ("a number is out of range", f"{K}: shm_gib, grace_s, keep_h")


def test_each_folder_of_a_run_lies_in_a_volume() -> None:
    assert found(checks.volumes_of_config, settled({})) == []
    (one,) = found(checks.volumes_of_config, settled({"results": None}))
    assert (one.what, one.where) == ("no volume holds cluster.paths.logs", f"{K}.results")
    assert one.fix == "set cluster.kubernetes.results to {claim: NAME} or {host_path: FOLDER}"
    relative = settled({})
    relative.plan.config.cluster.paths.logs = "runs"
    assert "runs is not a path in pods" in [one.what for one in found(checks.volumes_of_config, relative)]


def test_what_belongs_to_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = settled({})
    config = subject.plan.config
    config.launch.array, config.cluster.slurm, config.container.runtime = True, Slurm(), Runtime.pyxis
    assert [one.where for one in found(checks.shape, subject)] == ["launch.array", "cluster.slurm"]
    assert found(checks.image, subject)[0].where == "container"
    config.cluster.paths.logs = "/"
    for user, number in ((1000, 0), (7, 1)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert len(found(checks.owner, subject)) == number
    assert Kubernetes().run_as_user == 1000
