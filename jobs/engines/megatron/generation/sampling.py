"""Sample the next tokens on the device, from logits whose vocabulary is split over the TP ranks.

A token is sampled by the Gumbel-max trick: the maximum of logit / temperature + noise. The noise depends only on the
answer's seed, the token's position and its id, so that an answer is the same in any batch and any parallel layout.
Source: transformers 5.23, whose logits processors have the same order (temperature, top k, top p).

Shape letters: B answers, V vocabulary of this TP rank, W full vocabulary.
"""

import torch
from torch import Tensor

from bench.contract.generation import Sampling
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.hashing import hash32

_EXCLUDED = float("-inf")


def next_tokens(logits_BV: Tensor, sampling: Sampling, ranks: Ranks, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return the next token of each answer [B], the same on all TP ranks; positions: of the new tokens."""
    if sampling.temperature == 0:
        return _largest(logits_BV, ranks)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return _largest(logits_BV + _noise(logits_BV, ranks.rank, seeds_B, positions_B), ranks)
    logits_BW = filter_logits(ranks.gather_columns(logits_BV), sampling)
    return (logits_BW + _noise(logits_BW, 0, seeds_B, positions_B)).argmax(1)


def filter_logits(logits_BW: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits, with -inf for the tokens that top_k or top_p excludes."""
    if sampling.top_k is not None:
        least_B1 = logits_BW.topk(min(sampling.top_k, logits_BW.shape[1])).values[:, -1:]
        logits_BW = logits_BW.masked_fill(logits_BW < least_B1, _EXCLUDED)
    if sampling.top_p is None or sampling.top_p >= 1:
        return logits_BW
    descending_BW, order_BW = logits_BW.sort(dim=1, descending=True)
    p_BW = descending_BW.softmax(1)
    is_behind_BW = p_BW.cumsum(1) - p_BW >= sampling.top_p
    return torch.empty_like(logits_BW).scatter_(1, order_BW, descending_BW.masked_fill(is_behind_BW, _EXCLUDED))


def _largest(scores_BV: Tensor, ranks: Ranks) -> Tensor:
    """Return the token with the largest score of all TP ranks [B]."""
    score_B, token_B = scores_BV.max(dim=1)
    if ranks.size == 1:
        return token_B
    token_B = token_B + ranks.rank * scores_BV.shape[1]
    best_2B = torch.stack([score_B.double(), token_B.double()])  # FP64 holds both exactly
    best_R2B = ranks.gather(best_2B)
    winner_1B = best_R2B[:, 0].argmax(0, keepdim=True)
    return best_R2B[:, 1].gather(0, winner_1B)[0].long()


def _noise(logits_BV: Tensor, rank: int, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return Gumbel noise for each token id."""
    first = rank * logits_BV.shape[1]
    token_V = torch.arange(first, first + logits_BV.shape[1], device=logits_BV.device)
    of_answer_B = hash32(hash32(seeds_B & 0xFFFFFFFF) ^ positions_B)
    bits_BV = hash32(of_answer_B[:, None] ^ token_V)
    uniform_BV = ((bits_BV >> 9).float() + 0.5) * 2.0**-23  # neither 0 nor 1
    return -torch.log(-torch.log(uniform_BV))
