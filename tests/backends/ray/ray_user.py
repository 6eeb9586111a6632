"""A user who submits runs to the test cluster: their commands, and the content of run folders."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, until

from helpers import answers
from helpers.paths import ROOT

SHORT_RUN = (
    *("task=lora_tiny", "cluster=ray_test", "launch.health=false", "task.training.target_eval_loss=null"),
    *("task.benchmark=null", "recipe.eval_every_samples=160", "recipe.eval_skip=0", "data.eval_rows=16"),
    "recipe.log_every_steps=5",
)
"""Trials of seconds: no target to reach."""


@dataclass(frozen=True)
class Run:
    """A run's folder, and the job that works on it."""

    folder: Path
    job: str

    @property
    def status(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / "ledger.json").read_text()))

    def trains(self) -> bool:
        """Return whether trial 0 trains: its clock runs."""
        log = self.folder / "result_0.txt"
        return log.exists() and '"train_loss"' in log.read_text()

    def output(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("rank_logs/*")]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def processes(self, words: str = "") -> list[int]:
        """Return the processes that have the run folder on their command line or, like ranks, as working folder."""
        pids = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_ours = str(self.folder) in line or (place / "cwd").resolve() == self.folder
            except OSError:
                continue
            if is_ours and words in line:
                pids.append(int(place.name))
        return pids


@dataclass(frozen=True)
class RayUser:
    cluster: Cluster
    home: Path
    env: dict[str, str]

    def types(self, *words: object, module: str = "bench", code: int | None = 0) -> "subprocess.CompletedProcess[str]":
        """Run `runstop …` and return the finished process."""
        argv = [sys.executable, "-m", module, *map(str, words)]
        env = self.env | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, env=env, cwd=self.home, capture_output=True, text=True, timeout=600, check=False)
        assert code is None or done.returncode == code, f"{argv}\n{done.stdout}{done.stderr}\n{self.cluster.logs()}"
        return done

    def launch(self, *overrides: str) -> Run:
        """Submit a run and return at once."""
        output = self.types(*SHORT_RUN, *overrides, module="bench.launch").stdout
        match = re.search(r"^job (\S+): .* results in (.+)$", output, re.MULTILINE)
        assert match is not None, output
        return Run(self.home / match[2], match[1])

    def until_ended(self, run: Run, timeout_s: float = 240) -> None:
        """Wait for the final status of a run, and until none of its processes is left."""
        until(lambda: run.status and not run.processes(), timeout_s, lambda: f"{run.status}{run.output()}")

    def until_trains(self, run: Run) -> None:
        until(run.trains, 240, run.output)

    def why(self, run: Run) -> dict[str, Any]:
        return answers.one(self.types("why", run.folder, "--json", code=None).stdout)
