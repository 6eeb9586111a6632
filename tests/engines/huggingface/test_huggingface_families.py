"""The model families with engine=huggingface: it trains and generates like transformers alone, without any dropout."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bench.contract import families
from bench.contract.layers import differs_from_llama
from bench.contract.plan import Plan
from bench.contract.schema import EngineName
from bench.planning import compose
from helpers import ranks, tiny_families
from helpers.huggingface_alone import by_hand, group, random_rows, weights
from helpers.huggingface_runs import SHORT_RUN, TRAINS, needed

needed()

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from jobs.engines.generation import Request  # noqa: E402
from jobs.engines.huggingface import generator  # noqa: E402
from jobs.engines.huggingface.engine import HuggingFaceEngine  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

FROM_FOLDER = ("engine=huggingface", "model=hf", f"model.hidden_size={tiny_families.SIZES['hidden_size']}")
SMALL = (
    *("recipe.global_batch_size=4", "recipe.micro_batch_size=2", "data.seq_length=16"),
    *("recipe.adam_eps=1", "recipe.lr=0.8", "recipe.clip_grad=2.9", "data.eval_rows=5"),
    *("task.training.starts_from=checkpoint", "task.training.base=null", *TRAINS["all"]),
)
BATCHES = np.array([[3, 0, 1, 2], [10, 4, 5, 6]])
NAMES = [
    name
    for name in tiny_families.TINY
    if EngineName.huggingface in families.of_model(tiny_families.model(name)).engines
]
GENERATES = [name for name in NAMES if not differs_from_llama(tiny_families.model(name))]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a random model of transformers; biases and norms are random, too."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_families.TINY[request.param]())
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / request.param)
    return tmp_path / str(request.param)


def alone_in_transformers(folder: Path) -> PreTrainedModel:
    """Return the folder's model as transformers evaluates it, in FP32, all of whose embeddings have gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    return model


def plan_of(source: Path, folder: Path, *overrides: str) -> Plan:
    paths = (f"cluster.paths.data={folder}", f"cluster.paths.logs={folder}", f"cluster.paths.model={source}")
    return compose.compose([*overrides, *FROM_FOLDER, *paths, "cluster.ranks_per_node=1"])


@pytest.mark.long
@pytest.mark.parametrize("source", NAMES, indirect=True)
def test_training_equals_a_plain_loop_of_transformers(source: Path, tmp_path: Path) -> None:
    """Of all weights, in FP32. Some families have a dropout by default, or a padding token without gradients."""
    plan = plan_of(source, tmp_path, *SHORT_RUN, *SMALL)
    engine, reference, rows = HuggingFaceEngine(plan, 7), alone_in_transformers(source), random_rows(plan)
    padding = reference.config.to_dict().get("pad_token_id")
    rows.tokens[BATCHES[0], 3] = padding or 0
    engine.load(source, adapters=False)
    assert_close(weights(engine.placement.model), dict(reference.named_parameters()), rtol=0, atol=0)
    got = [engine.mean_loss(engine.train_step(rows, BATCHES[step - 1], step)) for step in (1, 2)]
    assert got == pytest.approx(by_hand(plan, reference, rows, BATCHES)[0], abs=5e-6)
    assert_close(weights(engine.placement.model), dict(reference.named_parameters()), rtol=0, atol=5e-6)


@pytest.mark.long
@pytest.mark.parametrize("source", GENERATES, indirect=True)
def test_greedy_tokens_are_those_of_transformers(source: Path, tmp_path: Path) -> None:
    lengths = ("task.generation.prompt_tokens=4", "task.generation.lengths=[9,12]", "precision=fp32")
    plan = plan_of(source, tmp_path, "task=generate_tiny", *lengths, "model.weights=random")
    built, reference = generator(plan, 7), alone_in_transformers(source)
    built.load(source)
    requests = [Request((5, 6, 7), 30), Request((9, 4), 20)]
    reference.generation_config.eos_token_id = None
    for answer, one in zip(built.generate(requests, seed=1), requests, strict=True):
        own = reference.generate(torch.tensor([one.prompt]), max_new_tokens=one.length, do_sample=False)
        expected = tuple(own[0, len(one.prompt) :].tolist())
        assert len(set(expected)) > 10, "repeated tokens would make the comparison weak"
        assert answer.tokens == expected
