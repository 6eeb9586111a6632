"""A real Kubernetes for the tests of this folder: booted once per session."""

import os
import shutil
from collections.abc import Iterator

import kube_cluster
import pytest
from kube_cluster import Cluster, User

SPEED = (
    *("task=lora_tiny", "model.weights=random", "launch.health=false", "task.training.max_steps=20"),
    *("recipe.eval_every_samples=160", "recipe.eval_skip=0", "recipe.log_every_steps=5", "walltime=10"),
)
"""A trial of a few seconds: random weights need no preparation, and the log only shows that the trial ran."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Boot the cluster. A failed boot is an error if the machine can run it, else the tests are skipped."""
    if os.geteuid() != 0:
        pytest.skip("a real Kubernetes needs root: its nodes make containers")
    missing = [name for name in ("etcd", "containerd", "runc", "kubectl", "setpriv") if not shutil.which(name)]
    if missing or not (kube_cluster.PROGRAMS / "kubelet").exists():
        pytest.skip(
            f"no Kubernetes in {kube_cluster.PROGRAMS}: sudo -E tests/backends/kubernetes/build.sh builds it, once"
        )
    pytest.importorskip("kubernetes", reason="pip install 'runstop[kubernetes]'")
    with kube_cluster.running() as booted:
        yield booted


@pytest.fixture
def user(cluster: Cluster) -> Iterator[User]:
    """A user with an empty home folder, on an empty cluster."""
    with kube_cluster.user(cluster, *SPEED) as somebody:
        yield somebody
        cluster.clear()
