"""NF4 linears and their checkpoints, on one rank: saved tensors, memory of loaded tensors, and loading in parts."""

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.checkpoint import MANIFEST, Stored
from bench.errors import ConfigError
from helpers import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from test_engine_units import adapters as trained
    from test_engine_units import one_rank  # noqa: F401

    from jobs.engines.megatron import checkpoint, model
    from jobs.engines.megatron.frozen.linear import NF4_LINEARS
    from jobs.weights import adapters as peft
    from jobs.weights import nf4

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]
SHAPE = (
    *("cluster.ranks_per_node=1", "model.hidden_size=128", "model.ffn_hidden_size=192", "model.num_layers=2"),
    *("data.seq_length=12", "precision=bf16", "task.training.lora.dropout=0"),
)
NF4 = "task.training.trains=qlora"
LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@cache
def built(*overrides: str, seed: int = 1) -> model.ModelAndOptimizer:
    plan = ranks.compose(Path("unused"), *SHAPE, *overrides)
    return model.build(replace(plan, base=None), seed)


def linears(engine: model.ModelAndOptimizer) -> dict[str, Any]:
    (chunk,) = engine.unwrapped_chunks()
    return {name: part for name, part in chunk.named_modules() if name.endswith(LINEAR)}


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Iterator[tuple[Path, dict[str, Tensor]]]:  # noqa: F811
    """A checkpoint in BF16, and the weights of its linears; engines are gone before their groups are."""
    folder, engine = tmp_path_factory.mktemp("base") / "base", built()
    checkpoint.save(engine, folder, adapters=False)
    yield folder, {name: linear.weight.detach().clone() for name, linear in linears(engine).items()}
    built.cache_clear()


def same(loaded: nf4.Nf4, expected: nf4.Nf4) -> bool:
    return all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@pytest.mark.long
def test_base_is_quantised_on_load(base: tuple[Path, dict[str, Tensor]]) -> None:
    """The codes are those of the full weight; no tensor is trained, or cast with the model."""
    folder, weights = base
    engine = built(NF4)
    checkpoint.load(engine, folder, adapters=False)
    loaded = linears(engine)
    assert loaded.keys() == weights.keys() and len(loaded) == 8
    for name, linear in loaded.items():
        expected = nf4.quantize(weights[name])
        assert isinstance(linear, NF4_LINEARS) and same(linear.nf4, expected), name
        assert linear.shape == tuple(weights[name].shape)
        values = linear.quantized
        assert torch.equal(values.values, nf4.dequantize(expected, torch.bfloat16)) and values.scale is None
        own = [linear.weight, linear.absmax, linear.absmax_scales]
        assert {p.dtype for p in own} == {torch.uint8} and not any(p.requires_grad for p in own)


def test_nf4_checkpoint_loads_codes_in_place_and_has_their_absmax() -> None:
    """Otherwise the state dict has a meta tensor of the full weight; the linear itself is unchanged."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for name, linear in linears(built(NF4)).items():
        prefix, weight = f"{name}.", linear.weight
        state = linear.sharded_state_dict(prefix, (), groups | {"stored": Stored.nf4})
        assert linear.weight is weight and not weight.is_meta
        assert {"weight", "weight_absmax"} == {key.removeprefix(prefix) for key in state if ".lora_" not in key} - {
            "_extra_state"
        }
        numbers, absmax = state[f"{prefix}weight"], state[f"{prefix}weight_absmax"]
        assert numbers.key == f"{prefix}weight_nf4" and numbers.data.data_ptr() == weight.data_ptr()
        num_out, num_in = linear.shape
        assert absmax.data.shape == (num_out, num_in // 64) and absmax.data.dtype is torch.bfloat16
        assert absmax.data.is_meta and absmax.key == f"{prefix}weight_absmax"
        assert isinstance(absmax, ShardedTensorFactory) is ("linear_fc1" in name), "gates and ups are split separately"
        plain = linear.sharded_state_dict(prefix, (), groups | {"stored": Stored.plain})[f"{prefix}weight"]
        assert plain.data.is_meta and plain.data.shape == linear.shape and plain.data.dtype is torch.bfloat16
        assert plain.key == f"{prefix}weight" and linear.weight is weight
        checkpoint._prepare_in_place({"chunk0": {"weight": plain}})
        assert plain.data.device.type == "cpu" and linear.weight is weight


def test_absmax_of_an_nf4_checkpoint_are_quantised_on_load() -> None:
    """The codes have been loaded in place before; tensors that a state dict lacks are unchanged."""
    engine = built(NF4)
    linear = next(iter(linears(engine).values()))
    before = nf4.Nf4(*(part.clone() for part in linear.nf4))
    absmax = torch.rand(linear.shape[0], linear.shape[1] // 64).bfloat16()
    linear.load_state_dict({}, strict=False)
    assert same(linear.nf4, before)
    state = {"weight_absmax": absmax, "weight": torch.zeros_like(linear.weight)}
    adapter = torch.rand_like(linear.lora_a)
    linear.load_state_dict(state | {"lora_a": adapter}, strict=False)
    assert torch.equal(linear.lora_a, adapter)
    assert same(linear.nf4, nf4.Nf4(before.codes, *nf4.quantize_absmax(absmax)))


def test_several_ranks_quantise_layers_one_at_a_time_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part also has the weights outside of the layers; layer numbers may have two digits."""
    names = ["embedding.weight", "decoder.layers.0.mlp", "decoder.layers.11.mlp", "decoder.layers.1.mlp", "head"]
    whole = {"chunk0": {name: f"tensor {name}" for name in names}, "chunk1": {"decoder.layers.0.mlp": "another"}}
    monkeypatch.setattr(checkpoint, "_sharded_state_dict", lambda engine, adapters, stored: whole)
    plan = ranks.compose(Path("unused"), *SHAPE, NF4)

    def parts(num_ranks: int, *, adapters: bool = False, stored: Stored = Stored.plain) -> Any:
        planned = replace(plan, world=replace(plan.world, num_ranks=num_ranks))
        engine: Any = SimpleNamespace(plan=planned)
        return checkpoint._load_parts(engine, adapters, stored)

    assert parts(2) == [
        {"chunk0": {name: f"tensor {name}" for name in (*names[:2], names[4])}},
        {"chunk0": {names[2]: f"tensor {names[2]}"}},
        {"chunk0": {names[3]: f"tensor {names[3]}"}},
        {"chunk1": {"decoder.layers.0.mlp": "another"}},
    ]
    assert parts(1) == parts(2, adapters=True) == parts(2, stored=Stored.nf4) == [whole]
    plan = ranks.compose(Path("unused"), *SHAPE)
    assert parts(2) == [whole], "nothing is quantised"


@pytest.mark.long
def test_adapters_of_a_peft_folder_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder has the format of engine=huggingface; the optimizer is reset."""
    engine, other = built(), built(seed=3)
    torch.manual_seed(5)
    for parameter in trained(engine).values():
        parameter.data.normal_()
    config = engine.plan.config
    assert config.training.lora is not None
    checkpoint.save(engine, tmp_path / "saved", adapters=True)
    where = {"model": config.model, "lora": config.training.lora}
    peft.export(tmp_path / "saved", tmp_path / "peft", base=None, **where)
    did: list[str] = []
    monkeypatch.setattr(other.optimizer, "reset", lambda: did.append("reset"))
    checkpoint.load(other, tmp_path / "peft", adapters=True)
    own, expected = trained(other), trained(engine)
    assert own.keys() == expected.keys() and all(torch.equal(own[name], x) for name, x in expected.items())
    assert did == ["reset"]


@pytest.mark.long
def test_another_model_s_checkpoint_is_refused(base: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    for name, precision in (("empty", None), ("eight bits", "fp8")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(json.dumps({"precision": precision}))
    with pytest.raises(ConfigError, match="cannot use FP8 weights"):
        checkpoint.load(built(), tmp_path / "eight bits", adapters=False)
    for engine, folder, reason in (
        (built("model.num_layers=3"), base[0], ": .*Global shape mismatch"),
        (built(), tmp_path / "empty", ": .*/empty is not a distributed checkpoint$"),
    ):
        with pytest.raises(ConfigError) as refused:
            checkpoint.load(engine, folder, adapters=False)
        assert re.match(f"this is not a checkpoint of tiny{reason}", refused.value.what)
        assert (refused.value.rule, refused.value.where) == ("CFG-06", str(folder))
