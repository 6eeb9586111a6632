"""The model families, each from a tiny random folder of transformers: training and generation equal transformers'.

Of each family of tests/helpers/tiny_families.py with layers like Llama's: loss and gradients of all weights and of
adapters on every kind of base, with and without recomputation and offloading, and greedy tokens; then the same on two
ranks, in every layout.
"""

import json
import os
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bench.backends.local import free_port
from bench.contract import families, plan_kinds
from bench.contract.checkpoint import Stored
from bench.contract.generation import Order, WeightPrecision
from bench.contract.layers import differs_from_llama
from bench.contract.model import Model
from bench.contract.plan import Plan, Recomputed
from bench.mlperf.result import parse
from helpers import ranks, tiny_families, tiny_llama
from helpers.chosen import chosen
from jobs.engines.generation import Request
from jobs.weights import tensor_map

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import one_rank, random_rows  # noqa: F401
    from test_frozen_bases import dense, in_peft
    from test_full_fine_tuning import mean_loss
    from test_megatron_generation import error, expected_logits, logits, ours, prompts, theirs

    from helpers.exact import exact_ops
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, model
    from jobs.engines.megatron.generation import weights
    from jobs.engines.megatron.generation.ranks import Ranks

if TYPE_CHECKING:  # its import takes seconds
    from peft import PeftModel
    from transformers import PreTrainedModel

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="FP32 numbers, and one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]

NAMES = [name for name in tiny_families.TINY if not differs_from_llama(tiny_families.model(name))]
"""The families whose layers generation and the hand-written layers have."""
HAS_OWN_QKV = [name for name in NAMES if tiny_families.model(name).qkv_bias or tiny_families.model(name).qk_norm]
IN_LAYOUTS = [pytest.param(name, marks=() if name in ("qwen2", "qwen3") else pytest.mark.slow) for name in NAMES]
"""Qwen2 has biases that TP splits, and Qwen3 has norms of heads; the others' layers are Llama's."""
ROWS, STEPS, GBS = 11, 3, 4
SMALL = (
    *("cluster.ranks_per_node=1", "data.seq_length=12", f"data.train_rows={ROWS}", f"data.eval_rows={ROWS}"),
    *("recipe.micro_batch_size=2", f"task.training.max_steps={STEPS}", f"recipe.global_batch_size={GBS}"),
    *("task.training.target_eval_loss=null", "recipe.lr_warmup_steps=0", "recipe.log_every_steps=1"),
    *(f"recipe.eval_every_samples={GBS}", f"recipe.eval_skip={STEPS - 1}", *ranks.SGD),
)
ALL = ("precision=fp32", "task.training.trains=all", "task.training.lora=null")
NO_DROPOUT = "task.training.lora.dropout=0"
BASES = {
    "megatron": ("precision=fp32", NO_DROPOUT),
    "fp8": ("precision=fp8", NO_DROPOUT),
    "bf16": ("precision=bf16", NO_DROPOUT),
    "nf4": ("precision=bf16", NO_DROPOUT, "task.training.trains=qlora"),
}
"""Frozen bases: of megatron-core's own layer, and of the hand-written layer."""
PARTLY = Recomputed(full=False, qkv_layers=1, fc1_layers=1, offloaded_layers=1)
LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "tp2_sp": ("parallel.tp=2", "parallel.sp=true", "recipe.micro_batch_size=4"),
    "cp2": ("parallel.cp=2", "recipe.micro_batch_size=4"),
    "pp2": ("parallel.pp=2",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows; `written` adds a folder of each family."""
    folder = tmp_path_factory.mktemp("families")
    rows = random_rows(ROWS)
    for split in ("train", "eval"):
        rows_of.save(folder, split, rows.tokens, rows.counts)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, "PreTrainedModel"]:
    """The models of transformers, each in its folder with its conversions."""
    stored = (Stored.plain, Stored.nf4)
    return {name: tiny_llama.write(folder / name / "hf", tiny_families.model(name), stored=stored) for name in NAMES}


def composed(name: str, folder: Path, *overrides: str) -> Plan:
    """Return a plan of a family that starts from its folder."""
    shape = {key: value for key, value in tiny_llama.as_json(tiny_families.model(name)).items() if value is not None}
    of_model = (f"model.{key}={value}" for key, value in shape.items() if key not in ("name", "source", "weights"))
    plan = ranks.compose(folder, *of_model, *SMALL, *overrides)
    return replace(plan, data_dir=str(folder), base=None, base_dir=str(folder / name / "hf"))


def in_transformers(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors by transformers' names."""
    renamed = {}
    for weight in families.of_model(model).weights(model):
        key = weight.key if weight.layer is None else weight.key.replace("layers.", f"layers.{weight.layer}.")
        renamed |= dict(zip(weight.sources, tensor_map.parts(weight, tensors[key], model), strict=True))
    return renamed


def gradients(engine: model.ModelAndOptimizer) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step's rows, and the gradients of its trained weights."""
    rows, (chunk,) = random_rows(ROWS), engine.unwrapped_chunks()
    engine.chunks[0].train()
    engine.chunks[0].zero_grad_buffer()
    loss = loop.mean_loss(loop._forward(engine, rows, np.arange(GBS), forward_only=False), GBS)
    return loss, {name: p.main_grad for name, p in chunk.named_parameters() if p.requires_grad}


def check_gradients(got: dict[str, Tensor], expected: dict[str, Parameter], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    largest = max(p.grad.norm() for p in expected.values())
    for name, parameter in expected.items():
        error = (got[name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3 * largest)
        assert error < tolerance, (name, error)


def with_random_adapters(engine: model.ModelAndOptimizer) -> model.ModelAndOptimizer:
    torch.manual_seed(3)
    for name, parameter in engine.unwrapped_chunks()[0].named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.3)
    return engine


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [None, PARTLY], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_all_weights_are_those_of_transformers(
    name: str, recomputed: Recomputed | None, folder: Path, written: dict[str, "PreTrainedModel"]
) -> None:
    plan = composed(name, folder, *ALL)
    engine = model.build(replace(plan, recompute=recomputed or plan.recompute), seed=2)
    checkpoint.load(engine, Path(str(plan.base_dir)), adapters=False)
    loss, got = gradients(engine)
    reference = written[name]
    reference.zero_grad()
    expected = mean_loss(reference, random_rows(ROWS), np.arange(GBS))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    check_gradients(in_transformers(plan.config.model, got), dict(reference.named_parameters()), 1e-4)


def peft_of(engine: model.ModelAndOptimizer, reference: "PreTrainedModel") -> "PeftModel":
    """Return peft's model in FP64 with the engine's weights; q, k and v share A, as in one adapter of linear_qkv."""
    from peft import LoraConfig, get_peft_model

    plan, weights = engine.plan, dense(engine)
    lora = plan.config.task.training.lora
    base = type(reference)(reference.config)
    base.load_state_dict(in_transformers(plan.config.model, weights), strict=False)
    base.tie_weights()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    wrapped = get_peft_model(base, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets))
    for layer in base.model.layers:
        layer.self_attn.k_proj.lora_A = layer.self_attn.v_proj.lora_A = layer.self_attn.q_proj.lora_A
    _, unexpected = wrapped.load_state_dict(in_peft(plan, weights), strict=False)
    assert not unexpected
    return wrapped.double()


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "is_exact"), [*((base, True) for base in BASES), ("bf16", False)], ids=[*BASES, "bf16, rounded"]
)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_of_adapters_are_those_of_peft(
    name: str, base: str, is_exact: bool, folder: Path, written: dict[str, "PreTrainedModel"]
) -> None:
    """is_exact: with FP32 instead of BF16 and FP8; of quantised bases, the reference has the dequantised weights."""
    plan = replace(composed(name, folder, *BASES[base]), recompute=PARTLY)
    engine = model.build(plan, seed=2, ops=exact_ops(plan) if is_exact and base != "megatron" else None)
    checkpoint.load(with_random_adapters(engine), Path(str(plan.base_dir)), adapters=False)
    reference = peft_of(engine, written[name])
    expected = mean_loss(reference, random_rows(ROWS), np.arange(GBS))
    expected.backward()
    loss, got = gradients(engine)
    assert loss == pytest.approx(expected.item(), rel=1e-5 if is_exact else 0.02)
    trained = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    inside = {name: x for name, x in in_peft(plan, got).items() if name in trained}
    check_gradients(inside, trained, 1e-4 if is_exact else 0.15)


def sgd(reference: torch.nn.Module, plan: Plan) -> tuple[list[float], float]:
    """Train the reference by SGD with the plan's rates; return the losses of all steps, and of the evaluation."""
    rows, losses = random_rows(ROWS), []
    trained = [p for p in reference.parameters() if p.requires_grad]
    steps = zip(range(1, STEPS + 1), rows_of.train_order(plan, plan.trials[0].seed), strict=False)
    for step, indices in steps:
        loss = mean_loss(reference, rows, indices)
        gradients = torch.autograd.grad(loss, trained)
        rate = plan_kinds.learning_rate(plan, step) / ranks.SGD_EPS
        for weight, gradient in zip(trained, gradients, strict=True):
            weight.data.sub_(gradient, alpha=rate)
        losses.append(loss.item())
    with torch.no_grad():
        return losses, mean_loss(reference, rows, np.arange(ROWS)).item()


def overrides_of(trains: str) -> tuple[str, ...]:
    return ALL if trains == "all" else (*BASES[trains], "task.training.target_eval_loss=null")


@pytest.fixture(scope="module")
def trained(
    folder: Path, written: dict[str, "PreTrainedModel"], request: pytest.FixtureRequest
) -> dict[tuple[str, str, str], Plan]:
    """The plans of families in all layouts, trained in one start of two ranks; their names are their folders'.

    Frozen bases in FP8 compute in FP32 (`exact`).
    """
    plans, exact = {}, {}
    for (name,) in sorted(chosen(request, "name")):
        for layout, split in LAYOUTS.items():
            for trains, into in (("all", plans), ("fp8", exact)):
                plan = composed(name, folder, *overrides_of(trains), *split, "cluster.ranks_per_node=2")
                if layout == "tp2_sp":
                    plan = replace(plan, recompute=PARTLY)
                into[name, trains, layout] = plan
    for options, by_key in (((), plans), (("--exact",), exact)):
        folders = [ranks.write(plan, folder / "_".join(key)) for key, plan in by_key.items()]
        command = ("tests.helpers.curves", *options, *map(str, folders))
        ranks.run(next(iter(by_key.values())), folder, *command)
    return plans | exact


@pytest.mark.trains
@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_every_layout_trains_all_weights_like_transformers(
    name: str, folder: Path, written: dict[str, "PreTrainedModel"], trained: dict[tuple[str, str, str], Plan]
) -> None:
    reference = type(written[name])(written[name].config)
    reference.load_state_dict(written[name].state_dict())
    losses, eval_loss = sgd(reference, trained[name, "all", "tp2"])
    assert eval_loss < losses[0] - 0.1, "the loss must have fallen"
    for layout in LAYOUTS:
        log = folder / f"{name}_all_{layout}" / "result_0.txt"
        np.testing.assert_allclose(ranks.train_losses(log), losses, rtol=0, atol=1e-4, err_msg=layout)
        assert parse(log).eval_final == pytest.approx(eval_loss, abs=1e-4), layout


@pytest.mark.trains
@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_every_layout_trains_adapters_like_peft(
    name: str, folder: Path, written: dict[str, "PreTrainedModel"], trained: dict[tuple[str, str, str], Plan]
) -> None:
    plan = composed(name, folder, *overrides_of("fp8"))
    engine = model.build(plan, seed=plan.trials[0].seed, ops=exact_ops(plan))
    checkpoint.load(engine, Path(str(plan.base_dir)), adapters=False)
    losses, eval_loss = sgd(peft_of(engine, written[name]), plan)
    assert eval_loss < losses[0] - 0.01, "the loss must have fallen"
    for layout in LAYOUTS:
        log = folder / f"{name}_fp8_{layout}" / "result_0.txt"
        np.testing.assert_allclose(ranks.train_losses(log), losses, rtol=0, atol=1e-4, err_msg=layout)
        assert parse(log).eval_final == pytest.approx(eval_loss, abs=1e-4), layout


@pytest.mark.long
def test_50_greedy_tokens_are_those_of_transformers(folder: Path, written: dict[str, "PreTrainedModel"]) -> None:
    for name, reference in written.items():
        expected = theirs(reference, request := Request(prompts(17)[0], 50))
        options = tiny_llama.GenerationOptions(order=Order.one_by_one)
        (answer,) = ours(folder / name / "hf", tiny_families.model(name), options).generate([request], seed=0)
        assert len(set(expected)) > 20, "repeated tokens would make the comparison weak"
        assert answer.tokens == expected, name


@pytest.mark.trains
def test_two_ranks_generate_the_tokens_of_transformers(folder: Path, written: dict[str, "PreTrainedModel"]) -> None:
    requests = [Request(row, length) for row, length in zip(prompts(17, 5, 9), (50, 8, 30), strict=True)]
    as_json = [["fp32", 0.0, [asdict(one) for one in requests]]]
    for name in written:
        content = {"model": tiny_llama.as_json(tiny_families.model(name)), "runs": as_json}
        (folder / name / "requests.json").write_text(json.dumps(content))
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    command = ("tests.helpers.generated", *(str(folder / name) for name in written))
    for code, output in ranks.ended_in(folder, command, environments):
        assert code == 0, output
    for name, reference in written.items():
        (answers,) = json.loads((folder / name / "answers.json").read_text())
        assert [tuple(row) for row in answers] == [theirs(reference, one) for one in requests], name


@pytest.mark.long
@pytest.mark.parametrize("precision", [WeightPrecision.bf16, WeightPrecision.fp8, WeightPrecision.nf4])
@pytest.mark.parametrize("name", HAS_OWN_QKV)
def test_logits_of_prompts_and_steps_are_those_of_transformers(
    name: str, precision: WeightPrecision, folder: Path, written: dict[str, "PreTrainedModel"]
) -> None:
    """In FP8 and NF4, those of the weights as they are dequantised."""
    shape, row = tiny_families.model(name), prompts(40)[0]
    source = folder / name / "hf"
    reference = type(written[name])(written[name].config).eval()
    reference.load_state_dict(written[name].state_dict())
    if precision is not WeightPrecision.bf16:
        loaded = weights.load(source, shape, weights.Place(precision, Ranks(), torch.device("cpu")))
        for layer, own in zip(reference.model.layers, loaded.layers, strict=True):
            set_linears(layer, own, shape)
    for got in logits(source, shape, precision, row):
        assert error(got, expected_logits(reference, row)) < 0.03


def set_linears(layer: Any, own: weights.Layer, shape: Model) -> None:
    """Give a layer of transformers the dequantised linears of ours."""
    dense = {name: getattr(own, name).dense(torch.float32) for name in ("qkv", "proj", "fc1", "fc2")}
    attention, mlp = layer.self_attn, layer.mlp
    qkv = tensor_map.separate(dense["qkv"], heads=shape.num_attention_heads, groups=shape.num_query_groups)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    for linear, new in zip(linears, (*qkv, *dense["fc1"].chunk(2)), strict=True):
        linear.weight.data.copy_(new)
    attention.o_proj.weight.data.copy_(dense["proj"])
    mlp.down_proj.weight.data.copy_(dense["fc2"])
