"""Somebody who works on the test cluster's login node: what they type, and what they then find in a run's folder."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booted import Cluster

from helpers.paths import ROOT

SHORT = (
    *(
        "cluster=slurm_test",
        "cluster.ranks_per_node=1",
        "launch.health=false",
        "task.training.target_eval_loss=null",
        "task.benchmark=null",
    ),
    *("recipe.eval_every_samples=160", "recipe.eval_skip=0", "data.eval_rows=16", "recipe.log_every_steps=5"),
)
"""Trials of seconds: two ranks, and no target to reach."""


@dataclass(frozen=True)
class Run:
    """A run's folder, and the job that works on it."""

    folder: Path
    job: str

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    @property
    def status(self) -> dict[str, Any]:
        return dict(self._json("status.json") or {})

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return list(self._json("ledger.json") or [])

    @property
    def outcomes(self) -> list[str]:
        return [entry["outcome"] for entry in self.ledger]

    @property
    def readable_ledger(self) -> list[dict[str, Any]]:
        """Return the ledger, or nothing if somebody has damaged it."""
        with suppress(ValueError):
            return self.ledger
        return []

    def _json(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def output(self) -> str:
        """Return everything that its jobs and ranks printed, for the message of a failed test."""
        logs = [*self.folder.glob("slurm-*.out"), *self.folder.glob("rank_logs/*")]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@dataclass(frozen=True)
class User:
    cluster: Cluster
    cache: Path
    """Where rows and base checkpoints are made, for all tests together."""
    home: Path
    disk: Path | None = None
    """A file system that is soon full, where mounting is allowed."""
    overrides: tuple[str, ...] = ()
    """What all their runs have, such as a container."""

    @property
    def env(self) -> dict[str, str]:
        paths = {"DATADIR": str(self.cache), "MODEL": str(self.cache), "LOGDIR": str(self.home / "runs")}
        return (
            self.cluster.env | paths | {"BENCH_PYTHON": sys.executable}
        )  # for plain sbatch; bench.launch says it by itself

    def types(self, *words: object, module: str = "bench", code: int | None = 0) -> "subprocess.CompletedProcess[str]":
        """Return what `python -m bench …` said."""
        argv = [sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=600, check=False
        )
        assert code is None or done.returncode == code, f"{argv}\n{done.stdout}{done.stderr}"
        return done

    def launch(self, *overrides: str) -> Run:
        """Submit a run and return at once."""
        return submitted(self.types(*self.overrides, *overrides, module="bench.launch").stdout, self.home)[0]

    def prepare(self) -> None:
        """Fill the cache, by a short job of its own."""
        self.end(self.launch(*SHORT, "task.training.max_steps=20"), "COMPLETED", timeout_s=600)

    def sbatch(self, script: Path, folder: Path | None = None, *, output: str | Path = "/dev/null") -> Run:
        """Submit a script as it is, without this project; its folder is there once it runs."""
        argv = ["sbatch", "--parsable", f"--output={output}", str(script), *([str(folder)] if folder else [])]
        done = subprocess.run(argv, env=self.env, cwd=self.home, capture_output=True, text=True, check=True)
        job = done.stdout.strip()
        if folder is None:
            until(lambda: [*self.home.glob(f"runs/*-{job}/ledger.json")], 60)
            folder = next(self.home.glob(f"runs/*-{job}"))
        return Run(folder, job)

    def end(self, run: Run, state: str, *, timeout_s: float = 300) -> None:
        """Wait until Slurm says that the job has ended, as `state`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        try:
            found = self.cluster.wait_for_state(run.job, ended, timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{run.output()}") from error
        assert found == state, f"{found}, not {state}\n{run.status}\n{run.output()}"

    def why(self, run: Run) -> dict[str, Any]:
        return dict(json.loads(self.types("why", run.folder, "--json", code=None).stdout))


def in_container(image: str) -> tuple[str, ...]:
    """Return overrides of runs in an image that holds Python 3.11 and torch; what else it lacks comes from here."""
    packages = sysconfig.get_path("purelib")
    mounts = json.dumps([f"{path}:{path}:ro" for path in dict.fromkeys((str(ROOT), packages))])
    path = f"+cluster.environment.PYTHONPATH={json.dumps(f'{ROOT}:{packages}')}"
    return ("container=pyxis", f"container.image={image}", f"container.mounts={mounts}", path)


def image_of(cluster: Cluster) -> tuple[str, str]:
    """Return the image for runs in containers, or nothing and why there are none on this cluster."""
    if "--container-image" not in cluster.run(["srun", "--help"]).stdout:
        return "", "Pyxis is not installed on this cluster (BENCH_SLURM_PLUGSTACK)"
    image = os.environ.get("BENCH_SLURM_IMAGE", "")
    return image, "" if image else "BENCH_SLURM_IMAGE names no image"


def submitted(printed: str, home: Path) -> list[Run]:
    """Return the runs that launching said it submitted, as far as its lines are complete."""
    found = re.findall(r"^job (\S+): .* results in (.+)\n", printed, re.MULTILINE)
    return [Run(home / folder, job) for job, folder in found]


def until(happens: Callable[[], Any], timeout_s: float, run: Run | None = None) -> None:
    """Wait for something."""
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{run.output() if run else ''}"
        time.sleep(0.1)


def training(run: Run, trial: int) -> Callable[[], bool]:
    """Return whether a trial trains: its clock runs."""
    log = run / f"result_{trial}.txt"
    return lambda: log.exists() and '"train_loss"' in log.read_text()
