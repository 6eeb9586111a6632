"""Times the update of a billion weights on this GPU: ours, and torch's fused AdamW with a copy to BF16 after it.

    python experiments/optimizer_step.py [--millions N]

Bytes are what an update has to move: gradient, master weight, moments and the BF16 weight, each read or written once;
moments that pass through the host count for what crosses the bus in one direction. The norm's pass over the gradients
is a line of its own.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.adam import kernels
    from jobs.engines.megatron.adam.offload import MomentStreamer, Piece, pieces_of
    from jobs.engines.megatron.adam.shards import Shard, range_table
    from jobs.engines.megatron.adam.update import Step

STEP = Step(count=10, lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LAYER = 200_000_000
"""Weights between two norms, which do not decay; as in a model of 7 billion weights."""
NORM = 4096
RUNS, ROUNDS = 5, 5
GRADIENT, MASTER, WEIGHT = 4, 2 * 4, 2
"""Bytes of a weight: the gradient is read, the master weight read and written, the BF16 weight written."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=1000, help="weights to update")
    length = parser.parse_args().millions * 10**6
    torch.manual_seed(0)
    shard = shard_of(length)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {length / 1e9:.3f} billion weights")
    print(f"{'update':44}{'ms':>10}{'bytes/weight':>14}{'GB/s':>8}")
    show("norm of the gradients", lambda: kernels.sum_of_squares([shard]), GRADIENT, length)
    show("norm of the gradients, torch foreach", lambda: torch._foreach_norm([shard.grad]), GRADIENT, length)
    show("torch fused AdamW, then a copy to BF16", fused_by_torch(shard), GRADIENT + MASTER + 16 + 4 + WEIGHT, length)
    factor = torch.full((), 0.5, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        name, moments = str(dtype).removeprefix("torch."), 4 * dtype.itemsize
        (piece,) = pieces_of([shard], dtype, offload=False)
        size = GRADIENT + MASTER + moments + WEIGHT
        show(f"ours, moments {name}", lambda p=piece: kernels.update(*p, factor, STEP), size, length)
        del piece
        pieces = pieces_of([shard], dtype, offload=True)
        show(f"ours, moments {name}, on the host", through_host(pieces, factor), moments // 2, length)
        del pieces


def shard_of(length: int) -> Shard:
    """Return a shard with random numbers, of which all but the norms decay."""
    grad = torch.randn(length, device="cuda")
    ranges = [(begin, min(begin + LAYER - NORM, length)) for begin in range(0, length, LAYER)]
    decayed, counted = range_table(ranges, length, grad.device), range_table([(0, length)], length, grad.device)
    master = torch.randn(length, device="cuda")
    return Shard(0, 0, grad, master, master.bfloat16(), [], counted, decayed)


def fused_by_torch(shard: Shard) -> Callable[[], Tensor]:
    master = Parameter(shard.master.clone())
    master.grad = shard.grad
    adamw = torch.optim.AdamW([master], lr=STEP.lr, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps, fused=True)

    def step() -> Tensor:
        adamw.step()
        return shard.weights.copy_(master.detach())

    return step


def through_host(pieces: list[Piece], factor: Tensor) -> Callable[[], None]:
    streamed = MomentStreamer(pieces)
    return lambda: streamed.update(pieces, lambda shard, moments: kernels.update(shard, moments, factor, STEP))


def show(name: str, run: Callable[[], object], size: int, length: int) -> None:
    """Time it and print a line."""
    ms = statistics.median(timed_ms(run) for _ in range(ROUNDS))
    print(f"{name:44}{ms:10.3f}{size:14}{size * length / ms / 1e6:8.0f}")


def timed_ms(run: Callable[[], object]) -> float:
    """Return the time of one run among some that follow each other, with all that they left to other streams."""
    run()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(RUNS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / RUNS * 1e3


if __name__ == "__main__":
    main()
