"""Adapters with their own A, as PEFT trains them: compared with PEFT's own model, and its folders."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bench.contract.plan import Plan
from bench.errors import ConfigError
from helpers import ranks
from helpers.huggingface_alone import group, random_rows, row_loss, theirs, tiny, weights
from helpers.huggingface_runs import needed

needed()

from jobs.engines.huggingface import adapters  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402
from jobs.weights.adapters import export  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

SEPARATE = "task.training.lora.shared_a=false"
TARGETS = "task.training.lora.target_modules=[{}]".format
MODULES = {
    "linear_qkv,linear_proj": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "q_proj,v_proj": ["q_proj", "v_proj"],
    "linear_qkv,o_proj,linear_fc1,linear_fc2": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


def placed(plan: Plan, seed: int = 7) -> HuggingFaceEngine:
    """Return an engine whose adapters have random A and B."""
    engine = HuggingFaceEngine(plan, seed)
    for p in adapters.trainable(engine.placement.model).values():
        torch.nn.init.normal_(p, std=0.1)
    return engine


def base(engine: HuggingFaceEngine, plan: Plan) -> torch.nn.Module:
    """Return the Llama of transformers with the base of an engine."""
    whole = weights(engine.placement.model)
    return theirs(plan, {name.replace(".base_layer", ""): x for name, x in whole.items() if ".lora_" not in name})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("targets", MODULES)
def test_as_many_parameters_and_the_same_loss_as_with_peft(targets: str, tmp_path: Path) -> None:
    import peft

    plan = tiny(tmp_path, "lora", SEPARATE, TARGETS(targets))
    engine, rows, lora = placed(plan), random_rows(plan), plan.config.training.lora
    assert lora is not None
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=MODULES[targets])
    reference: Any = peft.get_peft_model(base(engine, plan), config)
    num_trained, _ = reference.get_nb_trainable_parameters()
    assert plan.memory.trainable_parameters == num_trained
    own = adapters.trainable(engine.placement.model)
    assert sum(p.numel() for p in own.values()) == num_trained
    with torch.no_grad():
        for name, p in own.items():
            reference.get_parameter(adapters.PEFT_PREFIX + name).copy_(p)
    expected = sum(row_loss(reference, rows, index).item() for index in range(5)) / 5
    assert engine.evaluate(rows) == pytest.approx(expected, abs=2e-6)


@pytest.mark.long
def test_q_and_v_begin_with_different_a_that_depend_on_the_seed(tmp_path: Path) -> None:
    plan = tiny(tmp_path, "lora", SEPARATE)
    whole = weights(HuggingFaceEngine(plan, 7).placement.model)
    q, v = (whole[f"model.layers.0.self_attn.{module}.lora_A.default.weight"] for module in ("q_proj", "v_proj"))
    assert abs(float((q * v).mean())) < float(q.square().mean() / 3), "they are independent"
    assert_close(weights(HuggingFaceEngine(plan, 7).placement.model), whole, rtol=0, atol=0)
    other = weights(HuggingFaceEngine(plan, 8).placement.model)
    assert not torch.equal(other["model.layers.0.self_attn.q_proj.lora_A.default.weight"], q)


@pytest.mark.long
def test_saved_adapters_load_in_peft_and_in_this_engine(tmp_path: Path) -> None:
    import peft

    plan = tiny(tmp_path, "lora", SEPARATE, TARGETS("linear_qkv,down_proj"))
    engine, rows, lora = placed(plan), random_rows(plan), plan.config.training.lora
    assert lora is not None
    engine.save(tmp_path / "out", adapters=True)
    with warnings.catch_warnings(action="ignore"):
        reference: Any = peft.PeftModel.from_pretrained(base(engine, plan), str(tmp_path / "out"))
    expected = sum(row_loss(reference, rows, index).item() for index in range(5)) / 5
    assert engine.evaluate(rows) == pytest.approx(expected, abs=2e-6)
    export(tmp_path / "out", tmp_path / "exported", model=plan.config.model, lora=lora, base="a/base")
    for folder in ("out", "exported"):
        other = HuggingFaceEngine(plan, 7)
        other.load(tmp_path / folder, adapters=True)
        assert_close(weights(other.placement.model), weights(engine.placement.model), rtol=0, atol=0)


@pytest.mark.long
def test_folders_of_other_adapters_are_refused(tmp_path: Path) -> None:
    """Also those that this project writes: adapters with a shared A fit separate ones of the same layers."""
    shared, separate = tiny(tmp_path, "lora"), tiny(tmp_path, "lora", SEPARATE)
    placed(separate).save(tmp_path / "separate", adapters=True)
    placed(shared).save(tmp_path / "shared", adapters=True)
    HuggingFaceEngine(separate, 7).load(tmp_path / "shared", adapters=True)
    with pytest.raises(ConfigError, match="q, k and v have different matrices A"):
        HuggingFaceEngine(shared, 7).load(tmp_path / "separate", adapters=True)
    narrow = tiny(tmp_path, "lora", SEPARATE, TARGETS("q_proj,v_proj"))
    with pytest.raises(ConfigError, match="the adapters do not match this plan"):
        HuggingFaceEngine(narrow, 7).load(tmp_path / "separate", adapters=True)
    file = tmp_path / "separate" / "adapter_model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    gone = tensors.pop("base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight")
    assert gone.numel()
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_proj\.lora_B\.weight is missing"):
        HuggingFaceEngine(separate, 7).load(tmp_path / "separate", adapters=True)
