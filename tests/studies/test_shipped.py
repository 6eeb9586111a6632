"""The shipped studies: each loads, each arm has a plan or a reason, each published figure has an arm."""

from collections import Counter
from functools import cache

import pytest

from bench.contract.plan_kinds import KernelsPlan
from bench.planning import compose
from bench.results import names
from bench.results.measurement import Measurement, higher_is_better
from bench.results.study import Mark, PlannedArm
from bench.studies import arms as arms_of
from bench.studies import library, plans
from bench.studies.arms import Arm
from bench.studies.plans import Request
from bench.studies.spec import Jobs, Study, matches

STUDIES = library.names()
NOT_THERE = "{} does not exist".format
ONE_H200 = ["cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=1", "gpu@cluster.gpu=h200"]
EXPECTED = {
    "dissect_finetuning": ("cluster=dgxh200", {"": 51}),
    "dissect_few_gpus": ("cluster=dgxh200", {"": 7, "estimated memory is 140.6 GiB per GPU": 1}),
    "dissect_frameworks": ("cluster=dgxh200", {"": 7}),
    "dissect_links": ("cluster=dgxh200", {"": 15}),
    "dissect_max_batch": ("cluster=dgxh200", {"": 44}),
    "dissect_kernels": ("cluster=dgxh200", {"": 4}),
    "dissect_modules": ("cluster=dgxh200", {"": 11}),
    "dissect_pretraining": ("cluster=dgxh200", {"": 44}),
    "dissect_scaling": ("cluster=dgxh200", {"": 14}),
    "dissect_serving": (
        "cluster=dgxh200",
        {"": 14, "the command line of transformers does not set tensor": 1},
    ),
    "h200_generation_eight": ("cluster=dgxh200", {"": 6}),
    "h200_training": ("cluster=dgxh200", {"": 24}),
    "kubernetes_overhead": ("cluster=dgx8", {"": 12}),
    "kubernetes_overhead_tiny": ("cluster=local", {"": 4}),
    "quality": ("cluster=dgx1", {"": 3}),
    "quality_tiny": ("cluster=local", {"": 3}),
    "layouts": ("cluster=dgxh200", {"": 23, "144.4 GiB per GPU": 1}),
    "roce": ("cluster=dgx2", {"": 10, "118.0 GiB per GPU": 1, "142.2 GiB per GPU": 1}),
    "slow_network": (
        "cluster=dgx2",
        {"": 1, NOT_THERE("cluster net_10_gbit"): 5} | {NOT_THERE(f"cluster net_{gbit}_gbit"): 4 for gbit in (1, 80)},
    ),
    "ironbyte": (
        "cluster=dgx2",
        {"": 47, "a 4-bit base cannot be sharded": 4, NOT_THERE("cluster net_80_gbit"): 8}
        | {"so few steps take less time than merging the groups": 5},
    ),
}
"""The cluster of a study, and the arms by the reason why they do not run; "" for those that run."""


@cache
def loaded(name: str) -> tuple[Study, tuple[Arm, ...]]:
    study = library.load(name)
    return study, tuple(arms_of.build(study, where=name))


def planned(name: str, *words: str) -> list[PlannedArm]:
    study, arms = loaded(name)
    return plans.plan_arms(Request(study=study, arms=arms, cli_overrides=words))


def test_every_expected_study_exists() -> None:
    parts = ("frameworks", "pretraining", "max_batch", "finetuning", "modules", "kernels", "serving", "scaling")
    of_documents = {"ironbyte", "slow_network", "kubernetes_overhead", "roce", "dissect_links"}
    of_documents |= {f"dissect_{part}" for part in parts} | {"dissect_few_gpus", "quality", "quality_tiny"}
    ours = {"layouts", "h200_fp8", "h200_training", "h200_generation", "h200_generation_eight", "tiny"}
    assert set(STUDIES) == {*of_documents, *ours, "kubernetes_overhead_tiny"}


def test_bf16_and_fp8_on_one_h200_are_planned_for_it() -> None:
    bf16, fp8 = planned("h200_fp8", *ONE_H200)
    assert (bf16.steps, bf16.micro_batch_size, bf16.global_batch_size) == (12, 4, 8)
    assert bf16.step_time_ms and fp8.step_time_ms and fp8.step_time_ms < bf16.step_time_ms


@pytest.mark.long
def test_generation_on_one_h200_and_the_groups_of_the_document_are_planned() -> None:
    assert [arm.reason for arm in planned("h200_generation", *ONE_H200)] == [""] * 9
    study, arms = loaded("ironbyte")
    generating = [arm for arm in arms if "generation" in arm.name]
    outcomes = plans.plan_arms(Request(study=study, arms=generating, cli_overrides=["cluster=dgx2"]))
    sizes = {arm.name.removesuffix(" node").removesuffix(" nodes"): (arm.num_ranks, arm.layout) for arm in outcomes}
    assert all(arm.runs for arm in outcomes) and len(outcomes) == 8
    assert sizes["7B generation, groups, side by side, 1"] == (10, "dp 5 tp 2"), "5x2 of 8 GPUs, which share"
    assert sizes["70B generation, groups, side by side, 2"] == (16, "dp 8 tp 2")
    assert sizes["70B generation, groups, one by one"] == (8, "tp 8")
    assert sizes["70B generation, open source, one by one"] == (1, "1 rank")


def test_an_arm_that_names_a_cluster_does_not_use_that_of_the_command_line() -> None:
    study, arms = loaded("slow_network")
    two = [arm for arm in arms if arm.name in ("one node", "7B 10 Gbit/s synchronous")]
    by_name = {arm.name: arm for arm in plans.plan_arms(Request(study=study, arms=two, cli_overrides=["cluster=dgx2"]))}
    one_node, ten_gbit = by_name["one node"], by_name["7B 10 Gbit/s synchronous"]
    assert one_node.runs and one_node.num_ranks == 8
    assert (ten_gbit.runs, ten_gbit.reason) == (False, "cluster net_10_gbit does not exist")


@pytest.mark.parametrize(
    ("name", "cluster", "names", "backends"),
    [
        ("kubernetes_overhead_tiny", "local", (), {"local", "slurm", "kubernetes", "ray"}),
        ("kubernetes_overhead", "dgx8", ("126M 2 bare metal", "126M 2 Kubernetes"), {"slurm", "kubernetes"}),
    ],
)
def test_backends_are_compared_with_the_same_work_and_not_concurrently(
    name: str, cluster: str, names: tuple[str, ...], backends: set[str]
) -> None:
    """The arms of a pair have the same ranks, layout and batch; their backends use the same machines."""
    study, arms = loaded(name)
    some = [arm for arm in arms if not names or arm.name in names]
    outcomes = plans.plan_arms(Request(study=study, arms=some, cli_overrides=[f"cluster={cluster}"]))
    assert {arm.backend for arm in outcomes} == backends and study.jobs is Jobs.sequential
    assert len({(a.num_ranks, a.layout, a.micro_batch_size, a.global_batch_size, a.steps) for a in outcomes}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_every_arm_has_a_plan_or_a_reason(name: str) -> None:
    cluster, expected = EXPECTED[name]
    arms = planned(name, cluster)
    outcomes = Counter(
        next((why for why in expected if why and arm.reason.startswith(why)), arm.reason) for arm in arms
    )
    assert outcomes == expected
    marks = {arm.mark for arm in arms if "merging the groups" in arm.reason}
    assert marks == ({Mark.not_advisable} if name == "ironbyte" else set())


def test_every_column_has_a_known_measurement() -> None:
    kernels = set(names.KNOWN)
    for task in ("gemm", "memcpy", "collectives", "attention"):
        plan = compose.compose([f"task={task}", "cluster=dgxh200"])
        assert isinstance(plan, KernelsPlan)
        kernels |= {
            text for point in plan.points for text in (f"best {point.kernel}", point.name, f"{point.name} latency")
        }
    columns = {column.measurement for name in STUDIES for column in loaded(name)[0].columns}
    assert columns <= kernels


def test_higher_is_better_is_the_same_in_studies_comparisons_and_histories() -> None:
    """Only studies have batch sizes as columns."""
    columns = [column for name in STUDIES for column in loaded(name)[0].columns]
    requested = {
        (c.measurement, c.unit): c.higher_is_better for c in columns if c.measurement not in names.MEASURED_BATCH
    }
    assert {
        (name, unit): higher_is_better(Measurement(name=name, unit=unit, value=1.0)) for name, unit in requested
    } == requested
    assert higher_is_better(Measurement(name="sm_clock", unit="MHz", value=1980)), "a GPU that slows down is no gain"


@pytest.mark.parametrize("name", [name for name in STUDIES if loaded(name)[0].published])
def test_every_published_figure_has_an_arm(name: str) -> None:
    """A figure whose labels no arm has would not be shown."""
    study, arms = loaded(name)
    columns = {column.measurement for column in study.columns}
    shown = set()
    for publication, table in library.publications(study).items():
        for figure in table.figures:
            if figure.measurement in columns and figure.printed != "No solution":
                shown.add(publication)
                assert any(matches(arm.all_labels, figure.labels) for arm in arms), (publication, figure)
    assert set(study.published) - shown <= NOTHING_MEASURES


NOTHING_MEASURES = {
    *("dissect_scaling_rtx4090", "dissect_scaling_rtx3090"),
    *("dissect_table_8", "dissect_table_10", "dissect_table_11"),
}
"""Publications without a figure of any column: ratios of arms, and parts of programs that are not measured alone."""
