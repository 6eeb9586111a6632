"""Sample the next token of every slot and append it, in one Triton kernel. `sampling` documents the method.

A program processes some tokens of one slot; the program of a slot that finishes last compares the best tokens of all.
With TP it also compares them with those of the other ranks, through peer memory.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.contract.generation import Sampling
from jobs.engines.megatron.generation.kv_cache import KvCache
from jobs.engines.megatron.generation.peer_kernels import best_of_ranks
from jobs.engines.megatron.generation.peer_memory import PeerMemory
from jobs.engines.megatron.hash_kernel import hash32

_TOKENS = 2048
"""Tokens per program."""


def append(logits_BV: Tensor, cache: KvCache, sampling: Sampling, peers: PeerMemory | None = None) -> None:
    """Append the token with the largest logit, or, with a temperature, with the largest sum of logit and noise.

    peers: the memory of all TP ranks, if each rank has the logits of a part of the vocabulary.
    """
    num_slots, vocab_size = logits_BV.shape
    parts = triton.cdiv(vocab_size, _TOKENS)
    best = logits_BV.new_empty(num_slots, parts)
    best_token = torch.empty(num_slots, parts, dtype=torch.int32, device=logits_BV.device)
    numbers = (cache.tokens_B, cache.positions_B, cache.rows_BT, cache.seeds_B)
    tensors = (logits_BV, *numbers, best, best_token, _counters(num_slots, logits_BV.device))
    options = {"TOKENS": _TOKENS, "SIZE": triton.next_power_of_2(parts), "IS_DRAWN": sampling.temperature > 0}
    shared = (peers.best.addresses, peers.best.counts) if peers else (None, None)
    rank, num_ranks, most = (peers.rank, peers.size, peers.best.most) if peers else (0, 1, 0)
    options |= {"RANK": rank, "RANKS": num_ranks, "MOST": most}
    _append[(parts, num_slots)](*tensors, *shared, vocab_size, cache.capacity, sampling.temperature, **options)


@cache
def _counters(num_slots: int, device: torch.device) -> Tensor:
    """Return counters of finished programs per slot; the last program resets them to 0."""
    return torch.zeros(num_slots, dtype=torch.int32, device=device)


@triton.jit
def _noise(seed, position, token):
    """Return Gumbel noise for each token id."""
    of_answer = hash32(hash32(seed.to(tl.uint32)) ^ position.to(tl.uint32))
    uniform = ((hash32(of_answer ^ token.to(tl.uint32)) >> 9).to(tl.float32) + 0.5) * (2.0**-23)  # neither 0 nor 1
    return -tl.log(-tl.log(uniform))


@triton.jit
def _append(
    logits_ptr, tokens_ptr, positions_ptr, rows_ptr, seeds_ptr, best_ptr, best_token_ptr, done_ptr, addresses,
    counts_ptr, vocab_size, capacity, temperature, TOKENS: tl.constexpr, SIZE: tl.constexpr, IS_DRAWN: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    part, parts, slot = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    token = part * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(positions_ptr + slot) + 1
    score = tl.load(logits_ptr + slot.to(tl.int64) * vocab_size + token, token < vocab_size, other=float("-inf"))
    if IS_DRAWN:
        score = score / temperature + _noise(tl.load(seeds_ptr + slot), position, RANK * vocab_size + token)
    best, index = tl.max(score, 0, return_indices=True)
    tl.store(best_ptr + slot * parts + part, best)
    tl.store(best_token_ptr + slot * parts + part, part * TOKENS + index)
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + slot, 1) == parts - 1:
        other = tl.arange(0, SIZE)
        bests = tl.load(best_ptr + slot * parts + other, other < parts, other=float("-inf"), cache_modifier=".cg")
        highest, winner = tl.max(bests, 0, return_indices=True)
        chosen = tl.load(best_token_ptr + slot * parts + winner, cache_modifier=".cg").to(tl.int64)
        if RANKS > 1:
            chosen += RANK * vocab_size
            chosen = best_of_ranks(highest, chosen, addresses, counts_ptr, slot, tokens_ptr, RANK, RANKS, MOST)
        position = tl.minimum(position, capacity - 1)
        tl.store(positions_ptr + slot, position)
        tl.store(rows_ptr + slot * capacity + position, chosen)
        tl.store(tokens_ptr + slot, chosen)
        tl.store(done_ptr + slot, 0)
