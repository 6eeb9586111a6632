"""The rows of a generation plan, with numbers by hand arithmetic, and the tables of a trial."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.contract.generation import GenerationRequest, TokenCost
from bench.contract.plan_kinds import GenerationPlan
from bench.planning import compose
from bench.report import generation as sheets
from bench.report.kinds import ShownTrial
from bench.results import kind
from helpers import answers_log

H200 = ("task=generate_7b", "cluster=dgxh200")


def planned(*words: str) -> GenerationPlan:
    plan = compose.compose(words)
    assert isinstance(plan, GenerationPlan)
    return plan


@pytest.fixture(scope="module")
def random_7b() -> GenerationPlan:
    return planned(*H200, "model.weights=random", "parallel.tp=2")


@pytest.fixture(scope="module")
def tiny() -> GenerationPlan:
    return planned("task=generate_tiny", "cluster=local", "parallel.groups=1", "cluster.ranks_per_node=1")


def with_generation(plan: GenerationPlan, **changed: Any) -> GenerationPlan:
    task = plan.config.task
    assert task.generation is not None
    task = dataclasses.replace(task, generation=dataclasses.replace(task.generation, **changed))
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, task=task))


@pytest.mark.long
def test_a_plan_in_words(random_7b: GenerationPlan) -> None:
    """Four replicas share 7,750 tokens; the time per token has two decimals."""
    shown = dict(sheets.plan_rows(random_7b))
    assert list(shown)[:4] == ["model", "engine", "answers", "order"]
    assert shown["model"] == "llama2_7b, random weights, in bf16" and shown["engine"] == "megatron"
    assert shown["answers"] == "31 of 100 to 400 tokens, 7,750 in total; random prompts of 13 tokens"
    assert shown["order"] == "side by side, all of a replica's share in a static batch; greedy"
    assert shown["replicas"] == "4 of 2 ranks; 1 node with 8 x NVIDIA H200 SXM 141GB"
    shares = [sum(one.length for one in random_7b.requests if one.replica == number) for number in range(4)]
    assert shown["largest replica share"] == f"{max(shares):,} of 7,750 tokens" and len(set(shares)) > 1
    cost = TokenCost(bytes_per_token=6.64e9, bandwidth_gbs=4210.0, token_s=0.0015768)
    text = "1.58 ms (estimate for one answer at a time, from memory bandwidth): 6.6 GB at 4,210 GB/s"
    assert sheets.token_time(cost) == text


def test_plan_for_unknown_hardware_has_a_reason(tiny: GenerationPlan, random_7b: GenerationPlan) -> None:
    shown = dict(sheets.plan_rows(tiny))
    assert shown["model"] == "tiny, random weights, in fp32"
    assert shown["replicas"] == "1 of 1 rank; 1 node with 1 CPU rank"
    assert shown["largest replica share"] == "176 of 176 tokens"
    assert shown["time per token"] == "- (the memory bandwidth of the device is unknown)"
    wide = dataclasses.replace(random_7b, world=dataclasses.replace(random_7b.world, num_nodes=2), base_dir="/m/llama")
    shown = dict(sheets.plan_rows(wide))
    assert shown["replicas"] == "4 of 2 ranks; 2 nodes with 8 x NVIDIA H200 SXM 141GB"
    assert shown["model"] == "llama2_7b, /m/llama, in bf16"


@pytest.mark.parametrize(
    ("prompts", "lengths", "shown"),
    [
        (["Why?", "Why?"], [8, 8], "2 of 8 tokens, 16 in total; 'Why?'"),
        (["Why?", "How?"], [9, 8], "2 of 8 to 9 tokens, 17 in total; prompts from a file"),
        (["Why?"], [1200], "1 of 1200 tokens, 1,200 in total; 'Why?'"),
        ([None, None], [8, 8], "2 of 8 tokens, 16 in total; random prompts of 5 tokens"),
    ],
)
def test_answers_row_has_count_lengths_and_prompts(
    tiny: GenerationPlan, prompts: list[str | None], lengths: list[int], shown: str
) -> None:
    requests = [
        GenerationRequest(index=n, replica=0, prompt=prompt, prompt_tokens=5 + 9 * n, length=length)
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    assert sheets.answers(dataclasses.replace(tiny, requests=requests)) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("order=one_by_one",), "one by one; greedy"),
        (("order=one_by_one", "max_batch=4"), "one by one; greedy"),
        (("max_batch=4", "batching=continuous"), "side by side, up to 4 in a continuous batch; greedy"),
        (("order=one_by_one", "sampling.temperature=0.7"), "one by one; temperature 0.7"),
        (
            ("order=one_by_one", "sampling.temperature=1", "sampling.top_k=50", "sampling.top_p=0.9"),
            "one by one; temperature 1, top_k 50, top_p 0.9",
        ),
    ],
)
def test_order_row_has_batch_size_and_sampling(words: tuple[str, ...], shown: str) -> None:
    overrides = [f"task.generation.{override}" for override in words]
    config = compose.unplanned(["task=generate_tiny", "cluster=local", *overrides])
    plan = planned("task=generate_tiny", "cluster=local")
    assert sheets.order(dataclasses.replace(plan, config=config)) == shown


def test_memory_row_has_capacity_if_known(random_7b: GenerationPlan) -> None:
    needed = dataclasses.replace(
        random_7b.memory, weights_gib=6.2756, kv_cache_gib=1.555, workspace_gib=0.333, total_gib=8.1636
    )
    parts = "weights 6.28, KV cache 1.6, workspace 0.33"
    assert sheets.memory(dataclasses.replace(needed, capacity_gib=141.0)) == (
        f"8.2 of 141 GiB (estimate), fits: {parts}"
    )
    assert sheets.memory(dataclasses.replace(needed, capacity_gib=None)) == f"8.16 GiB (estimate): {parts}"


def test_a_trial_has_a_verdict_and_a_row_for_each_length(random_7b: GenerationPlan, tmp_path: Path) -> None:
    """A replica answers one by one: 10 ms per token, the first after 20 ms."""
    plan = random_7b
    shown = dataclasses.replace(plan, requests=[one for one in plan.requests if one.length in (100, 400)])
    rows = [[n, *row[1:4], 0.0, *row[5:]] for n, row in enumerate(answers_log.rows(shown))]
    log = answers_log.write(shown, tmp_path / "result_0.txt", rows, run_s=4.0)
    verdict, lengths = sheets.REPORT.tables(ShownTrial("0", kind.read(log)), more=[("more", "1", "")])
    assert verdict.caption == "n = 1 run" and verdict.rows[-1] == ("more", "1", "")
    assert verdict.title.startswith("generate_7b: 8 ranks on made up")
    assert lengths.title == "answers by length" and lengths.caption.startswith(
        "Medians. The times of an answer are counted from the common start"
    )
    assert [row[:5] for row in lengths.rows] == [
        ("100", "1", "1", "0.02", "9.899"),
        ("400", "1", "4", "0.02", "9.975"),
    ]
    none = answers_log.write(shown, tmp_path / "result_1.txt", [], run_s=4.0)
    assert len(sheets.REPORT.tables(ShownTrial("0", kind.read(none)))) == 1
