"""Convert tensors of transformers to megatron-core's, whose q, k and v are one tensor, and back.

bench/contract/families/ says which tensors a model has.

Shape letters: G query groups, I input; a group's rows are those of its query heads, its key and its value.
"""

import torch
from torch import Tensor

from bench.contract.families import Unit, Weight
from bench.contract.model import Model
from bench.errors import ConfigError
from jobs.weights.source import DTYPES, Source

DERIVED = ".rotary_emb.inv_freq"
"""A table in older checkpoints that every model computes itself."""


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
    """Fuse the tensors of transformers into megatron-core's."""
    parts = [part.T for part in parts] if weight.is_transposed else parts
    if ".linear_qkv." not in weight.key:
        return torch.cat(parts) if parts[1:] else parts[0].contiguous()
    if len(parts) == 1:  # they are already fused in the source, but in another order
        parts = list(parts[0].split([model.q_size, model.kv_size, model.kv_size]))
    return interleave(*parts, groups=model.num_query_groups)


def parts(weight: Weight, data: Tensor, model: Model) -> list[Tensor]:
    """Return the tensors of transformers that megatron-core's was fused from: the reverse of `fuse`."""
    split = [data]
    if ".linear_qkv." in weight.key:
        split = separate(data, heads=model.num_attention_heads, groups=model.num_query_groups)
        split = split if len(weight.sources) > 1 else [torch.cat(split)]
    elif len(weight.sources) > 1:
        split = list(data.split([shape[0] for shape in weight.sources.values()]))
    return [part.T for part in split] if weight.is_transposed else split


def interleave(q: Tensor, k: Tensor, v: Tensor, *, groups: int) -> Tensor:
    """Return q, k and v [O, I] or [O] as the rows of linear_qkv: group by group its queries, its key, its value."""
    return torch.cat([x.unflatten(0, (groups, -1)) for x in (q, k, v)], dim=1).flatten(0, 1)


def separate(qkv: Tensor, *, heads: int, groups: int) -> list[Tensor]:
    """Return q, k and v [O, I] or [O] from the rows of linear_qkv."""
    qkv_GOI = qkv.unflatten(0, (groups, -1))
    head_dim = qkv_GOI.shape[1] // (heads // groups + 2)
    return [x.flatten(0, 1) for x in qkv_GOI.split([heads // groups * head_dim, head_dim, head_dim], dim=1)]
