"""The rows of a training plan, with numbers by hand arithmetic."""

import dataclasses

import pytest

from bench.console import plan as plan_sheets
from bench.contract.plan import Cost, Plan
from bench.mlperf import published
from bench.planning import compose

COST = Cost(
    gemm_s=1.2,
    attention_s=0.3,
    elementwise_s=0.0,
    communication_s=0.0,
    recompute_s=0.0,
    bubble_s=0.0,
    host_s=0.0,
    step_s=1.5,
)


@pytest.fixture(scope="module")
def lora70b() -> Plan:
    return dataclasses.replace(compose.compose(["task=lora70b", "cluster=dgx2"]), cost=COST)


def test_a_plan_in_words(lora70b: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    known = published.Convergence(
        benchmark="llama2_70b_lora",
        global_batch_size=8,
        kind="submissions",
        shares=((1600, 0.5), (3200, 0.5)),  # 2400 samples on average: 300 steps of 8
        num_runs=12,
        source="",
    )
    monkeypatch.setattr(published, "samples_to_target", lambda benchmark, gbs: known)
    shown = dict(plan_sheets.rows(lora70b))
    assert shown["data"] == "gov_report: 3,901 training rows, 173 evaluation rows, 8,192 tokens per row"
    assert shown["time limit"] == "70 min: 1 trial of 60 min, and 10 min for start, checks and evaluation of the logs"
    assert shown["step time"] == "1.50 s (estimate): GEMMs 1.20, attention 0.30; measured errors: docs/prediction.md"
    projected = (
        "7.5 min (projection): 300 steps (mean of 12 published runs) of 1.50 s; without evaluations, which take "
    )
    assert shown["training time"] == projected + "about 15 s each", "0.45 x 173 rows / 8 x 1.50 s"
    assert shown["evaluation"] == "first after 1,536 samples, then every 384; target: evaluation loss of at most 0.925"
    assert shown["commands"] == "node facts; node check; trial 0"
    assert shown["batch"] == "8 = dp 8 x micro-batch 1 x gradient accumulation 1; 65,536 tokens per step"


def test_plan_with_prepare_command_and_without_published_runs() -> None:
    tiny = compose.compose(["task=lora_tiny", "cluster=local", "task.training.max_steps=240"])
    shown = dict(plan_sheets.rows(dataclasses.replace(tiny, cost=COST)))
    assert shown["commands"] == "prepare; trial 0"
    projected = (
        "6.0 min (projection): 240 steps (the maximum) of 1.50 s; without evaluations, which take about 15 s each"
    )
    assert shown["training time"] == projected


def test_message_names_only_sizes_that_tp_does_not_divide() -> None:
    with pytest.raises(compose.ConfigError, match="tp 16 does not divide the 8 query groups of llama2_70b"):
        compose.compose(["task=lora70b", "cluster=dgx2", "parallel.tp=16"])
