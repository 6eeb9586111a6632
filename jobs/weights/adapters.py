"""Export the adapters of a trial as a PEFT folder (adapter_config.json, adapter_model.safetensors).

linear_qkv has one adapter, y += s B A x. The rows of B that belong to q, k and v make three adapters with the same A.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from bench.contract.new_folder import appearing
from bench.contract.task import Lora, Model
from bench.errors import ConfigError
from jobs.weights import checkpoint_metadata
from jobs.weights.tensor_map import separate

PREFIX = "decoder.layers.self_attention."
MODULES = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]}


def export(adapters: Path, folder: Path, *, model: Model, lora: Lora, base: str | None) -> None:
    """Write the PEFT folder of an adapter checkpoint; it appears when it is complete.

    base: name or folder of the model, by which PEFT's AutoPeftModel finds it.

    Raises:
        ConfigError: the checkpoint does not hold the adapters of this plan, or the folder exists.
    """
    if folder.exists():
        raise ConfigError("this folder exists", where=str(folder), fix="name a new one")
    tensors = {f"base_model.model.model.{name}": x for name, x in split(read(adapters, model, lora), model)}
    with appearing(folder) as part:
        (part / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        (part / "adapter_config.json").write_text(json.dumps(described(lora, base), indent=2) + "\n")


def read(adapters: Path, model: Model, lora: Lora) -> dict[str, Tensor]:
    """Return the adapters of all layers, [L, R, I] and [L, O, R], whatever layout saved them."""
    keys = [f"{PREFIX}{module}.{part}" for module in lora.target_modules for part in ("lora_a", "lora_b")]
    checkpoint_metadata.require_plain(adapters)
    try:
        known = checkpoint.FileSystemReader(adapters).read_metadata().state_dict_metadata
        tensors = {key: torch.empty(known[key].size, dtype=known[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist asks for it
            checkpoint.load(tensors, checkpoint_id=adapters, no_dist=True)
        if any(x.shape[0] != model.num_layers or lora.rank not in x.shape[1:] for x in tensors.values()):
            raise ValueError(f"they do not have {model.num_layers} layers and rank {lora.rank}")
    except (OSError, KeyError, ValueError, AttributeError, CheckpointException) as error:
        raise ConfigError(
            f"no adapters of this plan: {error}",
            where=str(adapters),
            fix="name the plan.json of a run folder, and a trial that was trained there",
        ) from error
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
        "target_modules": [name for module in lora.target_modules for name in MODULES[module]],
        "bias": "none",
        "fan_in_fan_out": False,
    }
