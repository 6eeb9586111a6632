"""Which layout a plan takes: never a slower one than it could, all of what is given kept, nothing invented."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.console import plan as layout_sheets
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.schema import Config, Precision
from bench.contract.training import Recompute
from bench.errors import ConfigError
from bench.planning import compose, layouts, make_plan
from bench.planning.estimates import memory
from helpers.examples import in_proportion

OPEN = "parallel={tp: null, pp: null, cp: null, sp: null}"


def config_on(cluster: str) -> Config:
    return compose.compose(["task=lora70b", f"cluster={cluster}"]).config


def explicit(config: Config, tp: int, pp: int, cp: int, sp: bool) -> Config:
    return replace(config, parallel=replace(config.parallel, tp=tp, pp=pp, cp=cp, sp=sp))


def possible(config: Config) -> list[Plan]:
    """Every plan with all sizes given that is not refused."""
    ranks, plans = config.cluster.num_nodes * config.cluster.ranks_per_node, []
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp, sp in itertools.product(sizes, sizes, sizes, (False, True)):
        try:
            plans.append(make_plan.make(explicit(config, tp, pp, cp, sp)))
        except ConfigError:
            continue
    return plans


@pytest.mark.long
@given(
    cluster=st.sampled_from(["dgx1", "dgx2", "dgxh200"]),
    precision=st.sampled_from([Precision.bf16, Precision.fp8]),
    recompute=st.sampled_from(Recompute),
    batch=st.sampled_from([8, 16, 64]),
    micro=st.sampled_from([1, 2, None]),
    vpp=st.sampled_from([1, 2]),
    memory_gib=st.sampled_from([24.0, 79.6, 140.4]),
)
@settings(max_examples=in_proportion(15))  # each makes up to a hundred plans, one of every layout
def test_the_chosen_layout_is_the_fastest_that_fits(
    cluster: str, precision: Precision, recompute: Recompute, batch: int, micro: int | None, vpp: int, memory_gib: float
) -> None:
    config = config_on(cluster)
    assert config.cluster.gpu
    config.precision, config.parallel.vpp, config.cluster.gpu.memory_gib = precision, vpp, memory_gib
    config.recipe.recompute, config.recipe.global_batch_size, config.recipe.micro_batch_size = recompute, batch, micro
    others = possible(config)
    if not others:
        with pytest.raises(ConfigError):
            make_plan.make(config)
        return
    chosen = make_plan.make(config)
    assert chosen.memory.fits and chosen.cost
    assert chosen.cost.step_s == min(other.cost.step_s for other in others if other.cost)
    fitting = [one for one in layouts.ranked(config) if one.memory.fits]
    assert {one.world for one in fitting} == {other.world for other in others}
    times = [one.cost.step_s for one in fitting if one.cost]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "given_", ["parallel.tp=4", "parallel.cp=2", "parallel.pp=2", "parallel.sp=true", "parallel.tp=8"]
)
def test_given_parallel_sizes_are_kept(given_: str) -> None:
    name, value = given_.removeprefix("parallel.").split("=")
    plan = compose.compose(["task=lora70b", "cluster=dgxh200", given_])
    assert str(getattr(plan.world, name)).lower() == value
    assert getattr(plan.config.parallel, name) is not None and plan.config.parallel.vpp == plan.world.vpp


def test_fp8_on_h200_is_a_replica_per_gpu() -> None:
    w = compose.compose(["task=lora70b", "cluster=dgxh200"]).world
    assert (w.dp, w.tp, w.pp, w.cp, w.sp) == (8, 1, 1, 1, False)


@pytest.mark.parametrize(
    ("task", "micro_batch_size"),
    [
        ("pretrain_7b precision=bf16", 1),
        ("pretrain_7b precision=fp8", 1),
        ("pretrain_8b", 1),
        ("pretrain_gpt3_5b", 4),
        ("pretrain_gpt3_126m", 32),
        ("lora_8b", 8),
        ("qlora_70b", 1),
    ],
)
def test_the_micro_batch_of_one_h200_needs_no_recomputation(task: str, micro_batch_size: int) -> None:
    """Two micro-batches of 7B in one would recompute some layers, and save nothing that the estimate can tell."""
    plan = compose.compose([*f"task={task}".split(), "cluster=dgxh200", "cluster.ranks_per_node=1"])
    assert (plan.batch.micro_batch_size, plan.recompute) == (micro_batch_size, memory.NOTHING)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_70b_in_fp8_on_part_of_a_machine(ranks: int) -> None:
    sizes = ("cluster=local", "cluster.device=cuda", "gpu@cluster.gpu=h200", f"cluster.ranks_per_node={ranks}")
    plan = compose.compose(["task=lora70b", *sizes])
    assert plan.memory.fits and plan.cost and plan.world.dp == ranks
    assert plan.batch.gradient_accumulation_steps == 8 // ranks


@pytest.mark.long
def test_without_rates_the_simplest_layout_that_fits_is_chosen() -> None:
    def world(*overrides: str) -> tuple[int, int, int, int, bool]:
        plan = compose.compose(["task=lora70b", *overrides])
        assert plan.cost is None
        w = plan.world
        return w.dp, w.tp, w.pp, w.cp, w.sp

    unknown = ("cluster=dgxh200", "cluster.gpu.rates=null")
    assert world(*unknown) == (8, 1, 1, 1, False)
    assert world(*unknown, "precision=bf16") == (4, 2, 1, 1, True)
    assert world("cluster=local") == (2, 1, 1, 1, False)  # no memory known either
    assert world("cluster=local", "cluster.device=cuda") == (2, 1, 1, 1, False)


def test_if_no_layout_fits_the_smallest_is_refused() -> None:
    with pytest.raises(ConfigError, match="GiB per GPU, but an .* has 9") as refused:
        compose.compose(["task=lora70b", "cluster=dgx1", "cluster.gpu.memory_gib=9"])
    closest = min(one.memory.total_gib for one in layouts.ranked(_small()))
    assert f"{closest:.1f} GiB per GPU" in refused.value.what


def _small() -> Config:
    config = config_on("dgx1")
    assert config.cluster.gpu
    config.cluster.gpu.memory_gib = 9
    return config


def test_if_no_layout_is_legal_the_error_is_that_of_the_simplest() -> None:
    with pytest.raises(
        ConfigError, match="the global batch size is 9, but must be a multiple of dp x micro-batch size = 8 x 1"
    ):
        compose.compose(
            [
                "task=lora70b",
                "cluster=dgx1",
                "recipe.global_batch_size=9",
                "parallel.cp=1",
                "parallel.tp=1",
                "parallel.pp=1",
            ]
        )
    with pytest.raises(ConfigError, match="tp 3 does not divide"):
        compose.compose(["task=lora70b", "cluster=dgx1", "parallel.tp=3"])


def test_the_table_lists_them_all_with_what_fits_first() -> None:
    plan = compose.compose(["task=lora70b", "cluster=dgx1", "recipe.recompute=none"])
    sheet = layout_sheets.sheet(plan)
    assert len(sheet.rows) == len(layouts.ranked(plan.config)) > 10
    rows = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True) and {"yes", "no"} == set(fits)
    assert (
        rows[0]["tp"] == str(plan.world.tp) and rows[0]["step (s)"] == f"{plan.cost.step_s:.2f}" if plan.cost else False
    )
    cpu = layout_sheets.sheet(compose.compose([OPEN]))
    assert {(row[cpu.columns.index("fits")], row[cpu.columns.index("step (s)")]) for row in cpu.rows} == {("", "")}


@pytest.mark.long
def test_planning_again_from_the_config_gives_the_same_plan() -> None:
    plan = compose.compose(["task=lora70b", "cluster=dgx8"])
    assert make_plan.make(plan.config) == plan == plan_kinds.loads(plan_kinds.dumps(plan))
    assert plan.config.parallel.tp is None and plan.config.recipe.recompute is Recompute.fit


def test_fit_is_in_the_plan_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.console import plan as plan_sheets

    tight = ("task=lora70b", "cluster=dgxh200", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1")
    plan = compose.compose([*tight, "cluster.gpu.memory_gib=137"])
    assert plan.recompute.qkv_layers and not plan.recompute.full
    assert plan.cost and plan.cost.recompute_s > 0
    assert plan.recompute == memory.recompute(plan.config, plan.world)
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    plan_sheets.show_plan(plan, [])
    shown = capsys.readouterr().out
    assert f"fp8, recompute selective: qkv {plan.recompute.qkv_layers}/80 (automatic, to fit memory)" in shown
    assert f"step time: {plan.cost.step_s:.2f} s (estimate)" in shown and "cp 1 (sp automatic)" in shown
    assert compose.compose(["task=lora70b", "cluster=dgx1", "recipe.recompute=full"]).recompute == memory.EVERYTHING


TINY = {
    "local": (2, 1, 1),
    "slurm_test": (4, 1, 1),
    "dgx1": (8, 1, 1),
    "dgxh200": (8, 1, 1),
    "dgx2": (8, 2, 1),  # 16 ranks, and 8 samples in a batch
    "dgx8": (8, 2, 4),  # 64 ranks; two query groups allow no more than tp 2
}
"""dp, tp and cp of the tiny task."""


@pytest.mark.parametrize("cluster", TINY)
def test_the_tiny_task_starts_on_every_shipped_cluster(cluster: str) -> None:
    """It is what an admin tries first; its base task, with 16 samples in a batch, is planned with it."""
    plan = compose.compose(["task=lora_tiny", f"cluster={cluster}"])
    assert (plan.world.dp, plan.world.tp, plan.world.cp) == TINY[cluster] and plan.world.pp == 1
    assert plan.base is not None and plan.base.world.num_ranks == plan.world.num_ranks


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp8])
def test_a_null_micro_batch_size_is_the_fastest_that_fits(precision: Precision) -> None:
    """Of the divisors of a replica's share that are not too large; what is given is kept."""
    config = replace(compose.unplanned(["task=pretrain_7b", "cluster=dgxh200"]), precision=precision)
    config.parallel = replace(config.parallel, tp=1, pp=1, cp=1, sp=False)
    times = {}
    for size in (1, 2, 4, 8):
        given_ = make_plan.make(layouts.with_micro_batch(config, size))
        assert given_.batch.micro_batch_size == size and given_.cost
        times[size] = given_.cost.step_s
    plan = make_plan.make(config)
    assert plan.cost and plan.cost.step_s == min(times.values())
    assert times[plan.batch.micro_batch_size] == plan.cost.step_s and plan.config.recipe.micro_batch_size is None


@pytest.mark.long
def test_a_null_micro_batch_size_without_rates_is_the_largest_that_fits() -> None:
    config = compose.unplanned(["task=pretrain_7b", "cluster=dgxh200", "cluster.gpu.rates=null"])
    plan = make_plan.make(config)
    assert (plan.world.dp, plan.batch.micro_batch_size) == (8, 16)  # 65,536 tokens
    rows_of_8 = make_plan.make(replace(config, data=replace(config.data, seq_length=8)))
    assert rows_of_8.batch.micro_batch_size == 16  # a replica's whole share


def test_the_interleaved_schedule_needs_a_multiple_of_the_pipeline_stages() -> None:
    words = ["task=lora_tiny", "cluster=local", "cluster.ranks_per_node=4", "recipe.micro_batch_size=1"]
    words += ["parallel={tp: 1, pp: 2, vpp: 2, cp: 1, sp: false}"]
    assert compose.compose([*words, "recipe.global_batch_size=8"]).world.dp == 2
    with pytest.raises(ConfigError, match="micro-batches in a step is 3, but with vpp 2 it must be a multiple of pp"):
        compose.compose([*words, "recipe.global_batch_size=6"])
