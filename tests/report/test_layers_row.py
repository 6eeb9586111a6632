"""The row of a plan that names the layers, where they are not runstop's own with all kernels."""

import re

import pytest

from bench.errors import ConfigError
from bench.planning import compose
from bench.report import kinds

LORA = ("task=lora_7b", "cluster=dgxh200")
TORCH = r"runstop's own, but heads of 96 are left to plain torch: (\d+) % more bytes"
MEGATRON = r"megatron-core's own, because model.norm is LayerNorm: (\d+) % more bytes .* no FP8, no 4 bits"


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        (("precision=bf16",), None),
        (("precision=fp8", "model.qkv_bias=true"), None),
        (("precision=fp8", "model.qk_norm=true", "model.head_dim=64"), None),
        (("precision=fp8", "model.head_dim=96"), TORCH),
        (("precision=bf16", "model.norm=LayerNorm"), MEGATRON),
    ],
)
def test_plan_names_the_layers_and_what_they_cost(overrides: tuple[str, ...], row: str | None) -> None:
    plan = compose.compose([*LORA, *overrides])
    layers = dict(kinds.report_of(plan.kind).plan_rows(plan)).get("layers")
    assert (layers is None) == (row is None)
    if row is not None:
        matched = re.match(row, layers)
        assert matched and 20 < int(matched[1]) < 200


@pytest.mark.long
def test_odd_heads_are_refused_and_norms_take_time() -> None:
    with pytest.raises(ConfigError, match="the size of an attention head is 7, but RoPE needs an even size"):
        compose.compose([*LORA, "precision=bf16", "model.head_dim=7"])
    without, with_norms = (compose.compose([*LORA, "precision=fp8", f"model.qk_norm={on}"]) for on in ("false", "true"))
    more = with_norms.cost.elementwise_s / without.cost.elementwise_s
    assert 1.02 < more < 1.25
