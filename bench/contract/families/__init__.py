"""The model families, one file each. Standard library only: ranks import it.

To add a family, write its file and add it to _MODULES; no other code knows a family by name.
"""

from collections.abc import Mapping
from typing import Any

from bench.contract.families import gpt2, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, seed_oss
from bench.contract.families.family import ConfigJson, Family, Unit, Weight
from bench.contract.model import Model, Position
from bench.contract.schema import EngineName
from bench.errors import ConfigError

__all__ = ["ConfigJson", "Family", "Unit", "Weight"]

_MODULES = (llama, gpt2, qwen2, qwen3, mistral, mixtral, qwen3_moe, gpt_oss, seed_oss)
FAMILIES: Mapping[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""By name. A model without `family` is of the first family that has its layers."""


def of_config(config: ConfigJson) -> Family:
    """Return the family of a config.json.

    Raises:
        ConfigError: the family is unknown, or the weights are quantised.
    """
    model_type = config.values.get("model_type")
    family = next((one for one in FAMILIES.values() if model_type in one.model_types), None)
    if family is None:
        supported = sorted(one for family in FAMILIES.values() for one in family.model_types)
        raise ConfigError(
            f"model_type in config.json is {model_type!r}, but runstop's own layers support only "
            f"{', '.join(supported)}",
            where=config.where,
            fix="set engine=huggingface, which supports the other models of transformers, or set MODEL to a folder "
            "with one of these model types",
            rule="CFG-06",
        )
    quantization = config.values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization and method not in family.dequantised:
        raise ConfigError(
            f"the weights are quantised ({method or 'quantization_config'}), but runstop needs unquantised weights",
            where=config.where,
            fix="set MODEL to the folder of the unquantised model; for precision=fp8 and QLoRA, runstop quantises the "
            "weights itself",
            rule="CFG-06",
        )
    return family


def supports(values: Mapping[str, Any], engine: EngineName) -> bool:
    """Return whether a config.json is of a family that this engine builds itself, with settings of its layers only.

    transformers describes experts to engine=huggingface: it stores them otherwise than the files do.
    """
    config, kind = ConfigJson(values, "config.json"), values.get("model_type")
    family = next((one for one in FAMILIES.values() if kind in one.model_types), None)
    if family is None or engine not in family.engines or family.unsupported(config):
        return False
    return engine is not EngineName.huggingface or family.model_of(config, name="model", source="").experts is None


def model_of(values: Mapping[str, Any], *, name: str, source: str, where: str) -> Model:
    """Return the model of a config.json.

    Raises:
        ConfigError: the family is unknown, the weights are quantised, a size is missing, or our layers do not have one
            of the settings.
    """
    config = ConfigJson(values, where)
    family = of_config(config)
    _refuse_unsupported(family, config)
    return family.model_of(config, name=name, source=source)


def of_model(model: Model) -> Family:
    """Return the family of a model.

    Raises:
        ConfigError: no family has its layers, or those of `model.family` are different.
    """
    if model.family is not None and model.family not in FAMILIES:
        raise ConfigError(
            f"model.family is {model.family}, but runstop does not know this family",
            where="model.family",
            fix=f"set model.family to one of {', '.join(FAMILIES)}",
        )
    candidates = [FAMILIES[model.family]] if model.family else list(FAMILIES.values())
    family = next((one for one in candidates if one.has_layers_of(model)), None)
    if family is None:
        m = model.experts
        experts = None if m is None else f"{m.num_experts}, normalize_top_k={m.normalize_top_k}"
        expected_family = f"the family {model.family}" if model.family else "any model family"
        raise ConfigError(
            f"the layers of the model {model.name} do not match {expected_family}: norm={model.norm.name}, "
            f"activation={model.activation.name}, position={model.position.name}, bias={model.bias}, "
            f"num_query_groups={model.num_query_groups}, qkv_bias={model.qkv_bias}, qk_norm={model.qk_norm}, "
            f"experts={experts}",
            where="model",
            fix="use the layers of a Llama (RMSNorm, swiglu, rope, no bias), a Qwen2 (with qkv_bias), a Qwen3 (with "
            "qk_norm), a Mixtral (with experts and normalize_top_k) or a GPT-3 (LayerNorm, gelu, learned positions, "
            "biases)",
        )
    return family


def check(values: Mapping[str, Any], model: Model, *, where: str) -> None:
    """Refuse a config.json that does not match the plan's model.

    Raises:
        ConfigError: they differ, or the weights are quantised or have settings that our layers do not have.
    """
    config = ConfigJson(values, where)
    family = of_config(config)
    expected = of_model(model)
    different = [f"model_type is {values['model_type']}, but {model.name} is a {expected.name}"]
    if family is expected:
        _refuse_unsupported(family, config)
        different = differences(config, model)
    if different:
        raise ConfigError(
            f"config.json does not match the model {model.name}: {'; '.join(different)}",
            where=where,
            fix=f"set model=hf to read the sizes from this folder, or set MODEL to the folder of {model.name}",
            rule="CFG-06",
        )


def differences(config: ConfigJson, model: Model) -> list[str]:
    """Return the differences between a config.json and the model, with the keys of config.json.

    The context length is compared only with learned positions: RoPE has none.
    """
    family = of_model(model)
    stored = family.model_of(config, name=model.name, source=model.source)
    expected = family.config_of(model) | {"head_dim": model.head_size}
    actual = family.config_of(stored) | {"head_dim": stored.head_size}
    ignored = {"max_position_embeddings"} if model.position is Position.rope else set()
    keys = [key for key in {**actual, **expected} if key not in ignored]
    return [
        f"{key} is {actual.get(key)}, but {model.name} has {expected.get(key)}"
        for key in keys
        if actual.get(key) != expected.get(key)
    ]


def _refuse_unsupported(family: Family, config: ConfigJson) -> None:
    if unsupported := family.unsupported(config):
        raise ConfigError(
            f"runstop's layers for {family.name} do not support this model: {'; '.join(unsupported)}",
            where=config.where,
            fix="set MODEL to a model without these settings",
            rule="CFG-06",
        )
