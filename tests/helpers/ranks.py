"""Start real ranks for a test, as srun or torchrun would."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.backends.local import free_port
from bench.contract import mllog, plan_kinds
from bench.contract.plan import Plan
from bench.mlperf import reader
from bench.planning import compose as composing
from helpers import environment, pool
from helpers.paths import ROOT

TINY_BASE_STEPS = 4
EVAL_ROWS = 21
"""Two whole batches of eight and a part of one; the task itself has 173."""
DEVICE = environment.variable("TEST_DEVICE", "cpu")
"""cuda runs the same tests over NCCL, on a machine with as many GPUs as ranks."""
SGD_RATE, SGD_EPS = 0.1, 1e8
SGD = (
    *("recipe.adam_beta1=0", f"recipe.adam_eps={SGD_EPS:g}", f"recipe.lr={SGD_RATE * SGD_EPS:g}"),
    *("recipe.weight_decay=0", "recipe.clip_grad=1e9"),
)
"""AdamW that is SGD with this rate: without a first moment, and with an eps so large that FP32 drops the second one."""


def have(num_ranks: int) -> bool:
    """Return whether this machine has a device for each rank; CPU ranks share the cores."""
    if DEVICE == "cpu":
        return True
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len(listed.splitlines()) >= num_ranks


def compose(tmp: Path, *overrides: str) -> Plan:
    """Return the plan of lora_tiny with few evaluation rows and a base trained for a few steps, cached below `tmp`."""
    paths = [f"cluster.paths.{name}={tmp}/cache" for name in ("data", "model", "logs")]
    plan = composing.compose([f"cluster.device={DEVICE}", *paths, f"data.eval_rows={EVAL_ROWS}", *overrides])
    if plan.base is not None:
        plan = dataclasses.replace(plan, base=dataclasses.replace(plan.base, max_steps=TINY_BASE_STEPS))
        plan.base.evaluation.at_steps.clear()
    return plan


def write(plan: Plan, folder: Path) -> Path:
    """Write the plan into a new run folder."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    return folder


def ended(plan: Plan, folder: Path, *command: str) -> list[tuple[int, str]]:
    """Run `python -m COMMAND` in the folder, once per rank of the plan; return exit codes and what was printed."""
    size = plan.world.num_ranks
    shared = os.environ | plan.environment | {"WORLD_SIZE": str(size), "MASTER_PORT": str(free_port())}
    return ended_in(folder, command, [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)])


def ended_in(
    folder: Path, command: Sequence[str], environments: Sequence[Mapping[str, str]], *, timeout_s: float = 600
) -> list[tuple[int, str]]:
    """Run `python -m COMMAND` in each environment at once; forked, but started where there are GPUs."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environments = [{**env, "PYTHONPATH": path} for env in environments]
    if DEVICE == "cpu":
        return pool.run(folder, command, environments, timeout_s=timeout_s)
    return finish([start(folder, command, env) for env in environments], timeout_s=timeout_s)


def start(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start `python -m COMMAND` in the folder, with nothing but the environment."""
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list["subprocess.Popen[str]"], *, timeout_s: float = 900) -> list[tuple[int, str]]:
    """Wait for every rank; return exit codes and what was printed."""
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def run(plan: Plan, folder: Path, *command: str) -> None:
    """Run a command on every rank and expect success."""
    for code, output in ended(plan, folder, *command):
        assert code == 0, output


def train_losses(log: Path) -> list[float]:
    """Return the training losses of a log, in order."""
    return [event.value for event in reader.read(log)[0] if event.key == mllog.TRAIN_LOSS]


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A tmpfs with the options, for as long as the block; needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)
