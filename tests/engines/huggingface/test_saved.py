"""Folders that engine=huggingface writes and reads in this process: models, adapters; and random initial weights."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from bench.contract.engine import Strategy
from bench.contract.plan import Plan
from bench.errors import ConfigError
from helpers import ranks
from helpers.huggingface_alone import group, tiny, weights
from helpers.huggingface_runs import BLOCK, FSDP2, needed

needed()

from bench.contract import families  # noqa: E402
from jobs.engines.huggingface import adapters, folders, placement, quantized, training_state  # noqa: E402
from jobs.engines.huggingface import model as models  # noqa: E402
from jobs.engines.huggingface import weights as huggingface_weights  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402
from jobs.weights.adapter_init import init_adapter  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

CPU = torch.device("cpu")
GPT = (
    *("model=gpt3_126m", "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("model.num_attention_heads=2", "model.num_query_groups=2", "model.vocab_size=64", "model.max_seq_length=1024"),
)
EMBEDDING, MATRIX = 4 * 128 * 32, 4 * 32 * 32
"""Bytes of the tiny Llama's embedding, and of the query's matrix behind it."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return tiny(tmp_path_factory.mktemp("plan"), "all")


@pytest.fixture
def saved(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model of seed 7, saved in several files, the first of which is exactly full."""
    monkeypatch.setattr(folders, "SHARD_BYTES", EMBEDDING + MATRIX)
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "left over").touch()
    HuggingFaceEngine(plan, 7).save(tmp_path / "out", adapters=False)
    return tmp_path / "out"


@pytest.mark.long
def test_model_is_saved_in_shards_named_as_transformers_does(plan: Plan, saved: Path) -> None:
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in saved.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    whole = weights(HuggingFaceEngine(plan, 7).placement.model)
    assert list(index) == list(whole) and list(dict.fromkeys(index.values())) == files
    contents = [load_file(saved / file) for file in files]
    assert list(contents[0]) == ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert_close({name: tensor for content in contents for name, tensor in content.items()}, whole, rtol=0, atol=0)
    sizes = [sum(tensor.nbytes for tensor in content.values()) for content in contents]
    following = [next(whole[name].nbytes for name in index if index[name] == file) for file in files[1:]]
    assert max(sizes) == EMBEDDING + MATRIX
    assert all(size + first > EMBEDDING + MATRIX for size, first in zip(sizes[:-1], following, strict=True))
    described = families.of_model(plan.config.model).config_of(plan.config.model)
    assert json.loads((saved / "config.json").read_text()) == described | {"dtype": "float32"}
    assert not (saved / "left over").exists() and not saved.with_name("out.part").exists()


@pytest.mark.long
def test_saved_model_and_its_conversion_load_unchanged(
    plan: Plan, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights(HuggingFaceEngine(plan, 7).placement.model)
    reads: list[str] = []
    of_family = huggingface_weights.MegatronFolder._read_full
    monkeypatch.setattr(
        huggingface_weights.MegatronFolder,
        "_read_full",
        lambda self, weight: reads.append(weight.key) or of_family(self, weight),
    )
    for folder in (saved, saved / "megatron_core"):
        engine = HuggingFaceEngine(plan, 8)
        engine.load(folder, adapters=False)
        assert_close(weights(engine.placement.model), whole, rtol=0, atol=0)
        with pytest.raises(AssertionError, match="before the model is placed"):
            engine.load(folder, adapters=False)
    assert reads.count("decoder.layers.self_attention.linear_qkv.weight") == 2, "once for q, k and v of a layer"
    missing, wide = "model.layers.2.mlp.gate_proj.weight", "model.norm.weight"
    name = plan.config.model.name
    with pytest.raises(ConfigError, match=f"not a checkpoint of {name}: {missing} is missing"):
        huggingface_weights.open_folder(saved, plan).read(missing, (48, 32))
    for folder in (saved, saved / "megatron_core"):
        with pytest.raises(ConfigError, match=rf"not a checkpoint of {name}: {wide} has the shape \(32,\)"):
            huggingface_weights.open_folder(folder, plan).read(wide, (33,))
    manifest = saved / "megatron_core" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"precision": "nf4"}))
    with pytest.raises(ConfigError, match="the linear layers of this checkpoint are in nf4"):
        huggingface_weights.MegatronFolder(saved / "megatron_core", plan.config.model)


def test_folder_with_fused_qkv_is_refused(plan: Plan, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_weights.hugging_face, "is_fused", lambda tensors: "lm_head.weight" in tensors)
    with pytest.raises(ConfigError, match="the weights have q, k and v in one tensor"):
        huggingface_weights.HuggingFaceFolder(saved, plan.config.model)
    config = json.loads((saved / "config.json").read_text()) | {"num_hidden_layers": 3}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        huggingface_weights.HuggingFaceFolder(saved, plan.config.model)


@pytest.mark.long
def test_gpt_is_saved_as_one_file_with_tied_embedding_and_its_conversion_loads(tmp_path: Path) -> None:
    engine = HuggingFaceEngine(tiny(tmp_path, "all", *GPT), 7)
    engine.save(tmp_path / "out", adapters=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "manifest.json",
        "megatron_core",
        "model.safetensors",
    ]
    content = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in content
    assert_close(content, weights(engine.placement.model), rtol=0, atol=0)
    assert [name for name, p in content.items() if name.endswith(".bias") and p.any()] == []
    assert len(models.layers(engine.placement.model)) == 1
    other = HuggingFaceEngine(tiny(tmp_path, "all", *GPT), 8)
    other.load(tmp_path / "out" / "megatron_core", adapters=False)
    assert_close(weights(other.placement.model), weights(engine.placement.model), rtol=0, atol=0)


@pytest.mark.long
def test_adapters_are_saved_as_peft_does_and_loaded(tmp_path: Path) -> None:
    plan = tiny(tmp_path, "lora", FSDP2)
    engine = HuggingFaceEngine(plan, 7)
    for p in adapters.trainable(engine.placement.model).values():
        assert isinstance(p, DTensor)
        torch.nn.init.normal_(p.to_local())
    engine.save(tmp_path / "out", adapters=True)
    content, own = load_file(tmp_path / "out" / "adapter_model.safetensors"), weights(engine.placement.model)
    place = "model.layers.1.self_attn"
    assert len(content) == 2 * 4 * 2
    for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
        first = "o_proj" if module == "o_proj" else "q_proj"
        saved = {letter: content[f"base_model.model.{place}.{module}.lora_{letter}.weight"] for letter in "AB"}
        assert torch.equal(saved["A"], own[f"{place}.{first}.lora_A.default.weight"])
        assert torch.equal(saved["B"], own[f"{place}.{module}.lora_B.default.weight"])
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == plan.base_dir
    )
    other = HuggingFaceEngine(plan, 7)
    other.load(tmp_path / "out", adapters=True)
    assert_close(weights(other.placement.model), own, rtol=0, atol=0)
    gpt = HuggingFaceEngine(tiny(tmp_path, "all", *GPT), 7)
    with pytest.raises(ConfigError, match="because the model family gpt2 names its linear layers differently"):
        adapters.attach(gpt.placement.model, tiny(tmp_path, "all", *GPT))
    lora: Any = plan.config.training.lora
    lora.rank += 1
    with pytest.raises(ConfigError, match="the adapters do not match this plan"):
        huggingface_weights.Adapters(tmp_path / "out", plan)


def test_random_weights_depend_on_seed_and_name(plan: Plan, tmp_path: Path) -> None:
    source = huggingface_weights.RandomWeights(plan, 7, CPU)
    std = math.sqrt(2 / (5 * 32))
    into = std / math.sqrt(2 * plan.config.model.num_layers)
    whole, residual = source.read("a.weight", (400, 500)), source.read("a.down_proj.weight", (400, 500))
    assert float(whole.std()) == pytest.approx(std, rel=0.01) and float(residual.std()) == pytest.approx(into, rel=0.01)
    assert abs(float(whole.mean())) < std / 100
    assert source.read("norm.weight", (3,)).tolist() == [1, 1, 1] and source.read("q.bias", (2,)).tolist() == [0, 0]
    assert torch.equal(source.read("a.base_layer.weight", (400, 500)), whole)
    for other in (
        huggingface_weights.RandomWeights(plan, 8, CPU).read("a.weight", (400, 500)),
        source.read("b.weight", (400, 500)),
    ):
        assert abs(float((whole * other).mean())) < std**2 / 50
    name = "model.layers.1.self_attn.{}.lora_{}.default.weight"
    source = huggingface_weights.RandomWeights(tiny(tmp_path, "lora"), 7, CPU)
    for module, linear in {"v_proj": "linear_qkv", "o_proj": "linear_proj"}.items():
        expected = init_adapter((4, 32), "A", seed=7, name=f"layer 2 self_attention.{linear}")
        assert torch.equal(source.read(name.format(module, "A"), (4, 32)), expected)
    assert not source.read(name.format("o_proj", "B"), (32, 4)).any()


class Params4bit(torch.nn.Parameter):
    """Replaces bitsandbytes' weight, and keeps its constructor arguments."""

    compress_statistics, quant_type, quant_storage = True, "nf4", torch.uint8
    options: dict[str, Any]

    def __new__(cls, data: torch.Tensor, requires_grad: bool, **options: Any) -> "Params4bit":
        parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        parameter.options = options
        return parameter


def test_4_bit_weight_is_quantised_from_the_full_weight_in_bf16() -> None:
    """Its own shape is that of the packed bytes; the linear has the full shape."""
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.weight = Params4bit(torch.zeros(12, 1), requires_grad=False)
    whole = torch.randn(4, 6)
    requests: list[tuple[str, tuple[int, ...]]] = []
    source: Any = SimpleNamespace(read=lambda *words: requests.append(words) or whole)
    training_state.fill(layer, source, CPU)
    weight: Any = layer.weight
    assert requests == [("weight", (4, 6))]
    assert torch.equal(weight.data, whole.bfloat16()) and not weight.requires_grad
    options = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.uint8, "module": layer}
    assert weight.options == options
    assert quantized.is_quantized(weight) and not quantized.is_quantized(torch.nn.Parameter(whole))


@pytest.mark.long
def test_balanced_places_layers_on_gpus_by_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU replaces the GPUs."""
    plan = tiny(tmp_path, "all", f"{BLOCK}.strategy=balanced", "recipe.clip_grad=1")
    block: Any = plan.config.engine.huggingface
    block.num_gpus = 2
    assert block.strategy is Strategy.balanced
    model, source = models.build(plan), huggingface_weights.RandomWeights(plan, 7, CPU)
    calls: dict[str, Any] = {}
    monkeypatch.setattr(placement, "free_bytes", lambda num_gpus: [2**30] * num_gpus)
    allocate = models.allocate
    monkeypatch.setattr(
        models, "allocate", lambda model, places: calls.update(places=places) or allocate(model, torch.device("cpu"))
    )
    monkeypatch.setattr("accelerate.dispatch_model", lambda *words, **more: calls.update(handed=(words, more)))
    monkeypatch.setattr(placement, "_prepare_model", lambda plan, model, device: calls.update(on=device) or model)
    monkeypatch.setattr(placement, "TorchPlacement", lambda *words: words)
    gpu = torch.device("cuda", 0)
    assert placement.place(plan, model, source, gpu) == (plan, model, model)
    devices = calls["handed"][0][1]
    assert calls["handed"] == ((model, devices), {"force_hooks": True}) and set(devices.values()) == {0, 1}
    assert calls["places"] == {name: torch.device("cuda", index) for name, index in devices.items()}
    assert calls["on"] == gpu and torch.equal(model.lm_head.weight, source.read("lm_head.weight", (128, 32)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accelerate_gets_device_and_precision(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    prepared = SimpleNamespace(prepare_model=lambda model, device_placement: calls.append({"moves": device_placement}))
    monkeypatch.setattr("accelerate.Accelerator", lambda **more: calls.append(more) or prepared)
    plan = tiny(tmp_path, "all", f"precision={precision}")
    for device in ("cpu", "cuda"):
        placement._prepare_model(plan, models.build(plan), torch.device(device))
    mixed = "bf16" if precision == "bf16" else "no"
    moves = {"moves": False}
    assert calls == [{"cpu": True, "mixed_precision": mixed}, moves, {"cpu": False, "mixed_precision": mixed}, moves]
