"""Invalid settings of a Kubernetes cluster are refused, each with its own message."""

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
Expected = tuple[Check, str, str, str]
CASES: dict[str, tuple[dict[str, object], Expected]] = {
    "image": (
        {"image": "Not An Image"},
        (checks.image, "KUB-15", "the image is 'Not An Image', which is not a valid image name", "image"),
    ),
    "no image": ({"image": None}, (checks.image, "KUB-15", "the container image of the pods is not set", "image")),
    "namespace": (
        {"namespace": "Team"},
        (checks.texts, "KUB-15", "namespace is 'Team', which Kubernetes does not accept", "namespace"),
    ),
    "both": (
        {"data": Volume(claim="a", host_path="/b")},
        (
            checks.volumes_of_config,
            "KUB-15",
            "the volume data must have exactly one of the keys claim and host_path",
            "data",
        ),
    ),
    "claim": (
        {"model": Volume(claim="A b")},
        (checks.volumes_of_config, "KUB-15", "the claim is 'A b', which is not a valid name", "model.claim"),
    ),
    "host path": (
        {"results": Volume(host_path="b")},
        (checks.volumes_of_config, "KUB-15", "host_path is 'b', but must be an absolute path", "results.host_path"),
    ),
    "root": (
        {"run_as_user": 0},
        (checks.shape, "KUB-15", "run_as_user is 0, but must be 1 or more: pods may not run as root", "run_as_user"),
    ),
    "low port": ({"port": 1023}, (checks.shape, "KUB-15", "port is 1023, but must be from 1024 to 65535", "port")),
    "high port": ({"port": 65536}, (checks.shape, "KUB-15", "port is 65536, but must be from 1024 to 65535", "port")),
    "queue": (
        {"queue": "a", "version": "1.23"},
        (checks.shape, "KUB-16", "queue needs Kubernetes 1.24 or later, but version is ", "queue"),
    ),
    "jobset": (
        {"object": ObjectKind.jobset, "version": "1.26"},
        (checks.shape, "KUB-16", "object=jobset needs Kubernetes 1.27 or later", "version"),
    ),
}


def settled(changes: dict[str, object]) -> Subject:
    plan = compose.compose(["task=lora_tiny", "cluster=kubernetes_test"])
    assert plan.config.cluster.kubernetes is not None
    for name, value in changes.items():
        setattr(plan.config.cluster.kubernetes, name, value)
    return Subject(plan, "")


def findings(check: Check, subject: Subject) -> list[Finding]:
    outcomes = check(subject)
    assert hasattr(outcomes, "__iter__")
    return list(outcomes)


@pytest.mark.parametrize("case", CASES)
def test_an_invalid_setting_is_reported(case: str) -> None:
    changes, (check, rule, what, key) = CASES[case]
    (one,) = findings(check, settled(changes))
    assert (one.rule, one.severity, one.where) == (rule, "error", f"{K}.{key}") and one.what.startswith(what)


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpu", "resource", "what"),
    [
        (
            "mi300x",
            "nvidia.com/gpu",
            ["gpu_resource is nvidia.com/gpu, but cluster.gpu is AMD Instinct MI300X, a GPU of another vendor"],
        ),
        (
            "h200",
            "amd.com/gpu",
            ["gpu_resource is amd.com/gpu, but cluster.gpu is NVIDIA H200 SXM 141GB, a GPU of another vendor"],
        ),
        ("mi300x", "amd.com/gpu", []),
        ("h200", "nvidia.com/mig-1g.18gb", []),
        ("h200", "example.com/h200", []),
    ],
)
def test_pods_request_the_gpus_of_the_plan(gpu: str, resource: str, what: list[str]) -> None:
    words = ("task=lora_8b", "cluster=kubernetes", "model.weights=random", f"gpu@cluster.gpu={gpu}")
    plan = compose.compose([*words, f"cluster.kubernetes.gpu_resource={resource}"])
    problems = findings(checks.shape, Subject(plan, ""))
    assert [one.what for one in problems] == what
    assert all(
        one.fix == f"set {K}.gpu_resource to {'amd' if gpu == 'mi300x' else 'nvidia'}.com/gpu" for one in problems
    )


@pytest.mark.parametrize("changes", [{"port": 1024}, {"port": 65535}, {"shm_gib": 1, "grace_s": 1, "keep_h": 0}])
def test_the_limits_of_each_range_are_valid(changes: dict[str, object]) -> None:
    assert findings(checks.shape, settled(changes)) == []


@pytest.mark.parametrize("changes", [{"shm_gib": 0}, {"grace_s": 0}, {"keep_h": -1}])
def test_numbers_out_of_range_are_reported(changes: dict[str, object]) -> None:
    (one,) = findings(checks.shape, settled(changes))
    (key, value), *_ = changes.items()
    assert f"{key} ({value})" in one.what and "must be 1 or more" in one.what
    assert one.where == f"{K}: shm_gib, grace_s, keep_h"


def test_each_folder_of_a_run_needs_a_volume() -> None:
    assert findings(checks.volumes_of_config, settled({})) == []
    (one,) = findings(checks.volumes_of_config, settled({"results": None}))
    assert (one.what, one.where) == ("the pods have no volume for cluster.paths.logs", f"{K}.results")
    assert one.fix == "set cluster.kubernetes.results to {claim: NAME} or {host_path: FOLDER}"
    relative = settled({})
    relative.plan.config.cluster.paths.logs = "runs"
    assert "pods cannot use the path runs: it must be absolute, without $ and without colons" in [
        one.what for one in findings(checks.volumes_of_config, relative)
    ]


def test_settings_of_another_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = settled({})
    config = subject.plan.config
    config.launch.array, config.cluster.slurm, config.container.runtime = True, Slurm(), Runtime.pyxis
    assert [one.where for one in findings(checks.shape, subject)] == ["launch.array", "cluster.slurm"]
    assert findings(checks.image, subject)[0].where == "container"
    config.cluster.paths.logs = "/"
    for user, number in ((1000, 0), (7, 1)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert len(findings(checks.owner, subject)) == number
    assert Kubernetes().run_as_user == 1000
