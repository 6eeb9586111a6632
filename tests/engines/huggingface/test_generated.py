"""HuggingFaceGenerator in this process: its tokens, its calls of transformers' `generate`, and its times."""

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
from helpers.tiny_llama import GenerationOptions

needed()

from jobs.engines.generation import Answer, Request  # noqa: E402
from jobs.engines.huggingface import generation, generator, placement, quantized  # noqa: E402
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
    """A folder, and the answers of transformers' model of it."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama.write(folder, MODEL, stored=())
    return folder, [by_hand(model, one) for one in REQUESTS]


def plan(options: GenerationOptions, **chosen: Any) -> Any:
    built = tiny_llama.plan(MODEL, options)
    built.config.engine = SimpleNamespace(name=EngineName.huggingface, huggingface=HuggingFace(**chosen))
    return built


def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock by 1 s at every read, starting at 100 s."""
    moments = iter(range(100, 1000))
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: float(next(moments))))


@torch.no_grad()
def by_hand(model: torch.nn.Module, request: Request) -> tuple[int, ...]:
    """Return the most probable tokens, each from a forward pass over all tokens before it."""
    tokens = list(request.prompt)
    for _ in range(request.length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(request.prompt) :])


TIMES = {
    # clock reads: the start, then for each batch its prompts and every token; an answer is done with its last token
    (Order.side_by_side, None): [(2, 3), (2, 5), (2, 4)],
    (Order.side_by_side, 2): [(7, 8), (2, 5), (2, 4)],
    (Order.one_by_one, 2): [(11, 12), (2, 5), (7, 9)],
}


@pytest.mark.parametrize(("order", "max_batch"), TIMES)
def test_answers_are_the_most_probable_tokens_with_the_requested_length(
    order: Order, max_batch: int | None, loaded: tuple[Path, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a batch are padded, the longest answers start first, and answers are in the order of the requests."""
    built = generator(plan(GenerationOptions(order=order, max_batch=max_batch)), 7)
    built.load(loaded[0])
    ticks(monkeypatch)
    answers = built.generate(REQUESTS, seed=3)
    assert torch.initial_seed() == 3
    assert [answer.tokens for answer in answers] == loaded[1]
    assert [(answer.first_s, answer.done_s) for answer in answers] == TIMES[order, max_batch]
    with pytest.raises(AssertionError, match="before the model is built"):
        built.load(loaded[0])


class FakeGenerate:
    """Replaces transformers' `generate`: it records its arguments and returns the tokens 1, 2, …"""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def generate(self, model: Any, tokens: torch.Tensor, *, streamer: Any, **arguments: Any) -> torch.Tensor:
        self.calls.append(arguments | {"tokens": tokens.tolist()})
        new = torch.arange(1, arguments["generation_config"].max_new_tokens + 1).expand(len(tokens), -1)
        for _ in range(new.shape[1] + 1):
            streamer.put(tokens)
        return torch.cat([tokens, new], dim=1)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> FakeGenerate:
    from transformers import LlamaForCausalLM

    arguments = FakeGenerate()
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda *words, **more: arguments.generate(*words, **more))
    return arguments


SAMPLINGS = {
    "greedy": (Sampling(top_k=5, top_p=0.5), (False, None, None, None)),
    "sampled": (Sampling(temperature=0.7), (True, 0.7, 0, 1.0)),
    "sampled from the best": (Sampling(temperature=0.7, top_k=5, top_p=0.5), (True, 0.7, 5, 0.5)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_generate_gets_sampling_settings_and_padding(name: str, arguments: FakeGenerate) -> None:
    sampling, expected = SAMPLINGS[name]
    built = generator(plan(GenerationOptions(sampling=sampling)), 7)
    assert built.generate(REQUESTS[:2], seed=3)[0].tokens == (1, 2)
    (call,) = arguments.calls
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


def test_compiled_model_has_one_cache_per_batch_size(arguments: FakeGenerate, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[Any] = []
    monkeypatch.setattr(generation.StaticCache, "reset", lambda cache: emptied.append(cache))
    built = generator(plan(GenerationOptions(max_batch=2), compile=True), 7)
    ticks(monkeypatch)
    built.warm_up(REQUESTS)
    caches = [call["past_key_values"] for call in arguments.calls]
    assert [len(call["tokens"]) for call in arguments.calls] == [1, 1, 2, 2]
    assert caches[0] is caches[1] and caches[2] is caches[3] and caches[0] is not caches[2]
    assert emptied == caches
    assert {cache.layers[0].max_cache_len for cache in caches} == {5}, "the longest prompt with its answer"
    assert all(call["generation_config"].compile_config._compile_all_devices for call in arguments.calls)
    assert built.facts()[1:] == [(mllog.COMPILE_TIME, 0.0, {})]


@pytest.mark.parametrize(("device", "compiled"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)])
def test_a_warm_up_answers_a_batch_of_each_size(device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a dynamic cache is filled to its full length; otherwise first tokens are enough. Compiled: two runs."""
    monkeypatch.setattr(generation.process_group, "device", lambda: torch.device(device))
    batches: list[list[int]] = []
    seconds = iter([9.0, 4.0, 3.0, 5.0] if compiled else [9.0, 4.0])

    def answered(self: HuggingFaceGenerator, requests: list[Request], since_s: float) -> list[Answer]:
        batches.append([one.length for one in requests])
        slowest_s = next(seconds)
        return [Answer((), 0, slowest_s), Answer((), 0, slowest_s / 2)]

    monkeypatch.setattr(HuggingFaceGenerator, "_generate_batch", answered)
    built = generator(plan(GenerationOptions(max_batch=2), compile=compiled), 7)
    built.warm_up([Request((1,), length) for length in (20, 15, 12, 11, 6)])
    is_full_length = device == "cuda" and not compiled
    sizes = [[6], [20, 15]] if is_full_length else [[6], [8, 8]]
    assert batches == (sizes if not compiled else [sizes[0], sizes[0], sizes[1], sizes[1]])
    built.__dict__["_model"] = torch.nn.Linear(1, 1)
    about = {"engine": "huggingface", "attention": "sdpa", "compile": compiled, "dtype": "float32"}
    facts = [(mllog.STRATEGY, "ddp", about | {"cache": "static" if compiled else "dynamic"})]
    assert built.facts() == facts + ([(mllog.COMPILE_TIME, 5.0, {})] if compiled else [])


@pytest.mark.parametrize("precision", [WeightPrecision.fp32, WeightPrecision.bf16, WeightPrecision.nf4])
def test_weights_have_the_precision_of_the_plan(precision: WeightPrecision, monkeypatch: pytest.MonkeyPatch) -> None:
    in_4_bits: list[Any] = []
    monkeypatch.setattr(quantized, "replace_linears", in_4_bits.append)
    built: Any = generator(plan(GenerationOptions(weights=precision)), 7)
    model = built._model
    assert {p.dtype for p in model.parameters()} == {
        torch.float32 if precision is WeightPrecision.fp32 else torch.bfloat16
    }
    assert in_4_bits == ([model] if precision is WeightPrecision.nf4 else [])
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.generation_config.eos_token_id is None
    assert built.facts()[0][2]["dtype"] == str(next(model.parameters()).dtype).removeprefix("torch.")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_balanced_distributes_layers_over_gpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation.process_group, "device", lambda: torch.device(device))
    spread: list[tuple[Any, ...]] = []
    monkeypatch.setattr(placement, "distribute_layers", lambda *words: spread.append(words))
    own = plan(GenerationOptions(), strategy=Strategy.balanced)
    built: Any = generator(own, 7)
    model = built._model
    assert spread == ([(own, model, built._source, torch.device("cuda"))] if device == "cuda" else [])
    assert {p.is_meta for p in model.parameters()} == {device == "cuda"}
