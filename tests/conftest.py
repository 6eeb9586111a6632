"""Shared fixtures: start programs as a user does, a base model that is trained once, the log of a trial."""

import gc
import os
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from bench.contract import mllog
from bench.contract.mllog import Binding, Writer
from bench.planning import compose
from helpers import cached_configs, examples, ranks
from helpers.interpreter import faster
from helpers.written_log import INPUTS, ONCE

pytest_plugins = ("helpers.cpu_report",)
compose._composed = cached_configs.cached(compose._composed)
compose._of_choices = cached_configs.remembered(compose._of_choices)
for library in ("OMP", "OPENBLAS", "MKL"):
    # Read when torch and numpy are loaded. Tensors in tests are tiny, so threads would only add overhead.
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
if ranks.DEVICE == "cpu":
    # Triton kernels run in its interpreter. Triton reads this on import, and megatron-core imports it, too.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # messages have short commands
settings.load_profile(examples.UNTIMED)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it


TIMEOUTS_S = {"slurm": 1800, "trains": 900}
"""Timeouts of tests with these marks, on a busy machine; pyproject.toml has the timeout of all others."""


NUM_OBJECTS = 200_000
"""How many new objects trigger a garbage collection; the default of 700 takes 7 % of the CPU time."""
gc.set_threshold(NUM_OBJECTS)


def pytest_collection_finish() -> None:
    """Exclude all imported and collected objects from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start ranks last, with longer timeouts."""
    items.sort(key=lambda item: item.get_closest_marker("trains") is not None)
    for item in items:
        for mark, timeout_s in TIMEOUTS_S.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.timeout(timeout_s))


Spawn = Callable[..., "subprocess.Popen[str]"]
"""Takes a command and additional environment variables."""


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start programs as a user does, each in a new session; programs that still run after the test are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(argv: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            argv,
            cwd=ranks.ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def interpreter_that_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch convert numbers for Triton's interpreter, since torch rounds as a GPU does.

    Triton 3.7.1's own conversion cuts BF16 off, and loses the carry where FP8 rounds up to the next power of two.
    """
    if ranks.DEVICE == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "_convert_float", _converted_by_torch)
        for replaced in faster(interpreter):
            monkeypatch.setattr(*replaced)


def _converted_by_torch(data: Any, source: Any, target: Any, _rounding: Any) -> Any:
    """Return an array's numbers of another Triton type; both types as the integers of their size, save FP32."""
    import numpy as np
    import torch

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    raw = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}"))
    values = raw.view(types[source.name]).to(types[target.name])
    return values.view(integers[values.itemsize]).numpy().view(f"u{values.itemsize}")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache has prepared rows and a barely trained base model."""
    tmp = tmp_path_factory.mktemp("prepared")
    plan = ranks.compose(tmp, "cluster.ranks_per_node=1")
    ranks.run(plan, ranks.write(plan, tmp / "prepare"), "jobs.tasks.prepare", "plan.json")
    return tmp


@pytest.fixture
def written_log(tmp_path: Path) -> Callable[..., Path]:
    """Write a trial with one evaluation per loss, by the official schedule; a changed key that is None is left out.

    `after` are the records after run_stop; `inputs` are the checksums that a log of an attempt names.
    """

    def write(
        *,
        name: str = "result_0.txt",
        evals: tuple[float, ...] = (0.95, 0.93, 0.92),
        status: str = "success",
        binding: Binding | None = None,
        attached: Sequence[Path] = (),
        after: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] = INPUTS,
        **changes: Any,
    ) -> Path:
        path = tmp_path / name
        with Writer(path, binding) as log:
            log.start(mllog.INIT_START)
            for key, value in (ONCE | changes).items():
                if value is not None:
                    log.event(key, value)
            for each, sha256 in inputs.items() if binding else ():
                log.event(mllog.INPUT_SHA256, sha256, input=each)
            for file in attached:
                log.attach(file)
            log.stop(mllog.INIT_STOP)
            log.start(mllog.RUN_START)
            log.start(mllog.BLOCK_START, samples_count=0)
            for number, loss in enumerate(evals, 1):
                now = {"samples_count": 1152 + 384 * number, "step": 144 + 48 * number}
                log.event(mllog.TRAIN_LOSS, loss + 0.1, lr=4e-4, **now)
                log.event(mllog.TRACKED_STATS, {"throughput": 2.5, "train_step_time": 3.2}, **now)
                log.stop(mllog.BLOCK_STOP, **now)
                log.start(mllog.EVAL_START, **now)
                log.event(mllog.EVAL_ACCURACY, loss, **now)
                log.stop(mllog.EVAL_STOP, **now)
            log.finish(status, samples_count=1152 + 384 * len(evals))
            for key, value in (after or {}).items():
                log.event(key, value)
        return path

    return write
