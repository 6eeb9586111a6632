"""Generation with TP through peer memory and with NCCL: sums, and answers of the same weights in one process.

    python -m torch.distributed.run --nproc-per-node 2 experiments/tp_generation.py sums
    python -m torch.distributed.run --nproc-per-node 2 experiments/tp_generation.py answers task=generate_7b

TP is the number of processes. `sums` compares each sum with NCCL's, and prints microseconds of a sum: the median,
minimum and maximum of 7 replays of a CUDA graph of 50 sums. With more than two ranks NCCL adds in another order, so
that its sums are rounded otherwise. `answers` gives the requests of a task to both generators in alternating order.
With `task.generation.order=one_by_one` it generates one answer, else all answers of the task side by side.
"""

import os
import sys
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, distributed

from bench.contract.generation import Order
from bench.planning import compose
from jobs.engines.generation import Request
from jobs.engines.megatron.generation import peer_memory
from jobs.engines.megatron.generation.generator import MegatronGenerator
from jobs.engines.megatron.generation.peer_memory import PeerMemory
from jobs.engines.megatron.generation.ranks import Ranks

RANK, TP = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK)
REPEATS, PROMPT_TOKENS, ANSWER_TOKENS = 3, 13, 200
LAYOUT = [f"parallel.tp={TP}", "parallel.groups=1", "model.weights=random", "launch.health=false"]
LAYOUT += ["cluster=local", "cluster.device=cuda", "gpu@cluster.gpu=h200", f"cluster.ranks_per_node={TP}"]


def say(*what: object) -> None:
    if RANK == 0:
        print(*what, flush=True)


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f}, n = {len(values)})"


def by_nccl(x: Tensor) -> Tensor:
    distributed.all_reduce(x)
    return x


def sums(peers: PeerMemory) -> None:
    """Compare sums of random numbers with NCCL's, then time them."""
    num_sums = not_of_nccl = not_of_all = 0
    for size in (8, 100, 1024, 4096, 4100, 8192, 31 * 4096, 31 * 8192, 2**19):
        for number in range(5):
            torch.manual_seed(1000 * number + RANK)
            x = torch.randn(size, device=DEVICE).bfloat16()
            if not peers.sums_here(x):
                continue
            num_sums += 1
            ours = peers.sum_(x.clone())
            of_all = [torch.empty_like(ours) for _ in range(TP)]
            distributed.all_gather(of_all, ours)
            not_of_nccl += not torch.equal(ours, by_nccl(x))
            not_of_all += not all(torch.equal(one, ours) for one in of_all)
    say(f"{num_sums} sums: {not_of_nccl} differ from NCCL's, {not_of_all} between the ranks")
    for kib in (8, 16, 64, 248, 496, 1024):
        if 1024 * kib > peers.most_bytes:
            break
        times = [spread(microseconds(add, kib * 512)) for add in (by_nccl, peers.sum_)]
        say(f"{kib} KiB: NCCL {times[0]} us, peer memory {times[1]} us")


def microseconds(add: Callable[[Tensor], Tensor], size: int, num_sums: int = 50) -> list[float]:
    """Return the time of a sum, in each of 7 replays."""
    x, stream = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add(x)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_sums):
            add(x)
    for _ in range(7):
        distributed.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_sums)
    return times


def answers(peers: PeerMemory, overrides: list[str]) -> None:
    """Give the same requests to generators with and without peer memory; compare their tokens and print the rates."""
    plan = compose.compose([*overrides, *LAYOUT])
    settings = plan.config.task.generation
    assert settings is not None, "the task is of kind generate"
    is_one, numbers = settings.order is Order.one_by_one, torch.Generator().manual_seed(3)
    rows = torch.randint(plan.config.model.vocab_size, (len(settings.lengths), PROMPT_TOKENS), generator=numbers)
    lengths = [ANSWER_TOKENS] if is_one else settings.lengths
    requests = [Request(tuple(row), length) for row, length in zip(rows.tolist(), lengths, strict=False)]
    generators, weights = {}, None
    for name, memory in (("NCCL", None), ("peer memory", peers)):
        built = generators[name] = MegatronGenerator(
            plan, 1, ranks=Ranks(distributed.group.WORLD, memory), device=DEVICE
        )
        built._weights = weights
        built.warm_up(requests)
        weights = built._weights
    rates: dict[str, list[float]] = {name: [] for name in generators}
    tokens: dict[str, list[list[Sequence[int]]]] = {name: [] for name in generators}
    for number in range(REPEATS):
        for name in list(generators)[:: 1 if number % 2 == 0 else -1]:
            distributed.barrier()
            given = generators[name].generate(requests, seed=0)
            first_s, done_s = given[0].first_s, max(one.done_s for one in given)
            rates[name].append((ANSWER_TOKENS - 1) / (done_s - first_s) if is_one else sum(lengths) / done_s)
            tokens[name].append([one.tokens for one in given])
    of_ranks: list[dict[str, list[list[Sequence[int]]]]] = [tokens] * TP
    distributed.all_gather_object(of_ranks, tokens)
    for name, of_repeats in tokens.items():
        same = all(one == of_repeats[0] for of_rank in of_ranks for one in of_rank[name])
        say(f"{name}: the tokens are the same on all ranks and in all repeats: {same}")
    one_way, other_way = ([token for answer in of_repeats[0] for token in answer] for of_repeats in tokens.values())
    equal = sum(a == b for a, b in zip(one_way, other_way, strict=True))
    say(f"the same tokens by NCCL and through peer memory: {equal} of {len(other_way)}")
    for name, values in rates.items():
        say(f"{name}: {spread(values)} tokens/s{' behind the first token' if is_one else ''}")


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    shared, reason = peer_memory.share(distributed.group.WORLD, DEVICE)
    assert shared is not None, reason
    sums(shared) if sys.argv[1] == "sums" else answers(shared, sys.argv[2:])
    torch.cuda.synchronize()
    distributed.barrier()
    os._exit(0)  # NCCL does not end a communicator that a CUDA graph uses
