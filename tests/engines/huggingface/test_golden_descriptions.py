"""The whole descriptions of tiny models of transformers: sizes, attention, projections, and what a layer stores."""

import io
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import codec
from bench.contract.described_model import ProbeSettings
from helpers import golden
from helpers.described_folders import MODELS, SIZES
from helpers.huggingface_runs import needed

needed()

from jobs.engines.huggingface.described import describe, layer_probe  # noqa: E402
from jobs.engines.huggingface.described import transformers_model as models  # noqa: E402

pytestmark = pytest.mark.long
GOLDEN = Path(__file__).with_name("golden_descriptions.txt")
SMALL_EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 48, "n_inner": 56},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "gpt_neox": {"intermediate_size": 48},
    "mixtral": {"intermediate_size": 48, "num_local_experts": 20, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen2_moe": {"num_experts": 20, "num_experts_per_tok": 5, **SMALL_EXPERTS},
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **SMALL_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mamba": {"state_size": 4},
    "bert": {"intermediate_size": 48},
    "gemma3": {},
    "deepseek_v3": {"intermediate_size": 48, "first_k_dense_replace": 0},
}
"""Fused projections in Conv1D and learned positions; other keys; more experts than are probed; other layers. The last
three are refused."""
FULL = ProbeSettings(attention="eager", trained="float32", frozen="float32", is_autocast=False)
AUTOCAST = ProbeSettings(attention="sdpa", trained="float32", frozen="float32", is_autocast=True)
LORA = {"lora_rank": 4, "lora_dropout": 0.1, "attention": "eager", "trained": "float32", "frozen": "bfloat16"}
PROBED: dict[str, list[ProbeSettings]] = {
    "gemma2": [FULL],
    "olmo2": [FULL, AUTOCAST, ProbeSettings(**LORA, is_autocast=True, lora_modules=["q_proj", "down_proj"])],
    "gemma3_text": [FULL],
    "gpt2": [AUTOCAST, ProbeSettings(**LORA, is_autocast=False, lora_modules=["no_such"])],
    "mixtral": [FULL],
    "qwen2_moe": [FULL],
    "gpt_oss": [FULL],
    "bert": [FULL],
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "code": ("olmo2", {"auto_map": {"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"}}),
    "type": ("olmo2", {"model_type": "made_up"}),
    "quantised": ("olmo2", {"quantization_config": {"quant_method": "gptq"}}),
    "invalid": ("olmo2", {"hidden_size": "wide"}),
    "no experts": ("mixtral", {"num_local_experts": 0}),
    "no chosen experts": ("mixtral", {"num_experts_per_tok": 0}),
}
"""Changes of a config.json."""


def config_json(model_type: str) -> str:
    from transformers import AutoConfig

    sizes = (
        SIZES | MODELS[model_type]
        if model_type in MODELS
        else OTHERS[model_type] | {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    )
    if model_type == "gemma3":
        return json.dumps({"model_type": "gemma3"})
    return json.dumps(AutoConfig.for_model(model_type, **sizes).to_dict())


def printed(
    text: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, Any]:
    """Return the exit code and the JSON that the program prints for a config.json on stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with warnings.catch_warnings():
        code = describe.main(["-", *words])
    return code, json.loads(capsys.readouterr().out)


def test_descriptions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A second description of the same model only has another probe."""
    import transformers

    lines: list[str] = []
    texts = {name: config_json(name) for name in (*MODELS, *OTHERS)}
    texts |= {name: json.dumps(json.loads(texts[base]) | changed) for name, (base, changed) in REFUSED.items()}
    for name, text in texts.items():
        shown: dict[str, Any] = {}
        for settings in PROBED.get(name, []) or [None]:
            words = [json.dumps(codec.plain(settings))] if settings else []
            code, model = printed(text, words, monkeypatch, capsys)
            lines.append(
                f"\n# {name}: {', '.join(map(str, codec.plain(settings).values())) if settings else 'no probe'}"
            )
            described = model.pop("described", {}) | {"exit code": code}
            if not code:
                assert json.loads(described.pop("config_json")) == json.loads(text)
                assert described.pop("transformers") == transformers.__version__
            described["projections"] = [list(one.values()) for one in described.get("projections", [])]
            values = golden.significant(model | described)
            if "projections" in values:
                values["projections"] = described["projections"]
            lines += [f"{key}: {value}" for key, value in values.items() if shown.get(key) != value]
            shown = values
    text = "\n".join(lines).lstrip().replace(transformers.__version__, "VERSION") + "\n"
    golden.require(text, GOLDEN, variable="WRITE_DESCRIPTIONS")


@pytest.mark.parametrize("name", ["olmo2", "gemma2", "gemma3_text"])
def test_a_layer_that_does_not_fit_is_measured_by_its_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fused kernel, a CPU stores the same. gemma2 stores its capped logits, 4 bytes each."""
    config = models.parsed(config_json(name), where="config.json")
    on_cpu = layer_probe.measure(config, FULL, where="config.json")
    monkeypatch.setattr(layer_probe, "_free_bytes", lambda: 1000)
    by_shapes = layer_probe.measure(config, FULL, where="config.json")
    note = "one layer does not fit into this machine's memory: only its shapes were computed"
    assert on_cpu.scaled is None and on_cpu.bytes_per_logit == (4 if name == "gemma2" else 0)
    assert by_shapes == replace(on_cpu, scaled=note)
