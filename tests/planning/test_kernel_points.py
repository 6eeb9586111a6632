"""The points of a kernels task, their work by hand arithmetic, and what cannot be measured is refused."""

import pytest
import yaml

from bench.contract import plan_kinds
from bench.contract.kernels import Point
from bench.contract.plan_kinds import KernelsPlan
from bench.errors import ConfigError
from bench.planning import compose
from helpers.paths import ROOT

FULL = ("node", "gemm", "memcpy", "collectives", "attention")


def planned(*overrides: str) -> KernelsPlan:
    plan = compose.compose(overrides)
    assert isinstance(plan, KernelsPlan)
    return plan


def by_name(*overrides: str) -> dict[str, Point]:
    points = planned(*overrides).points
    by_point = {point.name: point for point in points}
    assert len(by_point) == len(points), "names are unique"
    return by_point


@pytest.mark.long
@pytest.mark.parametrize("task", FULL)
def test_every_task_is_planned_for_a_node_and_its_plan_round_trips(task: str) -> None:
    plan = planned(f"task={task}", "cluster=dgxh200")
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    families = {"memcpy", "collectives", "attention", "gemm"} if task == "node" else {task}
    assert {point.family for point in plan.points} == families
    assert plan.commands[-1].argv == ["python", "-m", "jobs.tasks.kernels", "plan.json", "--trial", "0"]
    assert [file for file in plan.files if file.startswith(("result", "loss", "prepare"))] == ["result_0.txt"]


def test_the_work_of_a_point_follows_the_usual_definitions() -> None:
    """7B on 8 ranks of one node; a causal row of 4,096 tokens has 4,096 x 4,097 / 2 scores."""
    by_point = by_name("task=node", "cluster=dgxh200")
    assert by_point["gemm bf16 666 x 11008 x 4096"].work == 60_058_238_976  # 2 x 666 x 11,008 x 4,096
    scores = 4 * 32 * 8_390_656
    assert by_point["attention forward cudnn 4 x 4096, 32 heads of 128, 32 of keys"].work == 4 * 128 * scores
    assert by_point["attention backward cudnn 4 x 4096, 32 heads of 128, 32 of keys"].work == 2.5 * 4 * 128 * scores
    assert by_point["copy host to device pinned 64 MiB"].work == 67_108_864
    assert by_point["copy within device 64 MiB"].work == 2 * 67_108_864
    mib = 2**20
    assert by_point["all-reduce of 8 ranks 1 MiB"].work == 1.75 * mib
    assert by_point["all-reduce of 2 ranks 1 MiB"].work == mib
    assert by_point["all-gather of 8 ranks 1 MiB"].work == by_point["all-to-all of 8 ranks 1 MiB"].work == 0.875 * mib
    assert by_point["reduce-scatter of 4 ranks 1 MiB"].work == 0.75 * mib
    assert by_point["reduce of 4 ranks 1 MiB"].work == mib


@pytest.mark.long
def test_attention_and_gemms_have_the_sizes_of_the_published_tables() -> None:
    """Rows of 350 tokens have 350 x 351 / 2 scores; M grows from 4,096, or from 4,109, to 16,384 in steps of 512."""
    attention = by_name("task=attention", "cluster=dgx1", "gpu@cluster.gpu=a800")
    for rows in (2, 32):
        for backend in ("math", "efficient", "flash", "cudnn"):
            point = attention[f"attention forward {backend} {rows} x 350, 32 heads of 128, 32 of keys"]
            assert (point.work, point.sizes) == (4 * 128 * rows * 32 * 61_425, [rows, 32, 32, 350, 128])
    gemms = by_name("task=gemm", "cluster=dgx1", "gpu@cluster.gpu=a800")
    for n, k, offset in ((4096, 4096, 0), (11008, 4096, 0), (16384, 16384, 0), (11008, 4096, 13)):
        for m in range(4096 + offset, 16385 + offset, 512):
            assert gemms[f"gemm bf16 {m} x {n} x {k}"].peak == 312
    assert gemms["gemm bf16 666 x 11008 x 4096"].peak == gemms["gemm bf16 10624 x 11008 x 4096"].peak == 312
    assert "attention" in {point.family for point in by_name("task=node", "cluster=dgx1").values()}
    only = ("task.kernels.attention.seq_lengths=[]", "task.kernels.attention.batches=[[3, 100]]")
    assert {point.sizes[0] for point in by_name("task=attention", "cluster=dgx1", *only).values()} == {3}


@pytest.mark.long
def test_gemms_of_the_model_have_the_shapes_of_one_rank() -> None:
    """Llama-2-70B: hidden 8,192, FFN 28,672, 8 of 64 heads for keys; tp 2 halves outputs, then inputs."""
    given = ("model=llama2_70b", "parallel.tp=2")
    gemm = ("task.kernels.gemm.shapes=[]", "task.kernels.gemm.model_tokens=2048")
    by_point = by_name("task=gemm", "cluster=dgxh200", *given, *gemm)
    shapes = {tuple(point.sizes) for point in by_point.values() if not point.is_sustained}
    assert shapes == {(2048, 5120, 8192), (2048, 8192, 4096), (2048, 28672, 8192), (2048, 8192, 14336)}
    heads = by_name("task=attention", "cluster=dgxh200", *given)[
        "attention forward flash 2 x 8192, 32 heads of 128, 4 of keys"
    ]
    assert heads.sizes == [2, 32, 4, 8192, 128]


def test_points_have_the_peak_and_best_known_rate_of_their_own_gpu() -> None:
    alone = by_name("task=node", "cluster=dgxh200", "cluster.ranks_per_node=1")
    assert not any(point.family == "collectives" for point in alone.values()), "one rank has no peers"
    assert alone["copy host to device pinned 1 GiB"].limit == 55.4
    assert alone["copy host to device pageable 1 GiB"].limit is None
    fp8, hot = alone["gemm fp8 8192 x 8192 x 8192"], alone["gemm fp8 sustained 8192 x 8192 x 8192"]
    assert (fp8.peak, fp8.limit, hot.peak, hot.limit) == (1978.9, 1453, 1978.9, None)
    node = by_name("task=node", "cluster=dgxh200")
    assert node["copy host to device pinned 1 GiB"].limit is None, "of a GPU that copies alone"
    assert node["copy to next device 1 GiB"].limit == 396
    assert node["all-reduce of 8 ranks 4 GiB"].limit == 367
    assert node["all-reduce of 4 ranks 4 GiB"].limit is None
    assert not any(point.limit for point in by_name("task=node", "cluster=dgx1").values())


def test_limits_are_for_gpus_in_conf() -> None:
    known = {yaml.safe_load(path.read_text())["name"] for path in (ROOT / "conf/gpu").glob("*.yaml")}
    kernels = planned("task=node", "cluster=dgxh200").config.task.kernels
    assert kernels is not None and {limits.gpu for limits in kernels.limits} <= known


@pytest.mark.long
def test_default_precisions_follow_the_device() -> None:
    old = by_name("task=gemm", "cluster=dgx1", "gpu@cluster.gpu=a100")
    assert {point.variant for point in old.values()} == {"bf16"}
    assert {point.variant for point in by_name("task=kernels_tiny").values() if point.family == "gemm"} == {
        "fp32",
        "bf16",
    }


TINY = "task=kernels_tiny"


@pytest.mark.parametrize(
    ("overrides", "what", "where"),
    [
        (
            ["task=collectives", "cluster.ranks_per_node=1"],
            "a collective needs at least two ranks, but the job has only one rank",
            "cluster.ranks_per_node",
        ),
        (
            [TINY, "task.kernels.collectives.ranks=[3]"],
            "a collective of 3 ranks is not possible in a job of 2",
            "collectives.ranks",
        ),
        (
            [TINY, "task.kernels.collectives.sizes_bytes=[1028]"],
            "a message size is 1,028 bytes, but must be a multiple of 8 from 8 to 34,359,738,368",
            "sizes_bytes",
        ),
        ([TINY, "task.kernels.collectives.operations=[]"], "the list of collective operations is empty", "operations"),
        (
            [TINY, "task.kernels.memcpy.sizes_bytes=[0]"],
            "a message size is 0 bytes, but must be a number from 1 to",
            "memcpy.sizes_bytes",
        ),
        ([TINY, "task.kernels.memcpy.sizes_bytes=[]"], "the list of message sizes is empty", "memcpy.sizes_bytes"),
        ([TINY, "task.kernels.gemm.shapes=[[64, 64]]"], r"\[64, 64\] is not a valid shape \[M, N, K\]", "gemm.shapes"),
        (
            [TINY, "task.kernels.gemm.shapes=[[64, 0, 64]]"],
            r"\[64, 0, 64\] is not a valid shape \[M, N, K\]",
            "gemm.shapes",
        ),
        (
            [TINY, "task.kernels.gemm.shapes=[[262144, 262144, 1]]"],
            r"\[262144, 262144, 1\] has a matrix with more than 2\^34 elements",
            "gemm.shapes",
        ),
        ([TINY, "task.kernels.gemm.precisions=[fp8]"], "a CPU does not support GEMMs in FP8", "gemm.precisions"),
        (
            ["task=gemm", "cluster=dgx1", "task.kernels.gemm.shapes=[[64, 100, 64]]"],
            r"\[64, 100, 64\] is not possible in FP8: N and K must be",
            "gemm.shapes",
        ),
        ([TINY, "task.kernels.gemm.sustained=[[1]]"], r"\[1\] is not a valid shape", "task.kernels.gemm.sustained"),
        ([TINY, "task.kernels.attention.seq_lengths=[]"], "the list of sequence lengths is empty", "seq_lengths"),
        (
            [TINY, "task.kernels.attention.seq_lengths=[60]"],
            "256 tokens cannot be divided into sequences of 60 tokens",
            "seq_lengths",
        ),
        ([TINY, "task.kernels.attention.batches=[[2, 0]]"], r"\[2, 0\] is not a valid batch \[sequences", "batches"),
        ([TINY, "task.kernels.attention.batches=[[2]]"], r"\[2\] is not a valid batch", "attention.batches"),
        (
            [TINY, "task.kernels.attention.backends=[cudnn]"],
            "the attention backend cudnn does not exist on a CPU",
            "attention.backends",
        ),
        (
            ["task=gemm", "cluster=dgxh200", "gpu@cluster.gpu=a100", "task.kernels.gemm.precisions=[fp8]"],
            "an NVIDIA A100 SXM 80GB does not support GEMMs in FP8",
            "gemm.precisions",
        ),
        (
            [TINY, "task.kernels.collectives.ranks=[]"],
            r"the lists of task\.kernels\.collectives are empty",
            "collectives",
        ),
        ([TINY, "task.kernels.attention.backends=[]"], r"the lists of task\.kernels\.attention are empty", "attention"),
        ([TINY, "parallel.tp=3"], "tp 3 does not divide the 4 attention heads", "parallel.tp"),
        (
            [TINY, "task.kernels.repeats=2"],
            r"task.kernels.repeats is 2, but must be 3 or more",
            "task.kernels.repeats",
        ),
        (
            [TINY, "task.kernels.tolerance=1.5"],
            r"tolerance is 1\.5, but must be 0 or more, and below 1",
            "task.kernels.tolerance",
        ),
        (["task=gemm", "task.kernels.gemm=null"], "the task has no kernel to measure", "task.kernels"),
        (
            [TINY, "launch.profile=kernels"],
            "launch.profile=kernels needs training steps, but this task does not",
            "launch.profile",
        ),
        (
            ["task=gemm"],
            "TFLOP of GEMMs and attention would take about .* hours on a CPU",
            "task.kernels.gemm.shapes",
        ),
        (
            [TINY, "task.kind=train"],
            r"is of kind train, but the block task\.training is missing",
            "task.kind, task.training",
        ),
        (
            ["task=lora_tiny", "task.kind=kernels"],
            r"task lora_tiny is of kind kernels, but the block task\.training is set",
            "task.training",
        ),
        (
            ["task=lora_tiny", "task.training=null"],
            r"task lora_tiny is of kind train, but the block task\.training is missing",
            "task.training",
        ),
    ],
)
def test_invalid_kernel_settings_are_refused(overrides: list[str], what: str, where: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        compose.compose(overrides)
    assert where in error.value.where and error.value.fix


def test_the_largest_matrix_is_measured_and_the_largest_copy() -> None:
    sizes = ("task.kernels.gemm.shapes=[[131072,131072,1]]", "task.kernels.memcpy.sizes_bytes=[34359738368]")
    points = [(point.family, point.sizes) for point in by_name(TINY, *sizes).values()]
    assert ("gemm", [131072, 131072, 1]) in points and ("memcpy", [2**35]) in points


def test_a_duplicate_size_is_measured_once() -> None:
    sizes = ("task.kernels.memcpy.sizes_bytes=[1024,1024]", "task.kernels.collectives.sizes_bytes=[1024,1024]")
    assert by_name(TINY, *sizes).keys() == by_name(TINY, *(size.replace(",1024", "") for size in sizes)).keys()


def test_a_config_of_another_kind_has_no_training_block() -> None:
    plan = planned(TINY)
    with pytest.raises(
        ConfigError, match="task kernels_tiny is of kind kernels, but this command needs a task of kind"
    ):
        _ = plan.config.training
    with pytest.raises(ConfigError, match="kernels_tiny is of kind kernels"):
        plan_kinds.required(plan, plan_kinds.TrainingPlan)
    with pytest.raises(ConfigError, match="lora_tiny is of kind train, but this command needs a task of kind kernels"):
        plan_kinds.required(compose.compose(["task=lora_tiny"]), plan_kinds.KernelsPlan)
