"""Create and destroy the process groups of a plan's parallel layout, with megatron-core."""

import os
import warnings

from bench.contract.groups import of_group
from bench.contract.plan import Plan
from bench.contract.plan_kinds import training_plan
from jobs.local_sgd import groups
from jobs.ranks import process_group
from jobs.ranks.identity import Rank

NCCL_ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0"}
"""NCCL does not register the buffers of captured collectives: with expandable_segments of torch's allocator, that leads
to illegal memory accesses. Source: megatron-core 0.16.1, transformer/cuda_graphs.py, which requires it."""


def start_ranks(plan: Plan, who: Rank) -> None:
    """Join the process groups of the plan's layout.

    Raises:
        SubmitError: see `process_group.join`.
    """
    from jobs.engines.megatron import cpu_patch

    # layer.py does not use Apex, and the current device is the right one.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    cpu_patch.install()
    for name, value in NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    process_group.join(plan, who, local_sgd=True)
    trained = training_plan(plan)
    split(of_group(trained) if trained else plan)
    _connect_groups(plan)


def split(plan: Plan) -> None:
    """Create megatron-core's process groups for the plan's layout; all ranks must have joined."""
    from megatron.core import parallel_state

    w = plan.world
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=w.tp,
        pipeline_model_parallel_size=w.pp,
        virtual_pipeline_model_parallel_size=w.vpp if w.vpp > 1 else None,
        context_parallel_size=w.cp,
        expert_model_parallel_size=w.ep,
        create_gloo_process_groups=False,  # nothing here uses the second set of groups
    )


def _connect_groups(plan: Plan) -> None:
    """Run one collective per group, so that NCCL allocates its memory before the model does.

    Replicas that only generate are not connected: they do not communicate, and NCCL rejects ranks that share a GPU.
    """
    import torch
    from megatron.core import parallel_state

    model_groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_model_parallel_group(),
        *((parallel_state.get_expert_tensor_and_model_parallel_group(),) if plan.world.ep > 1 else ()),
    )
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    replica_groups = (None, replicas) if plan.replicas_reduce else ()
    for group in (*replica_groups, *(group for group in model_groups if group.size() > 1)):
        torch.distributed.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)


def end_ranks() -> None:
    """Destroy the process groups, and drop megatron-core's references to them, which keep gloo's threads alive."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    parallel_state.destroy_model_parallel()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = (
        None  # destroy_model_parallel of 0.16.1 does not reset it
    )
    RotaryEmbedding.forward.cache_clear()  # its entries hold the context-parallel group
    get_moe_layer_wise_logging_tracker().clear()  # the sums of load-balancing losses, with their groups
    process_group.shut_down()
    groups.shut_down()
