"""Describe a model of transformers for the planner.

    python -m jobs.engines.huggingface.described.describe FOLDER [SETTINGS]

FOLDER is - for a config.json on stdin. The output is a `Model` with a `Described` as JSON. Parameters are counted on
the meta device; no weight is read. With SETTINGS (a JSON object, see `ProbeSettings`) one copy of each kind of layer
runs on the CPU, and its stored activations are measured. A refusal is printed as {"refused": {"what": …, "where": …,
"fix": …}}, with exit code 2.
"""

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.contract import codec
from bench.contract.described_model import FAMILY, AttentionLayers, Described, ProbeSettings, Projections
from bench.contract.model import Activation, Model, Norm, Position
from bench.errors import ConfigError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")
"""Keys of config.json for the number of experts, and for how many of them a token is sent to."""
FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
FFN_OF_EXPERT = ("moe_intermediate_size", "intermediate_size", "expert_dim")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
UNLIMITED = 2**20
"""The context of a model without a limit in config.json, in tokens. Assumed."""
COUNTED = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Values of layer_types whose operations are counted; the others are linear attention, Mamba and the like."""


def main(words: list[str]) -> int:
    """Print the description of the folder's model, or its refusal; return the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    where = "config.json" if words[0] == "-" else str(Path(words[0]) / "config.json")
    text = sys.stdin.read() if words[0] == "-" else Path(where).read_text()
    settings = codec.typed(ProbeSettings, json.loads(words[1])) if words[1:] else None
    try:
        model = describe(text, settings, where=where)
    except ConfigError as error:
        print(json.dumps({"refused": {"what": error.what, "where": error.where, "fix": error.fix}}))
        return error.exit_code
    print(json.dumps(codec.plain(model)))
    return 0


def describe(config_json: str, settings: ProbeSettings | None, *, where: str) -> Model:
    """Return the model of a config.json as transformers describes it; with settings, also the probe of its layers.

    Fields that only layers of runstop read have what comes closest: a gated MLP is swiglu.

    Raises:
        ConfigError: the model is not supported; the message names what is missing.
    """
    import transformers

    from jobs.engines.huggingface.described import layer_probe
    from jobs.engines.huggingface.described import transformers_model as models

    config = models.parsed(config_json, where=where)
    model = models.build(config, attention="eager")
    _require_no_other_weights(model, where=where)
    prefix, layers = models.layer_list(model)
    experts = expert_parameters(model)
    idle = _idle_share(config, bool(experts), where=where)
    matrices = {
        name: p.numel() for name, p in layers.named_parameters(prefix=prefix) if p.dim() > 1 and "bias" not in name
    }
    parameters = sum(p.numel() for p in model.parameters())
    attention, num_uncounted = attention_layers(config)
    described = Described(
        config_json=json.dumps(json.loads(config_json)),
        transformers=transformers.__version__,
        architecture=type(model).__name__,
        layer=", ".join(dict.fromkeys(type(layer).__name__ for layer in layers)),
        parameters=parameters,
        largest_parameter=max(p.numel() for p in model.parameters()),
        active_parameters=parameters - round(idle * sum(experts.values())),
        layer_weights=sum(matrices.values()),
        active_layer_weights=sum(matrices.values())
        - round(idle * sum(size for name, size in experts.items() if name in matrices)),
        kv_width=_kv_width(config, sum(one.num_layers for one in attention)),
        num_uncounted_layers=num_uncounted,
        attention=attention,
        projections=_projections(model),
        attention_implementations=_implementations(model),
        can_recompute=bool(model.supports_gradient_checkpointing),
        ignores_tensors=bool(model._keys_to_ignore_on_load_unexpected),
        is_mxfp4=bool(json.loads(config_json).get("quantization_config")),
        probe=layer_probe.measure(config, settings, where=where) if settings else None,
    )
    return _model(config, model, described, chosen=(_first(config, CHOSEN) or 1) if experts else 1)


def _model(config: Any, model: Any, described: Described, *, chosen: int) -> Model:
    classes = {type(module).__name__ for module in model.modules()}
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    ffn = _first(config, FFN) or config.hidden_size
    if chosen > 1:
        ffn = chosen * (_first(config, FFN_OF_EXPERT) or ffn)
    has_gate = {"gate_proj", "gate_up_proj"}.intersection(name.rpartition(".")[2] for name, _ in _members(model))
    return Model(
        name="model",
        source="config.json",
        family=FAMILY,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=config.vocab_size,
        max_seq_length=_first(config, CONTEXT) or UNLIMITED,
        norm=Norm.RMSNorm if any("RMSNorm" in name for name in classes) else Norm.LayerNorm,
        norm_epsilon=float(next((value for key in EPSILON if (value := getattr(config, key, None))), 1e-5)),
        activation=Activation.swiglu if has_gate else Activation.gelu,
        position=Position.rope if any("Rotary" in name for name in classes) else Position.learned,
        bias=any(name.endswith(".bias") for name, _ in model.named_parameters()),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        described=described,
    )


def _members(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_modules()
    yield from model.named_parameters()


def expert_parameters(model: Any) -> dict[str, int]:
    """Return the sizes of the parameters that belong to one of several routed experts, by name."""
    return {
        name: p.numel()
        for name, p in model.named_parameters()
        if "experts" in (parts := name.split(".")) and not any("shared" in part for part in parts)
    }


def _idle_share(config: Any, has_experts: bool, *, where: str) -> float:
    """Return the share of the experts that a token does not use."""
    if not has_experts:
        return 0.0
    num, chosen = (_first(config, names) for names in (EXPERTS, CHOSEN))
    if num is None or chosen is None:
        missing = "number of experts" if num is None else "number of experts per token (top-k)"
        keys = ", ".join(EXPERTS if num is None else CHOSEN)
        raise ConfigError(
            f"config.json has none of the keys {keys}, so runstop does not know the {missing}",
            where=where,
            fix="choose a model whose config.json has one of these keys",
        )
    return 1 - chosen / num


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _require_no_other_weights(model: Any, *, where: str) -> None:
    """Refuse a model with saved tensors that are not parameters: the engine would not save them."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if others := sorted(set(model.state_dict()) - parameters):
        raise ConfigError(
            f"{type(model).__name__} has weights that are not parameters ({others[0]} and {len(others) - 1} more), "
            "which engine=huggingface would not save",
            where=where,
            fix="choose another model",
        )


def attention_layers(config: Any) -> tuple[list[AttentionLayers], int]:
    """Return the layers by width and window of their attention, and how many layers are of another kind."""
    heads, num_layers = getattr(config, "num_attention_heads", None), config.num_hidden_layers
    if not isinstance(heads, int) or not heads:
        return [], num_layers
    width = heads * _head_size(config)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    windows = Counter(window if kind == "sliding_attention" else None for kind in kinds if kind in COUNTED)
    layers = [AttentionLayers(num_layers=n, width=width, window=keys) for keys, n in windows.items()]
    return layers, sum(kind not in COUNTED for kind in kinds)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_width(config: Any, num_layers: int) -> int:
    if not num_layers or getattr(config, "kv_lora_rank", None):  # latent attention: the cache has other sizes
        return 0
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(groups) * _head_size(config) * num_layers


def _implementations(model: Any) -> list[str]:
    """Return the attention implementations that compute this model; sdpa has no capping of the scores."""
    is_capped = bool(getattr(model.config, "attn_logit_softcapping", None))
    supported = {
        "eager": True,
        "sdpa": model._supports_sdpa and not is_capped,
        "flash_attention_2": model._supports_flash_attn,
    }
    return [name for name, is_supported in supported.items() if is_supported]


def _projections(model: Any) -> list[Projections]:
    from jobs.engines.huggingface.described import transformers_model as models

    by_name: dict[str, Projections] = {}
    for name, _, num_in, num_out in models.projections(model):
        last = name.rpartition(".")[2]
        one = by_name.setdefault(
            last,
            Projections(
                name=last,
                num_modules=0,
                weights=0,
                sides=0,
                largest_side=0,
                is_attention=models.is_attention(name),
                is_output=last in models.OUTPUTS,
            ),
        )
        one.num_modules += 1
        one.weights += num_in * num_out
        one.sides += num_in + num_out
        one.largest_side = max(one.largest_side, num_in, num_out)
    return list(by_name.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
