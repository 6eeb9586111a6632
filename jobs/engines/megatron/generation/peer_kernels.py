"""One-shot collectives of a few values between TP ranks on one node, in Triton, through the memory of the other GPUs.

Each rank writes its values into a buffer of every other rank, and then adds what all ranks have written into its own.
Nothing but the values is exchanged: a place of a buffer holds EMPTY, a number that is never written, until its value
arrives; its reader polls it and makes it EMPTY again. So a value needs one trip over NVLink, and no barrier.

A buffer has two halves, for the even and the odd calls of each program. A rank writes call n + 2 only after it has read
call n + 1 of the others, and those wrote call n + 1 after they had emptied the half of call n. The number of calls is
in device memory, so that CUDA graphs and eager kernels can follow each other in any order. Programs of all ranks must
be on their GPUs at the same time, so the number of programs is limited.

All ranks add in the order of the ranks, in FP32, and have the same sums to the last bit.

Source of the idea: NCCL's LL protocol and TensorRT-LLM's Lamport all-reduce, which detect values in the same way.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

EMPTY = {torch.int16: -(2**15), torch.int64: -1}
"""By the type of a buffer. Of BF16 numbers: the bits of -0.0, which is sent as 0.0. Of scores with their tokens: a
score of these bits is not a number."""
_EMPTY_BF16, _EMPTY_BEST = tl.constexpr(EMPTY[torch.int16]), tl.constexpr(EMPTY[torch.int64])


@triton.jit
def _pointer(address, like_ptr):
    """Return an address as a pointer of the type of `like_ptr`."""
    return tl.multiple_of(address.to(like_ptr.dtype), 16)


@triton.jit
def sum_over_ranks(
    x_ptr, addresses, counts_ptr, num_values, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
    VALUES: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Replace the BF16 numbers x, whose bits are int16, by their sums over the ranks.

    addresses: of the buffer in each rank's memory; MOST: values of a rank's part of a half.
    """
    program = tl.program_id(0)
    at = program * VALUES + tl.arange(0, VALUES)
    inside = at < num_values
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(counts_ptr + program)
    half = (count & 1) * (RANKS * MOST)
    own = tl.load(x_ptr + at, inside, other=0)
    own = tl.where(own == _EMPTY_BF16, 0, own).to(tl.int16)
    for step in tl.static_range(1, RANKS):
        there = _pointer(addresses[(RANK + step) % RANKS], x_ptr)
        tl.store(there + half + RANK * MOST + at, own, inside)
    here = _pointer(addresses[RANK], x_ptr) + half
    num_missing = 1
    while num_missing > 0:
        is_missing = tl.zeros((VALUES,), tl.int32)
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                bits = tl.load(here + rank * MOST + at, inside, other=0, volatile=True)
                is_missing |= (bits == _EMPTY_BF16).to(tl.int32)
        num_missing = tl.max(is_missing, 0)
    tl.debug_barrier()
    total = tl.zeros((VALUES,), tl.float32)
    for rank in tl.static_range(RANKS):
        # Loaded again: the compiler may repeat a load of the loop for another layout, with an older result.
        bits = own if rank == RANK else tl.load(here + rank * MOST + at, inside, other=0, cache_modifier=".cg")
        total += (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.store(here + rank * MOST + at, tl.full((VALUES,), _EMPTY_BF16, tl.int16), inside)
    tl.store(x_ptr + at, total.to(tl.bfloat16).to(tl.int16, bitcast=True), inside)
    tl.store(counts_ptr + program, count + 1)


@triton.jit
def best_of_ranks(
    best, token, addresses, counts_ptr, slot, like_ptr, RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr
):
    """Return the token with the highest score of all ranks for a slot; of equal scores the lowest token.

    The tokens of lower ranks are lower. `like_ptr` is any pointer to int64. One program for each slot calls this.
    """
    count = tl.load(counts_ptr + slot)
    half = (count & 1) * (RANKS * MOST)
    own = (best.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)
    for step in tl.static_range(1, RANKS):
        there = _pointer(addresses[(RANK + step) % RANKS], like_ptr)
        tl.store(there + half + RANK * MOST + slot, own)
    here, highest, chosen = _pointer(addresses[RANK], like_ptr) + half, best, token.to(tl.int64)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = here + rank * MOST + slot
            other = tl.atomic_xchg(place, tl.full((), _EMPTY_BEST, tl.int64), sem="relaxed", scope="sys")
            while other == _EMPTY_BEST:
                other = tl.atomic_xchg(place, tl.full((), _EMPTY_BEST, tl.int64), sem="relaxed", scope="sys")
            score = (other >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            theirs = other & 0xFFFFFFFF
            is_better = (score > highest) | ((score == highest) & (theirs < chosen))
            chosen = tl.where(is_better, theirs, chosen)
            highest = tl.where(is_better, score, highest)
    tl.store(counts_ptr + slot, count + 1)
    return chosen
