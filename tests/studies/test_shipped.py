"""The shipped studies: each loads, each arm has a plan or a reason, each published figure has an arm."""

from collections import Counter
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from bench.contract.engine import Strategy
from bench.contract.plan_kinds import KernelsPlan
from bench.contract.training import Trains
from bench.planning import compose
from bench.results import names
from bench.results.measurement import SHARE_OF_PEAK, Measurement, higher_is_better
from bench.results.published import Figure
from bench.results.study import Mark, PlannedArm
from bench.studies import arms as arms_of
from bench.studies import library, plans, tables
from bench.studies.arms import Arm
from bench.studies.plans import Request
from bench.studies.spec import Jobs, Study, matches
from helpers import published_arms
from helpers.paths import ROOT

STUDIES = library.names()
NOT_THERE = "{} does not exist".format
ONE_H200 = ["cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=1", "gpu@cluster.gpu=h200"]
EXPECTED = {
    "dissect_finetuning": ("cluster=dgxh200", {"": 51}),
    "dissect_few_gpus": ("cluster=dgxh200", {"": 7, "estimated memory is 140.6 GiB per GPU": 1}),
    "dissect_frameworks": ("cluster=dgxh200", {"": 7}),
    "dissect_links": ("cluster=dgxh200", {"": 15}),
    "dissect_max_batch": ("cluster=dgxh200", {"": 44}),
    "dissect_kernels": ("cluster=dgxh200", {"": 5}),
    "dissect_modules": ("cluster=dgxh200", {"": 11}),
    "dissect_pretraining": ("cluster=dgxh200", {"": 44}),
    "dissect_scaling": ("cluster=dgxh200", {"": 14}),
    "dissect_serving": (
        "cluster=dgxh200",
        {"": 14, "even for one request, a server needs": 1},
    ),
    "dissect_serving_modules": ("cluster=dgxh200", {"": 3}),
    "dissect_serving_tiny": ("cluster=local", {"": 2}),
    "h200_generation_eight": ("cluster=dgxh200", {"": 6}),
    "h200_training": ("cluster=dgxh200", {"": 24}),
    "kubernetes_memory": ("cluster=dgx8", {"": 9}),
    "kubernetes_overhead": ("cluster=dgx8", {"": 12}),
    "kubernetes_overhead_tiny": ("cluster=local", {"": 4}),
    "quality": ("cluster=dgx1", {"": 3}),
    "quality_tiny": ("cluster=local", {"": 3}),
    "layouts": ("cluster=dgxh200", {"": 23, "estimated memory is 144.4 GiB per GPU": 1}),
    "roce": ("cluster=kubernetes_mi300x", {"": 12}),
    "slow_network": ("cluster=hosts", {"": 15}),
    "three_programs": ("cluster=local", {"": 4}),
    "ironbyte": (
        "cluster=net_10_gbit",
        {"": 59, "the document says that so few steps take less time": 5},
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


@pytest.mark.long
def test_the_states_of_training_are_four_times_the_weights_also_for_arms_that_are_refused() -> None:
    """All nine printed sizes are met within 4 %, and all numbers of GPUs; an A100 has no FP8."""
    study, arms = loaded("kubernetes_memory")
    overrides = ("cluster=dgx8", "gpu@cluster.gpu=a100_40gb")
    some = [arm for arm in arms if arm.labels["model"] == "7B"]
    outcomes = plans.plan_arms(Request(study=study, arms=some, cli_overrides=overrides))
    assert [arm.runs for arm in outcomes] == [True, True, False]
    for arm, planned_arm in zip(some, outcomes, strict=True):
        figures = library.published("kubernetes_memory").figures
        mine = {one.measurement: one.value for one in figures if one.labels.items() <= arm.labels.items()}
        sizes = {name: getattr(planned_arm, field) for name, field in tables.SIZES.items()}
        assert sizes == pytest.approx(mine, rel=0.04)


def test_every_expected_study_exists() -> None:
    parts = ("frameworks", "pretraining", "max_batch", "finetuning", "modules", "kernels", "serving", "scaling")
    of_documents = {"ironbyte", "slow_network", "kubernetes_overhead", "kubernetes_memory", "roce", "dissect_links"}
    of_documents |= {f"dissect_{part}" for part in parts} | {"dissect_few_gpus", "quality", "quality_tiny"}
    ours = {"layouts", "h200_fp8", "h200_training", "h200_generation", "h200_generation_eight", "tiny"}
    in_small = {"kubernetes_overhead_tiny", "dissect_serving_tiny", "three_programs"}
    assert set(STUDIES) == {*of_documents, "dissect_serving_modules", *ours, *in_small}


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


@pytest.mark.long
def test_an_arm_that_names_a_cluster_does_not_use_that_of_the_command_line() -> None:
    study, arms = loaded("slow_network")
    two = [arm for arm in arms if arm.name in ("one node", "7B 10 Gbit/s synchronous")]
    by_name = {arm.name: arm for arm in plans.plan_arms(Request(study=study, arms=two, cli_overrides=["cluster=dgx2"]))}
    one_node, ten_gbit = by_name["one node"], by_name["7B 10 Gbit/s synchronous"]
    assert (one_node.backend, one_node.num_ranks) == ("slurm", 8)
    assert (ten_gbit.backend, ten_gbit.num_ranks) == ("ssh", 16)


def estimates_ms(name: str, cluster: str, *in_order: str) -> list[float]:
    """Return the estimated step times of these arms of a study."""
    study, arms = loaded(name)
    chosen = [arm for label in in_order for arm in arms if arm.name == label]
    outcomes = plans.plan_arms(Request(study=study, arms=chosen, cli_overrides=[f"cluster={cluster}"]))
    assert all(arm.runs for arm in outcomes) and len(outcomes) == len(in_order)
    return [arm.step_time_ms or 0.0 for arm in outcomes]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cluster", "in_order"),
    [
        ("roce", "dgxh200", [f"runstop 8B two nodes, {way}" for way in ("RoCE", "no RoCE")]),
        ("roce", "dgxh200", [f"runstop 70B two nodes, {way}" for way in ("RoCE", "no RoCE")]),
        ("dissect_links", "dgx1", [f"runstop {way}" for way in ("NVLink", "host memory", "sockets")]),
        ("slow_network", "hosts", [f"7B {gbit} Gbit/s synchronous" for gbit in (80, 10, 1)]),
    ],
)
def test_a_slower_transport_has_a_longer_step(name: str, cluster: str, in_order: list[str]) -> None:
    times_ms = estimates_ms(name, cluster, *in_order)
    assert all(0 < faster < slower for faster, slower in pairwise(times_ms))


@pytest.mark.long
def test_the_published_step_of_a_slow_network_is_next_to_its_own_technique() -> None:
    """The document's 375 s are of FSDP with a base in 4 bits, not of this project's engine."""
    study, arms = loaded("slow_network")
    (figure,) = library.publications(study)["ironbyte_slow_network"].figures
    (arm,) = [arm for arm in arms if matches(arm.all_labels, figure.labels)]
    config = compose.unplanned(Request(study=study, arms=arms, cli_overrides=["cluster=hosts"]).overrides(arm))
    assert (figure.printed, config.model.name, config.cluster.num_nodes) == ("375", "llama2_70b", 2)
    assert config.huggingface is not None and config.huggingface.strategy is Strategy.fsdp2
    assert config.training.trains is Trains.qlora and config.cluster.network_gbs == pytest.approx(10 / 8 / 8)


@pytest.mark.long
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
    marks = {arm.mark for arm in arms if "so few steps" in arm.reason}
    assert marks == ({Mark.not_advisable} if name == "ironbyte" else set())


GPUS = {
    "dissect_table_2": "a800",
    **{f"dissect_table_{table}_{gpu}": gpu for table in (3, 4, 9) for gpu in ("a800", "rtx4090", "rtx3090")},
    **{f"dissect_table_{table}": "a800" for table in (5, 7, 13, 15, 16)},
}
"""The GPU of each table of arXiv 2311.03687 on training, whose server has eight of them."""
FITS_HERE_ONLY = {"PEFT 70B L+F+R+Z3"}
"""Arms that the plan fits into 24 GB, and that were out of memory there."""


def of_table(name: str, *, only: str = "") -> tuple[tuple[Figure, ...], list[PlannedArm]]:
    """Return the figures of a table, and the arms of its largest study, planned for eight of its GPUs."""
    of_studies = [study for study in STUDIES if name in loaded(study)[0].published]
    study_name = max(of_studies, key=lambda study: len(loaded(study)[1]))
    study, arms = loaded(study_name)
    words = [*ONE_H200[:2], "cluster.ranks_per_node=8", f"gpu@cluster.gpu={GPUS[name]}"]
    some = tuple(arm for arm in arms if arm.name.startswith(only))
    planned_arms = plans.plan_arms(Request(study=study, arms=some, cli_overrides=words))
    return library.publications(study)[name].figures, planned_arms


@pytest.mark.long
@pytest.mark.parametrize("name", ["dissect_table_2", "dissect_table_5", "dissect_table_15", "dissect_table_3_a800"])
def test_baselines_of_the_document_are_planned_on_its_gpus(name: str) -> None:
    """66.7 GB of 80: states in BF16, ten bytes per weight."""
    _, arms = of_table(name, only="DDP")
    assert {arm.reason for arm in arms} == {""} and len(arms) == (2 if name == "dissect_table_2" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_arms_are_planned_exactly_where_the_document_has_numbers(name: str) -> None:
    figures, planned_arms = of_table(name)
    labels = {arm.name: arm.all_labels for study in STUDIES for arm in loaded(study)[1]}
    refused, beyond = set(), set()
    for figure in figures:
        own = [arm for arm in planned_arms if matches(labels[arm.name], figure.labels)]
        if figure.value is not None and not any(arm.runs for arm in own):
            refused.add(str(figure.labels))
        if figure.value is None:
            beyond |= {arm.name for arm in own if arm.runs and not arm.name.startswith("runstop")}
    assert not refused
    assert beyond == (FITS_HERE_ONLY if name in ("dissect_table_9_rtx4090", "dissect_table_9_rtx3090") else set())


def test_every_column_has_a_known_measurement() -> None:
    kernels = set(names.KNOWN)
    for task in ("gemm", "memcpy", "collectives", "attention"):
        plan = compose.compose([f"task={task}", "cluster=dgxh200"])
        assert isinstance(plan, KernelsPlan)
        kernels |= {
            text
            for point in plan.points
            for text in (f"best {point.kernel}", point.name, f"{point.name} latency", f"{point.name}{SHARE_OF_PEAK}")
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


PUBLISHED = sorted(path.stem for path in (ROOT / "conf" / "published").glob("*.yaml"))
MOST_REASONS = 6


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_figure_has_an_arm_that_measures_it(name: str) -> None:
    """The arm has the labels, its kind has the measurement. "-" and "No solution" are no numbers."""
    missing = published_arms.missing(library.published(name), must_plan=False)
    assert not missing, listed(name, missing)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_figure_has_an_arm_that_is_planned_for_its_hardware(name: str) -> None:
    missing = published_arms.missing(library.published(name), must_plan=True)
    assert not missing, listed(name, missing)


def listed(name: str, missing: list[published_arms.Missing]) -> str:
    return "\n".join([f"{name}: {len(missing)} figures without an arm", *map(str, missing)])


@pytest.mark.long
def test_few_tables_have_figures_that_nothing_measures() -> None:
    with_reasons = [name for name in PUBLISHED if any(one.not_measured for one in library.published(name).figures)]
    assert len(with_reasons) <= MOST_REASONS, with_reasons


def test_a_figure_of_another_server_or_measurement_has_no_arm() -> None:
    """The arms of dissect_links without NVLink do not count for the server with NVLink."""
    table = library.published("dissect_table_12")
    (first, *_) = table.figures
    changed = {
        "no arm": msgspec.structs.replace(first, labels={"kernels": "convolutions"}),
        "no column": msgspec.structs.replace(first, measurement="throughput_per_gpu"),
        "no labels": msgspec.structs.replace(first, labels={}),
    }
    only_these = msgspec.structs.replace(table, figures=tuple(changed.values()))
    assert len(published_arms.missing(only_these, must_plan=False)) == 3
    has_reason = msgspec.structs.replace(changed["no arm"], not_measured="tried")
    assert not published_arms.missing(msgspec.structs.replace(table, figures=(has_reason,)), must_plan=False)
    links, _ = next(
        (study, arms)
        for name, study, arms in published_arms.studies_of("dissect_table_3_rtx3090_nvlink")
        if name == "dissect_links"
    )
    arms = [arm for arm in loaded("dissect_links")[1] if arm.labels["method"] == "Z3"]
    nvlink = {arm.labels["links"]: set(tables.of_arm(arm, links, library.publications(links))) for arm in arms}
    assert nvlink == {
        "NVLink": {"dissect_table_3_rtx3090_nvlink"},
        "host memory": {"dissect_table_3_rtx3090"},
        "sockets": set(),
    }
