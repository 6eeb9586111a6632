"""engine=huggingface with a document mask, compared with transformers on each document alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from bench.contract.engine import Attention
from bench.contract.plan import Plan
from helpers import ranks
from helpers.huggingface_alone import group, theirs, tiny, weights
from helpers.huggingface_runs import BLOCK, FSDP2, needed

needed()

from jobs.data.rows import Rows  # noqa: E402
from jobs.engines.huggingface import build, loop  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

MASK = ("data.source=prepared", "data.packing=true", "data.document_mask=true")
STARTS = [[0], [0, 1, 15], [0, 4, 5, 11], [0, 8], [0, 7]]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


def packed(plan: Plan) -> Rows:
    rng, shape = np.random.default_rng(5), (len(STARTS), plan.config.data.seq_length)
    starts = np.zeros(shape, dtype=bool)
    for row, places in enumerate(STARTS):
        starts[row, places] = True
    counts = rng.random(shape) < 0.6
    counts[:, 2] = True
    tokens = rng.integers(0, plan.config.model.vocab_size, shape, dtype=np.int32)
    return Rows(tokens, counts, starts=starts, document_mask=True)


def row_loss(model: torch.nn.Module, rows: Rows, row: int) -> Tensor:
    """Return the mean loss of a row over its tokens that count; each document is its own batch."""
    losses, places = [], [*STARTS[row], rows.tokens.shape[1]]
    for start, end in zip(places, places[1:], strict=False):
        tokens = torch.from_numpy(rows.tokens[row, start:end].astype(np.int64))
        of_tokens = cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        losses.append(of_tokens[torch.from_numpy(rows.counts[row, start + 1 : end])])
    return torch.cat(losses).mean()


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [(), (f"{BLOCK}.attention=eager",), (FSDP2,), (f"{BLOCK}.activation_checkpointing=true",)],
    ids=["sdpa", "eager", "fsdp2", "recomputed"],
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_documents_have_the_losses_and_gradients_that_they_have_alone(chosen: tuple[str, ...], tmp_path: Path) -> None:
    """The first update of SGD shows the gradient."""
    plan = tiny(tmp_path, "all", *MASK, *ranks.SGD, *chosen)
    engine, rows = build(plan, 7), packed(plan)
    model = theirs(plan, weights(engine.placement.model))
    mean = np.mean([row_loss(model, rows, row).item() for row in range(5)])
    assert engine.evaluate(rows) == pytest.approx(mean, abs=2e-6)
    assert abs(engine.evaluate(replace(rows, document_mask=False)) - mean) > 1e-3
    got = engine.mean_loss(engine.train_step(rows, np.array([2, 0, 1, 3]), 1))
    loss = torch.stack([row_loss(model, rows, row) for row in (2, 0, 1, 3)]).mean()
    loss.backward()
    assert got == pytest.approx(loss.item(), abs=2e-6)
    rate = ranks.SGD_RATE / plan.config.recipe.lr_warmup_steps
    for name, after in weights(engine.placement.model).items():
        parameter = model.get_parameter(name)
        assert_close(after, parameter.detach() - rate * parameter.grad, rtol=0, atol=1e-5)


def test_flash_attention_gets_the_documents_of_all_rows(tmp_path: Path) -> None:
    plan = tiny(tmp_path, "all", *MASK)
    assert plan.config.huggingface is not None
    plan.config.huggingface.attention = Attention.flash_attention_2  # a plan for CPUs refuses it
    rows = packed(plan)
    first, second = loop.micro_batches(plan, rows, np.array([2, 1, 0, -1]), torch.device("cpu"))
    assert first.documents["cu_seq_lens_q"].tolist() == [0, 4, 5, 11, 16, 17, 31, 32]
    assert first.documents["cu_seq_lens_q"].dtype is torch.int32 and first.documents["max_length_k"] == 14
    assert first.documents["position_ids"][0].tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert second.documents["cu_seq_lens_k"].tolist() == [0, 16, 23, 32] and second.weights_BS[1].sum() == 0
    across = replace(rows, document_mask=False)
    assert loop.micro_batches(plan, across, np.arange(4), torch.device("cpu"))[0].documents == {}
