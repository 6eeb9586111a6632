"""A real Ray for the tests of this folder: booted once per session, in its own folder and on its own ports."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, running
from ray_user import RayUser


def is_installed() -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("ray.job_submission") is not None
    return False


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Boot it. Where Ray is installed, a boot that fails is an error."""
    if not is_installed():
        pytest.skip("a real Ray needs its package: pip install 'runstop[ray]'")
    with running() as booted:
        yield booted


@pytest.fixture
def user(cluster: Cluster, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayUser:
    """A user with an empty LOGDIR, prepared rows and a barely trained base."""
    paths = {"DATADIR": f"{prepared}/cache", "MODEL": f"{prepared}/cache", "LOGDIR": f"{tmp_path}/runs"}
    for name, value in (paths | {"RAY_API_SERVER_ADDRESS": cluster.address}).items():
        monkeypatch.setenv(name, value)
    if len(cluster.nodes) < 2:
        cluster.start_node()
    return RayUser(cluster, tmp_path, dict(os.environ))
