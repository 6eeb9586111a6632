"""Passes that are captured in a CUDA graph, compared with eager passes, with a fake graph."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.contract import modules
from bench.contract.modules import Part
from bench.contract.schema import ProfileKind
from helpers import ranks
from jobs.profiles import Profile

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import composed, one_rank, random_rows  # noqa: F401

    from jobs.engines.megatron import graphs, loop, model
    from jobs.engines.megatron.frozen.torch_ops import TorchOps

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]
TASKS = {
    "adapters": ("precision=fp8", "task.training.lora.dropout=0.5"),
    "all weights": ("task=pretrain_tiny", "precision=fp32"),
}
SPLITS = ("parallel.tp=2 parallel.sp=true", "parallel.tp=2 parallel.sp=false", "parallel.cp=2")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "data.seq_length=16")


class Graph:
    """A fake CUDA graph: capturing computes nothing, and a replay computes in the same memory."""

    num_replays = 0

    def capture(self, run: Callable[[], Tensor]) -> tuple[graphs.Replay, Tensor]:
        result = torch.full((), float("nan"))

        def replay() -> None:
            self.num_replays += 1
            result.copy_(run())

        return replay, result


def engine_of(*overrides: str, seed: int = 1) -> model.ModelAndOptimizer:
    """Return an engine whose FP8 layers, if it has any, compute in FP32, and whose adapters have a nonzero B."""
    ops = TorchOps(torch.float32, torch.float32) if "precision=fp8" in overrides else None
    engine = model.build(composed(*overrides), seed, ops=ops)
    torch.manual_seed(0)
    for name, weight in engine.unwrapped_chunks()[0].named_parameters():
        if name.endswith("lora_b"):
            weight.data.normal_(std=0.3)
    engine.optimizer.reset()
    return engine


@pytest.mark.long
@pytest.mark.parametrize("overrides", TASKS.values(), ids=TASKS)
def test_captured_pass_matches_the_eager_pass(monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    """Two micro-batches a step, with different rows and different dropout."""
    plain, captured, graph, rows = engine_of(*overrides), engine_of(*overrides), Graph(), random_rows(10)
    monkeypatch.setattr(graphs, "capture", graph.capture)
    captured.training_pass = graphs.training_pass(replace(captured.plan, cuda_graph=True), captured.chunks[0])
    losses = []
    for engine in (plain, captured):
        torch.manual_seed(3)
        batches = ([3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1])
        losses.append([loop.train_step(engine, rows, np.array(batch), step) for step, batch in enumerate(batches, 1)])
    assert graph.num_replays == 5, "all micro-batches except the first"
    assert losses[0] == losses[1]
    for weight, expected in zip(captured.chunks[0].parameters(), plain.chunks[0].parameters(), strict=True):
        assert torch.equal(weight, expected)
    assert loop.evaluate(captured, random_rows(6)) == loop.evaluate(plain, random_rows(6))


@pytest.mark.long
def test_profile_of_modules_runs_eagerly_and_keeps_the_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs before the graph is captured, and training afterwards is the same as without a profile."""
    rows, losses = random_rows(8), []
    for name in ("plain", "profiled"):
        graph, engine = Graph(), engine_of(*TASKS["adapters"])
        monkeypatch.setattr(graphs, "capture", graph.capture)
        engine.plan = replace(engine.plan, cuda_graph=True)
        engine.training_pass = graphs.training_pass(engine.plan, engine.chunks[0])
        files = (tmp_path / "kernels", tmp_path / "modules.json", tmp_path / "trace.json.gz")
        profile = Profile(ProfileKind.modules, *files) if name == "profiled" else None
        loop.warm_up(engine, 2, seed=7, profile=profile)
        assert graph.num_replays == 3, "two micro-batches a step, of which the first one is eager"
        losses.append([loop.train_step(engine, rows, np.arange(4), step) for step in (1, 2)])
    assert losses[0] == losses[1]
    times = modules.parsed(json.loads(files[1].read_text())["times"])
    assert times is not None and times.is_eager and {Part.fc1, Part.adapters} <= {row.part for row in times.rows}
    assert not files[0].exists()


@pytest.mark.long
@pytest.mark.parametrize("overrides", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize(
    "split", ["parallel.tp=2 parallel.sp=true", "parallel.tp=2 parallel.sp=false", "parallel.cp=2"]
)
def test_captured_pass_of_several_ranks_matches_the_eager_pass(
    tmp_path: Path, split: str, overrides: tuple[str, ...]
) -> None:
    """With collectives in the pass, and different dropout on the ranks; no generator is read."""
    size = ("cluster.ranks_per_node=2", "recipe.micro_batch_size=2", "recipe.global_batch_size=4", "data.eval_rows=4")
    plan = ranks.compose(tmp_path, *SMALL, *size, *split.split(), *overrides)
    ranks.run(plan, ranks.write(plan, tmp_path / "run"), "tests.helpers.captured", "plan.json")
