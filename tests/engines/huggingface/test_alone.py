"""engine=huggingface on one rank in this process, compared with a plain loop of transformers and torch's AdamW."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bench.contract import mllog
from bench.contract.schema import ProfileKind
from helpers import ranks
from helpers.huggingface_alone import by_hand, group, random_rows, row_loss, theirs, tiny, weights
from helpers.huggingface_runs import BLOCK, FSDP2, needed

needed()

from jobs.engines import WarmUpTimes, rank_state  # noqa: E402
from jobs.engines.huggingface import build, loop, offload  # noqa: E402
from jobs.engines.huggingface import engine as huggingface_engine  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402
from jobs.engines.huggingface.loop import parts_of  # noqa: E402
from jobs.profiles import Profile, recording  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

BATCHES = np.array([[3, 0, 1, 2], [10, 4, 5, 6], [7, 8, 9, 1]])


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.mark.long
@pytest.mark.parametrize("strategy", [(), (FSDP2,)], ids=["replicas", "fsdp2"])
def test_updates_are_those_of_torch_by_hand(strategy: tuple[str, ...], tmp_path: Path) -> None:
    """Checks micro-batches, token weights, clipping, weight decay, the learning rate, and the mean of an evaluation."""
    plan = tiny(tmp_path, "all", *strategy)
    engine, rows = build(plan, 7), random_rows(plan)
    model = theirs(plan, weights(engine.placement.model))
    mean = np.mean([row_loss(model, rows, index).item() for index in range(plan.config.data.eval_rows)])
    assert engine.evaluate(rows) == pytest.approx(mean, abs=2e-6)
    assert not engine.placement.module.training
    got = [engine.mean_loss(engine.train_step(rows, BATCHES[step - 1], step)) for step in (1, 2)]
    assert engine.placement.module.training
    expected, norms = by_hand(plan, model, rows, BATCHES[:2])
    assert norms[1] < plan.config.recipe.clip_grad < norms[0]
    assert got == pytest.approx(expected, abs=2e-6)
    assert_close(weights(engine.placement.model), dict(model.named_parameters()), rtol=0, atol=2e-6)


@pytest.mark.long
def test_first_gradient_of_adapters_follows_from_the_base_gradient(tmp_path: Path) -> None:
    """B starts at zero, so its first gradient is the gradient of the base weight times A^T and the scale."""
    plan = tiny(tmp_path, "lora", "recipe.clip_grad=1e9", "recipe.lr=4e4", "recipe.adam_eps=1e4")
    lora, r = plan.config.training.lora, plan.config.recipe
    assert lora is not None
    engine, rows = build(plan, 7), random_rows(plan)
    before = weights(engine.placement.model)
    base = {name.replace(".base_layer", ""): tensor for name, tensor in before.items() if ".lora_" not in name}
    model = theirs(plan, base)
    share = engine.train_step(rows, BATCHES[0], 1)
    loss = torch.stack([row_loss(model, rows, index) for index in BATCHES[0]]).mean()
    loss.backward()
    assert engine.mean_loss(share) == pytest.approx(loss.item(), abs=2e-6)
    after = weights(engine.placement.model)
    rate = r.lr / r.lr_warmup_steps
    for name, tensor in before.items():
        if ".lora_B" in name:
            place = name.split(".lora_B")[0]
            shared = place.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            of_base = model.get_parameter(f"{place}.weight").grad
            assert of_base is not None
            gradient = lora.alpha / lora.rank * of_base @ before[f"{shared}.lora_A.default.weight"].T
            assert gradient.abs().max() > 1e-4
            assert_close(after[name], -rate * gradient / (gradient.abs() + r.adam_eps), rtol=1e-3, atol=1e-7)
        else:
            kept = 1 - rate * r.weight_decay if ".lora_A" in name else 1
            assert torch.equal(after[name], tensor * kept), name
    assert len([name for name in before if ".lora_A" in name]) == 2 * 2, "q, k and v share theirs"


@pytest.mark.long
@pytest.mark.parametrize("has_room", [True, False])
def test_training_resumes_from_a_snapshot_in_any_layout(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(rank_state, "has_room", lambda *words: calls.append(words) or has_room)
    plan = tiny(tmp_path, "lora")
    rows = random_rows(plan)
    engine = HuggingFaceEngine(plan, 7)
    for step in (1, 2):
        engine.train_step(rows, BATCHES[step - 1], step)
    taken, bits = engine.snapshot(), torch.get_rng_state()
    num_trained = sum(p.numel() for p in engine.placement.model.parameters() if p.requires_grad)
    assert calls == [(plan, 3 * 4 * num_trained)] and engine.state_bytes() == 3 * 4 * num_trained
    own = engine.placement.shards()[0].state["master"].data_ptr()
    assert taken.is_copy is has_room
    assert (taken.shards[0].state["master"].data_ptr() == own) is not has_room
    if not has_room:
        taken.write(_made(tmp_path / "saved"))
    expected = engine.mean_loss(engine.train_step(rows, BATCHES[2], 3)), weights(engine.placement.model)
    if has_room:
        taken.write(_made(tmp_path / "saved"))
    engine.complete(tmp_path / "saved", {"step": 2})

    other = HuggingFaceEngine(tiny(tmp_path, "lora", *([FSDP2] if has_room else [])), 7)
    other.train_step(rows, BATCHES[2], 1)
    other.load_state(tmp_path / "saved", step=2, seed=70, same_layout=has_room)
    assert torch.equal(torch.get_rng_state(), bits) is has_room
    if not has_room:
        assert torch.initial_seed() == 72
    got = other.mean_loss(other.train_step(rows, BATCHES[2], 3)), weights(other.placement.model)
    assert_close(got, expected, rtol=0, atol=2e-6)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.long
def test_warm_up_returns_times_and_restores_all_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first iteration compiles; the profile of kernels is of the last one."""
    plan = tiny(tmp_path, "all")
    engine = HuggingFaceEngine(plan, 7)
    before, moments = weights(engine.placement.model), engine.placement.shards()
    times, profiled, recorded = iter([1.0, 6.0, 8.0, 10.0, 13.0, 20.0, 30.0, 34.0, 39.0]), [], []
    monkeypatch.setattr(loop, "device_time_s", lambda: next(times))
    profiling = recording.profile_kernels
    monkeypatch.setattr(recording, "profile_kernels", lambda path: profiled.append(path) or profiling(None))
    monkeypatch.setattr(recording, "record", lambda *words, **more: recorded.append((words, more)))
    kernels, modules = (
        Profile(kind, tmp_path / "kernels", tmp_path / "modules", tmp_path / "trace")
        for kind in (ProfileKind.kernels, ProfileKind.modules)
    )
    assert engine.warm_up(2, 70, profile=kernels) == WarmUpTimes(step_s=3.0, eval_batch_s=7.0)
    assert profiled == [None, tmp_path / "kernels"] and not recorded
    assert torch.initial_seed() == 70 and torch.equal(torch.get_rng_state(), torch.manual_seed(70).get_state())
    assert_close(weights(engine.placement.model), before, rtol=0, atol=0)
    assert not any(shard.state[key].any() for shard in moments for key in ("exp_avg", "exp_avg_sq"))
    assert engine.warm_up(1, 70, profile=modules) == WarmUpTimes(step_s=4.0, eval_batch_s=5.0)
    assert profiled[2:] == [None]
    (((step, profile), named),) = recorded
    assert profile is modules and named == {"modules": list(parts_of(engine.placement.model))}
    assert step().item() == pytest.approx(4 * engine.mean_loss(step()), abs=1e-6)
    assert engine.warm_up(0, 70, profile=None) is None
    assert [key for key, *_ in engine.facts()] == [mllog.STRATEGY], "no kernel was observed"


AUTOCAST = dict.fromkeys(("weights", "gradients", "master", "moments"), "float32")
PURE = dict.fromkeys(AUTOCAST, "bfloat16")
BF16 = {
    (): ("autocast", AUTOCAST),
    (FSDP2,): ("autocast", AUTOCAST | {"reduced": "bfloat16"}),
    (f"{BLOCK}.bf16=pure",): ("pure", PURE),
    (f"{BLOCK}.strategy=balanced", "recipe.recompute=full"): ("pure", PURE),
}


@pytest.mark.parametrize("chosen", BF16)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_facts_are_read_from_model_and_optimizer(chosen: tuple[str, ...], tmp_path: Path) -> None:
    plan = tiny(tmp_path, "all", "precision=bf16", *chosen, f"{BLOCK}.attention=eager")
    engine = HuggingFaceEngine(plan, 7)
    times = [WarmUpTimes(step_s=step_s, eval_batch_s=1.0) for step_s in (9.0, 5.0, 2.0)]
    (strategy, name, about), attention, bf16 = huggingface_engine.warm_up_facts(engine.loop, times)
    num = sum(p.numel() for p in engine.placement.model.parameters())
    assert (strategy, name) == (mllog.STRATEGY, "fsdp2" if FSDP2 in chosen else "balanced" if chosen[1:] else "ddp")
    assert about["engine"] == "huggingface" and about["rank_bytes"] == [num * (2 if BF16[chosen][0] == "pure" else 4)]
    assert about["activation_checkpointing"] is (len(chosen) == 2)
    assert attention == (mllog.ATTENTION_BACKEND, "eager", {"requested": "eager"})
    assert bf16 == (mllog.BF16_MODE, *BF16[chosen])
    block: Any = plan.config.engine.huggingface
    block.compile = True
    assert huggingface_engine.warm_up_facts(engine.loop, times)[3:] == [(mllog.COMPILE_TIME, 7.0, {})]
    assert huggingface_engine.warm_up_facts(engine.loop, times[:2])[3:] == [(mllog.COMPILE_TIME, 4.0, {})]
    assert len(huggingface_engine.warm_up_facts(engine.loop, times[:1])) == 3, (
        "one iteration does not separate compilation from training"
    )


@pytest.mark.long
def test_recomputed_layers_offload_their_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny(tmp_path, "all", f"{BLOCK}.activation_checkpointing=true", f"{BLOCK}.offload_activations=true")
    stored: list[torch.nn.Module] = []
    monkeypatch.setattr(offload, "save_activations_on_cpu", lambda model: stored.append(model) or loop.NO_CONTEXT)
    with warnings.catch_warnings(action="ignore"):
        engine = HuggingFaceEngine(plan, 7)
    passes = []
    engine.placement.model.get_decoder().layers[1].mlp.register_forward_pre_hook(lambda *_: passes.append(len(stored)))
    engine.train_step(random_rows(plan), BATCHES[0], 1)
    assert passes == [1, 1, 2, 2] and stored == [engine.placement.model] * 2
    engine.evaluate(random_rows(plan))
    assert len(stored) == 2 and len(passes) == 4 + 2 * 2


@pytest.mark.long
def test_layers_of_the_placed_model_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compiled.append(layer))
    engine = HuggingFaceEngine(tiny(tmp_path, "all", f"{BLOCK}.compile=true", "recipe.warmup_iterations=2"), 7)
    layers = list(engine.placement.model.get_decoder().layers)
    assert len(layers) == 2 and compiled == layers
    assert HuggingFaceEngine(tiny(tmp_path, "all"), 7).placement.module.training and compiled == layers
