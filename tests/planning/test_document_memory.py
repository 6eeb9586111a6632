"""What fits on the documents' GPUs by the plan, against their out-of-memory cells; and GPUs without FP8."""

from dataclasses import replace
from functools import cache

import pytest

from bench.contract.schema import Config, Gpu
from bench.contract.training import Recompute
from bench.errors import ConfigError
from bench.planning import compose, make_plan
from bench.results import published
from helpers.paths import ROOT

EIGHT_GPUS = ["cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=8", "model.weights=random"]
A_ROW_EACH = [
    *("data=rows_350", "recipe.micro_batch_size=1", "recipe.global_batch_size=8", "recipe.eval_every_samples=1040"),
    *(f"parallel.{axis}=1" for axis in ("tp", "pp", "cp")),
    *("parallel.sp=false", "parallel.distributed_optimizer=false"),
]
"""The rows of 003's tables, each GPU with all states of the weights that it trains."""
TASKS = {"Q": "qlora", "L": "lora", "QL": "qlora"}
"""By the part of a method that says what is trained; without one the whole model is."""
EXPRESSIBLE = {*TASKS, "Naive", "R", "F"}
"""Parts of the methods that the engine has a layout for. It shards and offloads unlike DeepSpeed's ZeRO. Its attention
is always a fused one (F), which matters little for memory in rows of 350 tokens."""
FITS_IN_THE_DOCUMENT_ONLY = {("a800", "7B", method) for method in ("Naive", "R", "F", "R+F")}
"""DeepSpeed's 66.7 GB are ten bytes a weight: states in BF16 alone. The engine has FP32 gradients, master weights and
moments, 18 bytes, so that one GPU of 80 GB does not hold them unless they are sharded."""


@cache
def config_of(task: str) -> Config:
    return compose.with_random_weights(compose.unplanned([f"task={task}", *EIGHT_GPUS, *A_ROW_EACH]))


@cache
def gpu_of(name: str) -> Gpu:
    gpu = compose.unplanned([*EIGHT_GPUS, f"gpu@cluster.gpu={name}"]).cluster.gpu
    assert gpu is not None
    return gpu


def fits(task: str, gpu: str, *, recompute: bool, sharded: bool = False, rows: int = 1) -> bool:
    config = config_of(task)
    recipe = replace(
        config.recipe,
        recompute=Recompute.full if recompute else Recompute.none,
        micro_batch_size=rows,
        global_batch_size=8 * rows,
        eval_every_samples=1040 * rows,
    )
    parallel = replace(config.parallel, distributed_optimizer=sharded)
    cluster = replace(config.cluster, gpu=gpu_of(gpu))
    try:
        plan = make_plan.make(replace(config, recipe=recipe, parallel=parallel, cluster=cluster))
    except ConfigError as error:
        assert "GiB per GPU" in error.what
        return False
    return bool(plan.memory.fits)


@pytest.mark.long
@pytest.mark.parametrize("table", [3, 9])
@pytest.mark.parametrize("gpu", ["a800", "rtx4090", "rtx3090"])
def test_the_plan_refuses_exactly_what_ran_out_of_memory(table: int, gpu: str) -> None:
    figures = published.read(ROOT / f"conf/published/dissect_table_{table}_{gpu}.yaml").figures
    differing, count = set(), 0
    for figure in figures:
        model, parts = figure.labels["model"], set(figure.labels["method"].split("+"))
        if figure.measurement != "peak_memory" or parts - EXPRESSIBLE:
            continue
        kind = next((TASKS[part] for part in parts if part in TASKS), "pretrain")
        count += 1
        if fits(f"{kind}_{model.lower()}", gpu, recompute="R" in parts) is not (figure.value is not None):
            differing.add((gpu, model, figure.labels["method"]))
    assert count == {3: 6, 9: 19}[table]
    assert differing == {known for known in FITS_IN_THE_DOCUMENT_ONLY if known[0] == gpu and table == 3}


@pytest.mark.long
def test_megatrons_rows_fit_with_a_sharded_optimizer_as_table_2_has_them() -> None:
    """49.1 GB of one row; 24 GB cards do not hold it. For 32 rows the table has 6.5 GB more, and activations of 31 rows
    of 7B are 30 GB, so that it must have summed the gradients of smaller batches."""
    assert fits("pretrain_7b", "a800", recompute=False, sharded=True)
    assert not fits("pretrain_7b", "a800", recompute=False, sharded=True, rows=32)
    assert not fits("pretrain_7b", "rtx4090", recompute=False, sharded=True)


@pytest.mark.long
@pytest.mark.parametrize("gpu", ["a100", "a100_40gb", "a800", "rtx3090"])
def test_fp8_is_refused_on_a_gpu_without_it(gpu: str) -> None:
    with pytest.raises(ConfigError, match=r"precision is fp8, but NVIDIA .* does not support FP8") as refused:
        compose.compose(["task=lora_7b", *EIGHT_GPUS, f"gpu@cluster.gpu={gpu}", "precision=fp8"])
    assert "set precision=bf16" in refused.value.fix


@pytest.mark.long
def test_fp8_has_a_peak_where_the_gpu_has_one() -> None:
    """330.3 TFLOP/s of an RTX 4090 by NVIDIA's whitepaper, twice its 165.2 in BF16."""
    plan = compose.compose(["task=lora_7b", *EIGHT_GPUS, "gpu@cluster.gpu=rtx4090", "precision=fp8"])
    assert plan.peak_tflops == 330.3 and plan.cost is None
