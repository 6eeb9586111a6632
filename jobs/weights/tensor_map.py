"""Convert tensors of transformers to megatron-core's, whose q, k and v are one tensor, and back.

bench/contract/families/ says which tensors a model has.

Shape letters: G query groups, I input; a group's rows are those of its query heads, its key and its value.
"""

import torch
from torch import Tensor

from bench.contract.families import Weight
from bench.contract.model import Model


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
