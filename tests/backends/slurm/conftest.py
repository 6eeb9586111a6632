"""A real Slurm for the tests of this folder: booted once per session, in a separate folder and on separate ports."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fault_matrix import Played, in_home, play
from faults import FAULTS
from slurm_cluster import Cluster, running, small_disk
from user import User


@pytest.fixture(scope="session")
def cluster(tiny_disk: Path | None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Boot Slurm. Skip where it cannot run; elsewhere a failed boot is an error."""
    if os.geteuid() != 0:
        pytest.skip("a real Slurm needs root: slurmd starts jobs under their users' names")
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        pytest.skip("a real Slurm needs Debian: neither slurmctld nor apt-get is installed")
    loses_nodes = any(test.get_closest_marker(name) for test in request.session.items for name in ("slow", "faults"))
    with running(loses_nodes=loses_nodes) as booted:
        yield booted


@pytest.fixture(scope="session")
def background(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of jobs that run in the background; no test may break nodes or partition batch meanwhile."""
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="session")
def tiny_disk(background: Path) -> Iterator[Path | None]:
    """A small file system, or None where mounting is not allowed; background jobs use it too."""
    (background / "disk").mkdir()
    with small_disk(background / "disk") as disk:
        yield disk


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest, background: Path) -> Iterator[None]:
    """After a test that used the cluster, end its jobs and bring back the nodes."""
    booted = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if booted:
        booted.clear(spare=background)


@pytest.fixture(scope="session")
def first_user(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_disk: Path | None) -> User:
    """A user whose first job has filled the cache with rows and base checkpoint of the short trials."""
    user = User(cluster, tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("first"), tiny_disk)
    user.prepare()
    return user


@pytest.fixture(scope="session")
def busy_user(first_user: User, background: Path) -> User:
    """A user whose jobs run in the background."""
    return replace(first_user, home=background)


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest, busy_user: User) -> Iterator[dict[str, "Future[Played]"]]:
    """The rows of the fault matrix in the gate; they run while other tests wait for their jobs."""
    names = {item.callspec.params.get("row") for item in request.session.items if hasattr(item, "callspec")}
    chosen = [fault for fault in FAULTS if fault.in_gate and fault.name in names]
    with ThreadPoolExecutor(2) as pool:
        yield {fault.name: pool.submit(play, in_home(busy_user, fault), fault) for fault in chosen}


@pytest.fixture
def user(first_user: User, played: object, tmp_path: Path) -> User:
    """A user with an empty home; the rows of the gate run meanwhile."""
    return replace(first_user, home=tmp_path)
