"""What TP ranks compute through peer memory, once per rank: `python -m tests.helpers.peer_ranks FOLDER`.

On GPUs the memory is torch's symmetric memory. On CPUs it is files that both processes map, and Triton's interpreter
runs the kernels. Each rank writes FOLDER/RANK.pt.
"""

import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from bench.contract.generation import Sampling, WeightPrecision
from bench.contract.schema import Precision
from tests.helpers import environment, tiny_llama

SIZES = [(1, 128), (3, 1000), (1, 128), (1, 1024), (2, 1024), (3, 1000), (1, 8)]
"""Shapes of the sums: of one program and of several."""
ROUNDS, SLOTS, VOCABULARY = 3, 3, 96
SAMPLINGS = [Sampling(), Sampling(temperature=0.7)]


def addends(rank: int, number: int) -> Tensor:
    """Return what a rank adds in a sum: integers, whose sums are exact in BF16, and -0.0."""
    x = torch.randint(-60, 60, SIZES[number % len(SIZES)], generator=torch.Generator().manual_seed(100 * number + rank))
    return torch.where(x == 7, -0.0, x.double()).bfloat16()


def logits(number: int) -> Tensor:
    """Return the logits of the full vocabulary; the first slot has two equal ones, of different ranks."""
    x = torch.randn(SLOTS, VOCABULARY, generator=torch.Generator().manual_seed(number))
    x[0, [11, VOCABULARY - 5]] = 9.0
    return x


def main() -> None:
    device = environment.variable("TEST_DEVICE", "cpu")
    torch.distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    group, folder = torch.distributed.group.WORLD, Path(sys.argv[1])
    from jobs.engines.megatron.generation import peer_memory

    rank = group.rank()
    if device == "cpu":
        peers = of_files(folder, rank, group.size())
    else:
        torch.cuda.set_device(rank)
        shared, reason = peer_memory.share(group, torch.device("cuda", rank))
        assert shared is not None, reason
        peers = shared
    delays = random.Random(rank)
    results = {"sums": [], "tokens": []}
    for number in range(ROUNDS * len(SIZES)):
        time.sleep(delays.choice([0, 0, 0.02]))
        results["sums"].append(peers.sum_(addends(rank, number).to(device)).cpu())
    for sampling in SAMPLINGS:
        results["tokens"].append(tokens(peers, sampling, device))
    results["logits"] = steps(folder, peers, group, torch.device(device))
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def of_files(folder: Path, rank: int, size: int) -> "object":
    """Return peer memory for processes on CPUs; this rank's part is empty before any rank continues."""
    from jobs.engines.megatron.generation import peer_kernels, peer_memory

    def buffer(name: str, dtype: torch.dtype, most: int) -> tuple[peer_memory.Buffer, list[Tensor]]:
        num = 2 * size * most
        mapped = [torch.from_file(str(folder / f"{name}{i}"), shared=True, size=num, dtype=dtype) for i in range(size)]
        mapped[rank].fill_(peer_kernels.EMPTY[dtype])
        addresses = tuple(one.data_ptr() for one in mapped)
        return peer_memory.Buffer(addresses, torch.zeros(most, dtype=torch.int32), most), mapped

    sums, mapped_sums = buffer("sums", torch.int16, 4096)
    best, mapped_best = buffer("best", torch.int64, 8)
    torch.distributed.barrier()
    return peer_memory.PeerMemory(rank, size, sums, best, [*mapped_sums, *mapped_best])


def tokens(peers, sampling: Sampling, device: str) -> Tensor:
    """Return three tokens of each slot, sampled from this rank's part of the vocabulary."""
    from jobs.engines.megatron.generation import kv_cache, sampling_kernels

    width = VOCABULARY // peers.size
    cache = kv_cache.empty(SLOTS, 64, layers=1, groups=1, dim=16, like=torch.empty(0, device=device))
    cache.seeds_B.copy_(torch.arange(SLOTS))
    for number in range(3):
        own = logits(number)[:, peers.rank * width :][:, :width]
        sampling_kernels.append(own.contiguous().to(device), cache, sampling, peers)
    return cache.rows_BT[:, 1:4].cpu()


def steps(folder: Path, peers, group, device: torch.device) -> Tensor:
    """Return the logits of this rank after a prompt, and after one more token of it."""
    from jobs.engines.megatron.device_ops import trained_ops
    from jobs.engines.megatron.generation import forward, kv_cache, weights
    from jobs.engines.megatron.generation.gpu_ops import GpuOps
    from jobs.engines.megatron.generation.ops import TorchOps
    from jobs.engines.megatron.generation.ranks import Ranks

    model, ranks = tiny_llama.model(num_layers=1), Ranks(group, peers)
    place = weights.Place(WeightPrecision.bf16, ranks, device)
    trained = trained_ops(device, Precision.bf16)
    loaded = weights.load(folder / "hf", model, place)
    decoder = forward.Decoder(model, loaded, GpuOps(TorchOps(trained)), trained, ranks, Sampling())
    shape = {"layers": 1, "groups": decoder.groups, "dim": decoder.dim}
    cache = kv_cache.empty(1, 64, **shape, like=loaded.embedding_VH)
    angles, first = forward.angles(model, cache.capacity, device), torch.tensor([0], device=device)
    rows = torch.tensor(PROMPT, device=device)
    prompt = forward.Prompts(rows[:-1, None], first + len(rows) - 1, first, first)
    with torch.no_grad():
        of_prompt = forward.prompt_logits(decoder, cache, angles, prompt)
        cache.start(first, rows[-1:], first + len(rows) - 1, first)
        return torch.cat([of_prompt, forward.step_logits(decoder, cache, angles)]).cpu()


PROMPT = [3, 500, 77, 260, 9, 411]
"""Tokens of both halves of the vocabulary."""


if __name__ == "__main__":
    main()
