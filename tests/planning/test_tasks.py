"""The tasks of the documents: each is planned for one GPU and for 1, 2 and 4 nodes, or refused for its memory."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import plan_kinds
from bench.contract.model import Weights
from bench.contract.plan import Plan
from bench.contract.schema import Config, Precision
from bench.contract.training import Trains
from bench.errors import ConfigError
from bench.planning import compose, make_plan

CONF = Path(compose.CONF)
OWN = {"llama31_8b", "lora70b", "lora70b_quick", "lora_tiny", "pretrain_tiny"}
KERNELS = {"node", "gemm", "memcpy", "collectives", "attention"}
SERVING = {f"serve_{size}" for size in ("7b", "8b", "13b", "70b")}
GENERATION = {f"generate_{size}" for size in ("7b", "8b", "70b")}
LOCAL_SGD = {p.stem for p in (CONF / "task").glob("*_local_sgd.yaml")}  # tested in test_local_sgd_plan.py
TINY = {p.stem for p in (CONF / "task").glob("*tiny*.yaml")}
OWN_DATA = {"finetune_chat"}  # its rows are counted before it can be planned: tests/data/test_own_data.py
PROGRAM = {"my_program"}  # it needs the command line of a program
OTHERS = OWN | OWN_DATA | PROGRAM | TINY | LOCAL_SGD | KERNELS | SERVING | GENERATION
TASKS = sorted(p.stem for p in (CONF / "task").glob("*.yaml") if p.stem not in OTHERS)
REFUSED_ON_ONE_GPU = {"finetune_70b_pubmedqa", "lora_70b", "pretrain_13b", "pretrain_70b"}
SIZES = {"one GPU": (1, 1), "1 node": (1, 8), "2 nodes": (2, 8), "4 nodes": (4, 8)}


def config_of(task: str) -> Config:
    return compose.unplanned([f"task={task}", "cluster=dgxh200"])


def planned(config: Config, num_nodes: int, per_node: int, *, precision: Precision = Precision.bf16) -> Plan:
    sized = copy.deepcopy(config)
    sized.cluster.num_nodes, sized.cluster.ranks_per_node = num_nodes, per_node
    return make_plan.make(replace(sized, precision=precision))


def refused_by_memory(config: Config, num_nodes: int, per_node: int) -> bool:
    try:
        plan = planned(config, num_nodes, per_node)
    except ConfigError as error:
        assert "GiB per GPU" in error.what and "raise parallel.tp" in error.fix
        return True
    b, w = plan.batch, plan.world
    assert plan.memory.fits and plan.cost and plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    assert w.num_ranks == num_nodes * per_node == w.dp * w.tp * w.pp * w.cp
    assert w.dp * b.micro_batch_size * b.gradient_accumulation_steps == b.global_batch_size
    return False


def test_they_are_from_the_documents() -> None:
    sizes = {"7b", "8b", "13b", "70b", "gpt3_126m", "gpt3_5b"}
    assert {name.removeprefix("pretrain_") for name in TASKS if name.startswith("pretrain_")} == sizes
    assert {name for name in TASKS if name.startswith("lora_")} == {
        f"lora_{size}" for size in ("7b", "8b", "13b", "70b")
    }
    assert {name for name in TASKS if name.startswith("qlora_")} == {f"qlora_{size}" for size in ("7b", "13b", "70b")}
    finetuned = {"7b_dolly", "70b_dolly", "8b_pubmedqa", "70b_pubmedqa"}
    assert {name for name in TASKS if name.startswith("finetune_")} == {f"finetune_{name}" for name in finetuned}


@pytest.mark.long
@pytest.mark.parametrize("task", ["finetune_70b_dolly", "pretrain_13b"])
def test_a_task_of_a_document_is_planned_or_refused_for_its_memory(task: str) -> None:
    config = config_of(task)
    assert refused_by_memory(config, 1, 1) is (task in REFUSED_ON_ONE_GPU)
    assert refused_by_memory(config, 1, 8) is False


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_task_of_every_size_is_planned_or_refused_for_its_memory(task: str) -> None:
    refused = {size for size, (nodes, per_node) in SIZES.items() if refused_by_memory(config_of(task), nodes, per_node)}
    assert refused == ({"one GPU"} if task in REFUSED_ON_ONE_GPU else set())


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_task_can_be_timed_with_random_weights(task: str) -> None:
    config = config_of(task)
    config.model.weights = Weights.random
    plan = planned(compose.with_random_weights(config), 1, 8)
    assert (plan.base_dir, plan.data_dir, [command.name for command in plan.commands][-1]) == (None, None, "trial 0")


@pytest.mark.long
def test_70b_trains_whole_in_fp8_on_a_node_and_13b_on_one_gpu_with_moments_in_host_memory() -> None:
    assert planned(config_of("pretrain_70b"), 1, 8, precision=Precision.fp8).memory.fits
    thirteen = config_of("pretrain_13b")
    thirteen.recipe.offload_moments = True
    plan = planned(thirteen, 1, 1)
    assert plan.memory.fits and plan.cost and plan.cost.step_s > 8 * plan.memory.parameters / 55e9


@pytest.mark.long
def test_quantized_training_means_adapters_on_a_frozen_base() -> None:
    """The NF4 base of 70 billion weights takes half a byte for each; only the adapters have moments."""
    config = config_of("finetune_70b_dolly")
    assert config.training.trains is Trains.qlora and config.training.lora is not None
    memory = planned(config, 1, 8).memory
    assert memory.trainable_parameters < memory.parameters / 100


def test_summaries_of_tasks_have_no_number_that_a_setting_changes() -> None:
    """A summary is the headline of a run, whatever recipe.local_sgd.every_steps is."""
    files = sorted((CONF / "task").glob("*local_sgd.yaml"))
    assert files and [path.name for path in files if re.search(r"summary: .*\d steps", path.read_text())] == []


@pytest.mark.long
def test_every_task_stops_by_steps_or_epochs() -> None:
    for task in TASKS:
        training = config_of(task).training
        assert (training.max_steps is None) != (training.epochs is None), task
        assert training.target_eval_loss is None, task
