"""Adapters on a frozen base in BF16 and NF4, compared with transformers and peft on the dequantised weights."""

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bench.contract.plan import Plan, Recomputed
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, one_rank, random_rows, reference_optimizer, reference_step  # noqa: F401
    from test_full_fine_tuning import RATES, llama, llama_weights, mean_loss

    from helpers.exact import exact_ops
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, model
    from jobs.weights import adapters, nf4

if TYPE_CHECKING:  # its import takes seconds
    from peft import PeftModel

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]

STEPS, GBS, ROWS = 20, 4, 11
SHAPE = (
    *("model.hidden_size=128", "model.ffn_hidden_size=256", "model.num_layers=4", "task.training.lora.dropout=0"),
    *("model.rope_base=500", "model.rope_scaling_factor=8"),
    *("task.training.target_eval_loss=null", f"data.train_rows={ROWS}", f"data.eval_rows={ROWS}"),
    *(f"task.training.max_steps={STEPS}", f"recipe.global_batch_size={GBS}", "recipe.micro_batch_size=2"),
    *("recipe.lr=0.004", "recipe.lr_warmup_steps=4", "recipe.weight_decay=0.3", "recipe.clip_grad=0.5"),
    *("recipe.log_every_steps=1", f"recipe.eval_every_samples={GBS}", f"recipe.eval_skip={STEPS - 1}"),
)
BASES = {"bf16": (), "nf4": ("task.training.trains=qlora",)}
LAYOUTS = {
    ("bf16", "cp2"): ("parallel.cp=2",),
    ("bf16", "tp2_sp"): ("parallel.tp=2", "parallel.sp=true"),
    ("nf4", "dp2"): (),
    ("nf4", "tp2"): ("parallel.tp=2",),
    ("nf4", "pp2_full"): ("parallel.pp=2", "recipe.recompute=full"),
}
PARTLY = Recomputed(full=False, qkv_layers=3, fc1_layers=1, offloaded_layers=2)


def composed(base: str, folder: Path, *overrides: str) -> Plan:
    plan = ranks.compose(folder, *TINY, *SHAPE, "precision=bf16", *BASES[base], *overrides)
    return replace(plan, data_dir=str(folder), base=None, base_dir=str(folder / "base"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and a base in FP32."""
    folder = tmp_path_factory.mktemp("frozen")
    rows = random_rows(ROWS)
    for split in ("train", "eval"):
        rows_of.save(folder, split, rows.tokens, rows.counts)
    plan = composed("bf16", folder, "precision=fp32")
    base = model.build(plan, seed=1)
    for parameter in base.unwrapped_chunks()[0].parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) / 10)
    checkpoint.save(base, folder / "base", adapters=False)
    return folder


def loaded(base: str, folder: Path, *, is_exact: bool, recomputed: Recomputed | None = None) -> model.ModelAndOptimizer:
    """Return an engine with the base; is_exact: with FP32 instead of BF16."""
    plan = composed(base, folder)
    if recomputed is not None:
        plan = replace(plan, recompute=recomputed)
    engine = model.build(plan, plan.trials[0].seed, ops=exact_ops(plan) if is_exact else None)
    checkpoint.load(engine, folder / "base", adapters=False)
    return engine


def dense(engine: model.ModelAndOptimizer) -> dict[str, Tensor]:
    """Return the weights of the base as the GEMMs use them."""
    (chunk,) = engine.unwrapped_chunks()
    weights = {name: p.detach() for name, p in chunk.named_parameters()}
    for name, part in chunk.named_modules():
        if hasattr(part, "nf4"):
            weights[f"{name}.weight"] = nf4.dequantize(part.nf4, part.config.params_dtype)
        elif hasattr(part, "weight_scale"):
            weights[f"{name}.weight"] = part.quantized.values.float() * part.weight_scale
    return weights


def adapter_names(plan: Plan) -> list[str]:
    return [
        f"{linear}.{part}" for linear in plan.config.task.training.lora.target_modules for part in ("lora_a", "lora_b")
    ]


def in_peft(plan: Plan, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return adapters, or their gradients, by peft's names."""
    layers = range(plan.config.model.num_layers)
    stacked = {
        f"{adapters.PREFIX}{name}": torch.stack([tensors[f"decoder.layers.{i}.self_attention.{name}"] for i in layers])
        for name in adapter_names(plan)
    }
    renamed = adapters.split(stacked, plan.config.model)
    return {f"base_model.model.model.{name.replace('.weight', '.default.weight')}": x for name, x in renamed}


def peft_of(engine: model.ModelAndOptimizer, dtype: torch.dtype) -> "PeftModel":
    """Return peft's model with the engine's weights; q, k and v share A, as in one adapter of linear_qkv."""
    from peft import LoraConfig, get_peft_model

    plan, weights = engine.plan, dense(engine)
    lora = plan.config.task.training.lora
    base = llama(plan)
    base.load_state_dict(dict(llama_weights(plan, weights)))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    wrapped = get_peft_model(base, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets))
    for layer in base.model.layers:
        layer.self_attn.k_proj.lora_A = layer.self_attn.v_proj.lora_A = layer.self_attn.q_proj.lora_A
    _, unexpected = wrapped.load_state_dict(in_peft(plan, weights), strict=False)
    assert not unexpected
    return wrapped.to(dtype)


def trained_in(reference: "PeftModel") -> dict[str, Parameter]:
    return {name: p for name, p in reference.named_parameters() if p.requires_grad}


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [None, Recomputed(full=False, qkv_layers=3, fc1_layers=2)], ids=["all", "fit"])
@pytest.mark.trains
@pytest.mark.parametrize(("is_exact", "tolerance"), [(True, 1e-5), (False, 0.06)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("base", BASES)
def test_gradients_are_those_of_autograd_in_fp64(
    base: str, is_exact: bool, tolerance: float, recomputed: Recomputed | None, folder: Path
) -> None:
    engine, rows, indices = (
        loaded(base, folder, is_exact=is_exact, recomputed=recomputed),
        random_rows(ROWS),
        np.arange(4),
    )
    (chunk,) = engine.unwrapped_chunks()
    torch.manual_seed(3)
    for name, parameter in chunk.named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.3)
    reference = peft_of(engine, torch.float64)
    loss = mean_loss(reference, rows, indices)
    loss.backward()
    engine.chunks[0].train()
    engine.chunks[0].zero_grad_buffer()
    share = loop._forward(engine, rows, indices, forward_only=False)
    assert loop.mean_loss(share, 4) == pytest.approx(loss.item(), rel=tolerance)
    gradients_by_name = {name: p.main_grad for name, p in chunk.named_parameters() if p.requires_grad}
    gradients_by_name, expected = (
        in_peft(engine.plan, gradients_by_name),
        {name: p.grad for name, p in trained_in(reference).items()},
    )
    assert len(expected) == 4 * 6, "in each layer four B, and A of qkv and of proj"
    for name, gradient in expected.items():
        assert (gradients_by_name[name].double() - gradient).norm() < tolerance * gradient.norm(), name


@cache
def learned(base: str, folder: Path) -> list[float]:
    """Return the losses of peft with torch's AdamW on the dequantised base."""
    engine, rows = loaded(base, folder, is_exact=True), random_rows(ROWS)
    reference, losses = peft_of(engine, torch.float32), []
    trained = trained_in(reference)
    optimizer = reference_optimizer(engine.plan, trained)
    for rate, indices in zip(RATES, rows_of.train_order(engine.plan, engine.plan.trials[0].seed), strict=False):
        loss = mean_loss(reference, rows, indices)
        optimizer.zero_grad()
        loss.backward()
        reference_step(optimizer, trained, lr=rate, clip=0.5)
        losses.append(loss.item())
    return losses


@pytest.mark.trains
@pytest.mark.parametrize(("is_exact", "tolerance"), [(True, 1e-5), (False, 0.02)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("base", BASES)
def test_losses_are_those_of_peft(base: str, is_exact: bool, tolerance: float, folder: Path) -> None:
    engine, rows = loaded(base, folder, is_exact=is_exact), random_rows(ROWS)
    order = rows_of.train_order(engine.plan, engine.plan.trials[0].seed)
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), GBS) for step in range(1, STEPS + 1)]
    assert np.abs(np.subtract(losses, learned(base, folder))).mean() < tolerance
    assert losses[-1] < losses[0] - 0.2, "the loss must have fallen"


@pytest.mark.long
def test_nf4_changes_the_output_of_the_base(folder: Path) -> None:
    assert np.abs(np.subtract(learned("nf4", folder), learned("bf16", folder))).max() > 0.01


@pytest.fixture(scope="module")
def in_layouts(folder: Path) -> dict[tuple[str, str], list[float]]:
    """The losses in every layout of two ranks, computed in FP32; all layouts are trained in one start of the ranks."""
    plans = {}
    for (base, layout), split in LAYOUTS.items():
        plan = composed(base, folder, "cluster.ranks_per_node=2", *split)
        if layout == "tp2_sp":
            plan = replace(plan, recompute=PARTLY)
        plans[base, layout] = plan
    folders = {key: ranks.write(plan, folder / "_".join(key)) for key, plan in plans.items()}
    ranks.run(next(iter(plans.values())), folder, "tests.helpers.curves", "--exact", *map(str, folders.values()))
    return {key: ranks.train_losses(run / "result_0.txt") for key, run in folders.items()}


@pytest.mark.trains
@pytest.mark.parametrize(("base", "layout"), LAYOUTS)
def test_every_layout_has_the_losses_of_peft(
    base: str, layout: str, folder: Path, in_layouts: dict[tuple[str, str], list[float]]
) -> None:
    """TP ranks group the absmax of NF4 differently: the 4-bit codes are the same, their scales almost the same."""
    is_regrouped = base == "nf4" and layout.startswith("tp")
    difference = np.abs(np.subtract(in_layouts[base, layout], learned(base, folder)))
    assert difference.max() < (0.01 if is_regrouped else 1e-4)
