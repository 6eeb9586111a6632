"""Packed rows with a document mask, compared with the same documents alone in rows, and with transformers."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.contract.plan import Plan, Recomputed
from bench.mlperf.result import parse
from helpers import ranks
from helpers.chosen import chosen

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, one_rank, reference_optimizer, reference_step  # noqa: F401
    from test_full_fine_tuning import FULL, RATES, SHAPES, STEPS, TRANSFORMERS, save_base, weights_of

    from helpers.exact import exact_ops
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, model

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning", r"ignore:barrier\(\)"
    ),  # what megatron-core calls
]

S, ROWS = 12, 11
MASK = ("data.source=prepared", "data.packing=true", "data.document_mask=true")
STARTS = [
    [0],
    [0, 1],
    [0, 11],
    [0, 4, 5, 6, 9],
    [0, 6],
    [0, 2, 4, 6, 8, 10],
    [0, 3],
    [0, 7, 8],
    [0, 10],
    [0, 5],
    [0, 1, 2],
]
"""Of ROWS rows: one document, documents of one token at both ends and inside, and several equal ones."""


def packed(starts: list[list[int]], seed: int = 5) -> rows_of.Rows:
    """Return full rows whose documents begin at these places; most tokens count."""
    rng, shape = np.random.default_rng(seed), (len(starts), S)
    is_start = np.zeros(shape, dtype=bool)
    for row, places in enumerate(starts):
        is_start[row, places] = True
    counts = rng.random(shape) < 0.7
    counts[:, 1:] |= ~is_start[:, 1:] & is_start[:, :-1]  # the second token of a document
    return rows_of.Rows(rng.integers(128, size=shape, dtype=np.int32), counts, starts=is_start, document_mask=True)


def unpacked(rows: rows_of.Rows) -> rows_of.Rows:
    """Return rows with one document each, in the same order, padded at the end."""
    assert rows.starts is not None
    tokens, counts = [], []
    for row in range(len(rows.tokens)):
        places = [*np.flatnonzero(rows.starts[row]), S]
        for start, end in zip(places, places[1:], strict=False):
            room = (0, S - end + start)
            tokens.append(np.pad(rows.tokens[row, start:end], room))
            counts.append(np.pad(rows.counts[row, start:end], room))
    return rows_of.Rows(np.stack(tokens), np.stack(counts))


LORA = ("task.training.lora.dropout=0", "model.hidden_size=128", "model.ffn_hidden_size=256")
ENGINES = {
    "adapters, megatron-core's layer": ("precision=fp32", *LORA),
    "adapters, BF16 base": ("precision=bf16", *LORA),
    "adapters, FP8 base": ("precision=fp8", *LORA),
    "adapters, 4-bit base": ("precision=bf16", "task.training.trains=qlora", *LORA),
    "all weights, Llama": (*FULL, *SHAPES["llama"]),
    "all weights, GPT-3": (*FULL, *SHAPES["gpt3"]),
    "all weights, recomputed": (*FULL, *SHAPES["llama"], "recipe.recompute=full"),
}


def built(folder: Path, *overrides: str) -> model.ModelAndOptimizer:
    """Return an engine that computes in FP32, with a saved base and random adapters."""
    plan = ranks.compose(folder, *TINY, *MASK, *overrides)
    lora = ("precision=fp32", "task.training.trains=lora") if plan.config.training.lora else ()
    whole = replace(ranks.compose(folder, *TINY, *MASK, *overrides, *lora), base_dir=str(folder / "base"))
    save_base(whole)
    engine = model.build(plan, 1, ops=None if "precision=fp32" in overrides else exact_ops(plan))
    checkpoint.load(engine, folder / "base", adapters=False)
    torch.manual_seed(0)
    for name, parameter in engine.unwrapped_chunks()[0].named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.3)
    return engine


def passed(engine: model.ModelAndOptimizer, rows: rows_of.Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses of the tokens that count, and the gradients of their sum."""
    (chunk,) = engine.chunks
    batch = loop.micro_batch(engine.plan, rows, np.arange(len(rows.tokens)))
    chunk.train()
    chunk.zero_grad_buffer()
    losses = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.documents)
    losses = losses[batch.weights > 0]
    losses.sum().backward()
    named = engine.unwrapped_chunks()[0].named_parameters()
    return losses.detach(), {name: p.main_grad.clone() for name, p in named if p.requires_grad}


def assert_same(engine: model.ModelAndOptimizer, rows: rows_of.Rows) -> None:
    losses, gradients = passed(engine, rows)
    expected, expected_gradients = passed(engine, unpacked(rows))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert len(gradients) > 4
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_each_layer_gives_documents_the_losses_and_gradients_that_they_have_alone(engine: str, tmp_path: Path) -> None:
    one, rows = built(tmp_path, *ENGINES[engine]), packed(STARTS)
    assert_same(one, rows)
    across = replace(rows, document_mask=False)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(passed(one, across)[0].mean(), passed(one, rows)[0].mean(), rtol=1e-3, atol=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> model.ModelAndOptimizer:
    return built(tmp_path_factory.mktemp("llama"), *ENGINES["all weights, Llama"])


@pytest.mark.long
@given(cuts=st.lists(st.sets(st.integers(1, S - 1), max_size=S - 1), min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_documents_of_any_lengths(llama: model.ModelAndOptimizer, cuts: list[set[int]], seed: int) -> None:
    rows = packed([[0], *([0, *sorted(places)] for places in cuts)], seed)
    assert_same(llama, rows)


LAYOUTS = {
    "dp2": (),
    "tp2": ("parallel.tp=2",),
    "tp2_sp": ("parallel.tp=2", "parallel.sp=true", "recipe.micro_batch_size=4"),
    "pp2": ("parallel.pp=2", "recipe.offload_activations=true"),
    "pp2_vpp2_full": ("parallel.pp=2", "parallel.vpp=2", "recipe.recompute=full"),
}
BASES = {"llama": (*FULL, *SHAPES["llama"]), "gpt3": (*FULL, *SHAPES["gpt3"])}
ADAPTERS = (
    *(*LORA, "precision=bf16", "model.num_layers=4", f"task.training.max_steps={STEPS}", "recipe.adam_eps=1e-3"),
    *("task.training.target_eval_loss=null", f"data.train_rows={ROWS}", f"data.eval_rows={ROWS}"),
    *("recipe.log_every_steps=1", "recipe.eval_every_samples=4", f"recipe.eval_skip={STEPS - 1}"),
)
BASES |= {"adapters": ADAPTERS, "adapters_fp32": (*ADAPTERS, "precision=fp32")}
CHOSEN = {
    "llama": tuple(LAYOUTS),
    "gpt3": ("tp2_sp", "pp2"),
    "adapters": ("dp2", "tp2_sp", "pp2_vpp2_full"),
    "adapters_fp32": ("tp2", "pp2"),
}
PARTLY = Recomputed(full=False, qkv_layers=3, fc1_layers=1, offloaded_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed rows; `in_layouts` adds the bases."""
    folder, rows = tmp_path_factory.mktemp("packed"), packed(STARTS)
    for split in ("train", "eval"):
        rows_of.save(folder, split, rows.tokens, rows.counts, starts=rows.starts)
    return folder


def composed(base: str, folder: Path, *overrides: str) -> Plan:
    plan = ranks.compose(folder, *TINY, *MASK, *BASES[base], *overrides)
    name = "adapters" if base.startswith("adapters") else base
    return replace(plan, data_dir=str(folder), base=None, base_dir=str(folder / f"{name}_base"))


@pytest.fixture(scope="module")
def in_layouts(folder: Path, request: pytest.FixtureRequest) -> dict[tuple[str, str], Path]:
    """The run folders of every base in its layouts of two ranks, trained in FP32."""
    for base in ("llama", "gpt3", "adapters_fp32"):
        save_base(composed(base, folder))
    plans = {}
    for (base,) in sorted(chosen(request, "base")):
        for layout in CHOSEN[base]:
            ours = base != "adapters_fp32"  # megatron-core's layer neither offloads nor recomputes a part
            split = [override for override in LAYOUTS[layout] if ours or "offload" not in override]
            plan = composed(base, folder, "cluster.ranks_per_node=2", *split)
            plans[base, layout] = replace(plan, recompute=PARTLY) if ours and layout == "tp2_sp" else plan
    folders = {key: ranks.write(plan, folder / "_".join(key)) for key, plan in plans.items()}
    of_adapters = [key for key in folders if key[0] == "adapters"]
    for keys, flags in ((folders.keys() - of_adapters, ()), (of_adapters, ("--exact",))):
        if not keys:
            continue
        start = plans[next(iter(keys))]
        ranks.run(start, folder, "tests.helpers.curves", *flags, *(str(folders[key]) for key in keys))
    return folders


def alone(reference: torch.nn.Module, rows: rows_of.Rows, indices: np.ndarray) -> Tensor:
    """Return the mean over rows of the mean loss of each row's tokens that count; each document is its own batch."""
    assert rows.starts is not None
    means = []
    for row in indices:
        losses, places = [], [*np.flatnonzero(rows.starts[row]), S]
        for start, end in zip(places, places[1:], strict=False):
            tokens = torch.from_numpy(rows.tokens[row, start:end].astype(np.int64))
            of_tokens = cross_entropy(reference(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
            losses.append(of_tokens[torch.from_numpy(rows.counts[row, start + 1 : end])])
        means.append(torch.cat(losses).mean())
    return torch.stack(means).mean()


@pytest.mark.trains
@pytest.mark.parametrize("base", ["llama", pytest.param("gpt3", marks=pytest.mark.slow)])
def test_every_layout_has_the_losses_of_transformers_on_single_documents(
    base: str, folder: Path, in_layouts: dict[tuple[str, str], Path]
) -> None:
    plan, rows = composed(base, folder), packed(STARTS)
    engine = model.build(plan, seed=2)
    checkpoint.load(engine, Path(str(plan.base_dir)), adapters=False)
    build, renamed = TRANSFORMERS[base]
    reference = build(plan).float()
    reference.load_state_dict(dict(renamed(plan, weights_of(engine))), strict=False)
    reference.tie_weights()
    trained, losses = dict(reference.named_parameters()), []
    optimizer = reference_optimizer(plan, trained)
    for rate, indices in zip(RATES, rows_of.train_order(plan, plan.trials[0].seed), strict=False):
        loss = alone(reference, rows, indices)
        optimizer.zero_grad()
        loss.backward()
        reference_step(optimizer, trained, lr=rate, clip=0.5)
        losses.append(loss.item())
    with torch.no_grad():
        eval_loss = alone(reference, rows, np.arange(ROWS)).item()
    assert losses[-1] < losses[0] - 0.3, "the loss must have fallen"
    for layout in CHOSEN[base]:
        log = in_layouts[base, layout] / "result_0.txt"
        np.testing.assert_allclose(ranks.train_losses(log), losses, rtol=0, atol=1e-4, err_msg=layout)
        assert parse(log).eval_final == pytest.approx(eval_loss, abs=1e-4)


@pytest.mark.trains
@pytest.mark.parametrize("base", ["adapters", pytest.param("adapters_fp32", marks=pytest.mark.slow)])
def test_every_layout_trains_adapters_as_one_rank_does(
    base: str, folder: Path, in_layouts: dict[tuple[str, str], Path]
) -> None:
    plan, rows = composed(base, folder), packed(STARTS)
    engine = model.build(plan, plan.trials[0].seed, ops=exact_ops(plan) if base == "adapters" else None)
    checkpoint.load(engine, Path(str(plan.base_dir)), adapters=False)
    order = rows_of.train_order(plan, plan.trials[0].seed)
    losses = [loop.mean_loss(loop.train_step(engine, rows, next(order), step), 4) for step in range(1, STEPS + 1)]
    for layout in CHOSEN[base]:
        got = ranks.train_losses(in_layouts[base, layout] / "result_0.txt")
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-4, err_msg=layout)
