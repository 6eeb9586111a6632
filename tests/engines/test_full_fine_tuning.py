"""Full fine-tuning from a base checkpoint, against transformers' Llama and torch's AdamW, on one rank."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.contract.plan import Plan
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, drawn_rows, one_rank, reference_optimizer, reference_step  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM

    from jobs.data.rows import Rows
    from jobs.engines.megatron import checkpoint, loop, model

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]

ALL = ("task.training.trains=all", "task.training.lora=null", "precision=fp32", "task.training.max_steps=5")
RECIPE = ("recipe.lr=0.004", "recipe.weight_decay=0.3", "recipe.clip_grad=0.5")
BATCHES = ([3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1], [2, 3, 5, 9], [4, 6, 7, 8])
COSINE = (1.0, 0.9045085, 0.6545085, 0.3454915, 0.0954915)
"""(1 + cos(pi k / 5)) / 2 for k = 0 to 4."""


def llama(plan: Plan, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    """Return transformers' Llama with megatron-core's weights."""
    m = plan.config.model
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=m.vocab_size,
            hidden_size=m.hidden_size,
            intermediate_size=m.ffn_hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.num_query_groups,
            max_position_embeddings=m.max_seq_length,
            rms_norm_eps=m.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": float(m.rope_base)},
            tie_word_embeddings=m.tied_embeddings,
        )
    )
    missing, unexpected = reference.load_state_dict(dict(hugging_face(plan, weights)), strict=False)
    assert not missing and not unexpected
    return reference.float()


def hugging_face(plan: Plan, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by transformers' names; a group of linear_qkv is its queries, its key and its value."""
    m = plan.config.model
    dim, queries = m.hidden_size // m.num_attention_heads, m.num_attention_heads // m.num_query_groups
    yield "model.embed_tokens.weight", weights["embedding.word_embeddings.weight"]
    yield "model.norm.weight", weights["decoder.final_layernorm.weight"]
    yield "lm_head.weight", weights["output_layer.weight"]
    for i in range(m.num_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        qkv = weights[f"{ours}self_attention.linear_qkv.weight"].view(m.num_query_groups, queries + 2, dim, -1)
        parts = {"q": qkv[:, :queries], "k": qkv[:, queries], "v": qkv[:, queries + 1]}
        yield from ((f"{theirs}self_attn.{x}_proj.weight", part.flatten(0, -2)) for x, part in parts.items())
        yield f"{theirs}self_attn.o_proj.weight", weights[f"{ours}self_attention.linear_proj.weight"]
        gate, up = weights[f"{ours}mlp.linear_fc1.weight"].chunk(2)
        yield from ((f"{theirs}mlp.{x}_proj.weight", part) for x, part in (("gate", gate), ("up", up)))
        yield f"{theirs}mlp.down_proj.weight", weights[f"{ours}mlp.linear_fc2.weight"]
        yield f"{theirs}input_layernorm.weight", weights[f"{ours}input_layernorm.weight"]
        yield f"{theirs}post_attention_layernorm.weight", weights[f"{ours}pre_mlp_layernorm.weight"]


def loss_of(reference: LlamaForCausalLM, rows: Rows, indices: list[int]) -> Tensor:
    """Return the mean over rows of the mean loss of each row's tokens that count."""
    tokens = torch.from_numpy(rows.tokens[indices].astype(np.int64))
    counts = torch.from_numpy(rows.counts[indices])[:, 1:]
    losses = cross_entropy(reference(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return ((losses * counts).sum(1) / counts.sum(1)).mean()


def weights_of(engine: model.Parts) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.bare_chunks()[0].named_parameters()}


def test_all_weights_train_from_the_base_as_transformers_and_torch_do(tmp_path: Path) -> None:
    plan = ranks.compose(Path("unused"), *TINY, *ALL, *RECIPE)
    base = model.build(plan, seed=1)
    checkpoint.save(base, tmp_path / "base", adapters=False)
    engine, rows = model.build(plan, seed=2), drawn_rows(10)
    drawn, saved = weights_of(engine), weights_of(base)
    checkpoint.load(engine, tmp_path / "base", adapters=False)
    loaded = weights_of(engine)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert not torch.equal(loaded["output_layer.weight"], drawn["output_layer.weight"])

    reference = llama(plan, loaded)
    trained = dict(reference.named_parameters())
    optimizer = reference_optimizer(plan, trained)
    for step, (indices, factor) in enumerate(zip(BATCHES, COSINE, strict=True), 1):
        loss = loss_of(reference, rows, indices)
        optimizer.zero_grad()
        loss.backward()
        share = loop.train_step(engine, rows, np.array(indices), step)
        assert loop.mean_loss(share, 4) == pytest.approx(loss.item(), abs=1e-4)
        reference_step(optimizer, trained, lr=0.004 * factor, clip=0.5)
    after = weights_of(engine)
    assert all((after[name] - loaded[name]).abs().max() > 1e-4 for name in loaded), "every weight must move"
    for name, weight in hugging_face(plan, after):
        torch.testing.assert_close(weight, trained[name].detach(), rtol=1e-3, atol=1e-4)
