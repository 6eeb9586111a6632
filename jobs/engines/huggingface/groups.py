"""Create and destroy the process group. Each rank is a data-parallel replica, or a shard of one."""

import logging
import os
import warnings

from bench.contract.engine import Strategy
from bench.contract.plan import Plan
from bench.contract.schema import Device
from jobs.engines.huggingface import packages
from jobs.ranks import process_group
from jobs.ranks.identity import Rank

THREADS_VARIABLE = "OMP_NUM_THREADS"


def start_ranks(plan: Plan, who: Rank) -> None:
    """Join the process group and run one collective, so that NCCL allocates its memory before the model does.

    Raises:
        ConfigError: a library that the plan needs is not installed.
        SubmitError: see `process_group.join`.
    """
    packages.require(plan)
    _prepare_environment(plan, who)
    _reduce_library_logging()
    process_group.join(plan, who, also_on_cpu=_computes_on_host(plan))
    import torch

    if plan.replicas_reduce:
        torch.distributed.all_reduce(torch.zeros(1, device=process_group.device()))


def end_ranks() -> None:
    """Destroy the process group; all ranks call this together."""
    process_group.shut_down()


def _prepare_environment(plan: Plan, who: Rank) -> None:
    """Set the environment variables from which Accelerate and DeepSpeed read this rank's identity."""
    os.environ |= {
        "RANK": str(who.rank),
        "LOCAL_RANK": str(who.local_rank),
        "WORLD_SIZE": str(who.world_size),
        "MASTER_ADDR": who.master_addr,
        "MASTER_PORT": str(who.master_port),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if plan.config.cluster.device is Device.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
    if (threads := optimizer_threads(plan)) is not None:
        os.environ[THREADS_VARIABLE] = str(threads)  # read when torch is imported


def optimizer_threads(plan: Plan) -> int | None:
    """Return the number of threads of a rank with a GPU whose optimizer runs on the CPU: its share of the node's cores.

    None if no optimizer runs on the CPU, or if cluster.environment sets the number.
    """
    chosen = packages.settings(plan)
    updates = chosen.offload_optimizer or _computes_on_host(plan)
    if not updates or plan.config.cluster.device is Device.cpu or THREADS_VARIABLE in plan.config.cluster.environment:
        return None
    cores = (os.cpu_count() or 1) // plan.config.cluster.ranks_per_node
    return max(1, min(cores, len(os.sched_getaffinity(0))))


def _reduce_library_logging() -> None:
    """Show only errors of these libraries: they also warn about settings that the plan chose on purpose."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    for name in ("DeepSpeed", "deepspeed", "bitsandbytes", "accelerate", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate|peft|deepspeed|bitsandbytes)\b")
    warnings.filterwarnings("ignore", message=r"barrier\(\)")


def _computes_on_host(plan: Plan) -> bool:
    """Return whether collectives also run on tensors in host memory: in FSDP2 with offloaded parameters."""
    chosen = packages.settings(plan)
    return chosen.offload_parameters and chosen.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid)
