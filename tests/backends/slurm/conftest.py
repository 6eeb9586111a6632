"""A real Slurm for the tests of this folder: booted once per session, in its own folder and on its own ports."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from booted import Cluster, running, small_disk
from faults import FAULTS
from matrix import Played, in_home, play
from user import User


@pytest.fixture(scope="session")
def cluster(tiny_disk: Path | None) -> Iterator[Cluster]:
    """Boot it. Where it could run, a boot that fails is an error; it is skipped only where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("a real Slurm needs root: slurmd starts jobs under their users' names")
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        pytest.skip("a real Slurm needs Debian: here are neither slurmctld nor apt-get")
    with running() as booted:
        yield booted


@pytest.fixture(scope="session")
def background(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs are submitted that go on beside the tests; no test may then break nodes or partition batch."""
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="session")
def tiny_disk(background: Path) -> Iterator[Path | None]:
    """A file system that is soon full, or None where mounting is not allowed; jobs go on there too."""
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
    """Somebody who has filled the cache with rows and base checkpoint of the short trials, by a job of their own."""
    user = User(cluster, tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("first"), tiny_disk)
    user.prepare()
    return user


@pytest.fixture(scope="session")
def busy_user(first_user: User, background: Path) -> User:
    """Somebody whose jobs go on beside the tests."""
    return replace(first_user, home=background)


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest, busy_user: User) -> Iterator[dict[str, "Future[Played]"]]:
    """The rows of the fault matrix that the gate asks for: they are played while other tests wait for their jobs."""
    names = {item.callspec.params.get("row") for item in request.session.items if hasattr(item, "callspec")}
    chosen = [fault for fault in FAULTS if fault.in_gate and fault.name in names]
    with ThreadPoolExecutor(2) as pool:
        yield {fault.name: pool.submit(play, in_home(busy_user, fault), fault) for fault in chosen}


@pytest.fixture
def user(first_user: User, played: object, tmp_path: Path) -> User:
    """Somebody with an empty home; the rows of the gate are played meanwhile."""
    return replace(first_user, home=tmp_path)
