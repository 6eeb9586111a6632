"""Build a causal language model of transformers from its config.json, and find its decoder layers and projections."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch.nn import Linear, Module, ModuleList
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.pytorch_utils import Conv1D

from bench.errors import ConfigError

MXFP4 = "mxfp4"
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "proj", "wo", "down_proj", "fc2", "w2", "dense_4h_to_h", "out_lin")
"""Names that transformers gives to the last projection of an attention or of an MLP."""
ATTENTION = ("attn", "attention", "self_attention")
"""Ends of the names that transformers gives to an attention module."""

Around = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which modules are built and which allocates their parameters (ZeRO stage 3)."""


def parsed(config_json: str, *, where: str) -> Any:
    """Return the config of transformers for the text of a config.json.

    Raises:
        ConfigError: not a causal language model that this installation knows, or one with code or formats of its own.
    """
    raw = dict(json.loads(config_json))
    model_type = raw.pop("model_type", None)
    _require_known(model_type, raw, where=where)
    quantization = raw.pop("quantization_config", None)
    if quantization and quantization.get("quant_method") != MXFP4:
        raise ConfigError(
            f"the folder has weights quantised with {quantization.get('quant_method')}, which runstop does not support",
            where=where,
            fix="set MODEL to a folder with unquantised weights (only gpt-oss may have quantised weights, in MXFP4)",
        )
    try:
        config_class: Any = CONFIG_MAPPING[model_type]
        config = config_class.from_dict(config_class._decode_special_floats(raw | {"model_type": model_type}))
    except Exception as error:  # transformers validates with many classes of errors
        raise ConfigError(
            f"transformers {transformers.__version__} rejects config.json: {_first_line(error)}",
            where=where,
            fix="correct config.json, or download the model again",
        ) from error
    if config.get_text_config() is not config:
        raise ConfigError(
            f"the model type {model_type} also reads images or sound, but runstop supports only text models",
            where=where,
            fix="set MODEL to the folder of a text model; its model_type in transformers often ends with _text",
        )
    return config


def _require_known(model_type: Any, raw: dict[str, Any], *, where: str) -> None:
    if raw.get("auto_map"):
        raise ConfigError(
            f"the folder has its own code (auto_map: {', '.join(sorted(raw['auto_map']))}), which runstop never runs",
            where=where,
            fix="if transformers has its own code for this model, remove auto_map from config.json; otherwise, set "
            "MODEL to the folder of another model",
        )
    if model_type not in CAUSAL:
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal language model with model_type {model_type!r}",
            where=where,
            fix="install a version of transformers with this model_type, or set MODEL to a folder of another model",
        )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]


def build(config: Any, *, attention: str, around: Around | None = None) -> PreTrainedModel:
    """Return the model in FP32, with buffers; parameters are on the meta device, or where `around` puts them."""
    with ExitStack() as stack:
        stack.enter_context(no_init_weights())
        stack.enter_context(around() if around else init_empty_weights(include_buffers=False))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
    model.tie_weights()  # transformers ties weights when it initialises them, which is switched off here
    return model


def layer_list(model: PreTrainedModel) -> tuple[str, ModuleList]:
    """Return the list of the decoder layers and its name.

    Raises:
        ConfigError: the model has no list with as many modules as config.json has layers.
    """
    num_layers = model.config.num_hidden_layers
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, ModuleList) and len(m) == num_layers]
    if not lists:
        raise ConfigError(
            f"config.json has num_hidden_layers={num_layers}, but no list of modules in {type(model).__name__} has "
            "this length",
            where="config.json, num_hidden_layers",
            fix="choose a decoder-only model",
        )
    return min(lists, key=lambda pair: pair[0].count("."))


def projections(model: PreTrainedModel) -> Iterator[tuple[str, Module, int, int]]:
    """Yield name, module, inputs and outputs of the linear layers in the decoder layers."""
    prefix, layers = layer_list(model)
    for name, module in layers.named_modules(prefix=prefix):
        if isinstance(module, Linear):
            yield name, module, module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield name, module, module.nx, module.nf


def is_attention(name: str) -> bool:
    """Return whether a module belongs to an attention, by its name."""
    return any(part.endswith(ATTENTION) for part in name.split(".")[:-1])
