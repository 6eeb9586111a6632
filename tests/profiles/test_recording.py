"""Only rank 0 profiles steps; a GPU is synchronized before its profile ends."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract import mllog
from bench.contract.modules import Part, Phase
from bench.contract.schema import ProfileKind
from helpers import alone
from jobs import profiles
from jobs.profiles import Profile, ranges, recording


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone.joined():
        yield


def profile_in(folder: Path) -> Profile:
    names = ("kernels.txt", "modules.json", "profiles/trace.json.gz")
    return Profile(ProfileKind.modules, *(folder / name for name in names))


@pytest.mark.usefixtures("one_rank")
def test_three_steps_are_recorded_and_two_of_them_are_timed(tmp_path: Path) -> None:
    """The forward pass has a GEMM in an explicit range, and a linear with the range of its module."""
    profile, linear, x = profile_in(tmp_path), torch.nn.Linear(8, 8), torch.ones(4, 8)
    steps: list[bool] = []

    def step() -> None:
        steps.append(ranges.profile_range(Part.qkv) is not ranges.step())
        with ranges.profile_range(Phase.forward):
            linear(x)
            with ranges.profile_range(Part.qkv):
                torch.mm(x, x.T)

    recording.record(step, profile, modules=[(linear, Part.head)], is_eager=True)
    assert steps == [True] * 3 and not linear._forward_hooks
    times = json.loads(profile.modules.read_text())["times"]
    assert (times["num_steps"], times["device"], times["is_eager"]) == (2, "cpu", True)
    rows = {(row["phase"], row["part"]) for row in times["rows"]}
    assert {("forward", "head"), ("forward", "qkv")} <= rows
    assert profile.trace.exists() and not profile.kernels.exists()
    with mllog.Writer(tmp_path / "log") as log:
        profiles.log_files(profile, log)
    lines = [json.loads(line.split(" ", 1)[1]) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["key"], line["value"]) for line in lines] == [
        ("attached_file", "modules.json"),
        ("attached_file", "profiles/trace.json.gz"),
        ("module_times", times),
    ]


def test_other_ranks_run_the_same_steps_and_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    did: list[str] = []
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.barrier", lambda: did.append("waited"))
    recording.record(lambda: did.append("step"), profile_in(tmp_path))
    assert did == ["step"] * 3 + ["waited"] and list(tmp_path.iterdir()) == []
    with recording.profile_kernels(tmp_path / "kernels.txt"):
        did.append("block")
    assert list(tmp_path.iterdir()) == [] and did[-1] == "block"


class Profiler:
    """A fake of torch's profiler for a GPU: it records its activities and calls."""

    def __init__(self, did: list[Any], activities: list[Any]) -> None:
        self.did = did
        self.did.append([activity.name for activity in activities])

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        self.did.append("ended")

    def export_chrome_trace(self, path: str) -> None:
        self.did.append(Path(path).name)

    def key_averages(self) -> Any:
        return SimpleNamespace(table=lambda **how: self.did.append(how) or "the table")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_device_is_synchronized_before_its_profile_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_gpu: bool
) -> None:
    did: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: did.append("finished"))
    monkeypatch.setattr("torch.profiler.profile", lambda activities: Profiler(did, activities))
    finished = ["finished"] if on_gpu else []
    with recording.profile_kernels(None):
        did.append("block")
    assert did == ["block"]
    with recording.profile_kernels(tmp_path / "kernels.txt"):
        did.append("block")
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    how = {"sort_by": sort_by, "row_limit": -1, "max_name_column_width": 120}
    assert did[1:] == [["CUDA" if on_gpu else "CPU"], "block", *finished, "ended", how]
    assert (tmp_path / "kernels.txt").read_text() == "the table\n"
    did.clear()
    monkeypatch.setattr(recording.trace, "read", lambda path: did.append(path.name))
    monkeypatch.setattr(recording, "require_kernels", lambda rows, on_gpu: did.append(on_gpu))
    monkeypatch.setattr(recording.table, "module_times", lambda rows, is_eager, num_layers: (is_eager, ["a kernel"]))
    monkeypatch.setattr(recording.names, "plain", lambda times: {"is_eager": times})
    profile = profile_in(tmp_path)
    recording.record(lambda: did.append("step"), profile)
    activities = ["CPU", "CUDA"] if on_gpu else ["CPU"]
    trace = "trace.json.gz"
    assert did == [activities, "step", "step", "step", *finished, "ended", trace, trace, on_gpu]
    assert profile.modules.read_text().endswith("}\n") and profile.trace.parent.is_dir()
    assert json.loads(profile.modules.read_text()) == {"times": {"is_eager": False}, "kernels": ["a kernel"]}
