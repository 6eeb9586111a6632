"""A user on the test cluster's login node: the commands they run, and the run folders they read."""

import json
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

from slurm_cluster import Cluster

from helpers import answers, environment
from helpers.paths import ROOT

SHORT_RUN = (
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
    """A run's folder and its job."""

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
        """Return the ledger, or an empty list if it is damaged."""
        with suppress(ValueError):
            return self.ledger
        return []

    def _json(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def output(self) -> str:
        """Return everything that its jobs and ranks printed, for the message of a failed test."""
        logs = [*self.folder.glob("slurm-*.out"), *filter(Path.is_file, self.folder.glob("rank_logs/*"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@dataclass(frozen=True)
class User:
    cluster: Cluster
    cache: Path
    """Folder of prepared rows and base checkpoints, shared by all tests."""
    home: Path
    disk: Path | None = None
    """A small file system, where mounting is allowed."""
    overrides: tuple[str, ...] = ()
    """Overrides of all runs of this user, such as a container."""

    @property
    def env(self) -> dict[str, str]:
        paths = {"DATADIR": str(self.cache), "MODEL": str(self.cache), "LOGDIR": str(self.home / "runs")}
        python = {"RUNSTOP_PYTHON": sys.executable}  # for plain sbatch; bench.launch sets it itself
        return self.cluster.env | paths | python

    def types(
        self, *words: object, module: str = "bench", code: int | None = 0, timeout_s: float = 600
    ) -> "subprocess.CompletedProcess[str]":
        """Run `runstop …` and return its output."""
        argv = [sys.executable, "-m", module, *map(str, words)]
        done = subprocess.run(
            argv, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert code is None or done.returncode == code, f"{argv}\n{done.stdout}{done.stderr}"
        return done

    def launch(self, *overrides: str) -> Run:
        """Submit a run and return at once."""
        return submitted(self.types(*self.overrides, *overrides, module="bench.launch").stdout, self.home)[0]

    def prepare(self) -> None:
        """Fill the cache with a short job."""
        self.end(self.launch(*SHORT_RUN, "task.training.max_steps=20"), "COMPLETED", timeout_s=600)

    def sbatch(self, script: Path, folder: Path | None = None, *, output: str | Path = "/dev/null") -> Run:
        """Submit a script with plain sbatch; its folder exists once it runs."""
        argv = ["sbatch", "--parsable", f"--output={output}", str(script), *([str(folder)] if folder else [])]
        done = subprocess.run(argv, env=self.env, cwd=self.home, capture_output=True, text=True, check=True)
        job = done.stdout.strip()
        if folder is None:
            until(lambda: [*self.home.glob(f"runs/*-{job}/ledger.json")], 60)
            folder = next(self.home.glob(f"runs/*-{job}"))
        return Run(folder, job)

    def end(self, run: Run, state: str, *, timeout_s: float = 300) -> None:
        """Wait until the job has ended; require `state`."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        try:
            ended_as = self.cluster.wait_for_state(run.job, ended, timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{run.output()}") from error
        assert ended_as == state, f"{ended_as}, not {state}\n{run.status}\n{run.output()}"

    def why(self, run: Run) -> dict[str, Any]:
        return answers.one(self.types("why", run.folder, "--json", code=None).stdout)


def in_container(image: str) -> tuple[str, ...]:
    """Return overrides of runs in an image with Python 3.11 and torch; other packages are mounted."""
    packages = sysconfig.get_path("purelib")
    mounts = json.dumps([f"{path}:{path}:ro" for path in dict.fromkeys((str(ROOT), packages))])
    path = f"+cluster.environment.PYTHONPATH={json.dumps(f'{ROOT}:{packages}')}"
    return ("container=pyxis", f"container.image={image}", f"container.mounts={mounts}", path)


def image_of(cluster: Cluster) -> tuple[str, str]:
    """Return the image for runs in containers, or nothing and why there are none on this cluster."""
    if "--container-image" not in cluster.run(["srun", "--help"]).stdout:
        return "", "Pyxis is not installed on this cluster (RUNSTOP_SLURM_PLUGSTACK)"
    image = environment.variable("SLURM_IMAGE")
    return image, "" if image else "RUNSTOP_SLURM_IMAGE is not set"


def submitted(printed: str, home: Path) -> list[Run]:
    """Return the submitted runs in the output of launch; incomplete lines are ignored."""
    submissions = re.findall(r"^job (\S+): .* results in (.+)\n", printed, re.MULTILINE)
    return [Run(home / folder, job) for job, folder in submissions]


def until(happens: Callable[[], Any], timeout_s: float, run: Run | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{run.output() if run else ''}"
        time.sleep(0.1)


def training(run: Run, trial: int) -> Callable[[], bool]:
    """Return a function that tests whether a trial is in its timed part."""
    log = run / f"result_{trial}.txt"
    return lambda: log.exists() and '"train_loss"' in log.read_text()
