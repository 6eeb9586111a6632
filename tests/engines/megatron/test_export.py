"""Export of trained models as Hugging Face folders: transformers computes the same logits, for Llama and GPT-3."""

import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ranks
from jobs.tasks import convert

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import one_rank  # noqa: F401
    from test_training_state import ALL, saved
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

    from jobs.engines.megatron import cpu_patch
    from jobs.engines.megatron.engine import MegatronEngine
    from jobs.weights import export

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]

GPT3 = (
    "model.norm=LayerNorm",
    "model.activation=gelu",
    "model.position=learned",
    "model.bias=true",
    "model.num_query_groups=4",
    "model.max_seq_length=96",
    "recipe.lr=0.02",
)
"""The learning rate is large enough to change biases, which start at 0, visibly."""
SHAPES = {
    "llama": ((), LlamaForCausalLM),
    "llama31_tied": (
        ("model.tied_embeddings=true", "model.rope_scaling_factor=8", "model.rope_base=500000"),
        LlamaForCausalLM,
    ),
    "gpt3": (GPT3, GPT2LMHeadModel),
    "gpt3_tied": ((*GPT3, "model.tied_embeddings=true"), GPT2LMHeadModel),
}
TOKENS = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(5))


def exported(run: Path, *options: str) -> Path:
    source, out = run / "checkpoints" / "trial_0" / "step_4", run / f"out{len(options)}"
    assert convert.main(["export", str(source), str(out), *options]) == 0
    return out


@pytest.fixture
def from_pretrained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load a model like another process, in which torch is not patched for megatron-core."""

    def load(folder: Path, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            for name in cpu_patch._FACTORIES:
                patch.setattr(torch, name, inspect.getclosurevars(getattr(torch, name)).nonlocals["factory"])
            return AutoModelForCausalLM.from_pretrained(folder, **options)

    return load


def logits(engine: MegatronEngine) -> Tensor:
    (chunk,) = engine.parts.unwrapped_chunks()
    with torch.no_grad():
        return chunk.eval()(TOKENS, torch.arange(12).expand(2, -1), None)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_logits_of_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_pretrained: Callable[..., Any], shape: str
) -> None:
    changes, kind = SHAPES[shape]
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    engine = saved(tmp_path, *ALL, *changes)
    out = exported(tmp_path)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    model, report = from_pretrained(out, output_loading_info=True)
    assert isinstance(model, kind) and model.dtype is torch.float32
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
    assert expected.std() > 0.1, "equal logits would make the comparison meaningless"
    torch.testing.assert_close(logits(engine), expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_bf16_run_is_exported_in_bf16_or_as_master_weights(tmp_path: Path, from_pretrained: Callable[..., Any]) -> None:
    engine = saved(tmp_path, *ALL, "precision=bf16")
    (state, *_) = engine.parts.optimizer.states()
    (tokenizer := tmp_path / "tokenizer").mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    plain, masters = exported(tmp_path, "--tokenizer", str(tokenizer)), exported(tmp_path, "--fp32")
    assert sorted(path.name for path in plain.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    weights = {name: from_pretrained(folder) for name, folder in (("bf16", plain), ("fp32", masters))}
    assert (weights["bf16"].dtype, weights["fp32"].dtype) == (torch.bfloat16, torch.float32)
    ours = dict(engine.parts.unwrapped_chunks()[0].named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
    theirs = {name: model.model.layers[1].mlp.down_proj.weight for name, model in weights.items()}
    assert torch.equal(theirs["bf16"], ours)
    assert torch.equal(theirs["fp32"].bfloat16(), ours) and not torch.equal(theirs["fp32"], ours.float())
    assert theirs["fp32"].flatten()[0] in state.master


REFUSED = {
    "no checkpoint": ((), "", "this folder is not a checkpoint of a trial"),
    "adapters": (("task.training.max_steps=9",), "step_4", "has only adapters (task.training.trains=lora)"),
    "no such model": (
        (*ALL, *GPT3, "model.num_query_groups=2"),
        "step_4",
        "the layers of the model tiny do not match any model family",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("why", REFUSED)
def test_unsupported_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str) -> None:
    overrides, name, message = REFUSED[why]
    if overrides:
        saved(tmp_path, *overrides)
    source = tmp_path / "checkpoints" / "trial_0" / name
    assert convert.main(["export", str(source), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_existing_folder_and_missing_tokenizer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, *ALL)
    source = str(tmp_path / "checkpoints" / "trial_0" / "step_4")
    assert convert.main(["export", source, str(tmp_path)]) == 2
    assert convert.main(["export", source, str(tmp_path / "out"), "--tokenizer", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "this folder already exists" in message and "the folder contains no tokenizer" in message
    assert json.loads((Path(source) / "manifest.json").read_text())["training"]["step"] == 4
