"""Tiny folders of models that transformers has and runstop does not, and plans for them."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import codec
from bench.contract.described_model import ProbeSettings
from bench.contract.model import Model, Weights
from bench.contract.plan import Plan
from bench.planning import compose, described_models, make_plan
from helpers.huggingface_runs import SHORT_RUN

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0, **WINDOW},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW},
    "phi3": {},
    "olmo2": {},
    "gpt_oss": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **EXPERTS, **WINDOW},
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 24, **EXPERTS},
}
"""By model_type: capped scores and windows; fused q, k and v; norms after layers; sinks; experts in single files."""


def write(folder: Path, model_type: str, *, max_shard_size: str = "40KB", spread: float = 0.2, **changed: Any) -> Path:
    """Write a folder with random weights, as `save_pretrained` does; return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **SIZES | MODELS.get(model_type, {}) | changed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)  # also biases and norms, which begin as zeros and ones
    model.save_pretrained(folder / model_type, max_shard_size=max_shard_size)
    return folder / model_type


@contextmanager
def described_here() -> Iterator[None]:
    """Describe models in this process, which has imported transformers already."""
    from jobs.engines.huggingface.described.describe import describe

    def run(config_json: str, words: list[str], *, where: str) -> Model:
        settings = codec.typed(ProbeSettings, json.loads(words[0])) if words else None
        return describe(config_json, settings, where=where)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as cache:
        patch.setattr(described_models, "_run", run)
        patch.setenv("XDG_CACHE_HOME", cache)
        yield


def plan(model: Path, folder: Path, *overrides: str) -> Plan:
    """Return a plan of engine=huggingface with the model of a folder."""
    words = (*SHORT_RUN, "engine=huggingface", "engine.huggingface.attention=eager", *overrides)
    paths = (f"cluster.paths.{name}={folder}" for name in ("data", "logs"))
    config = compose.unplanned([*words, *paths, f"cluster.paths.model={model}"])
    text = (model / "config.json").read_text()
    with described_here():
        read = described_models.read(text, name=model.name, source="a test", where=str(model))
        return make_plan.make(described_models.completed(replace(config, model=read)))


def generation_plan(model: Path, folder: Path) -> Plan:
    """Return a plan of greedy generation in FP32."""
    words = ("task=generate_tiny", "engine=huggingface", "engine.huggingface.attention=eager", "precision=fp32")
    lengths = ("task.generation.prompt_tokens=4", "task.generation.lengths=[9,12]", "cluster.ranks_per_node=1")
    config = compose.unplanned([*words, *lengths, f"cluster.paths.logs={folder}", f"cluster.paths.model={model}"])
    with described_here():
        text = (model / "config.json").read_text()
        read = described_models.read(text, name=model.name, source="a test", where=str(model))
        return make_plan.make(described_models.completed(replace(config, model=replace(read, weights=Weights.random))))


def write_mxfp4(folder: Path) -> Path:
    """Write a gpt-oss folder whose experts are in MXFP4: two 4-bit numbers a byte, a scale for each 32 numbers."""
    import torch
    from safetensors.torch import load_file, save_file

    path = write(folder, "gpt_oss", max_shard_size="1GB", intermediate_size=64)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_in, num_out = tensors.pop(name).shape
        blocks = (experts, num_out, num_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, blocks, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path
