"""engine=command on a real Kubernetes: TRL and a plain script over two pods, in one study with our engines."""

import json
import sysconfig
from collections.abc import Iterator

import kube_cluster
import pytest
from kube_cluster import Cluster, User

from helpers import three_programs

pytestmark = [pytest.mark.slow, pytest.mark.trains, pytest.mark.kubernetes]
PACKAGES = (
    f"+cluster.kubernetes.pod={{volumes: [{{name: packages, hostPath: {{path: {sysconfig.get_path('purelib')}}}}}]}}",
    "+cluster.kubernetes.container={volumeMounts: [{name: packages, mountPath: /mnt/site-packages, readOnly: true}]}",
    "+cluster.environment.PYTHONPATH=/mnt/site-packages",
)
"""The image has neither transformers nor TRL, so pods mount this machine's packages. dill, which TRL needs, must find
`site-packages` in their path: it pickles modules in other folders by value."""


@pytest.fixture
def home(cluster: Cluster) -> Iterator[User]:
    with kube_cluster.user(cluster) as user:
        yield user
        cluster.clear()


@pytest.mark.timeout(1800)
@three_programs.needs_trl
def test_the_same_fine_tuning_by_three_programs_over_two_pods(home: User) -> None:
    words = (*three_programs.STUDY, *home.overrides, *PACKAGES, "launch.wait=true")
    three_programs.check(json.loads(home.types(*words, timeout_s=1500).stdout))
    [run] = (home.home / "runs/studies").glob("three_programs*/TRL.1")
    assert json.loads((run / "plan.json").read_text())["world"]["num_nodes"] == 2
