"""The model folder of a server: the site's, a copy without end-of-sequence tokens, or random weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import Server
from bench.errors import ConfigError
from helpers import serving
from jobs.serving import model_folder, prompts

pytest.importorskip("torch")
SIZES = ("model.hidden_size=16", "model.ffn_hidden_size=24", "model.vocab_size=40", "model.num_attention_heads=4")


def server_of(plan: ServingPlan) -> Server:
    assert plan.config.task.serving is not None
    return plan.config.task.serving.server


def prepared(plan: ServingPlan, folder: Path, seed: int = 1) -> Path | None:
    return model_folder.prepared(plan, server_of(plan), folder, seed=seed)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_sites_model_is_used_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = serving.tokenizer(tmp_path / "llama")
    words = ("model.weights=checkpoint", "cluster.paths.model=$SITE/llama", "task.serving.server.removes_eos=false")
    monkeypatch.setenv("SITE", str(tmp_path))
    plan = serving.planned(*words)
    assert prepared(plan, tmp_path / "made") == source and not (tmp_path / "made").exists()
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match="the folder contains no Hugging Face model") as refused:
        prepared(plan, tmp_path / "made")
    assert (refused.value.where, refused.value.rule) == (str(source), "CFG-06")


def test_a_server_that_runs_elsewhere_has_no_folder(tmp_path: Path) -> None:
    plan = serving.planned(*serving.elsewhere("http://node7:8000", tmp_path))
    assert prepared(plan, tmp_path / "made") is None and not (tmp_path / "made").exists()


def test_a_copy_without_eos_links_the_weights_and_changes_three_files(tmp_path: Path) -> None:
    source = serving.tokenizer(tmp_path / "llama")
    config = read(source / "config.json")
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "top_k": 50}))
    plan = serving.planned("model.weights=checkpoint", f"cluster.paths.model={source}")
    created = prepared(plan, tmp_path / "below/made")
    assert created == tmp_path / "below/made"
    links = {path.name: path.readlink() for path in created.iterdir() if path.is_symlink()}
    assert links == {name: source / name for name in ("tokenizer.json", "model.safetensors")}
    assert read(created / "config.json") == config | {"eos_token_id": None}
    assert read(created / "generation_config.json") == {"eos_token_id": None, "top_k": 50}
    assert read(created / "tokenizer_config.json") == {"eos_token": None}
    assert read(source / "config.json")["eos_token_id"] == 2, "the site's folder is unchanged"


def test_random_weights_differ_by_layer_and_seed(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    plan, sampled = serving.planned(*SIZES), list[torch.Tensor]()
    for seed in (1, 2, 1):
        folder = prepared(plan, tmp_path / f"made{len(sampled)}", seed)
        assert folder is not None
        files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        assert list(files) == [f"model-0000{number}.safetensors" for number in range(3)]
        sampled += [files[name][f"model.layers.{n}.mlp.down_proj.weight"] for n, name in enumerate(list(files)[1:])]
    first, second, *others, repeated, _ = sampled
    assert torch.equal(first, repeated)
    assert not any(torch.equal(one, other) for one, other in [(first, second), *((second, other) for other in others)])
    assert read(folder / "model.safetensors.index.json") == {
        "metadata": {},
        "weight_map": {name: file for file, tensors in files.items() for name in tensors},
    }
    ends = files["model-00000.safetensors"]
    shapes = {"embed_tokens": (40, 16), "norm": (16,)}
    expected = {f"model.{name}.weight": shape for name, shape in shapes.items()} | {"lm_head.weight": (40, 16)}
    assert {name: tuple(one.shape) for name, one in ends.items()} == expected
    assert ends["model.norm.weight"].tolist() == [1.0] * 16
    weights = torch.cat([one.flatten() for file in files.values() for name, one in file.items() if "norm" not in name])
    assert weights.dtype == torch.float32 and 0.019 < weights.std() < 0.021 and abs(weights.mean()) < 0.001
    assert [len(file) for file in files.values()] == [3, 9, 9], "as many as transformers' Llama has"


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_config_and_tokenizer_of_random_weights(tmp_path: Path, precision: str, dtype: str) -> None:
    from safetensors import safe_open

    folder = prepared(serving.planned(*SIZES, f"precision={precision}"), tmp_path / "made")
    assert folder is not None
    config = read(folder / "config.json")
    assert (config["torch_dtype"], config["bos_token_id"], config["eos_token_id"]) == (dtype, None, None)
    assert (config["model_type"], config["vocab_size"], config["num_key_value_heads"]) == ("llama", 40, 2)
    with safe_open(folder / "model-00001.safetensors", "pt") as file:
        name = "model.layers.0.self_attn.q_proj.weight"
        assert file.metadata() == {"format": "pt"} and str(file.get_tensor(name).dtype) == f"torch.{dtype}"
    assert read(folder / "generation_config.json") == {"do_sample": False}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024}
    assert read(folder / "tokenizer_config.json") == about
    own = prompts.tokenizer(folder)
    assert own.encode("w3 w39 other w0").ids == [3, 39, 0, 0] and own.get_vocab_size() == 40
