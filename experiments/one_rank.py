"""Runs one rank of a plan alone, on one GPU: memory against the plan's estimate, and a step without communication.

    python experiments/one_rank.py [--rank R] [--steps N] [--profile FILE] \\
        task=lora70b cluster=dgxh200 model.weights=random parallel.tp=8 …

The other ranks do not exist. Sends to them are dropped. A collective returns this rank's own part; a receive from
another pipeline stage returns random numbers (with interleaving, the contents of the buffer). Shapes, kernels and
memory are those of the real rank, without NCCL's own memory. The computed numbers mean nothing, so the plan must have
random weights. Under SP the rows are copies of each other, which draws less power, so steps are too fast. In a
pipeline choose a rank of the fullest stage; the default is rank 0.
"""

import argparse
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import BenchError, ConfigError
from bench.planning import compose
from bench.planning.estimates import memory
from jobs.engines.megatron import cpu_patch
from jobs.engines.megatron.groups import split
from jobs.ranks.timing import forget_memory, peaks_gib

if TYPE_CHECKING:
    from jobs.data.rows import Rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--rank", type=int, default=0, help="which of the plan's ranks (default 0)")
    parser.add_argument("--steps", type=int, default=5, help="steps to time, after one that is not (default 5)")
    parser.add_argument("--profile", type=Path, help="where to write the kernels of one more step (rank 0 only)")
    args = parser.parse_args()
    if args.profile and args.rank:
        parser.error("--profile: only rank 0 writes a profile; leave out --rank or --profile")
    plan = composed(args.overrides, args.rank)
    times_s = measure(plan, args.rank, args.steps, args.profile)
    w = plan.world
    print(f"rank {args.rank} of {w.num_ranks} = dp {w.dp} x tp {w.tp} x pp {w.pp} x cp {w.cp}, sp {w.sp}, vpp {w.vpp}")
    line = f"step {statistics.median(times_s):.3f} s, without what other ranks take (median, n = {len(times_s)})"
    if (cost := plan.cost) is not None:
        compute_s = cost.gemm_s + cost.attention_s + cost.elementwise_s + cost.recompute_s
        line += f"; estimated {compute_s:.3f}" + (
            f", and {cost.host_s:.3f} waiting for the host" if cost.host_s else ""
        )
    print(line)
    if torch.cuda.is_available():
        allocated, reserved = peaks_gib()
        estimate = plan.memory.total_gib - memory.CUDA_ALLOWANCE_GIB
        print(
            f"peak {allocated:.1f} GiB allocated, {reserved:.1f} reserved; estimated {estimate:.1f} on the fullest rank"
        )
    return 0


def composed(overrides: list[str], rank: int = 0) -> Plan:
    """Return the plan of which this rank can run alone here.

    Raises:
        SystemExit: there is no such plan, or it cannot; the reason is on standard error.
    """
    try:
        plan = compose.compose(overrides)
        require(plan, rank)
    except BenchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    return plan


def require(plan: Plan, rank: int) -> None:
    """Do nothing if this rank of the plan can run alone here.

    Raises:
        ConfigError: the plan has no such rank, its weights are to be loaded, or it is for GPUs and there is none.
    """
    if not 0 <= rank < plan.world.num_ranks:
        last = plan.world.num_ranks - 1
        raise ConfigError(f"there is no rank {rank}", where="--rank", fix=f"the plan has ranks 0 to {last}")
    if plan.base_dir is not None or plan.data_dir is not None:
        raise ConfigError(
            "a single rank computes wrong values with real weights",
            where="model.weights",
            fix="set model.weights=random",
        )
    if plan.config.cluster.device is Device.cuda and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no GPU", where="cluster.device", fix="run it where there is one, or set cpu"
        )


def measure(plan: Plan, rank: int, steps: int, profile: Path | None) -> list[float]:
    """Build the rank's part of the model and return the seconds of each step; kernels of one more go into `profile`."""
    join(plan, rank)
    from jobs.engines.megatron import loop, model

    engine, rows = model.build(plan, seed=1), known_words(plan, rank)
    indices, times_s = np.arange(plan.batch.global_batch_size), []
    loop.train_step(engine, rows, indices, step=1)
    forget_memory()
    for _ in range(steps):
        synchronize()
        start = time.perf_counter()
        loop.train_step(engine, rows, indices, step=1)
        synchronize()
        times_s.append(time.perf_counter() - start)
    if profile:
        with loop.profiled(profile):
            loop.train_step(engine, rows, indices, step=1)
    return times_s


def known_words(plan: Plan, rank: int) -> "Rows":
    """Return random rows of one step, only of tokens whose embedding this TP rank holds: others would give zeros."""
    from jobs.data import rows
    from jobs.data import rows as rows_of

    share = plan.config.model.vocab_size // plan.world.tp
    shape = (plan.batch.global_batch_size, plan.config.training_data.seq_length)
    tokens, counts, _ = rows.rows(*shape, vocab_size=share, seed=1)
    return rows_of.Rows(tokens + rank % plan.world.tp * share, counts)


def join(plan: Plan, rank: int) -> None:
    """Join as one rank of the plan, with the fake process groups of torch's tests: every collective returns at once."""
    warnings.simplefilter("ignore")  # megatron-core's: what is not installed, and old names of torch
    cpu_patch.install()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world.num_ranks)
    exchange = torch.distributed.batch_isend_irecv

    def exchange_random(operations):
        for operation in operations:
            if operation.op is torch.distributed.irecv:
                operation.tensor.data.normal_()
        return exchange(operations)

    def scatter_own(out, whole, **_unused):
        """Give this rank its own part back; older torch leaves what was there."""
        out.copy_(whole.view(-1)[: out.numel()].view_as(out))

    torch.distributed.batch_isend_irecv = exchange_random
    torch.distributed.reduce_scatter_tensor = scatter_own
    split(plan)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
