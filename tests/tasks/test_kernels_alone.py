"""A kernels task of one rank, in this process: its log says what was measured, and its watchdog outlasts it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import distributed

from bench.contract import codec, mllog, plan_kinds
from bench.contract.plan_kinds import KernelsPlan
from bench.errors import ConfigError
from bench.mlperf import reader
from bench.planning import compose
from helpers import alone
from jobs.kernels import measure
from jobs.profiles import nsys
from jobs.ranks import identity, process_group, program
from jobs.ranks.identity import Rank
from jobs.tasks import kernels as task

SHORT_RUN = ("task.kernels.repeats=3", "task.kernels.point_s=0.001", "task.kernels.sustained_s=0.004")


@pytest.fixture
def plan() -> KernelsPlan:
    """The plan of a sustained product, a copy, and attention that no backend here supports."""
    created = compose.compose(["task=kernels_tiny", "cluster.ranks_per_node=1", *SHORT_RUN])
    assert isinstance(created, KernelsPlan)
    copy = next(point for point in created.points if point.family == "memcpy" and point.operation == "device")
    product = next(point for point in created.points if point.is_sustained)
    flash = next(point for point in created.points if point.variant == "flash")
    points = [product, copy, replace(flash, name="unknown", variant="cudnn")]
    return replace(created, points=points)


class Watch:
    """A fake watchdog that records its calls, with a limit of 500 s."""

    def __init__(self, who: Rank, stall: object, folder: Path, command: str, fail: object, *, gpu: int) -> None:
        self.calls: list[Any] = [command, who.rank, gpu]

    def start(self, nodes: Sequence[str]) -> None:
        self.calls.append(nodes)

    def expect_points(self, seconds: float) -> float:
        self.calls.append(seconds)
        return 500.0

    def alive(self, phase: str, step: int, end: object) -> None:
        self.calls.append((phase, step, end))


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Replace the task's watchdog by a fake one."""
    created: list[Watch] = []

    def watch(*arguments: Any, **others: Any) -> Watch:
        created.append(Watch(*arguments, **others))
        return created[-1]

    monkeypatch.setattr(program, "Watchdog", watch)
    return created


def timeout_of(group: Any) -> timedelta:
    return cast(timedelta, group._get_backend(torch.device("cpu")).options._timeout)


@pytest.mark.parametrize("under_nsys", [False, True])
def test_the_process_exits_with_its_program_unless_nsys_started_it(
    plan: KernelsPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, under_nsys: bool
) -> None:
    path, exits = tmp_path / "plan.json", []
    path.write_text(plan_kinds.dumps(plan))
    if under_nsys:
        monkeypatch.setenv(nsys.INSIDE, "1")
    with alone.started(monkeypatch, path, "--trial", "0"):
        monkeypatch.setattr(program, "exit_process", lambda: exits.append("exit"))
        with program.begun("a program", None, KernelsPlan):
            assert not exits
    assert exits == ([] if under_nsys else ["exit"])


@pytest.mark.long
def test_points_are_measured_between_run_start_and_run_stop(
    plan: KernelsPlan, watching: list[Watch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, limits = tmp_path / "plan.json", []
    path.write_text(plan_kinds.dumps(plan))
    system = {"num_ranks": 1, "commit": None}
    outcomes = measure.measure_points

    def measured(*arguments: Any, **others: Any) -> Any:
        timeout = timeout_of(distributed.group.WORLD)
        limits.append((torch.initial_seed(), timeout, others["timeout_s"]))
        return outcomes(*arguments, **others)

    monkeypatch.setattr(task.describe, "system", lambda plan: system)
    monkeypatch.setattr(measure, "measure_points", measured)
    with alone.started(monkeypatch, path, "--trial", "0"):
        task.main()
    events = reader.read(tmp_path / "result_0.txt")[0]
    actual = [(event.key, event.value, event.metadata) for event in events]
    assert [key for key, _, _ in actual] == [
        *(mllog.INIT_START, mllog.SUBMISSION_ORG, mllog.SUBMISSION_PLATFORM, mllog.SEED, mllog.CONFIG_FILENAME),
        *("num_ranks", "software", mllog.KERNELS_REQUESTED, mllog.INIT_STOP, mllog.RUN_START, mllog.KERNEL_MEASURED),
        *(mllog.KERNEL_MEASURED, mllog.KERNEL_FAILED, mllog.RUN_STOP),
    ]
    by_key = {key: (value, metadata) for key, value, metadata in actual}
    assert by_key[mllog.SEED][0] == plan.trials[0].seed and by_key["software"][0] == {"torch": torch.__version__}
    assert by_key[mllog.CONFIG_FILENAME][0] == "task/kernels_tiny.yaml"
    names = [point.name for point in plan.points]
    assert by_key[mllog.KERNELS_REQUESTED][0] == names and by_key[mllog.KERNELS_REQUESTED][1]["tolerance"] is None
    about = [(value, metadata) for key, value, metadata in actual if key == mllog.KERNEL_MEASURED]
    assert [value for value, _ in about] == names[:2]
    for point, (_, metadata) in zip(plan.points, about, strict=False):
        planned = {name: value for name, value in codec.plain(point).items() if name != "name"}
        assert planned.items() <= metadata.items() and metadata["rank"] == 0 and metadata["n"] >= 3
    assert by_key[mllog.KERNEL_FAILED][0] == "unknown" and by_key[mllog.KERNEL_FAILED][1]["reason"].startswith(
        "rank 0: "
    )
    assert by_key[mllog.RUN_STOP][1]["status"] == "success"
    (watch,) = watching
    both = [("measuring", number, None) for number in (0, 0, 1, 1, 2, 2)]
    assert watch.calls == ["trial 0", 0, 0, [identity.node_name()], 0.005, *both, ("saving", 3, None)]
    assert limits == [(plan.trials[0].seed, timedelta(seconds=2000), 2000.0)]


def test_without_a_watchdog_ranks_wait_two_minutes(
    plan: KernelsPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank without a log describes nothing; its random seed is its own."""
    given: list[Any] = []
    joins = {"join": lambda plan, who: torch.device("cpu"), "shut_down": lambda: given.append("left")}
    for name, stand_in in joins.items():
        monkeypatch.setattr(process_group, name, stand_in)
    monkeypatch.setattr(measure, "all_gather", lambda value: given.append(value))
    monkeypatch.setattr(measure, "measure_points", lambda *_, **others: given.append(others) or [])
    monkeypatch.setattr(task, "describe_kernels", None)
    who = Rank(2, 2, 4, "", 0)
    with mllog.Writer(None) as log:
        task.run(plan, plan.trials[0], who, log, tmp_path)
    assert given == [None, {"alive": task.ignore_progress, "timeout_s": 120.0}, None, "left"]
    assert torch.initial_seed() == plan.trials[0].seed + 2


def test_a_plan_without_kernels_is_refused(plan: KernelsPlan) -> None:
    assert task.required(plan) is plan.config.task.kernels
    plan.config.task.kernels = None
    with pytest.raises(ConfigError, match="the plan has no block task.kernels"):
        task.required(plan)


def test_software_versions_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert task.versions() == {"torch": torch.__version__}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91002)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    expected = {"torch": torch.__version__, "cuda": "13.0", "cudnn": "91002", "nccl": "2.27.3"}
    assert task.versions() == expected and json.dumps(expected)


def test_the_first_ranks_have_a_process_group() -> None:
    """Only they create it, with the given time-out."""
    with alone.joined():
        group = measure._first_ranks(1, 7.0)
        assert group is not None and distributed.get_process_group_ranks(group) == [0]
        assert group is not distributed.group.WORLD
        assert timeout_of(group) == timedelta(seconds=7)
        assert measure.all_gather("mine", group) == measure.all_gather("mine") == ["mine"]
