"""MegatronGenerator compared with transformers: greedy answers and logits, with the same random weights."""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from bench.backends.local import free_port
from bench.contract.checkpoint import Stored
from bench.contract.generation import Batching, Order, Sampling, WeightPrecision
from bench.contract.model import Activation, Model
from bench.errors import ConfigError
from bench.planning import compose
from bench.runs import trial as trials
from helpers import ranks, tiny_families, tiny_llama
from helpers.tiny_llama import GenerationOptions
from jobs.engines.generation import Request
from jobs.weights import nf4
from jobs.weights.tensor_map import interleave, separate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.generation import batch as generation_batch
    from jobs.engines.megatron.generation import forward, kv_cache, weights
    from jobs.engines.megatron.generation.generator import MegatronGenerator, build_decoder
    from jobs.engines.megatron.generation.ranks import Ranks
    from jobs.engines.megatron.generation.sampling import filter_logits, next_tokens

MODELS = {
    "grouped queries": tiny_llama.model(),
    "3.1's scaling": tiny_llama.model(rope_scaling_factor=8.0, rope_base=500000, num_query_groups=1),
    "a group for each head, tied": tiny_llama.model(num_query_groups=4, tied_embeddings=True),
    "Qwen2": tiny_families.model("qwen2"),
    "Qwen3": tiny_families.model("qwen3"),
}
DEVICE = torch.device(ranks.DEVICE)
LENGTHS = [(5, 40), (31, 7), (1, 64), (12, 1), (17, 23), (3, 33)]
"""Lengths of prompts and answers that are generated concurrently."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: GEMMs of tiny models are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(tiny_llama.VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]


def requests() -> list[Request]:
    rows = prompts(*(n for n, _ in LENGTHS))
    return [Request(row, length) for row, (_, length) in zip(rows, LENGTHS, strict=True)]


def theirs(model: LlamaForCausalLM, request: Request) -> tuple[int, ...]:
    """Return transformers' greedy answer."""
    row = torch.tensor([request.prompt])
    options = {"do_sample": False, "max_new_tokens": request.length, "min_new_tokens": request.length}
    with torch.no_grad():
        out = model.generate(row, attention_mask=torch.ones_like(row), pad_token_id=0, eos_token_id=None, **options)
    return tuple(out[0, len(request.prompt) :].tolist())


def ours(folder: Path, model: Model, options: GenerationOptions) -> MegatronGenerator:
    built = MegatronGenerator(tiny_llama.plan(model, options), 0, ranks=Ranks(), device=DEVICE)
    built.load(folder)
    return built


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_300_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    their_model = tiny_llama.write(tmp_path / "hf", model)
    request = Request(prompts(17)[0], 300)
    (answer,) = ours(tmp_path / "hf", model, GenerationOptions(order=Order.one_by_one)).generate([request], seed=0)
    expected = theirs(their_model, request)
    assert len(set(expected)) > 100, "repeated tokens would make the comparison weak"
    assert answer.tokens == expected
    assert 0 < answer.first_s < answer.done_s


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model, LlamaForCausalLM]:
    """A folder with a model, its settings and transformers' model, converted in each format."""
    folder, model = tmp_path_factory.mktemp("tiny") / "hf", tiny_llama.model()
    stored = (Stored.plain, Stored.fp8, Stored.nf4)
    return folder, model, tiny_llama.write(folder, model, stored=stored)


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Model, LlamaForCausalLM]) -> list[tuple[int, ...]]:
    """The answer of transformers to each request alone."""
    return [theirs(tiny[2], one) for one in requests()]


@pytest.mark.long
def test_an_answer_that_fills_its_slot_to_the_last_token_is_that_of_transformers(
    tiny: tuple[Path, Model, LlamaForCausalLM],
) -> None:
    """24 + 40 tokens: a slot holds a multiple of 64."""
    folder, model, their_model = tiny
    request = Request(prompts(24)[0], 40)
    (answer,) = ours(folder, model, GenerationOptions(order=Order.one_by_one)).generate([request], seed=0)
    assert answer.tokens == theirs(their_model, request)


BATCHES = [(Batching.static, None), (Batching.static, 3), (Batching.continuous, 3), (Batching.continuous, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("batching", "max_batch"), BATCHES)
def test_concurrent_answers_match_transformers(
    tiny: tuple[Path, Model, LlamaForCausalLM],
    expected: list[tuple[int, ...]],
    batching: Batching,
    max_batch: int | None,
) -> None:
    folder, model, _ = tiny
    built = ours(folder, model, GenerationOptions(batching=batching, max_batch=max_batch))
    built.warm_up(requests())
    answers = built.generate(requests(), seed=0)
    assert [answer.tokens for answer in answers] == expected
    assert all(answer.first_s <= answer.done_s for answer in answers)
    if max_batch == 3:  # the three longest start together, and the shortest waits for a slot
        assert max(answers[index].first_s for index in (0, 2, 5)) < answers[3].first_s
        is_before = answers[3].first_s < answers[2].done_s
        assert is_before == (batching is Batching.continuous), "a static batch ends with its longest answer"


@pytest.mark.long
def test_sampled_answers_depend_on_their_seed_alone(tiny: tuple[Path, Model, LlamaForCausalLM]) -> None:
    folder, model, _ = tiny
    sampling = Sampling(temperature=1.0, top_k=100, top_p=0.9)
    together = ours(folder, model, GenerationOptions(sampling=sampling, batching=Batching.continuous, max_batch=2))
    alone = ours(folder, model, GenerationOptions(sampling=sampling, order=Order.one_by_one))
    answers = together.generate(requests(), seed=5)
    assert answers[4].tokens == alone.generate([requests()[4]], seed=5 + 4)[0].tokens
    assert answers[4].tokens != alone.generate([requests()[4]], seed=5)[0].tokens


def logits(folder: Path, model: Model, precision: WeightPrecision, row: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the logits after a row: from a prefill of the full row, and from a decode step of its last token."""
    place = weights.Place(precision, Ranks(), DEVICE)
    built = build_decoder(model, weights.load(folder, model, place), place, Sampling())
    shape = {"layers": model.num_layers, "groups": model.num_query_groups, "dim": built.dim}
    batch = kv_cache.empty(1, len(row), **shape, like=built.weights.embedding_VH)
    tokens_S, first = torch.tensor(row, device=DEVICE), torch.tensor([0], device=DEVICE)
    angles, length = forward.angles(model, batch.capacity, DEVICE), first + len(row)
    prompt = forward.Prompts(tokens_S[:, None], length, first, first)
    with torch.no_grad():
        of_prompt = forward.prompt_logits(built, batch, angles, prompt)
        for cache in (*batch.keys, *batch.values):
            cache[:, :, len(row) - 1 :] = 0  # the step computes its own
        batch.start(first, tokens_S[-1:], length - 1, first)
        return of_prompt[0].cpu(), forward.step_logits(built, batch, angles)[0].cpu()


def error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def expected_logits(model: LlamaForCausalLM, row: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0, -1]


BOUNDS = {WeightPrecision.fp32: 1e-5, WeightPrecision.bf16: 0.03, WeightPrecision.fp8: 0.15}
"""Tolerance relative to the norm of the logits. Normally distributed weights lose 2.6 % in FP8, in each of 9 GEMMs."""


@pytest.mark.parametrize("precision", BOUNDS)
def test_logits_are_those_of_transformers(
    tmp_path: Path, tiny: tuple[Path, Model, LlamaForCausalLM], precision: WeightPrecision
) -> None:
    folder, model, their_model = tiny
    (tmp_path / "plain").symlink_to(folder / "megatron_core")
    row = prompts(40)[0]
    for got in logits(tmp_path / "plain", model, precision, row):
        assert error(got, expected_logits(their_model, row)) < BOUNDS[precision]


@pytest.mark.long
@pytest.mark.parametrize("stored", [Stored.fp8, Stored.nf4])
def test_quantised_weights_have_the_logits_of_their_dequantised_values(
    tiny: tuple[Path, Model, LlamaForCausalLM], stored: Stored
) -> None:
    """For converted weights, and for 4-bit weights that are quantised while BF16 is loaded."""
    folder, model, their_model = tiny
    exact = LlamaForCausalLM(their_model.config).eval()
    exact.load_state_dict(their_model.state_dict())
    for layer in exact.model.layers:
        replace(layer, model, stored)
    row = prompts(40)[0]
    sources = (folder, folder / "megatron_core") if stored is Stored.nf4 else (folder,)
    for source in sources:
        for got in logits(source, model, WeightPrecision[stored.name], row):
            assert error(got, expected_logits(exact, row)) < BOUNDS[WeightPrecision.bf16]
    assert error(expected_logits(exact, row), expected_logits(their_model, row)) > BOUNDS[WeightPrecision.bf16]


def replace(layer: Any, model: Model, stored: Stored) -> None:
    """Round the weights of a layer of transformers like megatron-core's fused weights."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    fused = rounded(interleave(*(x.data for x in qkv), groups=model.num_query_groups), stored)
    parts = separate(fused, heads=model.num_attention_heads, groups=model.num_query_groups)
    gates = rounded(torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data]), stored).chunk(2)
    others = [attention.o_proj.weight, mlp.down_proj.weight]
    parts = [*parts, *gates, *(rounded(x.data, stored) for x in others)]
    for weight, new in zip([*qkv, mlp.gate_proj.weight, mlp.up_proj.weight, *others], parts, strict=True):
        weight.data.copy_(new)


def rounded(weight: Tensor, stored: Stored) -> Tensor:
    if stored is Stored.nf4:
        return nf4.dequantize(nf4.quantize(weight.bfloat16()), torch.bfloat16).float()
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.trains
def test_two_ranks_give_the_answers_of_one(tmp_path: Path) -> None:
    model = tiny_llama.model(rope_scaling_factor=8.0, rope_base=500000, ffn_hidden_size=256)
    their_model = tiny_llama.write(tmp_path / "hf", model)
    options, few = [*requests()[:3], Request(prompts(17)[0], 300)], requests()[3:]
    runs = [("fp32", 0.0, options), ("fp32", 1.0, few), ("nf4", 0.0, few)]
    as_json = [(precision, temperature, [asdict(one) for one in run]) for precision, temperature, run in runs]
    (tmp_path / "requests.json").write_text(json.dumps({"model": tiny_llama.as_json(model), "runs": as_json}))
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    for code, output in ranks.ended_in(tmp_path, ("tests.helpers.generated", str(tmp_path)), environments):
        assert code == 0, output
    greedy, sampled, in_nf4 = json.loads((tmp_path / "answers.json").read_text())
    assert [tuple(row) for row in greedy] == [theirs(their_model, one) for one in options]
    alone = ours(tmp_path / "hf", model, GenerationOptions(sampling=Sampling(temperature=1.0, top_k=50))).generate(
        few, seed=3
    )
    assert [tuple(row) for row in sampled] == [answer.tokens for answer in alone]
    assert sampled != in_nf4 and [len(row) for row in in_nf4] == [one.length for one in few]


@pytest.mark.long
def test_prefills_of_warmed_up_shapes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake graph runs the captured function again with the current values of its inputs."""
    graph_launches = []

    def captured_pass(run: Callable[[], Tensor], pool: object) -> tuple[Callable[[], None], Tensor]:
        written = run()

        def replay() -> None:
            graph_launches.append(pool)
            written.copy_(run())

        return replay, written

    monkeypatch.setattr(generation_batch.graphs, "capture", captured_pass)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    model, seen = tiny_llama.model(), []
    place = weights.Place(WeightPrecision.fp32, Ranks(), DEVICE)
    built = build_decoder(model, weights.random_weights(model, place, seed=1), place, Sampling())
    shape = {"layers": model.num_layers, "groups": built.groups, "dim": built.dim}

    def pass_of(tokens: Tensor) -> forward.Prompts:
        at = torch.arange(tokens.shape[1])
        return forward.Prompts(tokens, torch.full_like(at, len(tokens)), at, at)

    rows = torch.arange(24).view(4, 6)
    first, second, other, long = rows[:, :2], rows[:, 2:4], rows[:, 4:5], torch.zeros(2049, 1).long()
    for warmed_up in ((), (first, other, first, long)):
        batch = kv_cache.empty(2, 2049, **shape, like=built.weights.embedding_VH)
        prefills = generation_batch.Prefills(
            partial(forward.prefill, built, batch, forward.angles(model, batch.capacity, DEVICE)), is_captured=True
        )
        for tokens in warmed_up:
            prefills.warm_up(pass_of(tokens))
        seen.append([(prefills(pass_of(tokens)).tolist(), batch.tokens_B.tolist()) for tokens in (second, other, long)])
    assert seen[1] == seen[0]
    assert graph_launches == [(0, 1), (0, 1)], "once for each of two shapes; a long prompt has none"


@pytest.mark.trains
def test_the_log_of_a_task_is_valid(tmp_path: Path) -> None:
    """Two TP ranks, and requests that wait for free slots."""
    options = {"batching": "continuous", "max_batch": 2, "lengths": "[3,9,1,6]"}
    batches = [f"task.generation.{name}={value}" for name, value in options.items()]
    split = ["parallel.tp=2", f"cluster.device={ranks.DEVICE}"]
    plan = compose.compose(["task=generate_tiny", "engine=megatron", *split, *batches])
    run = ranks.write(plan, tmp_path / "run")
    ranks.run(plan, run, "jobs.tasks.generate", "plan.json", "--trial", "0")
    assert trials.judge(run / "result_0.txt", plan, plan.trials[0]).valid
    log = (run / "result_0.txt").read_text()
    assert '"bytes_per_step"' in log
    assert ranks.DEVICE != "cpu" or '"all_reduce": "gloo", "no_peer_memory": "the ranks have no GPUs"' in log


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.7), Sampling(temperature=1.5, top_k=5), Sampling(temperature=1.0, top_p=0.8)]
)
def test_tokens_are_sampled_with_their_probabilities(sampling: Sampling) -> None:
    from scipy.stats import chisquare

    torch.manual_seed(0)
    row, num_draws = torch.randn(12) * 2, 20_000
    sampled = next_tokens(
        row.expand(num_draws, -1), sampling, Ranks(), torch.zeros(num_draws).long(), torch.arange(num_draws)
    )
    scores = row[None] / sampling.temperature
    if sampling.top_k is not None:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p is not None:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    expected = scores[0].double().softmax(0) * num_draws
    counts = torch.bincount(sampled, minlength=12).double()
    assert (counts[expected == 0] == 0).all() and (expected == 0).any() == (sampling.temperature != 0.7)
    is_kept = expected > 0
    assert chisquare(counts[is_kept], expected[is_kept]).pvalue > 1e-3


def test_top_k_and_top_p_match_transformers() -> None:
    torch.manual_seed(0)
    scores = torch.randn(50, 300) * torch.logspace(-1, 1, 50)[:, None]
    for top_k, top_p in ((7, None), (None, 0.6), (40, 0.9), (1000, 1.0)):
        expected = scores if top_k is None else TopKLogitsWarper(top_k)(None, scores)
        expected = expected if top_p is None else TopPLogitsWarper(top_p)(None, expected)
        assert torch.equal(filter_logits(scores, Sampling(temperature=1.0, top_k=top_k, top_p=top_p)), expected)


class Half:
    """A fake group of two ranks, as one of them sees it."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        (
            {"activation": Activation.gelu},
            WeightPrecision.bf16,
            "but in this model model.activation is gelu",
        ),
        ({"num_query_groups": 1}, WeightPrecision.bf16, "parallel.tp=2 does not divide the 1 query groups"),
        ({"vocab_size": 511}, WeightPrecision.bf16, "parallel.tp=2 does not divide the 511 rows of the vocabulary"),
        ({}, WeightPrecision.nf4, "a row of fc2 has 96 weights on each rank, but NF4 needs a multiple of 64"),
    ],
)
def test_unsupported_model_is_refused(changes: dict[str, Any], weights: WeightPrecision, message: str) -> None:
    plan = tiny_llama.plan(tiny_llama.model(**changes), GenerationOptions(weights))
    with pytest.raises(ConfigError, match=message):
        MegatronGenerator(plan, 0, ranks=Ranks(Half()), device=DEVICE)


def test_weights_in_another_quantised_format_are_refused(tiny: tuple[Path, Model, LlamaForCausalLM]) -> None:
    folder, model, _ = tiny
    with pytest.raises(ConfigError, match="the weights of the checkpoint are in fp8, but the task requests bf16"):
        ours(folder / "megatron_core_fp8", model, GenerationOptions(WeightPrecision.bf16))
    with pytest.raises(ConfigError, match="hidden_size is 128 instead of 256"):
        ours(folder, dataclasses.replace(model, hidden_size=256), GenerationOptions())
