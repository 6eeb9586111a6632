"""Describe a model of transformers for the planner: `python -m jobs.weights.describe FOLDER [SETTINGS]`.

It prints a `Described` as JSON. Parameters are counted on the meta device; no weight is read. With SETTINGS (a JSON
object, see `ProbeSettings`) one copy of each kind of layer runs on the CPU, and its stored activations are measured.
A refusal is printed as {"refused": {"what": …, "where": …, "fix": …}}, with exit code 2.
"""

import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from bench.contract import codec
from bench.contract.described_model import AttentionLayers, Described, ProbeSettings, Projections
from bench.errors import ConfigError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "moe_topk")
"""Keys of config.json for the number of experts, and for how many of them a token is sent to."""
COUNTED = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Values of layer_types whose operations are counted; the others are linear attention, Mamba and the like."""


def main(words: list[str]) -> int:
    """Print the description of the folder's model, or its refusal; return the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    path = Path(words[0]) / "config.json"
    settings = codec.typed(ProbeSettings, json.loads(words[1])) if words[1:] else None
    try:
        described = describe(path.read_text(), settings, where=str(path))
    except ConfigError as error:
        print(json.dumps({"refused": {"what": error.what, "where": error.where, "fix": error.fix}}))
        return error.exit_code
    print(json.dumps(codec.plain(described)))
    return 0


def describe(config_json: str, settings: ProbeSettings | None, *, where: str) -> Described:
    """Return what transformers says about a config.json; with settings, also the probe of its layers.

    Raises:
        ConfigError: the model is not supported; the message names what is missing.
    """
    import transformers

    from jobs.weights import layer_probe
    from jobs.weights import transformers_model as models

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
    attention, num_untold = attention_layers(config)
    return Described(
        config_json=config_json,
        transformers=transformers.__version__,
        architecture=type(model).__name__,
        layer=", ".join(dict.fromkeys(type(layer).__name__ for layer in layers)),
        parameters=parameters,
        active_parameters=parameters - round(idle * sum(experts.values())),
        layer_weights=sum(matrices.values()),
        active_layer_weights=sum(matrices.values())
        - round(idle * sum(size for name, size in experts.items() if name in matrices)),
        kv_width=_kv_width(config, sum(one.num_layers for one in attention)),
        num_untold_layers=num_untold,
        attention=attention,
        projections=_projections(model),
        attention_implementations=_implementations(model),
        can_recompute=bool(model.supports_gradient_checkpointing),
        is_mxfp4="quantization_config" in json.loads(config_json),
        probe=layer_probe.measure(config, settings, where=where) if settings else None,
    )


def expert_parameters(model: Any) -> dict[str, int]:
    """Return the sizes of the parameters that belong to one of several routed experts, by name."""
    return {
        name: p.numel()
        for name, p in model.named_parameters()
        if "experts" in (words := name.split(".")) and not any("shared" in word for word in words)
    }


def _idle_share(config: Any, has_experts: bool, *, where: str) -> float:
    """Return the share of the experts that a token does not use."""
    if not has_experts:
        return 0.0
    num, chosen = (_first(config, names) for names in (EXPERTS, CHOSEN))
    if num is None or chosen is None:
        raise ConfigError(
            f"the model has experts, but config.json has no key for {'their number' if num is None else 'top-k'} that "
            "runstop knows, so a token's operations cannot be counted",
            where=where,
            fix=f"choose a model with one of the keys {', '.join(EXPERTS if num is None else CHOSEN)}",
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
    from jobs.weights import transformers_model as models

    found: dict[str, Projections] = {}
    for name, _, num_in, num_out in models.projections(model):
        last = name.rpartition(".")[2]
        one = found.setdefault(
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
    return list(found.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
