"""`plan --scale`: what it shows, refuses and marks."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from bench import cli
from bench.console import scaling as tables
from bench.contract.network import Network
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning.estimates import memory, step_time, transports
from bench.planning.parallelism import split
from bench.prediction import grade, power, published, scale, uncertainty
from bench.prediction.scale import Point, Range, StackName
from bench.prediction.uncertainty import Interval
from helpers import answers
from helpers.examples import in_proportion

LORA = ("task=lora70b", "cluster=dgx8")


def exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *argv])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", [8]),
        ("1,2,4,...,16", [1, 2, 4, 8, 16]),
        ("1,2,4,…,24", [1, 2, 4, 8, 16, 24]),
        ("64, 96, 128, ..., 256", [64, 96, 128, 160, 192, 224, 256]),
    ],
)
def test_numbers_of_nodes_may_be_continued(text: str, numbers: list[int]) -> None:
    assert scale.numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "2,1", "1,1", "1,x", "...", "1,...,8", "1,2,...", "1,2,...,8,16"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an ascending list of numbers of nodes"):
        scale.numbers(text)


@pytest.mark.long
@pytest.mark.parametrize("stack", [StackName.runstop, StackName.reference])
def test_more_nodes_give_more_speed_and_every_number_an_interval(stack: StackName) -> None:
    config = compose.unplanned([*LORA, "cluster.price_per_gpu_hour=2"])
    scaling = scale.predict(config, [1, 2, 4], stack=stack)
    assert [one.num_gpus for one in scaling.points] == [8, 16, 32]
    minutes = [one.minutes.value for one in scaling.points if one.minutes]
    assert len(minutes) == 3 and minutes == sorted(minutes, reverse=True)
    for one in scaling.points:
        assert one.step_s and one.minutes and one.gpu_hours and one.price and one.terms and one.tokens_s_gpu
        assert sum(one.terms.values()) == pytest.approx(one.step_s.value)
        assert one.step_s.low and one.step_s.high and one.step_s.low < one.step_s.high
        assert one.gpu_hours.value == pytest.approx(one.minutes.value * one.num_gpus / 60)
        assert one.price.value == pytest.approx(2 * one.gpu_hours.value)
        assert one.tokens_s_gpu.value == pytest.approx(one.global_batch_size * 8192 / one.num_gpus / one.step_s.value)
    assert scaling.points[0].efficiency == 1
    first, last = scaling.points[0].tokens_s_gpu, scaling.points[-1].tokens_s_gpu
    assert first and last and scaling.points[-1].efficiency == pytest.approx(last.value / first.value)


@pytest.mark.long
def test_one_node_has_the_estimate_of_the_plan_and_the_wait_for_the_slowest_gpu() -> None:
    plan = compose.compose([*LORA, "cluster.num_nodes=1"])
    (point,) = scale.predict(plan.config, [1], stack=StackName.runstop).points
    assert plan.kind.name == "train" and point.terms is not None and point.step_s is not None
    cost, w = plan.cost, plan.world  # type: ignore[attr-defined]
    assert point.step_s.value == pytest.approx(cost.step_s * uncertainty.waiting(8, w.tp * w.pp * w.cp))


def test_an_interval_leaves_out_a_twentieth_at_each_end_and_rows_that_set_constants() -> None:
    ratios = [*range(1, 41)]
    assert uncertainty.interval(ratios[::-1], "").low == 3 and uncertainty.interval(ratios, "").high == 38
    assert uncertainty.interval([3, 1, 2], "") == Interval(low=1, high=3, num_rows=3, rows="")
    exact = [one for one in grade.graded() if one.sets and one.row.is_one_node]
    assert exact and all(one.row.benchmark in published.ADAPTER_WEIGHTS for one in exact)
    one_node = uncertainty.of_reference(is_lora=True, is_one_node=True)
    rows = [one for one in grade.graded() if one.row.benchmark in published.ADAPTER_WEIGHTS and one.row.is_one_node]
    judged = [one for one in rows if one.error is not None and one.row.round != published.SEEN]
    assert one_node.num_rows == len(judged) - len(exact)


@pytest.mark.long
def test_failures_cost_hours_and_give_the_checkpoint_interval() -> None:
    plain = compose.unplanned([*LORA, "recipe.global_batch_size=8"])
    failing = compose.unplanned([*LORA, "+failures@cluster.failures=meta", "cluster.num_nodes=8"])
    (without,) = scale.predict(plain, [8], stack=StackName.reference).points
    (with_them,) = scale.predict(failing, [8], stack=StackName.reference).points
    assert without.lost_share is None and with_them.lost_share is not None and 0 < with_them.lost_share < 0.1
    assert without.gpu_hours and with_them.gpu_hours
    assert with_them.gpu_hours.value == pytest.approx(without.gpu_hours.value / (1 - with_them.lost_share))


@pytest.mark.long
def test_days_and_energy_have_the_intervals_of_what_they_follow_from() -> None:
    words = ["+failures@cluster.failures=meta", "cluster.price_per_gpu_hour=2"]
    (point,) = scale.predict(compose.unplanned([*LORA, *words]), [8], stack=StackName.reference).points
    assert point.days and point.minutes and point.gpu_hours and point.energy_kwh and point.price and point.samples
    assert point.minutes.value < 1440 * point.days.value and point.minutes.low and point.days.low and point.days.high
    assert point.minutes.low / 1440 <= point.days.low < point.days.value < point.days.high
    assert point.gpu_hours.value == pytest.approx(24 * 64 * point.days.value)
    assert point.energy_kwh.value == pytest.approx(0.7 * 0.98 * point.gpu_hours.value)
    assert point.gpu_hours.low and point.energy_kwh.low and point.samples_low and point.samples_high
    assert point.energy_kwh.low / point.energy_kwh.value < point.gpu_hours.low / point.gpu_hours.value
    assert point.samples_low < point.samples < point.samples_high
    measured = compose.unplanned([*LORA, "cluster.power_per_gpu_w=1275"])
    (own,) = scale.predict(measured, [8], stack=StackName.reference).points
    assert own.energy_kwh and own.gpu_hours and own.energy_kwh == own.gpu_hours * 1.275


@pytest.mark.long
def test_every_gpu_has_a_power_or_is_unknown() -> None:
    files = [path.stem for path in (published.CONF / "gpu").glob("*.yaml") if path.stem != "unknown"]
    for name in files:
        cluster = compose.unplanned([*LORA, f"gpu@cluster.gpu={name}"]).cluster
        assert (known := power.of_gpu(cluster)) and known.low < known.watts < known.high, name


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "stack", "why"),
    [
        (("gpu@cluster.gpu=b300",), StackName.reference, "no step on NVIDIA B300"),
        (("gpu@cluster.gpu=b200",), StackName.reference_fp4, "no step in NVFP4"),
        (("model=gpt_oss_20b",), StackName.reference, "no step of a mixture of experts"),
    ],
)
def test_what_no_published_step_is_like_has_no_interval(words: tuple[str, ...], stack: StackName, why: str) -> None:
    config = compose.unplanned(["task=pretrain_8b", "model.weights=random", "cluster=dgx8", "precision=fp8", *words])
    scaling = scale.predict(config, [2, 8], stack=stack)
    assert why in scaling.not_calibrated and not scaling.intervals
    for point in scaling.points:
        assert point.step_s and point.step_s.low is None and point.minutes and point.minutes.high is None
    table = tables.sheet(scaling, "it")
    assert "Not calibrated, so without intervals" in table.caption and " to " not in table.rows[0][4]


def test_scaling_stops_paying_where_added_gpus_bring_less_than_half() -> None:
    def points(*minutes: float) -> list[Point]:
        return [
            Point(num_nodes=2**n, num_gpus=8 * 2**n, global_batch_size=8, minutes=Range(value=m, low=m, high=m))
            for n, m in enumerate(minutes)
        ]

    assert scale.pays_until(points(100, 50, 25, 20, 18)) == 4
    assert scale.pays_until(points(100, 90)) == 1
    assert scale.pays_until(points(100)) is None


@pytest.mark.long
def test_a_network_replaces_the_bandwidth_of_one_gpu(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "slow.yaml").write_text(
        "# @package _global_\ndefaults: [dgx8, _self_]\ncluster:\n  network:\n    source: a test\n"
        "    nvlink_gbs: 340\n    nics_per_node: 1\n    nic_gbs: 1.25\n"
    )
    fast, slow = (
        compose.unplanned(
            ["task=lora70b", f"cluster={name}", "parallel={tp: 2, pp: 1, cp: 8, sp: true}"], config_dir=tmp_path
        )
        for name in ("dgx8", "slow")
    )
    assert transports.gbs_between_nodes(slow.cluster) == 1.25 / 8
    for stack in (StackName.runstop, StackName.reference):
        steps = [scale.predict(config, [2], stack=stack).points[0].step_s for config in (fast, slow)]
        assert steps[0] and steps[1] and steps[0].value < steps[1].value


@pytest.mark.long
def test_the_table_marks_its_numbers_as_estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "scaling.png"
    assert exit_code(*LORA, "--scale", "1,2", "--stack", "reference", "--figure", str(figure)) == 0
    text = capsys.readouterr().out
    assert text.startswith("estimated scaling of lora70b") and "Everything here is estimated" in text
    assert "docs/prediction.md" in text
    with Image.open(figure) as image:
        assert image.format == "PNG" and image.width > 1000
    assert exit_code(*LORA, "--scale", "1,2", "--json") == 0
    document = answers.one(capsys.readouterr().out)
    assert document["marked"] == "estimated" and [one["num_nodes"] for one in document["points"]] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("task=lora_tiny", "cluster=local", "--scale", "1"), "this cluster has no GPUs"),
        (("task=serve_7b", "cluster=dgxh200", "--scale", "1"), "serve_7b is of kind serve"),
        (("task=lora70b", "cluster=dgxh200", "cluster.network_gbs=null", "--scale", "1,2"), "is not known"),
        (
            (*LORA, "engine=huggingface", "--scale", "1"),
            "set engine=megatron, or choose a task that uses engine=megatron",
        ),
        ((*LORA, "model=gpt_oss_20b", "--scale", "1"), "add --stack reference"),
        ((*LORA, "gpu@cluster.gpu=b200", "--scale", "1"), "the speeds of NVIDIA B200 SXM 180GB were not measured"),
        (
            (*LORA, "gpu@cluster.gpu=l40s", "--scale", "1", "--stack", "reference"),
            "does not know the speeds of NVIDIA L40S",
        ),
        ((*LORA, "--scale", "1", "--stack", "reference-fp4"), "NVIDIA H100 SXM 80GB cannot multiply matrices in FP4"),
        ((*LORA, "model=gpt_oss_20b", "--scale", "1", "--stack", "reference"), "but this task trains only adapters"),
        ((*LORA, "precision=bf16", "--scale", "1", "--stack", "reference"), "are in FP8, but precision=bf16"),
        ((*LORA, "--scale", "1", "--layouts"), "chooses a layout on each number of nodes"),
        ((*LORA, "--stack", "reference"), "are options of --scale"),
        ((*LORA, "--scale", "1", "--figure", "/nowhere/x.png"), "the figure cannot be written"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*words) == 2
    assert message in capsys.readouterr().err


OWN = compose.unplanned([*LORA, "precision=fp8", "recipe.global_batch_size=64"])


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4, 8]),
    gbs=st.floats(0.1, 400),
    slower=st.floats(1, 100),
)
@settings(max_examples=in_proportion(60), deadline=None)
def test_the_estimate_of_runstop_s_engine_does_not_fall_on_a_slower_network(
    tp: int, pp: int, cp: int, gbs: float, slower: float
) -> None:
    assume(tp * pp * cp <= 64)

    def step_s(nic_gbs: float) -> float:
        cluster = replace(OWN.cluster, network=Network(source="", nvlink_gbs=340, nics_per_node=8, nic_gbs=nic_gbs))
        world = split(replace(OWN, cluster=cluster), tp=tp, pp=pp, cp=cp, sp=tp > 1)
        cost = step_time.estimate(replace(OWN, cluster=cluster), world, memory.NOTHING)
        assert cost is not None
        return cost.step_s

    assert step_s(gbs / slower) >= step_s(gbs)
