"""engine=huggingface with models that only transformers has, compared with transformers and PEFT alone."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bench.contract.plan import Plan
from bench.errors import ConfigError
from helpers import described_folders, ranks
from helpers.huggingface_alone import by_hand, group, random_rows, row_loss, weights
from helpers.huggingface_runs import FSDP2, TRAINS, needed

needed()

from jobs.engines.generation import Request  # noqa: E402
from jobs.engines.huggingface import generator  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

TINY = (
    *("cluster.ranks_per_node=1", "recipe.global_batch_size=4", "recipe.micro_batch_size=2", "data.seq_length=16"),
    *("recipe.adam_eps=1", "recipe.lr=0.8", "recipe.clip_grad=2.9", "data.eval_rows=5"),
    *("task.training.starts_from=checkpoint", "task.training.base=null"),
)
BATCHES = np.array([[3, 0, 1, 2], [10, 4, 5, 6]])


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: described_folders.write(folder, name) for name in described_folders.MODELS}


def plan_of(model: Path, folder: Path, trains: str, *overrides: str) -> Plan:
    return described_folders.plan(model, folder, *TRAINS[trains], *TINY, *overrides)


def loaded(plan: Plan, model: Path) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(plan, 7)
    engine.load(model, adapters=False)
    return engine


def theirs(model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    own: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return own


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, ()) for name in described_folders.MODELS), ("gemma2", (FSDP2,)), ("gpt_oss", (FSDP2,))],
)
def test_training_equals_a_plain_loop_on_from_pretrained(
    name: str, strategy: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    """All weights, in FP32; the saved folder is loaded by transformers with the trained weights."""
    plan = plan_of(folders[name], tmp_path, "all", *strategy)
    engine, model, rows = loaded(plan, folders[name]), theirs(folders[name]), random_rows(plan)
    assert plan.memory.parameters == model.num_parameters()  # type: ignore[operator]
    assert_close(weights(engine.placement.model), dict(model.named_parameters()), rtol=0, atol=0)
    mean = np.mean([row_loss(model, rows, index).item() for index in range(plan.config.data.eval_rows)])
    assert engine.evaluate(rows) == pytest.approx(mean, abs=3e-6)
    got = [engine.mean_loss(engine.train_step(rows, BATCHES[step - 1], step)) for step in (1, 2)]
    model.train()
    expected, norms = by_hand(plan, model, rows, BATCHES)
    assert got == pytest.approx(expected, abs=5e-6) and max(norms) > plan.config.recipe.clip_grad
    assert_close(weights(engine.placement.model), dict(model.named_parameters()), rtol=0, atol=5e-6)
    engine.save(tmp_path / "saved", adapters=False)
    assert_close(dict(theirs(tmp_path / "saved").named_parameters()), dict(model.named_parameters()), rtol=0, atol=5e-6)


ADAPTERS = {
    "gemma2": (("linear_qkv", "linear_proj"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "phi3": (("linear_qkv", "linear_fc1"), {"qkv_proj", "gate_up_proj"}),
    "gpt_oss": (("linear_qkv", "o_proj"), {"q_proj", "k_proj", "v_proj", "o_proj"}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_as_those_of_peft(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Names of megatron-core mean the model's own linear layers; the saved adapters are loaded by PEFT."""
    import peft

    targets, expected = ADAPTERS[name]
    plan = plan_of(folders[name], tmp_path, "lora", f"task.training.lora.target_modules=[{','.join(targets)}]")
    lora = plan.config.training.lora
    assert lora is not None and set(lora.target_modules) == expected and not lora.shared_a
    engine, rows = loaded(plan, folders[name]), random_rows(plan)
    engine.save(tmp_path / "initial", adapters=True)
    own = peft.PeftModel.from_pretrained(theirs(folders[name]), tmp_path / "initial", is_trainable=True)
    assert plan.memory.trainable_parameters == sum(p.numel() for p in own.parameters() if p.requires_grad)
    got = [engine.mean_loss(engine.train_step(rows, BATCHES[step - 1], step)) for step in (1, 2)]
    assert got == pytest.approx(by_hand(plan, own, rows, BATCHES)[0], abs=5e-6)
    trained = {name.removeprefix("base_model.model."): p for name, p in own.named_parameters()}
    assert_close(weights(engine.placement.model), trained, rtol=0, atol=5e-6)
    engine.save(tmp_path / "trained", adapters=True)
    other = HuggingFaceEngine(plan, 8)
    other.load(folders[name], adapters=False)
    other.load(tmp_path / "trained", adapters=True)
    assert other.evaluate(rows) == pytest.approx(engine.evaluate(rows), abs=1e-6)


@pytest.mark.long
def test_adapters_on_a_base_in_4_bits_keep_the_biases(tmp_path: Path) -> None:
    """Phi has a bias in each linear layer. The loss is that of a base whose linears bitsandbytes has rounded."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    folder = described_folders.write(
        tmp_path, "phi", spread=0.6, hidden_size=64, intermediate_size=128, num_key_value_heads=4
    )
    plan = plan_of(folder, tmp_path, "lora", "task.training.trains=qlora", "precision=bf16")
    engine, rows, rounded = loaded(plan, folder), random_rows(plan), theirs(folder)
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            packed = quantize_4bit(module.weight.data.bfloat16(), quant_type="nf4", compress_statistics=True)
            module.weight.data = dequantize_4bit(*packed).float()
    expected = np.mean([row_loss(rounded, rows, index).item() for index in range(plan.config.data.eval_rows)])
    evaluated = engine.evaluate(rows)
    assert evaluated == pytest.approx(expected, rel=0.01)
    for layer in rounded.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj.bias.data.zero_()
        layer.mlp.fc1.bias.data.zero_()
    without = np.mean([row_loss(rounded, rows, index).item() for index in range(plan.config.data.eval_rows)])
    assert abs(evaluated - expected) < 0.5 * abs(evaluated - without)
    assert engine.mean_loss(engine.train_step(rows, BATCHES[0], 1)) > engine.mean_loss(
        engine.train_step(rows, BATCHES[0], 2)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_training_resumes_from_a_snapshot(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(folders[name], tmp_path, "all")
    engine, rows = loaded(plan, folders[name]), random_rows(plan)
    engine.train_step(rows, BATCHES[0], 1)
    (tmp_path / "state").mkdir()
    engine.snapshot().write(tmp_path / "state")
    engine.complete(tmp_path / "state", {"step": 1})
    expected = engine.mean_loss(engine.train_step(rows, BATCHES[1], 2))
    other = HuggingFaceEngine(plan_of(folders[name], tmp_path, "all", FSDP2), 9)
    other.load_state(tmp_path / "state", step=1, seed=9, same_layout=False)
    assert other.mean_loss(other.train_step(rows, BATCHES[1], 2)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", described_folders.MODELS)
def test_greedy_tokens_are_those_of_generate(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Longer than the window of those that have one."""
    plan = described_folders.generation_plan(folders[name], tmp_path)
    built = generator(plan, 7)
    built.load(folders[name])
    requests = [Request((5, 6, 7), 12), Request((9, 4), 9)]
    model = theirs(folders[name])
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    for answer, one in zip(built.generate(requests, seed=1), requests, strict=True):
        tokens = torch.tensor([one.prompt])
        own = model.generate(tokens, max_new_tokens=one.length, do_sample=False)  # type: ignore[operator]
        assert answer.tokens == tuple(own[0, len(one.prompt) :].tolist())


@pytest.mark.long
def test_experts_in_mxfp4_are_dequantised_on_load(tmp_path: Path) -> None:
    """As transformers does with Mxfp4Config(dequantize=True)."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    folder = described_folders.write_mxfp4(tmp_path)
    plan = plan_of(folder, tmp_path, "all")
    described = plan.config.model.described
    assert described is not None and described.is_mxfp4
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    engine = loaded(plan, folder)
    assert_close(weights(engine.placement.model), dict(model.named_parameters()), rtol=0, atol=0)
    assert weights(model)["model.layers.0.mlp.experts.down_proj"].std() > 0.01


@pytest.mark.long
@pytest.mark.parametrize("name", ["olmo2", "phi3", "qwen3_moe"])
def test_operations_are_those_that_torch_counts(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """torch counts all keys of each query, and the plan the half that is causal; a backward pass has twice as many."""
    from torch.utils.flop_counter import FlopCounterMode

    plan, model = plan_of(folders[name], tmp_path, "all"), theirs(folders[name])
    if name == "qwen3_moe":
        model.set_experts_implementation("eager")  # type: ignore[operator]  # torch does not count grouped GEMMs
    length, m = plan.config.data.seq_length, plan.config.model
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long))
    attention = 4 * length**2 * m.q_size * m.num_layers
    assert plan.tflop_per_sample == pytest.approx(3e-12 * (counter.get_total_flops() - attention / 2), rel=1e-9)


REFUSED = {
    "auto_map": ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "has its own code"),
    "type": ({"model_type": "made_up"}, "no causal language model with model_type 'made_up'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"weights quantised with gptq"),
    "invalid": ({"hidden_size": "wide"}, "rejects config.json"),
    "images": ({"model_type": "gemma3"}, "also reads images or sound"),
    "not causal": ({"model_type": "bert"}, "is not causal"),
    "buffers": ({"model_type": "deepseek_v3", "first_k_dense_replace": 0}, "are not parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_by_name(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    changed, message = REFUSED[name]
    config = json.loads((folders["olmo2"] / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        plan_of(tmp_path, tmp_path, "all")


@pytest.mark.long
def test_a_plan_refuses_what_a_model_does_not_compute(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sdpa attention does not support Gemma2ForCausalLM"):
        plan_of(folders["gemma2"], tmp_path, "all", "engine.huggingface.attention=sdpa")
    with pytest.raises(ConfigError, match="Phi3ForCausalLM has no linear layers named q_proj"):
        plan_of(folders["phi3"], tmp_path, "lora", "task.training.lora.target_modules=[q_proj]")


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "phi3", "gpt_oss"])
@pytest.mark.parametrize("trains", ["all", "lora"])
def test_probed_activations_are_those_that_autograd_stores(
    name: str, trains: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Of a whole micro-batch through the whole model, counted here by address."""
    plan = plan_of(folders[name], tmp_path, trains, "recipe.micro_batch_size=1", "data.seq_length=32")
    described, length = plan.config.model.described, plan.config.data.seq_length
    assert described is not None and described.probe is not None
    probe = described.probe
    engine = loaded(plan, folders[name])
    model, stored = engine.placement.model, dict[int, torch.Tensor]()
    weights_at = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights_at:
            stored.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randint(3, 100, (1, length)), use_cache=False)
    actual = sum(tensor.untyped_storage().nbytes() for tensor in stored.values())
    layers = plan.config.model.num_layers * length * (probe.bytes_per_token + probe.bytes_per_key * length)
    expected = layers + length * plan.config.model.vocab_size * probe.bytes_per_logit
    assert expected == pytest.approx(actual, rel=0.15)
