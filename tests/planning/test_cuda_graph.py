"""Where the plan has one CUDA graph launch a micro-batch."""

import pytest

from bench.contract.plan import Plan
from bench.planning import compose

FEW_TOKENS = ("data=rows_350", "recipe.micro_batch_size=1", "model.weights=random", "cluster=dgxh200")
"""A row of 350 tokens, whose kernels in a model of 7 billion weights run for less time than a launch takes."""


def planned(task: str, *overrides: str) -> Plan:
    return compose.compose([f"task={task}", "cluster.ranks_per_node=2", *FEW_TOKENS, *overrides])


@pytest.mark.parametrize(
    ("overrides", "is_chosen"),
    [
        ((), True),
        (("recipe.micro_batch_size=16",), False),
        (("parallel.tp=2",), True),
        (("parallel.cp=2", "data.seq_length=352"), True),
        (("parallel.pp=2",), False),
        (("recipe.recompute=full",), False),
        (("model.activation=gelu", "precision=bf16"), False),
    ],
)
def test_a_cuda_graph_is_chosen_if_the_gpu_waits_for_the_host(overrides: tuple[str, ...], is_chosen: bool) -> None:
    plan = planned("lora_7b", *overrides)
    assert plan.cuda_graph is is_chosen
    assert plan.cost is not None
    if is_chosen:
        assert plan.cost.host_s == 0
        parts = (plan.cost.gemm_s, plan.cost.attention_s, plan.cost.elementwise_s, plan.cost.communication_s)
        assert plan.cost.step_s == pytest.approx(sum(parts), abs=1e-8)


@pytest.mark.long
def test_a_cuda_graph_is_chosen_for_a_4_bit_base_but_not_on_a_cpu() -> None:
    assert planned("qlora_7b").cuda_graph
    assert not compose.compose(["task=lora_tiny", "cluster=local"]).cuda_graph


def test_a_cuda_graph_that_does_not_fit_is_not_chosen() -> None:
    """It needs more memory, for evaluations, than single launches do."""
    whole = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "recipe.recompute=none")  # on the smaller GPU, too
    fits = planned("lora_7b", *whole)
    needed_gib, capacity_gib = fits.memory.total_gib, fits.memory.capacity_gib
    alone = planned("lora_7b", *whole, "recipe.cuda_graph=false")
    assert fits.cuda_graph and capacity_gib is not None and alone.memory.total_gib < needed_gib
    between_gib = (needed_gib + alone.memory.total_gib) / 2
    small = planned("lora_7b", *whole, f"cluster.gpu.memory_gib={between_gib}")
    assert not small.cuda_graph and small.memory.fits


def test_collectives_between_nodes_are_captured_only_on_request() -> None:
    across = ("cluster.num_nodes=2", "cluster.ranks_per_node=1", "parallel.tp=1", "parallel.pp=1", "parallel.cp=2")
    across = (*across, "data.seq_length=352")
    waiting = planned("lora_7b", *across)
    assert not waiting.cuda_graph and waiting.cost is not None and waiting.cost.host_s > 0
    assert planned("lora_7b", *across, "recipe.cuda_graph=true").cuda_graph
