"""Join and leave the process group; every rank is one replica of the data, or a shard of one."""

import logging
import os
import warnings

from bench.contract.engine import Strategy
from bench.contract.plan import Plan
from bench.contract.schema import Device
from jobs.engines.huggingface import packages
from jobs.ranks import process_group
from jobs.ranks.identity import Rank

THREADS = "OMP_NUM_THREADS"


def start_ranks(plan: Plan, who: Rank) -> None:
    """Join the process group, and use it once, so that NCCL takes its memory before the model takes the rest.

    Raises:
        ConfigError: a library that the plan needs is not installed.
        SubmitError: what `process_group.join` raises.
    """
    packages.require(plan)
    _prepare_environment(plan, who)
    _quieten()
    process_group.join(plan, who, also_on_cpu=_computes_on_host(plan))
    import torch

    if plan.replicas_reduce:
        torch.distributed.all_reduce(torch.zeros(1, device=process_group.device()))


def end_ranks() -> None:
    """Leave the process group together."""
    process_group.leave()


def _prepare_environment(plan: Plan, who: Rank) -> None:
    """Say who this rank is, in the words of the launchers that Accelerate and DeepSpeed know."""
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
    if (threads := threads_on_host(plan)) is not None:
        os.environ[THREADS] = str(threads)  # read when torch is imported


def threads_on_host(plan: Plan) -> int | None:
    """Return the threads of a GPU's rank that updates in host memory: its share of the node's cores.

    None where nothing is updated there, or cluster.environment has the number.
    """
    chosen = packages.settings(plan)
    updates = chosen.offload_optimizer or _computes_on_host(plan)
    if not updates or plan.config.cluster.device is Device.cpu or THREADS in plan.config.cluster.environment:
        return None
    share = (os.cpu_count() or 1) // plan.config.cluster.ranks_per_node
    return max(1, min(share, len(os.sched_getaffinity(0))))


def _quieten() -> None:
    """Leave the rank's output to what is wrong: these libraries warn of what they do as they were told."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    for name in ("DeepSpeed", "deepspeed", "bitsandbytes", "accelerate", "transformers", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate|peft|deepspeed|bitsandbytes)\b")
    warnings.filterwarnings("ignore", message=r"barrier\(\)")


def _computes_on_host(plan: Plan) -> bool:
    """Return whether collectives have tensors in host memory too: FSDP2's optimizer, where parameters are offloaded."""
    chosen = packages.settings(plan)
    return chosen.offload_parameters and chosen.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid)
