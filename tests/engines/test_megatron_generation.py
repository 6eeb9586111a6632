"""Our engine's generator against transformers' own `generate`, with the same random weights."""

import warnings
from pathlib import Path

import pytest
import torch

from bench.contract.generation import Batching, Order
from bench.contract.task import Model
from helpers import tiny_llama
from helpers.tiny_llama import Asked
from jobs.engines.generation import Request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.generation.generator import MegatronGenerator
    from jobs.engines.megatron.generation.ranks import Ranks

MODELS = {
    "grouped queries": {},
    "3.1's scaling": {"rope_scaling_factor": 8.0, "rope_base": 500000, "num_query_groups": 1},
    "a group for each head, tied": {"num_query_groups": 4, "tied_embeddings": True},
}


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(tiny_llama.VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]


def theirs(model, request: Request) -> tuple[int, ...]:
    """Return transformers' greedy answer."""
    row = torch.tensor([request.prompt])
    options = {"do_sample": False, "max_new_tokens": request.length, "min_new_tokens": request.length}
    with torch.no_grad():
        out = model.generate(row, attention_mask=torch.ones_like(row), pad_token_id=0, eos_token_id=None, **options)
    return tuple(out[0, len(request.prompt) :].tolist())


def ours(folder: Path, model: Model, asked: Asked) -> MegatronGenerator:
    made = MegatronGenerator(tiny_llama.plan(model, asked), 0, ranks=Ranks(), device=torch.device("cpu"))
    made.load(folder)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_300_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny_llama.model(**MODELS[name])
    their_model = tiny_llama.write(tmp_path / "hf", model)
    request = Request(prompts(17)[0], 300)
    (answer,) = ours(tmp_path / "hf", model, Asked(order=Order.one_by_one)).generate([request], seed=0)
    expected = theirs(their_model, request)
    assert len(set(expected)) > 100, "tokens that repeat themselves prove little"
    assert answer.tokens == expected
    assert 0 < answer.first_s < answer.done_s
