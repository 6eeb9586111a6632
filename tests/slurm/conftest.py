"""A real Slurm for the tests of this folder: booted once per session, in its own folder and on its own ports."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import Cluster, running, small_disk
from user import User


@pytest.fixture(scope="session")
def tiny_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system that is soon full, or None where mounting is not allowed."""
    with small_disk(tmp_path_factory.mktemp("disk")) as disk:
        yield disk


@pytest.fixture(scope="session")
def cluster(tiny_disk: Path | None) -> Iterator[Cluster]:
    """Boot it. Where it could run, a boot that fails is an error; it is skipped only where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("a real Slurm needs root: slurmd starts jobs under their users' names")
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        pytest.skip("a real Slurm needs Debian: here are neither slurmctld nor apt-get")
    with running() as booted:
        yield booted


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the cluster, end all jobs and bring back the nodes."""
    booted = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if booted:
        booted.clear()


@pytest.fixture(scope="session")
def cache(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and base checkpoint of the short trials, made once by a job of their own."""
    cache = tmp_path_factory.mktemp("cache")
    User(cluster, cache, tmp_path_factory.mktemp("first")).prepare()
    return cache


@pytest.fixture
def user(cluster: Cluster, cache: Path, tmp_path: Path, tiny_disk: Path | None) -> User:
    """Somebody with an empty home."""
    return User(cluster, cache, tmp_path, tiny_disk)
