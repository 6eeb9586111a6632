"""The forward pass of generation: prefill of prompts, and decode steps of one new token per slot.

Both use the same layers; only attention differs. Nothing here waits for the device.

Shape letters: M rows, B slots or prompts, S tokens of the longest prompt, H hidden, O output of a linear, V vocabulary
of this TP rank, T tokens of a slot, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding

from bench.contract.generation import Sampling
from bench.contract.model import Model
from jobs.engines.megatron.attention import attend
from jobs.engines.megatron.generation.kv_cache import KvCache
from jobs.engines.megatron.generation.ops import GenerationOps
from jobs.engines.megatron.generation.ranks import OneRank, Ranks
from jobs.engines.megatron.generation.sampling import next_tokens
from jobs.engines.megatron.generation.weights import Layer, Weights
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.trained.ops import NormWeights, TrainedOps

Attend = Callable[[int, Tensor], Tensor]
"""Returns the attention output [M, O] of a layer, for its index and its qkv [M, O]."""


_NO_CP = cast(ProcessGroup, OneRank())
"""Generation uses no context parallelism; `attend` then only reads the size of the group."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The model of a TP rank: weights, operations and sampling settings."""

    model: Model
    weights: Weights
    ops: GenerationOps
    trained: TrainedOps
    ranks: Ranks
    sampling: Sampling

    @property
    def dim(self) -> int:
        return self.model.head_size

    @property
    def groups(self) -> int:
        """Number of key/value groups of this rank."""
        return self.model.num_query_groups // self.ranks.size

    def norm(self, weight_H: Tensor) -> NormWeights:
        return NormWeights(weight_H, None, self.model.norm_epsilon)

    def head_norms(self, layer: Layer) -> HeadNorms | None:
        return layer.head_norms(self.model.norm_epsilon)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts on the device, padded on the right: attention is causal, so no token attends to the padding."""

    tokens_SB: Tensor
    lengths_B: Tensor
    slots_B: Tensor
    """The slot of each answer."""
    seeds_B: Tensor


def step(decoder: Decoder, cache: KvCache, angles_TD: Tensor) -> None:
    """Run one decode step: sample and append the next token of every slot."""
    decoder.ops.append(step_logits(decoder, cache, angles_TD), cache, decoder.sampling, decoder.ranks)


def prefill(decoder: Decoder, cache: KvCache, angles_TD: Tensor, prompts: Prompts) -> Tensor:
    """Write the keys and values of the prompts to the cache; sample and return the first new token of each [B]."""
    logits_BV = prompt_logits(decoder, cache, angles_TD, prompts)
    tokens_B = next_tokens(logits_BV, decoder.sampling, decoder.ranks, prompts.seeds_B, prompts.lengths_B)
    cache.start(prompts.slots_B, tokens_B, prompts.lengths_B, prompts.seeds_B)
    return tokens_B


def step_logits(decoder: Decoder, cache: KvCache, angles_TD: Tensor) -> Tensor:
    """Return the logits [B, V] in FP32 after the newest token of every slot; its key and value go to the cache."""

    def attended(index: int, qkv_BO: Tensor) -> Tensor:
        caches = cache.keys[index], cache.values[index], cache.positions_B, angles_TD
        layer = decoder.weights.layers[index]
        return decoder.ops.attend(qkv_BO, *caches, bias_O=layer.qkv_bias_O, norms=decoder.head_norms(layer))

    return _logits(decoder, _layers(decoder, _embedded(decoder, cache.tokens_B), attended))


def prompt_logits(decoder: Decoder, cache: KvCache, angles_TD: Tensor, prompts: Prompts) -> Tensor:
    """Return the logits [B, V] in FP32 after each prompt; keys and values go to the cache."""
    num_tokens, batch = prompts.tokens_SB.shape
    angles_MD = angles_TD[:num_tokens].repeat_interleave(batch, dim=0)

    def attended(index: int, qkv_MO: Tensor) -> Tensor:
        layer, shape = decoder.weights.layers[index], (decoder.groups, decoder.dim)
        norms = decoder.head_norms(layer)
        heads = decoder.trained.split_heads(qkv_MO, layer.qkv_bias_O, angles_MD, *shape, norms)
        q, k, v = (x.unflatten(0, (num_tokens, batch)) for x in heads)
        for cached, new in ((cache.keys[index], k), (cache.values[index], v)):
            cached[prompts.slots_B, :, :num_tokens] = new.permute(1, 2, 0, 3)
        out_SBND, _ = attend(q, k, v, scale=decoder.dim**-0.5, group=_NO_CP)
        return out_SBND.flatten(2).flatten(0, 1)

    x_MH = _layers(decoder, _embedded(decoder, prompts.tokens_SB.flatten()), attended)
    x_SBH, of_batch = x_MH.unflatten(0, (num_tokens, batch)), torch.arange(batch, device=x_MH.device)
    return _logits(decoder, x_SBH[prompts.lengths_B - 1, of_batch])


def _logits(decoder: Decoder, x_BH: Tensor) -> Tensor:
    return decoder.ops.logits(x_BH, decoder.weights.head, decoder.norm(decoder.weights.norm_H))


def _embedded(decoder: Decoder, tokens_M: Tensor) -> Tensor:
    """Return the embeddings; the table is split over the TP ranks by vocabulary."""
    table_VH, ranks = decoder.weights.embedding_VH, decoder.ranks
    if ranks.size == 1:
        return embedding(tokens_M, table_VH)
    return ranks.sum(decoder.ops.own_rows(tokens_M, table_VH, ranks.rank * len(table_VH)))


def _layers(decoder: Decoder, x_MH: Tensor, attended: Attend) -> Tensor:
    """Return the output of the last layer. TP ranks sum their partial outputs; the first rank adds the residual."""
    ops, ranks = decoder.ops, decoder.ranks
    for index, layer in enumerate(decoder.weights.layers):
        qkv_MO = ops.linear(x_MH, layer.qkv, norm=decoder.norm(layer.norm_H))
        residual_MH = x_MH if ranks.rank == 0 else None
        x_MH = ranks.sum(ops.linear(attended(index, qkv_MO), layer.proj, residual_MO=residual_MH))
        hidden_MF = ops.gated(x_MH, layer.fc1, decoder.norm(layer.mlp_norm_H))
        residual_MH = x_MH if ranks.rank == 0 else None
        x_MH = ranks.sum(ops.linear(hidden_MF, layer.fc2, residual_MO=residual_MH))
    return x_MH


def angles(model: Model, num_positions: int, device: torch.device) -> Tensor:
    """Return RoPE's angles [T, D] in FP32; both halves of a row are the same."""
    rope = RotaryEmbedding(
        kv_channels=model.head_size,
        rotary_percent=1.0,
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scaling_factor != 1,
        rope_scaling_factor=model.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    angles_TH: Tensor = rope.get_freqs_non_repeated(num_positions)
    return angles_TH.repeat(1, 2).to(device)
