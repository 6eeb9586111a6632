"""Adapters in PEFT's folder and back: numbers that say where they come from, and every way not to fit the plan."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint

from bench.contract.model import Model
from bench.contract.training import Lora
from bench.errors import ConfigError
from helpers import ranks
from jobs.weights import adapters

LAYERS, RANK = 2, 3
HEADS, GROUPS, SIZE = 4, 2, 4
"""Two heads of 4 numbers to each group of keys and values."""
KEY = "decoder.layers.self_attention."
QKV_ROWS = (HEADS + 2 * GROUPS) * SIZE
SHAPES = {
    f"{KEY}linear_qkv.lora_a": (LAYERS, RANK, HEADS * SIZE),
    f"{KEY}linear_qkv.lora_b": (LAYERS, QKV_ROWS, RANK),
    f"{KEY}linear_proj.lora_a": (LAYERS, RANK, HEADS * SIZE),
    f"{KEY}linear_proj.lora_b": (LAYERS, HEADS * SIZE, RANK),
}


@pytest.fixture
def of_plan(tmp_path: Path) -> tuple[Model, Lora]:
    sizes = (f"model.num_layers={LAYERS}", f"model.hidden_size={HEADS * SIZE}", f"model.num_attention_heads={HEADS}")
    plan = ranks.compose(tmp_path, "cluster.ranks_per_node=1", *sizes, f"model.num_query_groups={GROUPS}")
    lora = plan.config.training.lora
    assert lora is not None
    lora.rank, lora.alpha, lora.dropout = RANK, 7, 0.25
    return plan.config.model, lora


def numbered() -> dict[str, Tensor]:
    """Return adapters in which no number occurs twice."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    numbers = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    return {name: x.view(shape) for (name, shape), x in zip(SHAPES.items(), numbers, strict=True)}


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Save a checkpoint as an engine does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def test_an_exported_folder_has_one_adapter_for_each_of_q_k_and_v(of_plan: tuple[Model, Lora], tmp_path: Path) -> None:
    """linear_qkv has, group by group, the rows of two queries, a key and a value."""
    (model, lora), whole = of_plan, numbered()
    folder = tmp_path / "peft"
    adapters.export(saved(tmp_path / "saved", whole), folder, model=model, lora=lora, base="a/base")
    assert json.loads((folder / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a/base",
        "inference_mode": True,
        "r": 3,
        "lora_alpha": 7,
        "lora_dropout": 0.25,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    actual = load_file(folder / "adapter_model.safetensors")
    own = [f"{module}.lora_{letter}" for module in ("q_proj", "k_proj", "v_proj", "o_proj") for letter in "AB"]
    assert actual.keys() == {f"base_model.model.model.layers.{i}.self_attn.{x}.weight" for i in range(2) for x in own}
    by_group = whole[f"{KEY}linear_qkv.lora_b"].view(LAYERS, GROUPS, 4, SIZE, RANK)
    for i in range(LAYERS):
        by_name = {name: actual[f"base_model.model.model.layers.{i}.self_attn.{name}.weight"] for name in own}
        assert all(torch.equal(by_name[f"{x}_proj.lora_A"], whole[f"{KEY}linear_qkv.lora_a"][i]) for x in "qkv")
        assert torch.equal(by_name["q_proj.lora_B"], by_group[i, :, :2].reshape(HEADS * SIZE, RANK))
        assert torch.equal(by_name["k_proj.lora_B"], by_group[i, :, 2].reshape(GROUPS * SIZE, RANK))
        assert torch.equal(by_name["v_proj.lora_B"], by_group[i, :, 3].reshape(GROUPS * SIZE, RANK))
        assert torch.equal(by_name["o_proj.lora_A"], whole[f"{KEY}linear_proj.lora_a"][i])
        assert torch.equal(by_name["o_proj.lora_B"], whole[f"{KEY}linear_proj.lora_b"][i])
    loaded = adapters.load(folder, model, lora)
    back = adapters.fused(loaded, model, lora, folder)
    assert back.keys() == whole.keys() and all(torch.equal(back[name], x) for name, x in whole.items())
    with pytest.raises(ConfigError, match="this folder already exists"):
        adapters.export(tmp_path / "saved", folder, model=model, lora=lora, base=None)
    broken = {name: x + ("layers.1.self_attn.k_proj.lora_A" in name) for name, x in loaded.items()}
    with pytest.raises(
        ConfigError, match="q, k and v have different matrices A, but an adapter of linear_qkv has only one A"
    ):
        adapters.fused(broken, model, lora, folder)
    del loaded["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"]
    with pytest.raises(ConfigError, match="layers.1.self_attn.o_proj.lora_B.weight"):
        adapters.fused(loaded, model, lora, folder)


def test_a_peft_folder_of_other_adapters_is_refused(of_plan: tuple[Model, Lora], tmp_path: Path) -> None:
    """The order of modules, the dropout and the base may differ."""
    model, lora = of_plan
    tensors = {"x": torch.ones(1)}
    adapters.write(tmp_path / "peft", tensors, lora=lora, base=None)
    config = tmp_path / "peft/adapter_config.json"
    peft_config = json.loads(config.read_text())
    assert peft_config["base_model_name_or_path"] is None
    config.write_text(
        json.dumps(peft_config | {"target_modules": peft_config["target_modules"][::-1], "lora_dropout": 0})
    )
    assert adapters.load(tmp_path / "peft", model, lora).keys() == {"x"}
    for key, value in (("r", 4), ("lora_alpha", 8), ("target_modules", ["q_proj"]), ("target_modules", None)):
        config.write_text(json.dumps(peft_config | {key: value}))
        wrong = f"the adapters do not match this plan: {key} in adapter_config.json is "
        with pytest.raises(ConfigError, match=wrong) as one:
            adapters.load(tmp_path / "peft", model, lora)
        assert one.value.where == str(tmp_path / "peft")
    config.write_text("{")
    with pytest.raises(ConfigError, match="the adapters do not match this plan: Expecting property name"):
        adapters.load(tmp_path / "peft", model, lora)
    config.write_text(json.dumps(peft_config))
    (tmp_path / "peft/adapter_model.safetensors").write_text("no such file")
    with pytest.raises(ConfigError, match="the adapters do not match this plan"):
        adapters.load(tmp_path / "peft", model, lora)


def test_a_checkpoint_of_other_adapters_is_refused(of_plan: tuple[Model, Lora], tmp_path: Path) -> None:
    model, lora = of_plan
    whole = numbered()
    folder = saved(tmp_path / "saved", whole)
    assert all(torch.equal(x, whole[name]) for name, x in adapters.read(folder, model, lora).items())
    assert list(adapters.read(folder, model, lora)) == list(SHAPES)
    for name, other in (("num_layers", 3), ("rank", 4)):
        changed = model if name == "num_layers" else lora
        before = getattr(changed, name)
        setattr(changed, name, other)
        with pytest.raises(ConfigError, match=f"but the plan has {model.num_layers} layers and the rank {lora.rank}"):
            adapters.read(folder, model, lora)
        setattr(changed, name, before)
    del whole[f"{KEY}linear_proj.lora_a"]
    with pytest.raises(ConfigError, match="linear_proj.lora_a"):
        adapters.read(saved(tmp_path / "fewer", whole), model, lora)
    with pytest.raises(ConfigError, match="the adapters do not match this plan"):
        adapters.read(tmp_path / "missing", model, lora)
