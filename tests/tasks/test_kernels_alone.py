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
from jobs.ranks import identity, process_group, program
from jobs.ranks.identity import Rank
from jobs.tasks import kernels as task

SHORT = ("task.kernels.repeats=3", "task.kernels.point_s=0.001", "task.kernels.sustained_s=0.004")


@pytest.fixture
def plan() -> KernelsPlan:
    """The plan of a sustained product, a copy, and attention that nothing here computes."""
    made = compose.compose(["task=kernels_tiny", "cluster.ranks_per_node=1", *SHORT])
    assert isinstance(made, KernelsPlan)
    copy = next(point for point in made.points if point.family == "memcpy" and point.operation == "device")
    product = next(point for point in made.points if point.is_sustained)
    flash = next(point for point in made.points if point.variant == "flash")
    points = [product, copy, replace(flash, name="unknown", variant="cudnn")]
    return replace(made, points=points)


class Watch:
    """A watchdog that notes what it is told, and allows for 500 s whatever it is told."""

    def __init__(self, who: Rank, stall: object, folder: Path, command: str, fail: object, *, gpu: int) -> None:
        self.told: list[Any] = [command, who.rank, gpu]

    def start(self, nodes: Sequence[str]) -> None:
        self.told.append(nodes)

    def expect_points(self, seconds: float) -> float:
        self.told.append(seconds)
        return 500.0

    def alive(self, phase: str, step: int, end: object) -> None:
        self.told.append((phase, step, end))


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Have the task's watchdog note what it is told."""
    made: list[Watch] = []

    def watch(*arguments: Any, **others: Any) -> Watch:
        made.append(Watch(*arguments, **others))
        return made[-1]

    monkeypatch.setattr(program, "Watchdog", watch)
    return made


def timeout_of(group: Any) -> timedelta:
    return cast(timedelta, group._get_backend(torch.device("cpu")).options._timeout)


def test_a_task_measures_its_points_between_start_and_stop(
    plan: KernelsPlan, watching: list[Watch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, limits = tmp_path / "plan.json", []
    path.write_text(plan_kinds.dumps(plan))
    system = {"num_ranks": 1, "commit": None}
    outcomes = measure.outcomes

    def measured(*arguments: Any, **others: Any) -> Any:
        timeout = timeout_of(distributed.group.WORLD)
        limits.append((torch.initial_seed(), timeout, others["meeting_s"]))
        return outcomes(*arguments, **others)

    monkeypatch.setattr(task.describe, "system", lambda plan: system)
    monkeypatch.setattr(measure, "outcomes", measured)
    with alone.started(monkeypatch, path, "--trial", "0"):
        task.main()
    events = reader.read(tmp_path / "result_0.txt")[0]
    found = [(event.key, event.value, event.metadata) for event in events]
    assert [key for key, _, _ in found] == [
        *(mllog.INIT_START, mllog.SUBMISSION_ORG, mllog.SUBMISSION_PLATFORM, mllog.SEED, mllog.CONFIG_FILENAME),
        *("num_ranks", "software", mllog.KERNELS_ASKED, mllog.INIT_STOP, mllog.RUN_START, mllog.KERNEL_MEASURED),
        *(mllog.KERNEL_MEASURED, mllog.KERNEL_FAILED, mllog.RUN_STOP),
    ]
    of = {key: (value, metadata) for key, value, metadata in found}
    assert of[mllog.SEED][0] == plan.trials[0].seed and of["software"][0] == {"torch": torch.__version__}
    assert of[mllog.CONFIG_FILENAME][0] == "task/kernels_tiny.yaml"
    names = [point.name for point in plan.points]
    assert of[mllog.KERNELS_ASKED][0] == names and of[mllog.KERNELS_ASKED][1]["tolerance"] is None
    about = [(value, metadata) for key, value, metadata in found if key == mllog.KERNEL_MEASURED]
    assert [value for value, _ in about] == names[:2]
    for point, (_, metadata) in zip(plan.points, about, strict=False):
        planned = {name: value for name, value in codec.plain(point).items() if name != "name"}
        assert planned.items() <= metadata.items() and metadata["rank"] == 0 and metadata["n"] >= 3
    assert of[mllog.KERNEL_FAILED][0] == "unknown" and of[mllog.KERNEL_FAILED][1]["reason"].startswith("rank 0: ")
    assert of[mllog.RUN_STOP][1]["status"] == "success"
    (watch,) = watching
    both = [("measuring", number, None) for number in (0, 0, 1, 1, 2, 2)]
    assert watch.told == ["trial 0", 0, 0, [identity.node_name()], 0.005, *both, ("saving", 3, None)]
    assert limits == [(plan.trials[0].seed, timedelta(seconds=2000), 2000.0)]


def test_without_a_watchdog_other_ranks_are_waited_for_two_minutes(
    plan: KernelsPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that writes no log describes nothing; the numbers that it draws are its own."""
    given: list[Any] = []
    joins = {"join": lambda plan, who: torch.device("cpu"), "leave": lambda: given.append("left")}
    for name, stand_in in joins.items():
        monkeypatch.setattr(process_group, name, stand_in)
    monkeypatch.setattr(measure, "gathered", lambda value: given.append(value))
    monkeypatch.setattr(measure, "outcomes", lambda *_, **others: given.append(others) or [])
    monkeypatch.setattr(task, "describe_kernels", None)
    who = Rank(2, 2, 4, "", 0)
    with mllog.Writer(None) as log:
        task.run(plan, plan.trials[0], who, log, tmp_path)
    assert given == [None, {"alive": task.nobody_asks, "meeting_s": 120.0}, None, "left"]
    assert torch.initial_seed() == plan.trials[0].seed + 2


def test_a_plan_without_kernels_is_refused(plan: KernelsPlan) -> None:
    assert task.required(plan) is plan.config.task.kernels
    plan.config.task.kernels = None
    with pytest.raises(ConfigError, match="the plan names no kernels"):
        task.required(plan)


def test_a_gpu_s_software_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert task.versions() == {"torch": torch.__version__}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91002)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    expected = {"torch": torch.__version__, "cuda": "13.0", "cudnn": "91002", "nccl": "2.27.3"}
    assert task.versions() == expected and json.dumps(expected)


def test_the_first_ranks_are_a_group_of_their_own() -> None:
    """Only they create it, and it waits as long as it is told."""
    with alone.joined():
        group = measure._first_ranks(1, 7.0)
        assert group is not None and distributed.get_process_group_ranks(group) == [0]
        assert group is not distributed.group.WORLD
        assert timeout_of(group) == timedelta(seconds=7)
        assert measure.gathered("mine", group) == measure.gathered("mine") == ["mine"]
