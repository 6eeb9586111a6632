"""engine=huggingface in this process: tiny plans of one rank, groups without other processes, rows, whole weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

from bench.contract.plan import Plan
from helpers.huggingface_runs import TRAINS, composed
from jobs.data.rows import Rows

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TINY = (
    *("cluster.ranks_per_node=1", "recipe.global_batch_size=4", "recipe.micro_batch_size=2", "data.seq_length=16"),
    *("model.hidden_size=32", "model.ffn_hidden_size=48", "model.num_attention_heads=4", "model.num_query_groups=2"),
    *("model.vocab_size=128", "recipe.adam_eps=1", "recipe.lr=0.8", "recipe.clip_grad=2.9", "data.eval_rows=5"),
)
"""Two micro-batches a step. With this eps an update depends on how large gradients are, not on signs alone."""
NUM_ROWS = 11
"""Of which an evaluation takes the first five."""


def tiny(folder: Path, trains: str, *overrides: str) -> Plan:
    """Return a plan whose model takes milliseconds; `trains` is all or lora."""
    return composed(folder, *TRAINS[trains], *TINY, *overrides)


@contextmanager
def group(rank: int = 0, num_ranks: int = 1) -> Iterator[None]:
    """A process group of this process: alone with gloo, or one of several ranks, whose collectives then do nothing.

    What DTensor remembers of an operation holds for one rank, and a mesh cannot distinguish ranks.
    """
    if num_ranks == 1:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
        for forget in (_clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache):
            forget()


def random_rows(plan: Plan, seed: int = 5) -> Rows:
    """Return rows some of whose tokens count, the second one of each."""
    rng, shape = np.random.default_rng(seed), (NUM_ROWS, plan.config.data.seq_length)
    tokens, counts = rng.integers(0, plan.config.model.vocab_size, shape, dtype=np.int32), rng.random(shape) < 0.6
    counts[:, 1] = True
    return Rows(tokens, counts)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's weights, whole ones of those that are sharded."""
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def theirs(plan: Plan, state: dict[str, Tensor]) -> "LlamaForCausalLM":
    """Return a Llama that transformers makes, with these weights."""
    from transformers import LlamaForCausalLM

    from helpers.llama_config import llama_config

    m = plan.config.model
    positions: dict[str, Any] = {"max_position_embeddings": m.max_seq_length, "rope_theta": float(m.rope_base)}
    model = LlamaForCausalLM(llama_config(m, **positions))
    model.load_state_dict(state)
    return model


def row_loss(model: torch.nn.Module, rows: Rows, index: int) -> Tensor:
    """Return the mean loss of one row over its tokens that count, without a batch."""
    tokens = torch.from_numpy(rows.tokens[index].astype(np.int64))
    losses = torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
    return losses[torch.from_numpy(rows.counts[index, 1:])].mean()


def by_hand(plan: Plan, model: torch.nn.Module, rows: Rows, batches: np.ndarray) -> tuple[list[float], list[float]]:
    """Train one step with each batch of row indices, one row at a time in plain torch.

    Return losses, and gradient norms before clipping.
    """
    r, trained = plan.config.recipe, [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": r.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(r.adam_beta1, r.adam_beta2), eps=r.adam_eps)
    losses, norms = [], []
    for step, batch in enumerate(batches, 1):
        for one in optimizer.param_groups:
            one["lr"] = r.lr * step / r.lr_warmup_steps
        loss = torch.stack([row_loss(model, rows, index) for index in batch]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, r.clip_grad)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms
