"""Map the tensors of Hugging Face's Llama to megatron-core's, whose q, k and v are one tensor.

Shape letters: G query groups, I input; a group's rows are those of its query heads, its key and its value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from bench.contract.model import Model
from bench.errors import ConfigError
from jobs.weights.source import DTYPES, Source

PIECES = 8
"""Number of pieces along the TP axis, if it divides evenly, so that a TP rank reads only its own pieces."""
DERIVED = ".rotary_emb.inv_freq"
"""A table in older checkpoints that every model computes itself."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One of megatron-core's tensors (of one layer) and the tensors it is fused from."""

    key: str
    layer: int | None
    sources: Mapping[str, tuple[int, ...]]
    """Shapes by name."""
    axis: int | None = None
    """The axis along which TP splits it."""
    num_pieces: int = 1

    @property
    def is_linear(self) -> bool:
        """Whether it is stored in FP8 with precision=fp8: the matrix of a layer that TP splits, not its bias."""
        return self.layer is not None and self.axis is not None and self.key.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are converted together into one file."""

    name: str
    weights: list[Weight]


def units(model: Model, *, fused: bool) -> list[Unit]:
    """Return the model's tensors in units that fit in memory; fused: q, k and v are one tensor in the source."""
    table = (model.vocab_size, model.hidden_size)
    split = {"axis": 0, "num_pieces": gcd(PIECES, model.vocab_size)}
    embedding = Weight("embedding.word_embeddings.weight", None, {"model.embed_tokens.weight": table}, **split)
    last = [Weight("decoder.final_layernorm.weight", None, {"model.norm.weight": (model.hidden_size,)})]
    if not model.tied_embeddings:
        last.append(Weight("output_layer.weight", None, {"lm_head.weight": table}, **split))
    layers = [Unit(f"layer_{i:03}", list(_layer(model, i, fused=fused))) for i in range(model.num_layers)]
    return [Unit("embedding", [embedding]), *layers, Unit("output", last)]


def _layer(m: Model, i: int, *, fused: bool) -> Iterator[Weight]:
    h, f, q, kv = m.hidden_size, m.ffn_hidden_size, m.q_size, m.kv_size
    near, far = f"model.layers.{i}.", "decoder.layers."
    widths = {"q_proj": q, "k_proj": kv, "v_proj": kv} if not fused else {"qkv_proj": q + 2 * kv}
    qkv = {f"{near}self_attn.{name}.weight": (width, h) for name, width in widths.items()}
    gates = {f"{near}mlp.{name}.weight": (f, h) for name in ("gate_proj", "up_proj")}
    yield Weight(f"{far}input_layernorm.weight", i, {f"{near}input_layernorm.weight": (h,)})
    yield Weight(f"{far}self_attention.linear_qkv.weight", i, qkv, 0, gcd(PIECES, m.num_query_groups))
    if m.qkv_bias:
        biases = {f"{near}self_attn.{name}.bias": (width,) for name, width in widths.items()}
        yield Weight(f"{far}self_attention.linear_qkv.bias", i, biases, 0, gcd(PIECES, m.num_query_groups))
    if m.qk_norm:
        for name in ("q", "k"):
            norm = {f"{near}self_attn.{name}_norm.weight": (m.head_size,)}
            yield Weight(f"{far}self_attention.{name}_layernorm.weight", i, norm)
    out = {f"{near}self_attn.o_proj.weight": (h, q)}
    yield Weight(f"{far}self_attention.linear_proj.weight", i, out, 1, gcd(PIECES, m.num_attention_heads))
    yield Weight(f"{far}pre_mlp_layernorm.weight", i, {f"{near}post_attention_layernorm.weight": (h,)})
    yield Weight(f"{far}mlp.linear_fc1.weight", i, gates, 0, 2 * gcd(PIECES, f))  # gates first, then ups: each is split
    yield Weight(f"{far}mlp.linear_fc2.weight", i, {f"{near}mlp.down_proj.weight": (h, f)}, 1, gcd(PIECES, f))


def is_fused(source: Source) -> bool:
    """Return whether q, k and v are one tensor in the source."""
    return "model.layers.0.self_attn.qkv_proj.weight" in source.tensors


def check(source: Source, units: list[Unit]) -> list[str]:
    """Return the names of the tensors that are skipped because every model computes them; all others are used once.

    Raises:
        ConfigError: a tensor is missing or unknown or has another shape, or the dtypes are mixed or not supported.
    """
    wanted = {name: shape for unit in units for weight in unit.weights for name, shape in weight.sources.items()}
    derived = sorted(name for name in source.tensors if name.endswith(DERIVED))
    stored_tensors = {name: stored for name, stored in source.tensors.items() if name not in derived}
    shapes = [
        f"{name} has shape {stored.shape} instead of {wanted[name]}"
        for name, stored in stored_tensors.items()
        if name in wanted and stored.shape != wanted[name]
    ]
    for wrong, problem in (
        (sorted(wanted.keys() - stored_tensors.keys()), "are missing"),
        (sorted(stored_tensors.keys() - wanted.keys()), "are unknown"),
        (shapes, "have another shape"),
    ):
        if wrong:
            raise ConfigError(
                f"{len(wrong)} of {len(wanted)} tensors {problem}: "
                f"{', '.join([*wrong[:3], *('…' for _ in wrong[3:4])])}",
                where=str(source.folder),
                fix="set model= to the model of these weights, or download the weights again",
            )
    if len(dtypes := {stored.dtype for stored in stored_tensors.values()}) != 1 or not dtypes <= DTYPES.keys():
        raise ConfigError(
            f"the tensors have unsupported or different dtypes: {', '.join(sorted(dtypes))}",
            where=str(source.folder),
            fix=f"use weights in one of the dtypes {', '.join(DTYPES)}",
        )
    return derived


def fuse(weight: Weight, parts: list[Tensor], model: Model) -> Tensor:
    """Fuse Hugging Face's tensors into megatron-core's."""
    if ".linear_qkv." not in weight.key:
        return torch.cat(parts) if parts[1:] else parts[0]
    if len(parts) == 1:  # they are already fused in the source, but in another order
        parts = list(parts[0].split([model.q_size, model.kv_size, model.kv_size]))
    return interleave(*parts, groups=model.num_query_groups)


def interleave(q: Tensor, k: Tensor, v: Tensor, *, groups: int) -> Tensor:
    """Return q, k and v [O, I] or [O] as the rows of linear_qkv: group by group its queries, its key, its value."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def separate(qkv: Tensor, *, heads: int, groups: int) -> list[Tensor]:
    """Return q, k and v [O, I] or [O] from the rows of linear_qkv."""
    qkv_GOI = qkv.unflatten(0, (groups, -1))
    head_dim = qkv_GOI.shape[1] // (heads // groups + 2)
    return [x.flatten(0, 1) for x in qkv_GOI.split([heads // groups * head_dim, head_dim, head_dim], dim=1)]
