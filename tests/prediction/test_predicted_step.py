"""The predicted step: its published errors, and that it never falls where it cannot."""

import runpy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.contract.model import Experts, Model
from bench.mlperf import published as mlperf
from bench.planning.estimates import flops
from bench.prediction import grade, published, search, step
from bench.prediction.step import Layout, Work
from helpers.examples import in_proportion
from helpers.paths import ROOT

WORKS = {
    (gpu, benchmark): grade.work(gpu, benchmark, gpus_per_node=4 if gpu.startswith("g") else 8)
    for gpu in published.PREDICTED_GPUS
    for benchmark in published.MODELS
}


def powers(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most).map(lambda n: 2**n)


@st.composite
def layouts(draw: Any) -> Layout:
    dp, microbatches, size = draw(powers(10)), draw(st.integers(1, 64)), draw(st.sampled_from([1, 2, 4]))
    return Layout(
        tp=draw(powers(3)),
        pp=draw(powers(4)),
        cp=draw(powers(3)),
        dp=dp,
        vpp=draw(powers(3)),
        micro_batch_size=size,
        global_batch_size=dp * microbatches * size,
        seq_length=draw(st.sampled_from([2048, 8192])),
        balances_ends=draw(st.booleans()),
        recompute=draw(st.booleans()),
        graphs=draw(st.booleans()),
    )


@pytest.mark.long
@given(
    work=st.sampled_from(list(WORKS.values())),
    layout=layouts(),
    link=st.sampled_from(["nvlink", "nic", "nvlink_latency_s", "nic_latency_s"]),
    slower=st.floats(1, 100),
)
@settings(max_examples=in_proportion(300), deadline=None)
def test_no_step_is_shorter_over_a_slower_link(work: Work, layout: Layout, link: str, slower: float) -> None:
    value = getattr(work.links, link)
    worse = replace(work.links, **{link: value * slower if link.endswith("_s") else value / slower})
    slow_s = step.predict(replace(work, links=worse), layout).step_s
    assert slow_s >= step.predict(work, layout).step_s * (1 - 1e-12)


@pytest.mark.long
@given(work=st.sampled_from(list(WORKS.values())), layout=layouts(), nic_gbs=st.floats(1, 400))
@settings(max_examples=in_proportion(300), deadline=None)
def test_no_step_of_the_same_batch_is_shorter_on_half_of_the_replicas(
    work: Work, layout: Layout, nic_gbs: float
) -> None:
    """Unless replicas exchange gradients for longer than they compute: then fewer replicas are faster indeed."""
    work = replace(work, links=replace(work.links, nic=nic_gbs * 1e9))
    terms = step.predict(work, layout)
    computed_s = terms.gemm_s + terms.attention_s + terms.elementwise_s + terms.tensor_parallel_s
    assume(layout.dp > 1 and terms.gradients_s + terms.sends_s < computed_s)
    assert step.predict(work, replace(layout, dp=layout.dp // 2)).step_s >= terms.step_s


@given(work=st.sampled_from(list(WORKS.values())), layout=layouts())
@settings(max_examples=in_proportion(100), deadline=None)
def test_no_step_is_faster_than_the_gpu_multiplies(work: Work, layout: Layout) -> None:
    sample = flops.tflop_per_sample(work.model, None, seq_length=layout.seq_length)
    peak = {"h100": 1978.9, "h200": 1978.9, "b200": 4500, "gb200": 5000, "b300": 4500, "gb300": 5000}[work.gpu]
    least_s = layout.global_batch_size * sample * (0.6 if work.adapter_weights else 1) / layout.num_gpus / peak
    assert step.predict(work, layout).step_s > least_s


MOE = replace(
    WORKS["b300", "gpt3"],
    model=published.model("gpt_oss_20b"),
    attention_of_kind=published.attention_of_64("b300"),
)
ON_64 = Layout(tp=1, pp=1, cp=1, dp=64, micro_batch_size=1, global_batch_size=128, seq_length=8192)


@given(work=st.sampled_from(list(WORKS.values())), layout=layouts())
@settings(max_examples=in_proportion(50), deadline=None)
def test_one_expert_for_all_tokens_is_a_dense_layer_with_sorted_rows(work: Work, layout: Layout) -> None:
    """Only sorting the rows, and the router, take time in addition."""
    experts = Experts(num_experts=1, experts_per_token=1, ffn_hidden_size=work.model.ffn_hidden_size)
    of_one = step.predict(replace(work, model=replace(work.model, experts=experts)), layout)
    dense = step.predict(work, layout)
    for name in ("attention_s", "tensor_parallel_s", "expert_parallel_s", "update_s"):
        assert getattr(of_one, name) == pytest.approx(getattr(dense, name)), name
    assert of_one.gemm_s == pytest.approx(dense.gemm_s, rel=1e-3) and of_one.elementwise_s > dense.elementwise_s


def test_splitting_the_experts_costs_an_exchange_and_saves_gradients() -> None:
    whole, split = step.predict(MOE, ON_64), step.predict(MOE, replace(ON_64, ep=8))
    assert whole.expert_parallel_s == 0 < split.expert_parallel_s
    assert split.gradients_s < whole.gradients_s and split.gemm_s <= whole.gemm_s
    assert split.update_s == pytest.approx(whole.update_s)
    # two rows of 8,192 tokens in BF16, 4 experts each; there and back, forward and backward, in 24 layers
    sent = 2 * 8192 * 4 * 2880 * 2 * 4 * 24
    assert split.expert_parallel_s == pytest.approx(7 / 8 * sent / MOE.links.nvlink, rel=0.03)
    assert search.memory(MOE, replace(ON_64, ep=8)) < search.memory(MOE, ON_64)
    splits = {
        one.ep for one in search.layouts(MOE.model, num_gpus=64, largest_tp=1, global_batch_size=64, seq_length=8192)
    }
    assert splits == {1, 2, 4, 8, 16, 32}


def test_a_step_in_fp4_only_has_faster_gemms() -> None:
    fp8, fp4 = (
        step.predict(grade.work("b200", "llama31_405b", gpus_per_node=8, is_fp4=is_fp4), replace(ON_64, tp=8, dp=8))
        for is_fp4 in (False, True)
    )
    assert fp4.gemm_s < 0.75 * fp8.gemm_s
    assert replace(fp4, gemm_s=0.0, wait_s=0.0) == replace(fp8, gemm_s=0.0, wait_s=0.0)
    assert published.fp4("h200") is None


def test_no_constant_is_from_a_gpu_that_counts_as_not_calibrated() -> None:
    rows = [one.row for one in grade.graded() if not one.row.is_seen and one.terms]
    assert {row.gpu for row in rows} == set(published.CALIBRATED_GPUS) and {row.precision for row in rows} == {"fp8"}
    assert set(grade.REFERENCE.adapter_factors) == set(published.CALIBRATED_GPUS)


def test_the_published_pretraining_steps_are_predicted() -> None:
    """What docs/prediction.md states: no constant was set by one of these rows."""
    rows = [one for one in grade.graded() if one.row.benchmark != "llama2_70b_lora"]
    errors = [one.error for one in rows]
    assert len(rows) == 20 and not any(one.sets for one in rows) and None not in errors
    summary = grade.summary(rows)
    assert summary is not None and summary.median < 0.045 and summary.maximum < 0.09


def test_every_constant_is_set_by_a_row_on_one_node_and_makes_it_exact() -> None:
    rows = [one for one in grade.graded() if one.sets]
    assert {name for one in rows for name in one.sets} == set(grade.REFERENCE.constants())
    for one in rows:
        assert one.row.is_one_node and one.row.round != published.SEEN
        assert one.error is not None and abs(one.error) < 0.002, one.row.name


def test_no_published_row_is_left_out() -> None:
    """A row without a prediction says why; one with a step that is predicted has an error."""
    for one in grade.graded():
        assert (one.error is None) == bool(one.why_not), one.row.name
        if one.row.layout:
            assert one.row.layout.num_gpus == one.row.num_gpus, one.row.name
            assert one.row.layout.num_microbatches >= 1, one.row.name


def test_the_systems_of_lora_are_those_of_the_table_of_minutes() -> None:
    """Both tables have these systems; the table of minutes lacks some step times."""
    known = {(one.round, one.submitter, one.system): one for one in mlperf.systems()}
    rows = [row for row in published.rows() if row.benchmark == "llama2_70b_lora"]
    assert len(rows) == 143
    for row in rows:
        one = known[row.round, row.submitter, row.system]
        assert (row.num_gpus, row.global_batch_size) == (one.num_gpus, one.global_batch_size), row.name
        assert one.step_time_s is None or row.step_s == one.step_time_s, row.name


@pytest.mark.parametrize(("name", "largest"), [("vtrain_many_nodes", 0.12), ("selene", 0.07)])
def test_steps_of_a100_that_set_nothing_are_predicted(name: str, largest: float) -> None:
    summary = grade.summary_of([grade.error_on_a100(row) for row in published.measured(name)])
    assert summary is not None and summary.median < largest


def test_a_pipeline_of_one_stage_has_no_bubble_and_half_the_chunks_have_twice_the_bubble() -> None:
    work = WORKS["h100", "gpt3"]
    layout = Layout(tp=4, pp=8, cp=1, dp=1, vpp=6, micro_batch_size=2, global_batch_size=128, seq_length=2048)
    many, few = (step.predict(work, replace(layout, vpp=vpp)) for vpp in (6, 3))
    assert few.bubble_s == pytest.approx(2 * many.bubble_s)
    assert step.predict(work, replace(layout, pp=1, vpp=1)).bubble_s == 0


@pytest.mark.long
def test_a_thousand_layouts_of_405b_are_ranked_and_the_fastest_is_first() -> None:
    """The limit is 5 s on one core; this takes 0.05."""
    work = WORKS["h100", "llama31_405b"]
    every = [
        layout
        for batch in (1536, 3072, 6144)
        for layout in search.layouts(work.model, num_gpus=8192, largest_tp=8, global_batch_size=batch, seq_length=8192)
    ]
    ranked = search.rank(work, every, memory_gib=1e9)
    assert len(ranked) == len(every) > 1000
    steps = [one.terms.step_s for one in ranked]
    assert steps == sorted(steps)
    assert {one.layout.num_gpus for one in ranked} == {8192}


def test_the_published_layouts_of_405b_fit_and_are_among_those_searched() -> None:
    for one in grade.graded():
        if one.row.benchmark != "llama31_405b" or one.row.layout is None:
            continue
        work = WORKS[one.row.gpu, one.row.benchmark]
        memory_gib = {"h100": 79.6, "h200": 139.8, "gb200": 185.0}[one.row.gpu]
        assert search.memory(work, one.row.layout) < memory_gib, one.row.name
        searched = search.layouts(
            work.model,
            num_gpus=one.row.num_gpus,
            largest_tp=8,
            global_batch_size=one.row.global_batch_size,
            seq_length=8192,
        )
        assert replace(one.row.layout, graphs=True) in list(searched), one.row.name


def test_models_have_the_published_number_of_parameters() -> None:
    from bench.planning.estimates.parameters import parameters

    def count(model: Model) -> float:
        return parameters(model) / 1e9

    assert count(published.model("llama31_405b")) == pytest.approx(405.85, abs=0.01)
    assert count(published.model("gpt3_175b")) == pytest.approx(174.6, abs=0.1)


def test_the_page_has_every_row_as_the_program_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    printed = runpy.run_path(str(ROOT / "experiments/predict.py"))
    rows = grade.graded()
    printed["markdown"](rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| v") or " v4.1 " in line]
    assert len(lines) >= len([one for one in rows if one.row.benchmark == "llama2_70b_lora"])
    page = (ROOT / "docs/prediction.md").read_text().splitlines()
    assert set(lines) <= set(page)
