"""Full fine-tuning from a checkpoint: in every layout the losses of transformers' models with torch's AdamW.

With RUNSTOP_TEST_DEVICE=cuda the reference still computes on the CPU.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.contract.plan import Plan, Recomputed
from bench.mlperf.result import parse
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, one_rank, random_rows, reference_optimizer, reference_step  # noqa: F401
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

    from helpers.llama_config import llama_config
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, model

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning", r"ignore:barrier\(\)"
)  # what megatron-core calls

STEPS, GBS, ROWS = 20, 4, 11
FULL = (
    *("task.training.trains=all", "task.training.lora=null", "task.training.target_eval_loss=null", "precision=fp32"),
    *("model.num_layers=4", "model.ffn_hidden_size=64", f"data.train_rows={ROWS}", f"data.eval_rows={ROWS}"),
    *(f"task.training.max_steps={STEPS}", f"recipe.global_batch_size={GBS}", "recipe.micro_batch_size=2"),
    *("recipe.lr=0.004", "recipe.lr_warmup_steps=4", "recipe.weight_decay=0.3", "recipe.clip_grad=0.5"),
    *("recipe.log_every_steps=1", f"recipe.eval_every_samples={GBS}", f"recipe.eval_skip={STEPS - 1}"),
)
"""Two micro-batches a step, and with DP 2 one on each rank; some layouts have only one."""
FP8_BOUND = 0.15
"""Tolerance of losses that fall from 5 to 2.5."""
RATES = [0.001, 0.002, 0.003, 0.004, *(0.002 * (1 + np.cos(np.pi * k / 16)) for k in range(16))]
SHAPES = {
    "llama": ("model.rope_base=500000", "model.rope_scaling_factor=8"),
    "gpt3": ("model={norm: LayerNorm, activation: gelu, position: learned, bias: true, tied_embeddings: true}",)
    + ("model.num_query_groups=4",),
}
LAYOUTS = {
    "dp2": (),
    "tp2": ("parallel.tp=2",),
    "tp2_sp": ("parallel.tp=2", "parallel.sp=true", "recipe.micro_batch_size=4"),
    "cp2": ("parallel.cp=2", "recipe.micro_batch_size=4"),
    "pp2": ("parallel.pp=2", "recipe.offload_activations=true"),
    "pp2_vpp2_full": ("parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
}
PARTLY = Recomputed(full=False, qkv_layers=3, fc1_layers=1, offloaded_layers=2)


@dataclass(frozen=True)
class Run:
    """A reference run from the base: the losses of all steps, of the last evaluation, and the final weights."""

    plan: Plan
    losses: list[float]
    eval_loss: float
    weights: dict[str, Tensor]


def llama(plan: Plan) -> LlamaForCausalLM:
    """Return transformers' Llama of the same shape, with Llama 3.1's RoPE."""
    m = plan.config.model
    scaling = {"factor": m.rope_scaling_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    return LlamaForCausalLM(
        llama_config(
            m,
            max_position_embeddings=131072,
            rope_parameters={"rope_type": "llama3", "rope_theta": float(m.rope_base), **scaling},
            tie_word_embeddings=False,
        )
    )


def gpt3(plan: Plan) -> GPT2LMHeadModel:
    """Return transformers' GPT-2, which is GPT-3 with dense attention, of the same shape."""
    m = plan.config.model
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=m.vocab_size,
            n_positions=m.max_seq_length,
            n_embd=m.hidden_size,
            n_layer=m.num_layers,
            n_head=m.num_attention_heads,
            n_inner=m.ffn_hidden_size,
            bos_token_id=None,
            eos_token_id=None,
            activation_function="gelu",
            layer_norm_epsilon=m.norm_epsilon,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama_weights(plan: Plan, ours: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by transformers' names; a group of linear_qkv has its queries, its key and its value."""
    m = plan.config.model
    dim, queries = m.hidden_size // m.num_attention_heads, m.num_attention_heads // m.num_query_groups
    yield "model.embed_tokens.weight", ours["embedding.word_embeddings.weight"]
    yield "model.norm.weight", ours["decoder.final_layernorm.weight"]
    yield "lm_head.weight", ours["output_layer.weight"]
    for i in range(m.num_layers):
        our, their = f"decoder.layers.{i}.", f"model.layers.{i}."
        qkv = ours[f"{our}self_attention.linear_qkv.weight"].view(m.num_query_groups, queries + 2, dim, -1)
        parts = {"q": qkv[:, :queries], "k": qkv[:, queries], "v": qkv[:, queries + 1]}
        yield from ((f"{their}self_attn.{x}_proj.weight", part.flatten(0, -2)) for x, part in parts.items())
        yield f"{their}self_attn.o_proj.weight", ours[f"{our}self_attention.linear_proj.weight"]
        gate, up = ours[f"{our}mlp.linear_fc1.weight"].chunk(2)
        yield from ((f"{their}mlp.{x}_proj.weight", part) for x, part in (("gate", gate), ("up", up)))
        yield f"{their}mlp.down_proj.weight", ours[f"{our}mlp.linear_fc2.weight"]
        yield f"{their}input_layernorm.weight", ours[f"{our}input_layernorm.weight"]
        yield f"{their}post_attention_layernorm.weight", ours[f"{our}pre_mlp_layernorm.weight"]


def gpt3_weights(plan: Plan, ours: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights by transformers' names; its linears are [I, O], and c_attn has all queries, keys and values."""
    m = plan.config.model
    linears = {"attn.c_attn": "self_attention.linear_qkv", "attn.c_proj": "self_attention.linear_proj"}
    linears |= {"mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
    norms = {"ln_1": "input_layernorm", "ln_2": "pre_mlp_layernorm"}
    yield "transformer.wte.weight", ours["embedding.word_embeddings.weight"]
    yield "transformer.wpe.weight", ours["embedding.position_embeddings.weight"]
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", ours[f"decoder.final_layernorm.{kind}"]
        for i in range(m.num_layers):
            for their, our in (linears | norms).items():
                weight = ours[f"decoder.layers.{i}.{our}.{kind}"]
                if their == "attn.c_attn":
                    weight = weight.unflatten(0, (m.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                yield f"transformer.h.{i}.{their}.{kind}", weight.T if their in linears else weight


TRANSFORMERS = {"llama": (llama, llama_weights), "gpt3": (gpt3, gpt3_weights)}


def weights_of(engine: model.ModelAndOptimizer) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in engine.unwrapped_chunks()[0].named_parameters()}


def composed(shape: str, folder: Path, *overrides: str) -> Plan:
    """Return the plan of one rank or of a layout, from the shape's base and rows."""
    plan = ranks.compose(folder, *TINY, *SHAPES[shape], *FULL, *overrides)
    return replace(plan, data_dir=str(folder), base_dir=str(folder / f"{shape}_base"))


def save_base(plan: Plan) -> dict[str, Tensor]:
    """Save a base whose norms and biases are also random; return its weights."""
    base = model.build(plan, seed=1)
    for parameter in base.unwrapped_chunks()[0].parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) / 10)
    checkpoint.save(base, Path(str(plan.base_dir)), adapters=False)
    return weights_of(base)


def mean_loss(reference: PreTrainedModel, rows: rows_of.Rows, indices: np.ndarray) -> Tensor:
    """Return the mean over rows of the mean loss of each row's tokens that count."""
    tokens = torch.from_numpy(rows.tokens[indices].astype(np.int64))
    counts = torch.from_numpy(rows.counts[indices])[:, 1:]
    losses = cross_entropy(reference(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return ((losses * counts).sum(1) / counts.sum(1)).mean()


def learned(shape: str, plan: Plan, base: dict[str, Tensor], rows: rows_of.Rows) -> Run:
    """Train transformers' model with the settings of the plan and torch's AdamW."""
    build, renamed = TRANSFORMERS[shape]
    reference = build(plan).float()
    missing, unexpected = reference.load_state_dict(dict(renamed(plan, base)), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, "only a tied head may be missing"
    reference.tie_weights()
    trained, losses = dict(reference.named_parameters()), []
    optimizer = reference_optimizer(plan, trained)
    for rate, indices in zip(RATES, rows_of.train_order(plan, plan.trials[0].seed), strict=False):
        loss = mean_loss(reference, rows, indices)
        optimizer.zero_grad()
        loss.backward()
        reference_step(optimizer, trained, lr=rate, clip=0.5)
        losses.append(loss.item())
    with torch.no_grad():
        eval_loss = mean_loss(reference, rows, np.arange(ROWS)).item()
    return Run(plan, losses, eval_loss, {name: p.detach() for name, p in trained.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows; `reference` adds the bases."""
    folder = tmp_path_factory.mktemp("full")
    rows = random_rows(ROWS)
    for split in ("train", "eval"):
        rows_of.save(folder, split, rows.tokens, rows.counts)
    return folder


@cache
def reference(shape: str, folder: Path) -> Run:
    plan = composed(shape, folder)
    return learned(shape, plan, save_base(plan), rows_of.load(plan, "train"))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_full_fine_tuning_matches_transformers_and_torch(shape: str, folder: Path) -> None:
    expected = reference(shape, folder)
    engine = model.build(expected.plan, seed=2)
    random_weights = weights_of(engine)
    checkpoint.load(engine, Path(str(expected.plan.base_dir)), adapters=False)
    loaded, rows = weights_of(engine), rows_of.load(expected.plan, "train")
    assert not torch.equal(
        loaded["embedding.word_embeddings.weight"], random_weights["embedding.word_embeddings.weight"]
    )
    order = rows_of.train_order(expected.plan, expected.plan.trials[0].seed)
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), GBS) for step in range(1, STEPS + 1)]
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 0.5, "the loss must have fallen"
    assert loop.evaluate(engine, rows) == pytest.approx(expected.eval_loss, abs=1e-4)
    after = weights_of(engine)
    assert all((after[name] - loaded[name]).abs().max() > 1e-4 for name in loaded), "every weight must change"
    for name, weight in TRANSFORMERS[shape][1](expected.plan, after):
        seen = slice(None)
        if name.endswith(
            "c_attn.bias"
        ):  # the keys' bias cancels in the softmax: its gradient is noise, which Adam amplifies
            seen = torch.arange(len(weight)) // (len(weight) // 3) != 1
        torch.testing.assert_close(weight[seen], expected.weights[name][seen], rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_rope_is_scaled_as_transformers_scales_it(folder: Path) -> None:
    """Of four frequencies two are unchanged, one is interpolated, and the lowest is divided by the factor."""
    plan = composed("llama", folder)
    (chunk,) = model.build(plan, seed=1).unwrapped_chunks()
    expected, unscaled = llama(plan).model.rotary_emb.inv_freq, 500_000.0 ** -(torch.arange(4) / 4)
    torch.testing.assert_close(chunk.rotary_pos_emb.inv_freq.cpu(), expected, rtol=1e-6, atol=0)
    assert (expected / unscaled).tolist() == pytest.approx([1, 1, 0.372, 0.125], abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("fp8", FP8_BOUND)])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_precisions_have_losses_close_to_fp32(shape: str, precision: str, bound: float, folder: Path) -> None:
    """From weights in BF16. FP8 copies of weights are updated after loading, after each update, and after a warm-up."""
    expected = reference(shape, folder)
    engine = model.build(composed(shape, folder, f"precision={precision}"), seed=2)
    checkpoint.load(engine, Path(str(expected.plan.base_dir)), adapters=False)
    rows, order = rows_of.load(expected.plan, "train"), rows_of.train_order(expected.plan, expected.plan.trials[0].seed)
    before = loop.evaluate(engine, rows)
    loop.warm_up(engine, 1, seed=1)
    assert loop.evaluate(engine, rows) == before
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), GBS) for step in range(1, STEPS + 1)]
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=bound)
    assert np.abs(np.subtract(losses, expected.losses)).max() > bound / 20, "the bound must mean something"


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[tuple[str, str], Path]:
    """The run folders of every shape in every layout of two ranks, trained in one start of the ranks."""
    if not ranks.have(2):
        pytest.skip("2 GPUs needed")
    plans = {}
    for shape in SHAPES:
        reference(shape, folder)
        for layout, split in LAYOUTS.items():
            plan = composed(shape, folder, "cluster.ranks_per_node=2", *split)
            if layout == "tp2_sp":
                plan = replace(plan, recompute=PARTLY)
            plans[shape, layout] = plan
    fp8 = composed("llama", folder, "cluster.ranks_per_node=2", *LAYOUTS["tp2_sp"], "precision=fp8")
    plans["llama", "fp8_tp2_sp"] = fp8
    folders = {key: ranks.write(plan, folder / "_".join(key)) for key, plan in plans.items()}
    ranks.run(next(iter(plans.values())), folder, "tests.helpers.curves", *map(str, folders.values()))
    return folders


@pytest.mark.trains
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_has_the_losses_of_transformers_and_torch(
    shape: str, layout: str, folder: Path, trained: dict[tuple[str, str], Path]
) -> None:
    expected, log = reference(shape, folder), trained[shape, layout] / "result_0.txt"
    np.testing.assert_allclose(ranks.train_losses(log), expected.losses, rtol=0, atol=1e-4)
    assert parse(log).eval_final == pytest.approx(expected.eval_loss, abs=1e-4)


@pytest.mark.trains
def test_fp8_trains_with_tensor_parallelism(folder: Path, trained: dict[tuple[str, str], Path]) -> None:
    losses = ranks.train_losses(trained["llama", "fp8_tp2_sp"] / "result_0.txt")
    np.testing.assert_allclose(losses, reference("llama", folder).losses, rtol=0, atol=FP8_BOUND)
