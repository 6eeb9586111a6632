"""A Kubernetes cluster that cluster.sh boots, with the test image on its nodes, and a user who is not root."""

import fcntl
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kube_image

from helpers import answers
from helpers.paths import ROOT

SCRIPT = Path(__file__).parent / "cluster.sh"
PROGRAMS = Path(os.environ.get("RUNSTOP_KUBERNETES") or Path("~/.cache/runstop/kubernetes-1.20.2").expanduser())
USER = 1000
"""The user id that submits runs and runs pods."""
AS_USER = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
"""The command that switches to this user, who may read this machine's Python in any folder."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two nodes, node-1 and node-2, without GPUs and without DNS."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"RUNSTOP_KUBERNETES_DIR": str(self.folder), "KUBECONFIG": str(self.folder / "kubeconfig")}

    def manage(self, *verb: str) -> None:
        done = subprocess.run([SCRIPT, *verb], env=self.env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{SCRIPT.name} {' '.join(verb)}: exit code {done.returncode}\n{done.stderr}"

    def kubectl(self, *words: object, check: bool = True, stdin: str = "") -> str:
        argv = ["kubectl", *map(str, words)]
        done = subprocess.run(argv, env=self.env, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def get(self, *words: object) -> list[dict[str, Any]]:
        """Return objects, for example `get("pods", "-l", "runstop/run=a")`."""
        return list(json.loads(self.kubectl("get", *words, "--output", "json"))["items"])

    def clear(self) -> None:
        """Delete every object of a test, and bring back what a test has stopped."""
        self.manage("up")
        kinds = "jobs,pods,services,resourcequotas,persistentvolumeclaims"
        self.kubectl("delete", kinds, "--all", "--force", "--grace-period=0", "--ignore-not-found")
        self.kubectl("delete", "configmaps", "-l", "app.kubernetes.io/managed-by=runstop")
        until(lambda: not self.get("pods"), 60)
        until(self.is_ready, 120)

    def is_ready(self) -> bool:
        """Return whether pods can start on every node; after an outage of the API server this takes a while."""
        nodes = self.get("nodes")
        conditions = [{one["type"]: one["status"] for one in node["status"]["conditions"]} for node in nodes]
        is_tainted = any(node["spec"].get("taints") for node in nodes)
        return not is_tainted and all(one.get("Ready") == "True" for one in conditions)

    def load_image(self) -> None:
        """Put the image onto the nodes; of its lower layer only what they do not have yet."""
        with tempfile.TemporaryDirectory(prefix="runstop-image-") as scratch:
            whole, small = Path(scratch, "whole.tar"), Path(scratch, "small.tar")
            kube_image.write(
                whole,
                PROGRAMS / "pause",
            )
            base = _without_base(whole, small)
            for node in ("node-1", "node-2"):
                ctr = ["ctr", "--address", f"{self.folder}/{node}/containerd.sock", "--namespace", "k8s.io"]
                known = subprocess.run(
                    [*ctr, "content", "list", "-q"], capture_output=True, text=True, check=True
                ).stdout
                archive = small if base in known.split() else whole
                subprocess.run([*ctr, "images", "import", archive], capture_output=True, check=True)


def _without_base(whole: Path, small: Path) -> str:
    """Write an archive without its largest blob, and return that one's digest."""
    with tarfile.open(whole) as source, tarfile.open(small, "w") as target:
        largest = max(source, key=lambda entry: entry.size)
        for entry in source:
            if entry is not largest:
                target.addfile(entry, source.extractfile(entry))
    return f"sha256:{Path(largest.name).name}"


@contextmanager
def running() -> Iterator[Cluster]:
    """Boot a cluster for as long as the block takes; with RUNSTOP_KUBERNETES_DIR use the one that runs there."""
    own = os.environ.get("RUNSTOP_KUBERNETES_DIR")
    folder = Path(own or tempfile.mkdtemp(prefix="runstop-kube-", dir="/tmp"))
    cluster = Cluster(folder=folder)
    with (PROGRAMS / "lock").open("w") as lock:  # nodes have one address and one store of images on this machine
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            cluster.manage("up")
            cluster.load_image()
            yield cluster
        finally:
            if own is None:
                cluster.manage("down")


@dataclass(frozen=True)
class Run:
    """A run's folder, and its job."""

    folder: Path
    job: str

    def json(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def name(self) -> str:
        return self.job.rpartition("/")[2]

    @property
    def outcome(self) -> str:
        return str(self.json("status.json").get("outcome", ""))

    def output(self) -> str:
        """Return what its ranks and its runner printed, for the message of a failed test."""
        logs = sorted(self.folder.glob("rank_logs/*.out"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)


@dataclass(frozen=True)
class User:
    """A user of the cluster on this machine."""

    cluster: Cluster
    home: Path
    overrides: tuple[str, ...] = ()

    @property
    def env(self) -> dict[str, str]:
        paths = {name: str(self.home / folder) for name, folder in FOLDERS.items()}
        return self.cluster.env | paths | {"PYTHONPATH": str(ROOT), "HOME": str(self.home), "TMPDIR": "/tmp"}

    def types(
        self, *words: object, module: str = "bench", code: int | None = 0, timeout_s: float = 600
    ) -> "subprocess.CompletedProcess[str]":
        """Run `runstop …` and return the finished process."""
        argv = [*AS_USER, sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert code is None or done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def launch(self, *overrides: str, name: str = "run") -> Run:
        """Submit a run and return at once."""
        folder = self.home / "runs" / name
        output = self.types(*self.overrides, *overrides, f"launch.folder={folder}", module="bench.launch").stdout
        return Run(folder, output.split()[1].rstrip(":"))

    def why(self, run: Run) -> dict[str, Any]:
        return answers.one(self.types("why", run.folder, "--json", code=None).stdout)

    def state(self, run: Run) -> dict[str, Any]:
        """Return the entry of a run in `runstop runs`."""
        output = self.types("runs", run.folder.parent, "--json").stdout
        return next(one for one in answers.read(output) if one["run"] == str(run.folder))

    def end(self, run: Run, outcome: str, timeout_s: float = 600) -> None:
        """Wait for the final status of a run; an interrupted run may resume by itself."""
        until(lambda: run.outcome not in {"", "interrupted"} - {outcome}, timeout_s, run)
        assert run.outcome == outcome, f"{run.json('status.json')}\n{run.output()}"


FOLDERS = {"DATADIR": "cache", "MODEL": "cache", "LOGDIR": "runs"}


@contextmanager
def user(cluster: Cluster, *overrides: str) -> Iterator[User]:
    """Create a home folder for a user, with the same path in pods."""
    with tempfile.TemporaryDirectory(prefix="runstop-home-", dir="/tmp", ignore_cleanup_errors=True) as home:
        for folder in (home, *(f"{home}/{name}" for name in {*FOLDERS.values()})):
            Path(folder).mkdir(exist_ok=True)
            Path(folder).chmod(0o755)
            os.chown(folder, USER, USER)
        yield User(cluster, Path(home), ("cluster=kubernetes_test", *overrides))


def until(happens: Callable[[], Any], timeout_s: float, run: Run | None = None) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{run.output() if run else ''}"
        time.sleep(0.3)


def trains(run: Run, steps: int = 1) -> Callable[[], bool]:
    """Return a condition: the trial has logged at least `steps` training steps."""
    log = run.folder / "result_0.txt"
    return lambda: log.exists() and log.read_text().count('"train_loss"') >= steps


def pods_of(cluster: Cluster, run: Run) -> Sequence[dict[str, Any]]:
    return cluster.get("pods", "--selector", f"runstop/run={run.name}")
