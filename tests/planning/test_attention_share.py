"""A document mask in plans: the attention that it leaves, against packing many documents, and what it refuses."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config
from bench.errors import ConfigError
from bench.planning import compose as composing
from bench.planning.estimates import documents
from bench.report import training_plan as report

RANDOM = ("model.weights=random", "data.packing=true", "data.document_mask=true", "data.lengths=[100,500,1500]")
GPU = ("cluster=dgxh200", "cluster.num_nodes=1", "cluster.ranks_per_node=1")


def planned(*overrides: str) -> TrainingPlan:
    plan = composing.compose(list(overrides))
    assert isinstance(plan, TrainingPlan)
    return plan


def counted(lengths: list[int], seq_length: int) -> float:
    """Return the share of pairs that remain, for every place in a row at which each document may begin."""
    pairs = tokens = 0
    for length in lengths:
        for place in range(seq_length):
            rows = (np.arange(length) + place) // seq_length
            pairs += sum(n * (n + 1) / 2 for n in np.bincount(rows))
        tokens += length * seq_length
    return float(pairs / tokens / ((seq_length + 1) / 2))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), seq_length=st.integers(2, 16))
def test_share_is_that_of_counted_pairs(lengths: list[int], seq_length: int) -> None:
    got = documents.share([float(length) for length in lengths], seq_length=seq_length)
    assert got == pytest.approx(counted(lengths, seq_length)) and got <= 1


def test_share_is_the_mean_over_packed_random_rows() -> None:
    from jobs.data import rows

    lengths = [20, 100, 700]
    starts = rows.random_starts(2000, 256, seed=3, lengths=lengths).ravel()
    sizes = np.diff([*np.flatnonzero(starts), starts.size])
    measured = (sizes * (sizes + 1) / 2).sum() / (2000 * 256 * 257 / 2)
    assert documents.share([float(length) for length in lengths], seq_length=256) == pytest.approx(measured, rel=0.05)


def test_a_mask_lowers_flops_and_not_the_estimated_time() -> None:
    masked = planned("task=pretrain_7b", *GPU, *RANDOM)
    whole = planned("task=pretrain_7b", *GPU, "model.weights=random", "data.packing=true")
    share = documents.share([100, 500, 1500], seq_length=masked.data.seq_length)
    assert masked.attention_share == share < 0.5 and whole.attention_share is None
    m = masked.config.model
    attention = 6 * masked.data.seq_length**2 * m.hidden_size * m.num_layers / 1e12
    assert whole.tflop_per_sample - masked.tflop_per_sample == pytest.approx((1 - share) * attention)
    assert masked.cost is not None and masked.cost == whole.cost
    (row,) = (value for name, value in report.plan_rows(masked) if name == "document mask")
    assert row.startswith("each token attends only to its own document; ") and "by data.lengths" in row
    assert "document mask" not in dict(report.plan_rows(whole))


def test_unknown_lengths_are_an_upper_bound() -> None:
    plan = planned("task=pretrain_7b", *GPU, "data.document_mask=true", "cluster.paths.data=/nowhere")
    whole = planned("task=pretrain_7b", *GPU, "cluster.paths.data=/nowhere")
    assert plan.attention_share is None and plan.tflop_per_sample == whole.tflop_per_sample and plan.cost == whole.cost
    assert "FLOPs are an upper bound" in dict(report.plan_rows(plan))["document mask"]


@pytest.mark.long
def test_rows_bound_by_the_host_get_no_cuda_graph() -> None:
    small = ("task=pretrain_gpt3_126m", "cluster=dgxh200", "cluster.ranks_per_node=1", "recipe.micro_batch_size=1")
    whole = planned(*small, "model.weights=random", "data.packing=true")
    masked = planned(*small, *RANDOM)
    assert whole.cuda_graph and not masked.cuda_graph
    assert "no CUDA graph, because the documents differ" in dict(report.plan_rows(masked))["document mask"]
    assert masked.cost and masked.cost.host_s > 0


REFUSED: dict[str, tuple[str, ...]] = {
    "without packing each row has only one document": ("data=tiny_dolly", "data.document_mask=true"),
    "data.source=grammar generates no document boundaries": ("data.packing=true", "data.document_mask=true"),
    "random rows have no documents, because data.lengths is null": (*RANDOM, "data.lengths=null"),
    "must list lengths of documents, each 1 token or more": (*RANDOM, "data.lengths=[0,3]"),
    "context parallelism splits documents and does not support a document mask": (
        *RANDOM,
        "cluster.ranks_per_node=2",
        "parallel.cp=2",
    ),
    "NeMo's recipes do not support a document mask": (*RANDOM, "engine=nemo"),
}


@pytest.mark.long
@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        planned("task=pretrain_tiny", *REFUSED[what])


@pytest.mark.long
def test_the_planner_chooses_no_context_parallelism() -> None:
    from bench.planning import layouts

    def sizes(config: Config) -> set[Any]:
        return {layout.world.cp for layout in layouts.ranked(config)}

    open_choice = ("task=pretrain_7b", "cluster=dgxh200", "parallel.tp=null", "parallel.pp=null", "parallel.cp=null")
    assert sizes(planned(*open_choice, *RANDOM).config) == {1} < sizes(planned(*open_choice, RANDOM[0]).config)
