"""The test clusters of Slurm, Kubernetes and Ray, side by side on this machine, for one user who is not root.

    sudo -E python tests/helpers/places.py COMMAND…

boots all three, runs a command as that user, with an empty home in which DATADIR, MODEL and LOGDIR lie, and takes them
down again. With HOME_OF_PLACES=DIR the home is DIR, and stays. A place that cannot be booted here is left out.
"""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = {"DATADIR": "cache", "MODEL": "cache", "LOGDIR": "runs"}
for name in ("tests", *(f"tests/backends/{name}" for name in ("slurm", "kubernetes", "ray"))):
    sys.path.append(str(ROOT / name))

import cluster as ray  # noqa: E402
import kube_cluster as kubernetes  # noqa: E402
import slurm_cluster as slurm  # noqa: E402


@dataclass(frozen=True)
class Places:
    """What is there, and who may use it."""

    home: Path
    env: dict[str, str]

    def types(self, argv: Sequence[str], **how: Any) -> "subprocess.CompletedProcess[str]":
        """Return how a command of the user's ended; `how` is subprocess.run's."""
        command = [*kubernetes.AS_USER, *argv]
        return subprocess.run(command, env=self.env, cwd=self.home, text=True, check=False, **how)


def missing() -> list[str]:
    """Return what this machine lacks, as a reader can get it."""
    if os.geteuid() != 0:
        return ["root: it boots the nodes"]
    missing_programs = [] if shutil.which("apt-get") or shutil.which("slurmctld") else ["Slurm: Debian's packages"]
    if not (kubernetes.PROGRAMS / "kubelet").exists():
        missing_programs.append("Kubernetes: sudo -E tests/backends/kubernetes/build.sh builds it, once")
    missing_programs += [] if (ray.BIN / "ray").exists() else ["Ray: pip install 'runstop[ray]'"]
    if not any(user.pw_uid == kubernetes.USER for user in pwd.getpwall()):
        return [*missing_programs, f"a user with the id {kubernetes.USER}: useradd --uid {kubernetes.USER} somebody"]
    ids = [f"--reuid={kubernetes.USER}", f"--regid={kubernetes.USER}", "--clear-groups"]
    starts = subprocess.run(
        ["setpriv", *ids, sys.executable, "-c", "import bench, torch"], cwd=ROOT, capture_output=True, check=False
    )
    reads = f"a Python and a checkout that the user {kubernetes.USER} may read: {sys.executable}, {ROOT}"
    return missing_programs if starts.returncode == 0 else [*missing_programs, reads]


@contextmanager
def running(home: Path | None = None, *, kube: kubernetes.Cluster | None = None) -> Iterator[Places]:
    """Boot all three for as long as the block takes; `kube` is a Kubernetes that is there already."""
    with ExitStack() as stack:
        home = home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runstop-home-", dir="/tmp")))
        for folder in (home, *(home / name for name in {*FOLDERS.values()})):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
            os.chown(folder, kubernetes.USER, kubernetes.USER)
        os.environ["SUDO_USER"] = pwd.getpwuid(kubernetes.USER).pw_name  # cluster.sh gives this user an account
        env = stack.enter_context(slurm.running()).env
        env |= (kube or stack.enter_context(kubernetes.running())).env | {"SLURM_CONF": env["SLURM_CONF"]}
        env["RAY_API_SERVER_ADDRESS"] = stack.enter_context(ray.running(as_user=kubernetes.AS_USER)).address
        paths = {name: str(home / folder) for name, folder in FOLDERS.items()}
        paths |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": str(ROOT)}
        yield Places(home, env | paths | {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": "/tmp"})


if __name__ == "__main__":
    if lacks := missing():
        sys.exit("not here:\n" + "\n".join(f"  {one}" for one in lacks))
    kept = os.environ.get("HOME_OF_PLACES")
    with running(Path(kept) if kept else None) as places:
        sys.exit(places.types(sys.argv[1:]).returncode)
