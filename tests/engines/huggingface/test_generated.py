"""Hugging Face's generator in this process: the tokens of transformers' logits, one by one, and what it is told."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract import mllog
from bench.contract.engine import HuggingFace, Strategy
from bench.contract.generation import Order, Sampling, WeightPrecision
from bench.contract.schema import EngineName
from helpers import ranks, tiny_llama
from helpers.huggingface_alone import group
from helpers.huggingface_runs import needed
from helpers.tiny_llama import Asked

needed()

from jobs.engines.generation import Answer, Request  # noqa: E402
from jobs.engines.huggingface import generation, generator, placement  # noqa: E402
from jobs.engines.huggingface import model as huggingface_model  # noqa: E402
from jobs.engines.huggingface.generation import HuggingFaceGenerator  # noqa: E402

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the group is gloo's")

MODEL = tiny_llama.model(hidden_size=32, ffn_hidden_size=48, vocab_size=64, max_seq_length=64)
REQUESTS = [Request((5, 6, 7), 2), Request((9,), 4), Request((1, 2), 3)]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with group():
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A folder, and the answers of transformers' own model of it."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama.write(folder, MODEL, stored=())
    return folder, [by_hand(model, one) for one in REQUESTS]


def plan(asked: Asked, **chosen: Any) -> Any:
    made = tiny_llama.plan(MODEL, asked)
    made.config.engine = SimpleNamespace(name=EngineName.huggingface, huggingface=HuggingFace(**chosen))
    return made


def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock be a second later, from 100 s on."""
    moments = iter(range(100, 1000))
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: float(next(moments))))


@torch.no_grad()
def by_hand(model: torch.nn.Module, request: Request) -> tuple[int, ...]:
    """Return the most probable tokens, each from a whole pass over all before it."""
    tokens = list(request.prompt)
    for _ in range(request.length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(request.prompt) :])


TIMES = {
    # looks at the clock: the start, then for each batch its prompts and every token; an answer ends with its own token
    (Order.side_by_side, None): [(2, 3), (2, 5), (2, 4)],
    (Order.side_by_side, 2): [(7, 8), (2, 5), (2, 4)],
    (Order.one_by_one, 2): [(11, 12), (2, 5), (7, 9)],
}


@pytest.mark.parametrize(("order", "max_batch"), TIMES)
def test_answers_are_the_most_probable_tokens_and_each_ends_at_its_length(
    order: Order, max_batch: int | None, loaded: tuple[Path, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one batch are padded, the longest answers come first, and the order is that of the requests."""
    made = generator(plan(Asked(order=order, max_batch=max_batch)), 7)
    made.load(loaded[0])
    ticks(monkeypatch)
    found = made.generate(REQUESTS, seed=3)
    assert torch.initial_seed() == 3
    assert [answer.tokens for answer in found] == loaded[1]
    assert [(answer.first_s, answer.done_s) for answer in found] == TIMES[order, max_batch]
    with pytest.raises(AssertionError, match="before the model is made"):
        made.load(loaded[0])


class Told:
    """Stands where transformers would generate; what it is told is kept, and its tokens are 1, 2, …"""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(self, model: Any, tokens: torch.Tensor, *, streamer: Any, **told: Any) -> torch.Tensor:
        self.calls.append(told | {"tokens": tokens.tolist()})
        new = torch.arange(1, told["generation_config"].max_new_tokens + 1).expand(len(tokens), -1)
        for _ in range(new.shape[1] + 1):
            streamer.put(tokens)
        return torch.cat([tokens, new], dim=1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    from transformers import LlamaForCausalLM

    told = Told()
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda *words, **more: told.generate(*words, **more))
    return told


SAMPLINGS = {
    "greedy": (Sampling(top_k=5, top_p=0.5), (False, None, None, None)),
    "drawn": (Sampling(temperature=0.7), (True, 0.7, 0, 1.0)),
    "drawn from the best": (Sampling(temperature=0.7, top_k=5, top_p=0.5), (True, 0.7, 5, 0.5)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_transformers_is_told_how_to_sample_and_what_is_padding(name: str, told: Told) -> None:
    sampling, expected = SAMPLINGS[name]
    made = generator(plan(Asked(sampling=sampling)), 7)
    assert made.generate(REQUESTS[:2], seed=3)[0].tokens == (1, 2)
    (call,) = told.calls
    config = call["generation_config"]
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == expected
    assert (config.max_new_tokens, config.pad_token_id, config.eos_token_id, config.compile_config) == (
        4,
        0,
        None,
        None,
    )
    assert call["tokens"] == [[0, 0, 9], [5, 6, 7]]
    assert call["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]] and "past_key_values" not in call


def test_what_is_compiled_has_one_emptied_cache_for_each_size_of_batch(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[Any] = []
    monkeypatch.setattr(generation.StaticCache, "reset", lambda cache: emptied.append(cache))
    made = generator(plan(Asked(max_batch=2), compile=True), 7)
    ticks(monkeypatch)
    made.warm_up(REQUESTS)
    caches = [call["past_key_values"] for call in told.calls]
    assert [len(call["tokens"]) for call in told.calls] == [1, 1, 2, 2]
    assert caches[0] is caches[1] and caches[2] is caches[3] and caches[0] is not caches[2]
    assert emptied == caches
    assert {cache.layers[0].max_cache_len for cache in caches} == {5}, "of the longest prompt with its answer"
    assert all(call["generation_config"].compile_config._compile_all_devices for call in told.calls)
    assert made.facts()[1:] == [(mllog.COMPILE_TIME, 0.0, {})]


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)])
def test_a_warm_up_answers_a_batch_of_each_size(device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a cache that grows does so to the end; elsewhere the first tokens do. What is compiled runs twice."""
    monkeypatch.setattr(generation.process_group, "device", lambda: torch.device(device))
    batches: list[list[int]] = []
    seconds = iter([9.0, 4.0, 3.0, 5.0] if compiled else [9.0, 4.0])

    def answered(self: HuggingFaceGenerator, requests: list[Request], since_s: float) -> list[Answer]:
        batches.append([one.length for one in requests])
        slowest_s = next(seconds)
        return [Answer((), 0, slowest_s), Answer((), 0, slowest_s / 2)]

    monkeypatch.setattr(HuggingFaceGenerator, "_answered", answered)
    made = generator(plan(Asked(max_batch=2), compile=compiled), 7)
    made.warm_up([Request((1,), length) for length in (20, 15, 12, 11, 6)])
    is_whole = device == "cuda" and not compiled
    sizes = [[6], [20, 15]] if is_whole else [[6], [8, 8]]
    assert batches == (sizes if not compiled else [sizes[0], sizes[0], sizes[1], sizes[1]])
    made.__dict__["_model"] = torch.nn.Linear(1, 1)
    about = {"engine": "huggingface", "attention": "sdpa", "compile": compiled, "dtype": "float32"}
    facts = [(mllog.STRATEGY, "ddp", about | {"cache": "static" if compiled else "dynamic"})]
    assert made.facts() == facts + ([(mllog.COMPILE_TIME, 5.0, {})] if compiled else [])


@pytest.mark.parametrize("precision", [WeightPrecision.fp32, WeightPrecision.bf16, WeightPrecision.nf4])
def test_weights_are_of_the_plan_s_precision(precision: WeightPrecision, monkeypatch: pytest.MonkeyPatch) -> None:
    in_4_bits: list[Any] = []
    monkeypatch.setattr(huggingface_model, "replace_linears", in_4_bits.append)
    made: Any = generator(plan(Asked(weights=precision)), 7)
    model = made._model
    assert {p.dtype for p in model.parameters()} == {
        torch.float32 if precision is WeightPrecision.fp32 else torch.bfloat16
    }
    assert in_4_bits == ([model] if precision is WeightPrecision.nf4 else [])
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.generation_config.eos_token_id is None
    assert made.facts()[0][2]["dtype"] == str(next(model.parameters()).dtype).removeprefix("torch.")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_balanced_spreads_the_layers_where_there_are_gpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation.process_group, "device", lambda: torch.device(device))
    spread: list[tuple[Any, ...]] = []
    monkeypatch.setattr(placement, "spread", lambda *words: spread.append(words))
    own = plan(Asked(), strategy=Strategy.balanced)
    made: Any = generator(own, 7)
    model = made._model
    assert spread == ([(own, model, made._source, torch.device("cuda"))] if device == "cuda" else [])
    assert {p.is_meta for p in model.parameters()} == {device == "cuda"}
