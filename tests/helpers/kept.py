"""Print the bytes per token that the second layer stores for its backward pass.

    python -m tests.helpers.kept PLAN.json …

Each plan is for one process. A tensor's storage counts once and as a whole, however many views of it are saved.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from bench.contract import plan as plans
from bench.contract import plan_kinds
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import from_environment


def main() -> None:
    all_plans = [plan_kinds.load(Path(path)) for path in sys.argv[1:]]
    start_ranks(all_plans[0], from_environment())
    from jobs.engines.megatron import model

    for plan in all_plans:
        print("kept", kept(plan, model.build(plan, 1).unwrapped_chunks()[0].train()))
    end_ranks()


def kept(plan: plans.Plan, model: torch.nn.Module) -> float:
    """Return bytes per token, without parameters."""
    seq_length = plan.config.data.seq_length
    x_SBH = torch.randn(seq_length, 1, plan.config.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    freqs = model.rotary_pos_emb(seq_length) if model.position_embedding_type == "rope" else None
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y_SBH, _ = model.decoder.layers[1](x_SBH, attention_mask=None, rotary_pos_emb=freqs)
    for tensor in tensors_in(getattr(y_SBH.grad_fn, "saved", None)):
        keep(tensor)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(storage.nbytes() for start, storage in saved.items() if start not in parameters) / seq_length


def tensors_in(saved: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a hand-written layer saves by itself: a dataclass of tensors and tuples of them."""
    if isinstance(saved, torch.Tensor):
        yield saved
    elif is_dataclass(saved):
        for field in fields(saved):
            yield from tensors_in(getattr(saved, field.name))
    elif isinstance(saved, tuple):
        for part in saved:
            yield from tensors_in(part)


if __name__ == "__main__":
    main()
