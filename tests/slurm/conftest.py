"""A real Slurm for the tests of this folder: booted once per session, in its own folder and on its own ports."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import Cluster, describe
from user import SHORT, User


@pytest.fixture(scope="session")
def tiny_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system that is soon full, or None where mounting is not allowed.

    It is made before the nodes boot, since they see what was mounted then.
    """
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], capture_output=True, check=False
    )
    yield folder if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tiny_disk: Path | None) -> Path:
    if tiny_disk is None:
        pytest.skip("a small disk needs mount, which is not allowed here")
    return tiny_disk


@pytest.fixture(scope="session")
def cluster(tiny_disk: Path | None) -> Iterator[Cluster]:
    """Boot it. Where it could run, a boot that fails is an error; it is skipped only where it cannot."""
    if os.geteuid() != 0:
        pytest.skip("a real Slurm needs root: slurmd starts jobs under their users' names")
    if not shutil.which("apt-get") and not shutil.which("slurmctld"):
        pytest.skip("a real Slurm needs Debian: here are neither slurmctld nor apt-get")
    folder = Path(tempfile.mkdtemp(prefix="bench-slurm-", dir="/tmp"))  # not tmp_path: Unix sockets need it short
    booted = describe(folder)
    try:
        booted.boot()
        yield booted
    finally:
        booted.remove()


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
    cache, home = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("first")
    user = User(cluster, cache, home)
    user.end(user.launch(*SHORT, "task.training.max_steps=20"), "COMPLETED", timeout_s=600)
    return cache


@pytest.fixture
def user(cluster: Cluster, cache: Path, tmp_path: Path) -> User:
    """Somebody with an empty home."""
    return User(cluster, cache, tmp_path)
