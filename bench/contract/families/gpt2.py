"""GPT-2 and GPT-3: LayerNorm, learned positions, biases everywhere, no gate. GELU is the exact one.

Source: transformers 5.23, GPT2Config.
"""

from collections.abc import Iterator
from math import gcd
from typing import Any

from bench.contract.families.family import ConfigJson, Family, Fixed, Unit, Weight
from bench.contract.families.llama import PIECES
from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.schema import EngineName


def _model_of(config: ConfigJson, **names: Any) -> Model:
    heads, hidden = config.count("n_head"), config.count("n_embd")
    return Model(
        num_layers=config.count("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=config.count("n_inner", 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.count("n_positions", 1024),
        norm=Norm.LayerNorm,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        activation=Activation.gelu,
        position=Position.learned,
        bias=True,
        tied_embeddings=config.flag("tie_word_embeddings", default=True),
        family="gpt2",
        **names,
    )


def _config_of(m: Model) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": m.vocab_size,
        "n_positions": m.max_seq_length,
        "n_embd": m.hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "n_inner": m.ffn_hidden_size,
        "activation_function": "gelu",
        "layer_norm_epsilon": m.norm_epsilon,
        "tie_word_embeddings": m.tied_embeddings,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _units(model: Model, *, fused: bool) -> list[Unit]:
    m, near = model, "transformer."
    h, last, pieces = m.hidden_size, {"weight": (m.hidden_size,), "bias": (m.hidden_size,)}, gcd(PIECES, m.vocab_size)
    words = {f"{near}wte.weight": (m.vocab_size, h)}
    embedding = [
        Weight("embedding.word_embeddings.weight", None, words, 0, pieces),
        Weight("embedding.position_embeddings.weight", None, {f"{near}wpe.weight": (m.max_seq_length, h)}),
    ]
    output = [Weight(f"decoder.final_layernorm.{x}", None, {f"{near}ln_f.{x}": shape}) for x, shape in last.items()]
    if not m.tied_embeddings:
        output.append(Weight("output_layer.weight", None, {"lm_head.weight": (m.vocab_size, h)}, 0, pieces))
    layers = [Unit(f"layer_{i:03}", list(_layer(m, i))) for i in range(m.num_layers)]
    return [Unit("embedding", embedding), *layers, Unit("output", output)]


def _layer(m: Model, i: int) -> Iterator[Weight]:
    """Yield a layer's weights; the bias of a linear is split with its rows."""
    h, f, near, far = m.hidden_size, m.ffn_hidden_size, f"transformer.h.{i}.", "decoder.layers."
    heads, columns = gcd(PIECES, m.num_attention_heads), gcd(PIECES, f)
    for theirs, ours, num_in, num_out, axis, pieces in (
        ("ln_1", "input_layernorm", None, h, None, 1),
        ("attn.c_attn", "self_attention.linear_qkv", h, 3 * h, 0, heads),
        ("attn.c_proj", "self_attention.linear_proj", h, h, 1, heads),
        ("ln_2", "pre_mlp_layernorm", None, h, None, 1),
        ("mlp.c_fc", "mlp.linear_fc1", h, f, 0, columns),
        ("mlp.c_proj", "mlp.linear_fc2", f, h, 1, columns),
    ):
        shape = (num_out,) if num_in is None else (num_in, num_out)
        weight = {f"{near}{theirs}.weight": shape}
        yield Weight(f"{far}{ours}.weight", i, weight, axis, pieces, is_transposed=num_in is not None)
        bias = {f"{near}{theirs}.bias": (num_out,)}
        yield Weight(f"{far}{ours}.bias", i, bias, *((0, pieces) if axis == 0 else (None, 1)))


def _has_layers_of(m: Model) -> bool:
    layers = (m.norm, m.activation, m.position, m.bias)
    has_others = m.qkv_bias or m.qk_norm or m.experts is not None or m.head_dim is not None
    is_gpt = layers == (Norm.LayerNorm, Activation.gelu, Position.learned, True)
    return is_gpt and m.num_query_groups == m.num_attention_heads and not has_others


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    fixed=(
        Fixed("activation_function", "gelu_new", ("gelu",)),
        Fixed("scale_attn_weights", True, (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", False, (False,)),
        Fixed("add_cross_attention", False, (False,)),
    ),
    has_layers_of=_has_layers_of,
    model_of=_model_of,
    config_of=_config_of,
    units=_units,
    has_peft_linears=False,
    engines=tuple(EngineName),
)
