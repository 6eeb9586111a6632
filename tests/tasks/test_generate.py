"""The order of a generation's log, with a scripted generator on one rank."""

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog
from bench.contract.plan import Trial
from bench.contract.plan_kinds import GenerationPlan
from bench.planning import compose
from helpers import ranks
from jobs.engines.generation import Answer, Request
from jobs.ranks.identity import Rank
from jobs.tasks import generate

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="no device: nothing here differs on a GPU")


class Scripted:
    """A fake generator with a token every 0.1 s; it records its calls."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def warm_up(self, requests: Sequence[Request]) -> None:
        self.notes.append("warm-up")

    def facts(self) -> list[tuple[str, str, dict[str, str]]]:
        return [(mllog.STRATEGY, "scripted", {})]

    def generate(self, requests: Sequence[Request], *, seed: int) -> list[Answer]:
        self.notes.append(f"{len(requests)} answers, seed {seed}")
        return [Answer(tuple(range(one.length)), 0.1, one.length / 10) for one in requests]


@pytest.mark.long
def test_only_answers_are_timed_and_the_generator_is_freed_before_the_ranks_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL waits for captured CUDA graphs, so the generator that holds them must be freed first."""
    plan = compose.compose(["task=generate_tiny", "cluster.ranks_per_node=1", "parallel.groups=1"])
    assert isinstance(plan, GenerationPlan)
    notes, generators = list[str](), list[Any]()

    def generator(_: GenerationPlan, seed: int) -> Scripted:
        one = Scripted(notes)
        generators.append(weakref.ref(one))
        return one

    def end() -> None:
        notes.append("ended with its generator" if generators[0]() else "ended")

    module = SimpleNamespace(start_ranks=lambda plan, who: None, end_ranks=end, versions=dict, generator=generator)
    monkeypatch.setattr(generate, "engine_of", lambda plan: module)
    trial, path = Trial(index=0, seed=7, log="result_0.txt"), tmp_path / "result_0.txt"
    with mllog.Writer(path) as log:
        generate.run(plan, trial, Rank(0, 0, 1, "127.0.0.1", 0), log, tmp_path)

    assert notes == ["warm-up", "8 answers, seed 7", "ended"]
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    keys = [record["key"] for record in records]
    clock = [key for key in keys if key in ("init_start", "init_stop", "run_start", "run_stop", mllog.ANSWERS)]
    assert clock == ["init_start", "init_stop", "run_start", "run_stop", mllog.ANSWERS]
    given = records[keys.index(mllog.ANSWERS)]["value"]
    assert [answer[3] for answer in given] == [8, 12, 16, 20, 24, 28, 32, 36]
