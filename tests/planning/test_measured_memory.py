"""The plan's memory compared with the peaks that torch measured on H200s."""

from typing import Any

import pytest

from bench.contract import layers
from bench.contract.schema import Config
from bench.planning import compose
from bench.planning.estimates import memory
from bench.planning.parallelism import split

NEAR_GIB = 0.5


def unplanned(*overrides: str, micro_batch_size: int, global_batch_size: int, gpus: int) -> Config:
    sizes = (f"recipe.micro_batch_size={micro_batch_size}", f"recipe.global_batch_size={global_batch_size}")
    cluster = ("cluster=dgxh200", f"cluster.ranks_per_node={gpus}", "model.weights=random")
    return compose.unplanned([*overrides, *sizes, *cluster])


def allocated_gib(config: Config, *, has_graph: bool = False, vpp: int = 1, **axes: Any) -> float:
    """What torch would allocate by the plan: the allowance is for what torch does not count."""
    config.parallel.vpp = vpp
    world = split(config, **({"tp": 1, "pp": 1, "cp": 1, "sp": False} | axes))
    needed = memory.estimate(config, world, memory.recompute(config, world), has_graph=has_graph)
    return needed.total_gib - memory.CUDA_ALLOWANCE_GIB


@pytest.mark.parametrize(
    ("task", "batches", "gpus", "axes", "peak_gib"),
    [
        ("pretrain_7b precision=bf16", (1, 16), 1, {}, 125.03),
        ("pretrain_7b precision=fp8", (1, 16), 1, {}, 128.57),
        ("pretrain_8b precision=bf16", (1, 4), 1, {}, 130.96),
        ("pretrain_8b precision=fp8", (1, 4), 1, {}, 130.71),
        ("lora_7b precision=fp8", (8, 16), 1, {}, 72.20),
        ("pretrain_gpt3_5b precision=bf16", (4, 16), 1, {}, 101.15),
        ("pretrain_gpt3_126m precision=bf16", (32, 256), 1, {}, 20.09),
        ("lora_8b precision=bf16", (8, 8), 1, {}, 116.62),
        ("lora_8b precision=fp8", (8, 8), 1, {}, 78.75),
        ("qlora_70b", (1, 2), 1, {}, 95.8),
        ("pretrain_7b precision=bf16", (1, 8), 2, {}, 87.36),
        ("pretrain_7b precision=bf16", (1, 8), 2, {"tp": 2, "sp": True}, 62.61),
        ("pretrain_7b precision=bf16", (1, 64), 4, {}, 68.53),
        ("pretrain_7b precision=fp8", (1, 64), 4, {}, 72.07),
        ("lora_7b precision=fp8", (8, 64), 4, {}, 71.79),
        ("pretrain_gpt3_126m precision=bf16", (32, 1024), 4, {}, 19.03),
    ],
)
def test_measured_allocations_of_document_tasks(
    task: str, batches: tuple[int, int], gpus: int, axes: dict[str, Any], peak_gib: float
) -> None:
    """docs/results/2026-11-22-training.md, whose logs have the digits."""
    config = unplanned(*f"task={task}".split(), micro_batch_size=batches[0], global_batch_size=batches[1], gpus=gpus)
    assert allocated_gib(config, **axes) == pytest.approx(peak_gib, abs=NEAR_GIB)


def test_a_head_stores_hidden_states_and_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.1-8B under LoRA, to a tenth of a GiB: the embedding's output and the final norm's input and output, of
    which an FP8 head holds one at its peak. docs/results/2026-11-22-training.md; at micro-batches of 4 in FP8 the head
    was in BF16."""

    def estimated(precision: str, size: int) -> float:
        words = ("task=lora_8b", f"precision={precision}")
        return allocated_gib(unplanned(*words, micro_batch_size=size, global_batch_size=8, gpus=1))

    assert estimated("bf16", 8) == pytest.approx(116.62, abs=0.1)
    assert estimated("fp8", 8) == pytest.approx(78.75, abs=0.1)
    monkeypatch.setattr(layers, "FP8_HEAD_VOCABULARY", 10**9)
    assert estimated("fp8", 4) == pytest.approx(41.87, abs=0.1)


@pytest.mark.parametrize(
    ("axes", "peak_gib"),
    [
        ({"tp": 2, "sp": True}, 67.8),
        ({"tp": 4, "sp": True}, 34.1),
        ({"tp": 8, "sp": True}, 17.4),
        ({"tp": 2}, 73.1),
        ({"tp": 4}, 42.0),
        ({"tp": 8}, 26.6),
        ({"cp": 2}, 100.6),
        ({"cp": 4}, 83.3),
        ({"cp": 8}, 74.8),
        ({"tp": 2, "cp": 2, "sp": True}, 50.5),
        ({"tp": 2, "pp": 2, "sp": True}, 51.7),
        ({"tp": 4, "pp": 2, "sp": True}, 26.0),
        ({"pp": 4}, 87.2),
    ],
)
def test_measured_allocations_of_one_rank_of_eight(axes: dict[str, Any], peak_gib: float) -> None:
    """Llama-2-70B LoRA in FP8, 8 rows a step: docs/results/2026-11-22-fp8.md."""
    config = unplanned("task=lora70b", "precision=fp8", micro_batch_size=1, global_batch_size=8, gpus=8)
    assert allocated_gib(config, **axes) == pytest.approx(peak_gib, abs=NEAR_GIB)


@pytest.mark.parametrize(
    ("rows", "axes", "peak_gib"),
    [(2, {}, 135.47), (4, {"pp": 2}, 103.4), (4, {"pp": 2, "vpp": 2}, 120.8)],
)
def test_measured_allocations_of_two_gpus(rows: int, axes: dict[str, Any], peak_gib: float) -> None:
    """Llama-2-70B LoRA in FP8: docs/results/2026-11-22-fp8.md, pipelines 2026-11-21-fp8-two-gpus.md."""
    config = unplanned("task=lora70b", "precision=fp8", micro_batch_size=1, global_batch_size=rows, gpus=2)
    assert allocated_gib(config, **axes) == pytest.approx(peak_gib, abs=NEAR_GIB)


def test_memory_of_a_cuda_graph_is_not_an_allocation() -> None:
    """Llama-2-7B LoRA, rows of 350: 13.57 GiB were allocated and 14.79 reserved, the graph's memory among them."""
    words = ("task=lora_7b", "precision=bf16", "data=rows_350")
    config = unplanned(*words, micro_batch_size=1, global_batch_size=1, gpus=1)
    with_graph, without = (allocated_gib(config, has_graph=has_graph) for has_graph in (True, False))
    assert 13.57 < without < with_graph < 14.79
    assert with_graph == pytest.approx(14.79, abs=NEAR_GIB)
