"""One of four ranks in this process: the parts that it holds, updates, saves and reads; collectives do nothing."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate.utils import fsdp_utils
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Parameter

from bench.contract.engine import Strategy
from bench.contract.plan import Plan
from helpers import ranks
from helpers.huggingface_alone import group, random_rows, row_loss, theirs, tiny, weights
from helpers.huggingface_runs import BLOCK, FSDP2, needed

needed()

from jobs.engines.huggingface import loop, training_state  # noqa: E402
from jobs.engines.huggingface import placement as placing  # noqa: E402
from jobs.engines.huggingface import weights as huggingface_weights  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402
from jobs.engines.huggingface.training_state import NAMES, Shard  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

SHAPE = ("model.ffn_hidden_size=5", "recipe.global_batch_size=8")
"""Five rows on four ranks are 2, 2, 1 and 0."""
NODE = ("cluster.ranks_per_node=4", *SHAPE)
GATE, NORM = "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"
ROWS_OF_GATE = {0: (0, 2), 1: (2, 4), 2: (4, 5), 3: (5, 5)}


def in_environment(monkeypatch: pytest.MonkeyPatch, rank: int, num_ranks: int) -> None:
    """Set the environment variables of a rank, which Accelerate reads."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    for name, value in (numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))


def test_single_rank_has_no_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, 0, 1)
    with group():
        placement = HuggingFaceEngine(tiny(tmp_path, "all"), 7).placement
    assert placement.module is placement.model


def random_weights(plan: Plan, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the full random weights of seed 7."""
    source = huggingface_weights.RandomWeights(plan, 7, torch.device("cpu"))
    return {name: source.read(name, tuple(p.shape)) for name, p in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_of_fsdp2_holds_and_saves_its_rows(rank: int, tmp_path: Path) -> None:
    plan = tiny(tmp_path, "all", *NODE, FSDP2)
    with group(rank, 4):
        engine = HuggingFaceEngine(plan, 7)
        assert torch.initial_seed() == 7 + 1000 * rank
        model = engine.placement.model
        whole, shards = random_weights(plan, model), {shard.name: shard for shard in engine.placement.shards()}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), _chunk(whole[name], rank)), name
        begin, end = ROWS_OF_GATE[rank]
        assert (GATE in shards) is (end > begin)
        assert shards.keys() == {name for name, tensor in whole.items() if len(_chunk(tensor, rank))}
        assert (shards[NORM].full_shape, shards[NORM].begin, shards[NORM].size) == ((32,), 8 * rank, 8)
        if GATE in shards:
            assert (shards[GATE].full_shape, shards[GATE].begin) == ((5, 32), 32 * begin)
            assert torch.equal(shards[GATE].state["master"], whole[GATE][begin:end].flatten())
        assert all(shard.is_saved for shard in shards.values())
        assert training_state.weight_bytes(model) == 4 * sum(_chunk(tensor, rank).numel() for tensor in whole.values())


def _chunk(whole: Tensor, rank: int) -> Tensor:
    parts = whole.chunk(4)
    return parts[rank] if rank < len(parts) else whole[:0]


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 2])
def test_hybrid_replicates_across_nodes_and_the_first_node_saves(rank: int, tmp_path: Path) -> None:
    plan = tiny(tmp_path, "all", *NODE, FSDP2)
    plan = dataclasses.replace(plan, world=dataclasses.replace(plan.world, ranks_per_node=2))
    block: Any = plan.config.engine.huggingface
    block.strategy = Strategy.fsdp2_hybrid
    with group(rank, 4):
        engine = HuggingFaceEngine(plan, 7)
        shards = {shard.name: shard for shard in engine.placement.shards()}
        whole, num_bytes = random_weights(plan, engine.placement.model), engine.state_bytes()
    assert {shard.is_saved for shard in shards.values()} == {rank < 2}
    assert (shards[GATE].begin, shards[GATE].size) == ((3 * 32, 2 * 32) if rank % 2 else (0, 3 * 32))
    assert torch.equal(shards[NORM].state["master"], whole[NORM].chunk(2)[rank % 2])
    assert num_bytes == (12 * sum(shard.size for shard in shards.values()) if rank < 2 else 0)


def test_ddp_rank_saves_every_fourth_weight_and_reduces_after_the_last_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_environment(monkeypatch, 1, 4)
    plan = tiny(tmp_path, "all", *NODE)
    with group(1, 4):
        engine = HuggingFaceEngine(plan, 7)
        placement: Any = engine.placement
        shards = placement.shards()
        names = [name for name, _ in placement.model.named_parameters()]
        assert [shard.name for shard in shards] == names
        assert [shard.is_saved for shard in shards] == [number % 4 == 1 for number in range(len(names))]
        assert {shard.begin for shard in shards} == {0}
        sums = []
        for is_last in (False, True):
            with placement.accumulating(is_last=is_last):
                sums.append(placement.module.require_backward_grad_sync)
        assert sums == [False, True] and placement.module.module is placement.model
        engine.save(tmp_path / "out", adapters=False)
        assert not list(tmp_path.glob("out*")), "rank 0 writes"


@pytest.mark.long
def test_fsdp2_reduces_after_the_last_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate shards each layer, gathers its weights again in the backward pass, and offloads them if requested."""
    options_given: list[dict[str, Any]] = []
    plugin = accelerate.utils.FullyShardedDataParallelPlugin
    monkeypatch.setattr(
        accelerate.utils, "FullyShardedDataParallelPlugin", lambda **more: options_given.append(more) or plugin(**more)
    )
    handed: list[Any] = []
    prepare = fsdp_utils.fsdp2_prepare_model
    monkeypatch.setattr(fsdp_utils, "fsdp2_prepare_model", lambda own, model: handed.append(own) or prepare(own, model))
    plan = tiny(tmp_path, "all", *NODE, FSDP2, f"{BLOCK}.offload_parameters=true", "precision=bf16")
    with group(1, 4):
        placement: Any = HuggingFaceEngine(plan, 7).placement
    assert all(isinstance(layer, FSDPModule) for layer in placement.model.get_decoder().layers)
    (options,), (own,) = options_given, handed
    assert (own.is_main_process, own.mixed_precision, own.device) == (False, "bf16", torch.device("cpu"))
    assert own.torch_device_mesh.shape == (4,) and own.parallelism_config.fsdp_dim_names == ("dp_shard",)
    assert (
        options.pop("cpu_offload") == placing._offload(plan, torch.device("cpu")) == CPUOffloadPolicy(pin_memory=False)
    )
    assert options == {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "transformer_based_wrap",
        "cpu_ram_efficient_loading": False,
    }
    policy = placement.module._get_fsdp_state()._mp_policy
    assert policy.param_dtype == policy.reduce_dtype == torch.bfloat16
    assert placing._offload(plan, torch.device("cuda")) == CPUOffloadPolicy(pin_memory=True)
    assert placing._offload(tiny(tmp_path, "all", *NODE, FSDP2), torch.device("cuda")) == OffloadPolicy()
    calls: list[bool] = []
    monkeypatch.setattr(placement.module, "set_requires_gradient_sync", calls.append)
    for is_last in (False, True):
        with placement.accumulating(is_last=is_last):
            assert calls[-1] is is_last
    assert calls == [False, True]


def test_loss_shares_of_ranks_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny(tmp_path, "all", *NODE, "recipe.micro_batch_size=1")
    with group(2, 4):
        engine, rows = HuggingFaceEngine(plan, 7), random_rows(plan)
        cut = loop.micro_batches(plan, rows, np.array([0, 1, 2, 3, 9, -1, 6, 7]), torch.device("cpu"))
        assert [batch.tokens_BS.tolist() for batch in cut] == [rows.tokens[[9]].tolist(), rows.tokens[[-1]].tolist()]
        assert [float(batch.weights_BS.sum()) for batch in cut] == [pytest.approx(1), 0]
        share = engine.loop.loss_share(rows, np.array([0, 1, 2, 3, 9, -1, 6, 7]))
        model = theirs(plan, weights(engine.placement.model))
        assert share.item() == pytest.approx(row_loss(model, rows, 9).item(), abs=1e-6)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(4))
        assert engine.mean_loss(torch.tensor(6.0)) == 4 * 6.0 / 8
        assert engine.evaluate(rows) == pytest.approx(4 * row_loss(model, rows, 4).item() / 5, abs=1e-6)


@pytest.mark.long
def test_rank_loads_its_rows_from_another_layout(tmp_path: Path) -> None:
    """Its own snapshot then records the offsets of its rows in the full weight."""
    alone, sharded = tiny(tmp_path, "all", *SHAPE), tiny(tmp_path, "all", *NODE, FSDP2)
    saved = tmp_path / "saved"
    saved.mkdir()
    with group():
        engine = HuggingFaceEngine(alone, 7)
        engine.train_step(random_rows(alone), np.arange(8), 1)
        engine.snapshot().write(saved)
        engine.complete(saved, {})
        expected = {shard.name: shard for shard in engine.placement.shards()}
    with group(1, 4):
        engine = HuggingFaceEngine(sharded, 8)
        engine.load_state(saved, step=5, seed=70, same_layout=False)
        assert torch.initial_seed() == 70 + 5 + 1000
        placement: Any = engine.placement
        assert {float(state["step"]) for state in placement._optimizer.state.values()} == {5.0}
        for shard in placement.shards():
            for key in NAMES:
                mine = expected[shard.name].state[key][shard.begin : shard.begin + shard.size]
                assert torch.equal(shard.state[key], mine), (shard.name, key)
        second = tmp_path / "again"
        second.mkdir()
        engine.snapshot().write(second)
    record = json.loads((second / "rank_1.json").read_text())
    places = {place["key"]: place for place in record["places"]}
    for prefix in NAMES.values():
        place = places[prefix + GATE]
        assert (place["whole"], place["offset"], place["shape"]) == ([5, 32], [2, 0], [2, 32])
    assert "rng_state.cpu.1" in places and record["path"] == "rank_1.distcp"


def test_shard_that_begins_inside_a_row_has_several_boxes() -> None:
    shard = Shard("w", (3, 4), 2, {"master": torch.arange(7.0)}, True)
    ends = ((0, 2), (1, 2), slice(0, 2)), ((2, 0), (1, 1), slice(6, 7))
    assert list(shard.boxes()) == [ends[0], ((1, 0), (1, 4), slice(2, 6)), ends[1]]
    assert shard.size == 7


@pytest.mark.parametrize(("rank", "part"), [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, -1, -1, -1])])
def test_zero_3_rank_loads_its_part_and_the_full_weight_only_if_gathered(
    rank: int, part: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    whole = torch.arange(9.0).view(3, 3)
    source: Any = SimpleNamespace(read=lambda name, shape: whole.view(shape))
    for is_gathered in (True, False):
        layer = Linear(3, 3, bias=False)
        layer.weight.data = torch.zeros(3, 3) if is_gathered else torch.empty(0)
        layer.weight.ds_shape, layer.weight.ds_tensor = torch.Size((3, 3)), torch.full((4,), -1.0)
        training_state.fill(layer, source, torch.device("cpu"))
        assert layer.weight.ds_tensor.tolist() == part
        assert layer.weight.tolist() == (whole.tolist() if is_gathered else [])
        assert training_state.weight_bytes(layer) == 4 * 4


def test_each_weight_is_read_once_and_frozen_weights_are_optional() -> None:
    model = torch.nn.Module()
    model.own, model.a, model.b, model.c = Parameter(torch.zeros(2)), Linear(2, 2), Linear(2, 2), Linear(2, 3)
    model.b.weight = model.a.weight
    model.c.weight.requires_grad_(False)
    calls: list[tuple[str, tuple[int, ...]]] = []
    source: Any = SimpleNamespace(read=lambda *words: calls.append(words) or torch.full(words[1], len(calls)))
    training_state.fill(model, source, torch.device("cpu"))
    every = [("own", (2,)), ("a.weight", (2, 2)), ("a.bias", (2,)), ("b.bias", (2,))]
    every += [("c.weight", (3, 2)), ("c.bias", (3,))]
    assert calls == every
    assert model.own.tolist() == [1, 1] and model.c.bias.tolist() == [6, 6, 6]
    calls.clear()
    training_state.fill(model, source, torch.device("cpu"), only_trained=True)
    assert calls == [one for one in every if one[0] != "c.weight"] and model.c.weight.tolist() == [[5, 5]] * 3
