"""The estimated activations of a layer against the tensors that autograd saves in it."""

from pathlib import Path

import pytest

from bench.contract.plan import Plan
from bench.planning.estimates.activations import layer_bytes
from helpers import ranks

HIDDEN = 512
SIZES = (
    "precision=bf16",
    "cluster.ranks_per_node=1",
    "model.norm=LayerNorm",  # of which a CPU, too, has one kernel
    "model.num_layers=2",
    f"model.hidden_size={HIDDEN}",
    "model.ffn_hidden_size=1792",
    "model.num_attention_heads=8",
)
GPT = ("model.activation=gelu", "model.position=learned", "model.bias=true")
LAYERS = {
    "llama_lora": ("task=lora_tiny", "model.num_query_groups=2"),
    "llama_lora_mha_without_dropout": ("task=lora_tiny", "model.num_query_groups=8", "task.training.lora.dropout=0"),
    "gpt_gqa_lora": ("task=lora_tiny", "model.num_query_groups=2", *GPT),
    "llama": ("task=pretrain_tiny", "model.num_query_groups=2"),
    "gpt": ("task=pretrain_tiny", "model.num_query_groups=8", *GPT),
    "experts": ("model=tiny_moe", "model.family=null", "task=pretrain_tiny", "model.num_query_groups=2"),
    "experts_lora": ("model=tiny_moe", "model.family=null", "task=lora_tiny", "model.num_query_groups=2"),
    "gpt_gqa": ("task=pretrain_tiny", "model.num_query_groups=2", *GPT),
}
FUSED = {
    "frozen": ("task=lora_tiny", "model.num_query_groups=2", "model.norm=RMSNorm"),
    "frozen_fp8": ("task=lora_tiny", "model.num_query_groups=2", "model.norm=RMSNorm", "precision=fp8"),
    "frozen_nf4": ("task=lora_tiny", "model.num_query_groups=2", "model.norm=RMSNorm", "task.training.trains=qlora"),
    "trained_fp8": ("task=pretrain_tiny", "model.num_query_groups=2", "precision=fp8"),
    "trained_gpt_fp8": ("task=pretrain_tiny", "model.num_query_groups=8", *GPT, "precision=fp8"),
}
"""Of the hand-written layers, whose statistics of norms and scales of rows are counted."""
CPU_MASK_BYTES = dict.fromkeys(("llama_lora", "gpt_gqa_lora", "experts_lora"), 2 * HIDDEN)
"""Dropout on a CPU stores its masks, here of two inputs, in BF16; on a GPU as booleans, which the formula counts."""
pytestmark = pytest.mark.trains


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="compares with what a CPU saves")
def test_a_bf16_layer_stores_as_much_as_the_formula(tmp_path: Path) -> None:
    """To a thousandth, which is less than the part of an adapter or the softmax; norm statistics are not counted."""
    plans = {name: ranks.compose(tmp_path, *SIZES, *overrides) for name, overrides in (LAYERS | FUSED).items()}
    measured = saved_bytes(plans, tmp_path)
    expected = {
        name: layer_bytes(plan.config, plan.world) + CPU_MASK_BYTES.get(name, 0) for name, plan in plans.items()
    }
    assert measured == pytest.approx(expected, rel=1e-3)


def saved_bytes(plans: dict[str, Plan], tmp_path: Path) -> dict[str, float]:
    folders = [ranks.write(plan, tmp_path / name) for name, plan in plans.items()]
    paths = [str(folder / "plan.json") for folder in folders]
    [(code, output)] = ranks.ended(next(iter(plans.values())), tmp_path, "tests.helpers.kept", *paths)
    assert code == 0, output
    lines = [line.split() for line in output.splitlines() if line.startswith("kept ")]
    return dict(zip(plans, (float(number) for _, number in lines), strict=True))
