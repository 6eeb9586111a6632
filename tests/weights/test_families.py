"""Each family's config.json, tensors and sizes are those of transformers; other settings and weights are refused."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.contract import codec, families, plan_kinds
from bench.contract.model import Model
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning.estimates.flops import tflop_per_sample
from bench.planning.estimates.parameters import parameters
from helpers import model_folders
from helpers.paths import ROOT
from jobs.tasks import convert

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.tiny_families import SIZES, TINY  # noqa: E402

CASES: dict[str, Callable[[], Any]] = TINY | {
    "mistral, heads of the usual size": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2, not tied": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3, tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}


def random_model(config: Any) -> Any:
    """Return a model in FP32 whose biases and norms are random, too."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.2)
    model.tie_weights()
    return model


def planned(folder: Path, *words: str) -> Any:
    words = ("task=finetune_tiny_dolly", "model=hf", f"cluster.paths.model={folder}", "data.tokenizer=/t.json", *words)
    start = ("task.training.starts_from=checkpoint", "task.training.base=null", "data.seq_length=64")
    return compose.compose([*words, *start])


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_converted_and_exported_bit_by_bit(case: str, tmp_path: Path) -> None:
    theirs = random_model(CASES[case]())
    theirs.save_pretrained(source := tmp_path / "source")
    plan = planned(source)
    model = plan.config.model
    kind = theirs.config.model_type
    assert model.family in (None, kind) and families.of_model(model).name == kind
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    assert convert.main(["weights", str(tmp_path / "plan.json"), str(source)]) == 0
    manifest = source / "megatron_core/manifest.json"
    record = json.loads(manifest.read_text())
    trained = {"model": codec.plain(model), "training": {"same": {"trains": "all"}, "precision": "fp32"}}
    manifest.write_text(json.dumps(record | trained))  # as a checkpoint of a trial has it
    assert convert.main(["export", str(source / "megatron_core"), str(tmp_path / "out")]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert type(loaded) is type(theirs)
    exported, stored = loaded.state_dict(), theirs.state_dict()
    assert exported.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(exported[name], stored[name])] == []
    tokens = torch.arange(40).view(2, 20)
    assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert families.model_of(written, name=model.name, source=model.source, where="") == model


@pytest.mark.parametrize("case", CASES)
def test_the_parameters_and_tensors_are_those_of_transformers(case: str) -> None:
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(CASES[case]())
    model = families.model_of(theirs.config.to_dict(), name="x", source="y", where="")
    assert parameters(model) == theirs.num_parameters()
    shapes = {name: tuple(weight.shape) for name, weight in theirs.named_parameters()}
    assert families.of_model(model).tensors(model) == shapes


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama2_7b", "llama2_70b", "llama31_8b", "gpt3_5b", "qwen3_8b"])
def test_the_parameters_of_shipped_models_are_those_of_transformers(name: str) -> None:
    model = compose.unplanned([f"model={name}"]).model
    config = families.of_model(model).config_of(model)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        )
    assert parameters(model) == theirs.num_parameters()


TESTED_WITH_EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}
"""Families of test_moe.py (engine=megatron), test_described.py (engine=huggingface) and test_experts.py (the plan)."""


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_is_tested_and_documented(name: str) -> None:
    family = families.FAMILIES[name]
    assert name in TESTED_WITH_EXPERTS | {make().model_type for make in TINY.values()}
    table = (ROOT / "docs/your-model.md").read_text()
    (row,) = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith(f"| {name} |")]
    assert row[1] == ", ".join(f"`{one}`" for one in family.model_types)


def test_a_copied_head_is_not_read(tmp_path: Path) -> None:
    """Qwen3-0.6B has tied embeddings, and stores them a second time as lm_head.weight."""
    theirs = random_model(CASES["qwen3, tied"]())
    theirs.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert planned(tmp_path).config.model.tied_embeddings


def qwen3(**changes: Any) -> dict[str, Any]:
    return TINY["qwen3"]().to_dict() | changes


UNSUPPORTED = {
    "model_type in config.json is 'gemma3', but runstop's own layers support only": {"model_type": "gemma3"},
    "the weights are quantised (awq)": {"quantization_config": {"quant_method": "awq"}},
    "use_sliding_window is true (supported: false)": {"use_sliding_window": True},
    "layer_types has sliding_attention (supported: full_attention)": {"layer_types": ["sliding_attention"] * 2},
    "rope_type is yarn (supported: default or llama3)": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "partial_rotary_factor is 0.5 (supported: 1)": {"partial_rotary_factor": 0.5},
    "attention_bias is true (supported: false)": {"attention_bias": True},
    'hidden_act is "gelu" (supported: "silu")': {"hidden_act": "gelu"},
    "num_hidden_layers is missing, but must be a whole number of 1 or more": {"num_hidden_layers": None},
    'vocab_size is "many", but must be a whole number': {"vocab_size": "many"},
    "rms_norm_eps is 0, but must be a number above 0": {"rms_norm_eps": 0},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_our_layers_lack_is_refused_by_name(message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        families.model_of(qwen3(**UNSUPPORTED[message]), name="x", source="y", where="config.json")
    assert message in refused.value.what and refused.value.where == "config.json"


def test_the_sliding_window_of_mistral_is_refused() -> None:
    """transformers takes 4,096 where the key is missing."""
    config = TINY["mistral"]().to_dict()
    del config["sliding_window"]
    with pytest.raises(ConfigError, match="sliding_window is 4096"):
        families.model_of(config, name="x", source="y", where="")


def a_model() -> Model:
    return families.model_of(qwen3(), name="qwen", source="y", where="")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "this folder does not exist": lambda folder: folder.rename(folder.with_name("moved")),
    "there is no config.json in this folder": lambda folder: (folder / "config.json").unlink(),
    "config.json cannot be read": lambda folder: (folder / "config.json").write_text("{"),
    "the folder contains no *.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "a file of the weights is incomplete or damaged: the file has 3 bytes instead": lambda folder: None,
    "another shape: model.norm.weight has shape (3,) instead of (128,)": lambda folder: model_folders.write_header(
        folder / "model.safetensors", families.of_model(a_model()).tensors(a_model()) | {"model.norm.weight": (3,)}
    ),
}


@pytest.mark.parametrize("message", FOLDERS)
def test_a_wrong_folder_is_refused_by_the_plan(message: str, tmp_path: Path) -> None:
    folder = model_folders.write(tmp_path / "qwen", a_model())
    assert planned(folder).config.model.qk_norm
    FOLDERS[message](folder)
    if "bytes" in message:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(200)
        message = "a file of the weights is incomplete or damaged"
    with pytest.raises(ConfigError) as refused:
        planned(folder)
    assert message in refused.value.what and str(tmp_path) in refused.value.where and refused.value.fix


def test_a_shard_without_read_permission_need_not_be_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folders.write(tmp_path / "qwen", a_model())
    opened = Path.open

    def denied(path: Path, *args: Any, **named: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError) as refused:
        planned(folder)
    assert refused.value.what == "a file of the weights cannot be read: Permission denied"
    assert "read permission" in refused.value.fix and "download" not in refused.value.fix


def test_a_folder_without_weights_measures_speed(tmp_path: Path) -> None:
    folder = model_folders.write(tmp_path / "Qwen3 8B", a_model())
    (folder / "model.safetensors").unlink()
    plan = planned(folder, "model.weights=random", "model.max_seq_length=256", "model.num_layers=1")
    model = plan.config.model
    assert (model.name, model.max_seq_length, model.num_layers) == ("Qwen3-8B", 256, 1)
    assert plan_kinds.loads(plan_kinds.dumps(plan), where="") == plan, "the plan has the whole model"


@pytest.mark.long
def test_model_hf_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    with pytest.raises(ConfigError, match="but the folder is not set"):
        compose.compose(["model=hf", "task=lora_8b", "cluster=dgxh200"])


@pytest.mark.long
def test_a_shipped_model_is_compared_with_the_folder(tmp_path: Path) -> None:
    folder = model_folders.write(tmp_path / "qwen", a_model())
    with pytest.raises(ConfigError, match="model_type is qwen3, but llama31_8b is a llama"):
        compose.compose(["task=lora_8b", f"cluster.paths.model={folder}", "cluster=dgxh200"])


@pytest.mark.parametrize("case", CASES)
def test_the_operations_of_a_sample_are_those_that_torch_counts(case: str) -> None:
    """Torch counts the whole square of attention's scores; a causal mask leaves half of it."""
    from torch.utils.flop_counter import FlopCounterMode

    theirs, length = random_model(CASES[case]()), 32
    model = families.model_of(theirs.config.to_dict(), name="x", source="y", where="")
    theirs.set_attn_implementation("eager")  # whose GEMMs are counted on a CPU, too
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(torch.arange(length).view(1, -1), use_cache=False)
    above_diagonal = 2 * length**2 * model.q_size * model.num_layers
    forward = tflop_per_sample(model, None, seq_length=length) * 1e12 / 3
    assert forward + above_diagonal == pytest.approx(counter.get_total_flops(), rel=1e-4)
