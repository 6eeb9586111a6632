"""Mixtures of experts: megatron-core's MoE layer has the losses and gradients of transformers, in every layout.

With RUNSTOP_TEST_DEVICE=cuda the reference still computes on the CPU.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.contract import families, mllog
from bench.contract.families import Weight
from bench.contract.model import Model
from bench.contract.plan import Plan
from bench.mlperf.result import parse
from helpers import ranks
from helpers.chosen import chosen
from helpers.short_training import values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, one_rank, random_rows, reference_optimizer, reference_step  # noqa: F401
    from test_export import exported, from_pretrained, logits  # noqa: F401
    from test_full_fine_tuning import FULL, GBS, RATES, ROWS, STEPS, mean_loss
    from test_training_state import saved
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, lora, model
    from jobs.weights import conversion, tensor_map

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning", r"ignore:barrier\(\)"
)  # what megatron-core calls

EXPERTS = "model.experts.ffn_hidden_size=24"
SHAPES = {
    "mixtral": (EXPERTS,),
    "qwen3_moe": (
        *(EXPERTS, "model.family=qwen3_moe", "model.qk_norm=true", "model.head_dim=16"),
        *("model.experts.num_experts=6", "model.experts.experts_per_token=3"),
    ),
    "qwen3_moe_not_normalised": (
        *(EXPERTS, "model.family=qwen3_moe", "model.qk_norm=true", "model.experts.normalize_top_k=false"),
    ),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": ("recipe.recompute=full",),
    "ep2": ("parallel.ep=2",),
    "ep2_cp2": ("parallel.ep=2", "parallel.cp=2", "recipe.micro_batch_size=4"),
    "tp2_sp": ("parallel.tp=2", "parallel.sp=true"),
    "cp2": ("parallel.cp=2",),
    "pp2": ("parallel.pp=2",),
    "pp2_vpp2": ("parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
}
LORA = (
    *(key for key in FULL if "trains=all" not in key and "lora=null" not in key),
    "task.training.lora.dropout=0",
)
TWO, FOUR = "cluster.ranks_per_node=2", "cluster.ranks_per_node=4"


@dataclass(frozen=True)
class Run:
    """A run of transformers: the losses of all steps, the gradients of the first, the last evaluation's loss."""

    plan: Plan
    losses: list[float]
    gradients: Mapping[str, Tensor]
    eval_loss: float


def composed(shape: str, folder: Path, *overrides: str, full: tuple[str, ...] = FULL) -> Plan:
    """Return the plan of one rank or of a layout, from the shape's weights and rows."""
    plan = ranks.compose(folder, "model=tiny_moe", *TINY, *SHAPES[shape], *full, *overrides)
    return replace(plan, data_dir=str(folder), base_dir=str(folder / shape))


def write(folder: Path, shape: Model) -> PreTrainedModel:
    """Write transformers' random model of this shape, whose norms are random, too, with its conversion."""
    torch.manual_seed(1)
    config = families.of_model(shape).config_of(shape) | {"initializer_range": 0.15}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float()
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    theirs.save_pretrained(folder)
    conversion.convert(conversion.prepare(folder, shape))
    return theirs


def stored(shape: Model, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by their names in a folder, where transformers has one tensor for each expert's projection."""
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if shape.family == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    for name, tensor in tensors.items():
        near = name.replace(".mlp.", f".{block}.").removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith("experts.gate_up_proj"):
            for n, both in enumerate(tensor):
                yield from ((f"{near}{n}.{one}.weight", part) for one, part in zip(names, both.chunk(2), strict=False))
        elif name.endswith("experts.down_proj"):
            yield from ((f"{near}{n}.{names[2]}.weight", one) for n, one in enumerate(tensor))
        else:
            yield near, tensor


def name_of(weight: Weight) -> str:
    """Return the name of a weight of one rank's GPTModel."""
    name = weight.key.replace(".layers.", f".layers.{weight.layer}.")
    return name.replace("experts.experts.", f"experts.local_experts.{weight.expert}.")


def learned(plan: Plan, theirs: PreTrainedModel, rows: rows_of.Rows) -> Run:
    """Train transformers' model with the settings of the plan and torch's AdamW."""
    trained, losses, gradients = dict(theirs.named_parameters()), [], {}
    optimizer = reference_optimizer(plan, trained)
    for rate, indices in zip(RATES, rows_of.train_order(plan, plan.trials[0].seed), strict=False):
        loss = mean_loss(theirs, rows, indices)
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        reference_step(optimizer, trained, lr=rate, clip=0.5)
        losses.append(loss.item())
    with torch.no_grad():
        eval_loss = mean_loss(theirs, rows, np.arange(ROWS)).item()
    return Run(plan, losses, dict(stored(plan.config.model, gradients)), eval_loss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows; `reference` adds the weights."""
    folder = tmp_path_factory.mktemp("moe")
    rows = random_rows(ROWS)
    for split in ("train", "eval"):
        rows_of.save(folder, split, rows.tokens, rows.counts)
    return folder


@cache
def reference(shape: str, folder: Path) -> Run:
    plan = composed(shape, folder)
    return learned(plan, write(folder / shape, plan.config.model), rows_of.load(plan, "train"))


def loaded(plan: Plan) -> model.ModelAndOptimizer:
    engine = model.build(plan, seed=2)
    checkpoint.load(engine, Path(str(plan.base_dir)), adapters=False)
    return engine


def gradients(engine: model.ModelAndOptimizer, rows: rows_of.Rows, indices: np.ndarray) -> dict[str, Tensor]:
    """Return the gradients of a batch, by the names of a folder of transformers."""
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    loop._forward(engine, rows, indices, forward_only=False)
    ours = {name: p.main_grad.cpu() for name, p in engine.unwrapped_chunks()[0].named_parameters()}
    shape, result = engine.plan.config.model, {}
    for weight in families.of_model(shape).weights(shape):
        parts = tensor_map.parts(weight, ours.pop(name_of(weight)), shape)
        result |= dict(zip(weight.sources, parts, strict=True))
    assert not ours, "every weight must be converted"
    return result


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_those_of_transformers(shape: str, folder: Path) -> None:
    expected = reference(shape, folder)
    engine, rows = loaded(expected.plan), rows_of.load(expected.plan, "train")
    order = list(zip(range(STEPS), rows_of.train_order(expected.plan, expected.plan.trials[0].seed), strict=False))
    actual = gradients(engine, rows, order[0][1])
    assert actual.keys() == expected.gradients.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)
    losses = [loop.mean_loss(loop.train_step(engine, rows, rows_i, i + 1), GBS) for i, rows_i in order]
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 0.5, "the loss must have fallen"
    assert loop.evaluate(engine, rows) == pytest.approx(expected.eval_loss, abs=1e-4)


@pytest.mark.long
def test_bf16_has_losses_close_to_fp32(folder: Path) -> None:
    expected = reference("mixtral", folder)
    engine, rows = loaded(composed("mixtral", folder, "precision=bf16")), rows_of.load(expected.plan, "train")
    order = rows_of.train_order(expected.plan, expected.plan.trials[0].seed)
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), GBS) for step in range(1, STEPS + 1)]
    np.testing.assert_allclose(losses, expected.losses, rtol=0, atol=0.1)
    assert np.abs(np.subtract(losses, expected.losses)).max() > 1e-3, "the bound must mean something"


@pytest.mark.long
def test_load_balancing_loss_is_that_of_transformers_in_one_layer(folder: Path, tmp_path: Path) -> None:
    """Of several layers runstop takes the mean of their losses; transformers pools their tokens first."""
    words = ("model.num_layers=1", "model.experts.aux_loss_coef=0.5", "recipe.micro_batch_size=4")
    plan = replace(composed("mixtral", folder, *words), base_dir=str(tmp_path / "one"))
    theirs, rows = write(tmp_path / "one", plan.config.model), rows_of.load(plan, "train")
    indices = np.arange(GBS)
    tokens = torch.from_numpy(rows.tokens[indices].astype(np.int64))
    aux_loss = theirs(tokens, output_router_logits=True).aux_loss
    (mean_loss(theirs, rows, indices) + 0.5 * aux_loss).backward()
    parameters = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected, actual = dict(stored(plan.config.model, parameters)), gradients(loaded(plan), rows, indices)
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    without = replace(composed("mixtral", folder, words[0], words[2]), base_dir=plan.base_dir)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert (gradients(loaded(without), rows, indices)[router] - expected[router]).abs().max() > 1e-3


@pytest.mark.skipif(ranks.DEVICE != "cuda", reason="the all-to-all dispatcher creates a CUDA stream")
@pytest.mark.parametrize("shape", SHAPES)
def test_both_dispatchers_have_the_same_gradients(shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reference(shape, folder).plan
    rows, by_dispatcher = rows_of.load(plan, "train"), {}
    for name in ("alltoall", "allgather"):
        monkeypatch.setattr(model, "dispatcher", lambda name=name: name)
        by_dispatcher[name] = gradients(loaded(plan), rows, np.arange(GBS))
    for name, gradient in by_dispatcher["alltoall"].items():
        torch.testing.assert_close(gradient, by_dispatcher["allgather"][name], rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="compares logits on a CPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_trained_experts_are_exported_to_transformers(shape: str, tmp_path: Path, from_pretrained: Any) -> None:  # noqa: F811
    engine = saved(tmp_path, "model=tiny_moe", *TINY, *SHAPES[shape], *FULL, "task.training.max_steps=9")
    theirs, report = from_pretrained(exported(tmp_path), output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(engine), expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_lora_trains_attention_and_freezes_experts_and_router(folder: Path) -> None:
    expected = reference("mixtral", folder)
    plan = composed("mixtral", folder, full=LORA)
    engine, rows = loaded(plan), rows_of.load(plan, "train")
    before = {name: p.detach().clone() for name, p in engine.unwrapped_chunks()[0].named_parameters()}
    order = rows_of.train_order(plan, plan.trials[0].seed)
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), GBS) for step in range(1, STEPS + 1)]
    assert losses[0] == pytest.approx(expected.losses[0], abs=1e-4)
    assert losses[-1] < losses[0] - 0.01
    for name, weight in engine.unwrapped_chunks()[0].named_parameters():
        assert torch.equal(weight, before[name]) != lora.is_adapter(name), name


@pytest.fixture(scope="module")
def trained(folder: Path, request: pytest.FixtureRequest) -> dict[tuple[str, str], Path]:
    """The run folders of two shapes in every layout of two ranks, trained in one start of the ranks."""
    if not ranks.have(2):
        pytest.skip("2 GPUs needed")
    plans = {}
    for shape, layout in sorted(chosen(request, "shape", "layout")):
        reference(shape, folder)
        plans[shape, layout] = composed(shape, folder, TWO, *LAYOUTS[layout])
    folders = {key: ranks.write(plan, folder / "_".join(("run", *key))) for key, plan in plans.items()}
    ranks.run(next(iter(plans.values())), folder, "tests.helpers.curves", *map(str, folders.values()))
    return folders


@pytest.mark.trains
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ("ep2", "tp2_sp") else pytest.mark.slow) for name in LAYOUTS]
)
@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_every_layout_has_the_losses_of_transformers(
    shape: str, layout: str, folder: Path, trained: dict[tuple[str, str], Path]
) -> None:
    expected, log = reference(shape, folder), trained[shape, layout] / "result_0.txt"
    np.testing.assert_allclose(ranks.train_losses(log), expected.losses, rtol=0, atol=1e-4)
    assert parse(log).eval_final == pytest.approx(expected.eval_loss, abs=1e-4)


@pytest.mark.trains
@pytest.mark.slow
def test_experts_with_replicas_have_the_losses_of_transformers(folder: Path) -> None:
    """Of four ranks, two and two hold the same experts, whose gradients they average."""
    if not ranks.have(4):
        pytest.skip("4 GPUs needed")
    expected = reference("mixtral", folder)
    plans = [
        composed("mixtral", folder, FOUR, "recipe.micro_batch_size=1", *split)
        for split in (("parallel.ep=2",), ("parallel.ep=2", "parallel.tp=2", "parallel.sp=true"))
    ]
    folders = [ranks.write(plan, folder / f"four_{i}") for i, plan in enumerate(plans)]
    ranks.run(plans[0], folder, "tests.helpers.curves", *map(str, folders))
    for one in folders:
        np.testing.assert_allclose(ranks.train_losses(one / "result_0.txt"), expected.losses, rtol=0, atol=1e-4)


@pytest.mark.trains
@pytest.mark.slow
def test_training_that_splits_experts_resumes_with_another_split(tmp_path: Path, folder: Path) -> None:
    """Bitwise with the same split; with the same losses on ranks that hold all experts."""
    if not ranks.have(2):
        pytest.skip("2 GPUs needed")
    reference("mixtral", folder)
    saving = ("task.benchmark=null", "task.training.checkpoint_every_steps=8")
    logs = {}
    for name, split in {"whole": "2", "same": "2", "other": "1"}.items():
        plan = composed("mixtral", folder, TWO, f"parallel.ep={split}", *saving)
        run = ranks.write(plan, tmp_path / name)
        if name != "whole":
            shutil.copytree(tmp_path / "whole" / "checkpoints", run / "checkpoints")
            shutil.rmtree(run / "checkpoints" / "trial_0" / f"step_{STEPS}")
        ranks.run(plan, run, "jobs.tasks.train", "plan.json", "--trial", "0")
        logs[name] = run / "result_0.txt"
    expected = values(logs["whole"], mllog.TRAIN_LOSS, after=16)
    assert len(expected) == STEPS - 16 and values(logs["same"], mllog.RESUMED) == [(16, 16)]
    assert values(logs["same"], mllog.TRAIN_LOSS) == expected
    np.testing.assert_allclose(values(logs["other"], mllog.TRAIN_LOSS), expected, rtol=0, atol=1e-5)
