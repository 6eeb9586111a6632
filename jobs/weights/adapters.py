"""Export the adapters of a trial as a PEFT folder (adapter_config.json, adapter_model.safetensors).

linear_qkv has one adapter, y += s B A x. It is exported as three adapters for q, k and v, with the same A and their
rows of B.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from bench.contract import checksums
from bench.contract.atomic_files import atomic_folder
from bench.contract.model import Model
from bench.contract.training import LORA_TARGETS, PEFT_MODULES, Lora
from bench.errors import ConfigError
from jobs.weights import checkpoint_reader
from jobs.weights.tensor_map import interleave, separate

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IN_PEFT = "base_model.model.model."
PREFIX = "decoder.layers.self_attention."
MODULES = {name: PEFT_MODULES[name] for name in LORA_TARGETS}
"""PEFT's adapters that one adapter of megatron-core is exported as."""
_ATTENTION = tuple(name for names in MODULES.values() for name in names)


def export(adapters: Path, folder: Path, *, model: Model, lora: Lora, base: str | None) -> None:
    """Write the PEFT folder of an adapter checkpoint, atomically.

    base: name or folder of the base model, for PEFT's AutoPeftModel.

    Raises:
        ConfigError: the checkpoint does not contain the adapters of this plan, or the folder exists.
    """
    if folder.exists():
        raise ConfigError("this folder already exists", where=str(folder), fix="give a folder that does not exist")
    write(folder, load(adapters, model, lora), lora=lora, base=base)


def write(folder: Path, tensors: dict[str, Tensor], *, lora: Lora, base: str | None) -> None:
    """Write a PEFT folder of adapters by PEFT's names, atomically."""
    with atomic_folder(folder) as part:
        (part / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        (part / CONFIG).write_text(json.dumps(described(lora, base), indent=2) + "\n")
        checksums.write(part, (CONFIG, WEIGHTS))


def load(adapters: Path, model: Model, lora: Lora) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint or of a PEFT folder, by PEFT's names.

    Raises:
        ConfigError: the adapters do not match this plan.
    """
    if not (adapters / CONFIG).is_file():
        return {f"{IN_PEFT}{name}": x for name, x in split(read(adapters, model, lora), model)}
    try:
        config = json.loads((adapters / CONFIG).read_text())
        tensors = load_file(adapters / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_these(adapters, str(error)) from error
    expected = described(lora, None)
    differing = [key for key in ("r", "lora_alpha") if config.get(key) != expected[key]]
    if sorted(config.get("target_modules") or ()) != sorted(expected["target_modules"]):
        differing.append("target_modules")
    if differing:
        key = differing[0]
        raise _not_these(adapters, f"{key} in {CONFIG} is {config.get(key)}, but the plan has {expected[key]}")
    return tensors


def check_complete(tensors: dict[str, Tensor], model: Model, lora: Lora, folder: Path) -> None:
    """Check that adapters with PEFT's names are those of the plan.

    Raises:
        ConfigError: one is missing, or there are others.
    """
    expected = {
        f"{IN_PEFT}layers.{layer}.{'self_attn' if module in _ATTENTION else 'mlp'}.{module}.lora_{letter}.weight"
        for layer in range(model.num_layers)
        for module in lora.peft_modules
        for letter in "AB"
    }
    if differing := sorted(expected ^ set(tensors)):
        state = "is missing" if differing[0] in expected else "is not in the plan"
        raise _not_these(folder, f"the tensor {differing[0]} {state}")


def fused(tensors: dict[str, Tensor], model: Model, lora: Lora, folder: Path) -> dict[str, Tensor]:
    """Return adapters with PEFT's names as those of megatron-core's linears, [L, R, I] and [L, O, R].

    Raises:
        ConfigError: one is missing, or q, k and v of a layer have different A, as in adapters that PEFT trained.
    """
    stacked: dict[str, Tensor] = {}
    for linear in lora.target_modules:
        try:
            for letter in "AB":
                per_layer = [_fused(tensors, i, linear, letter, model) for i in range(model.num_layers)]
                stacked[f"{PREFIX}{linear}.lora_{letter.lower()}"] = torch.stack(per_layer)
        except (KeyError, ValueError, RuntimeError) as error:
            raise _not_these(folder, str(error)) from error
    return stacked


def _fused(tensors: dict[str, Tensor], layer: int, linear: str, letter: str, model: Model) -> Tensor:
    names = (f"{IN_PEFT}layers.{layer}.self_attn.{module}.lora_{letter}.weight" for module in MODULES[linear])
    parts = [tensors[name] for name in names]
    if letter == "B":
        return interleave(*parts, groups=model.num_query_groups) if parts[1:] else parts[0]
    if not all(torch.equal(parts[0], part) for part in parts):
        raise ValueError("q, k and v have different matrices A, but an adapter of linear_qkv has only one A")
    return parts[0]


def read(adapters: Path, model: Model, lora: Lora) -> dict[str, Tensor]:
    """Return the adapters of all layers, [L, R, I] and [L, O, R], of a checkpoint of any layout."""
    keys = [f"{PREFIX}{module}.{part}" for module in lora.target_modules for part in ("lora_a", "lora_b")]
    checkpoint_reader.require_plain(adapters)
    try:
        metadata = checkpoint.FileSystemReader(adapters).read_metadata()
        known = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
        tensors = {key: torch.empty(known[key].size, dtype=known[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # because of no_dist
            checkpoint.load(tensors, checkpoint_id=adapters, no_dist=True)
        for key, x in tensors.items():
            if x.shape[0] != model.num_layers or lora.rank not in x.shape[1:]:
                sizes = f"{model.num_layers} layers and the rank {lora.rank}"
                raise ValueError(f"the tensor {key} has the shape {tuple(x.shape)}, but the plan has {sizes}")
    except (OSError, KeyError, ValueError, AttributeError, CheckpointException) as error:
        raise _not_these(adapters, str(error)) from error
    return tensors


def split(tensors: dict[str, Tensor], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield each layer's adapters by the names that PEFT gives them."""
    for key, x_L in tensors.items():
        linear, part = key.removeprefix(PREFIX).split(".")
        modules, letter = MODULES[linear], part[-1].upper()
        for i, x in enumerate(x_L):
            is_rows = letter == "B" and linear == "linear_qkv"
            parts = (
                separate(x, heads=model.num_attention_heads, groups=model.num_query_groups)
                if is_rows
                else [x] * len(modules)
            )
            for module, own in zip(modules, parts, strict=True):
                yield f"layers.{i}.self_attn.{module}.lora_{letter}.weight", own.clone()


def described(lora: Lora, base: str | None) -> dict[str, Any]:
    """Return adapter_config.json; every other field has PEFT's default. Source: peft 0.21, LoraConfig."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.peft_modules),
        "bias": "none",
        "fan_in_fan_out": False,
    }


def _not_these(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"the adapters do not match this plan: {reason}",
        where=str(folder),
        fix="give the plan.json of the run that trained these adapters, and the index of its trial",
    )
