"""Units of the engine compared with torch's optimizer and loss and with explicit computation, on one rank."""

import math
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from bench.backends.local import free_port
from bench.contract.plan import Plan
from helpers import ranks, without_cuda
from jobs.engines import WarmUpTimes
from jobs.engines.megatron import groups
from jobs.ranks import timing
from jobs.ranks.identity import Rank

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from megatron.core.tensor_parallel import random

    from jobs.data import rows as rows_of
    from jobs.engines.megatron import checkpoint, loop, lora, model
    from jobs.engines.megatron.adam import offload
    from jobs.engines.megatron.frozen.torch_ops import TorchOps

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"
    ),  # what megatron-core calls
]

TINY = (
    "cluster.ranks_per_node=1",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "data.seq_length=12",
    "data.train_rows=10",
    "data.eval_rows=6",
    "recipe.global_batch_size=4",
    "recipe.micro_batch_size=2",
    "recipe.eval_every_samples=8",
    "recipe.eval_skip=0",
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """Make this process rank 0 of 1, with megatron-core's process groups over gloo."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        without_cuda.prepare(patch)
        groups.start_ranks(composed(), Rank(0, 0, 1, "127.0.0.1", free_port()))
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads that wait for a core of a busy machine cost more than they give
        yield
        torch.set_num_threads(num_threads)
        loop.parallel_state.destroy_model_parallel()
        warnings.filterwarnings("ignore", message=r"barrier\(\)")  # on a GPU; pytest has forgotten that of start_ranks
        groups.end_ranks()


@cache
def composed(*overrides: str) -> Plan:
    return ranks.compose(Path("unused"), *TINY, *overrides)


def built(*overrides: str, seed: int = 1) -> model.ModelAndOptimizer:
    """Return an engine whose adapters, if it has any, have a nonzero B."""
    engine = model.build(composed(*overrides), seed)
    torch.manual_seed(0)
    for name, parameter in engine.unwrapped_chunks()[0].named_parameters():
        if name.endswith("lora_b"):
            parameter.data.normal_(std=0.3)
    engine.optimizer.reset()
    return engine


def random_rows(num_rows: int) -> rows_of.Rows:
    """Return rows with 1, 2, 3, … counted tokens, in addition to the first token, which is not predicted."""
    rng = np.random.default_rng(5)
    counts = np.zeros((num_rows, 12), dtype=bool)
    counts[:, 0] = True
    for row in range(num_rows):
        counts[row, rng.choice(np.arange(1, 12), size=row + 1, replace=False)] = True
    return rows_of.Rows(rng.integers(128, size=(num_rows, 12), dtype=np.int32), counts)


def mean_of_rows(
    engine: model.ModelAndOptimizer, rows: rows_of.Rows, indices: list[int], weights: dict[str, Tensor]
) -> Tensor:
    """Return the mean over rows of each row's mean loss, token by token, with `weights` instead of the model's."""
    tokens = torch.from_numpy(rows.tokens[indices].astype(np.int64))
    places = torch.arange(12).expand(len(indices), -1)
    logits = torch.func.functional_call(engine.unwrapped_chunks()[0], weights, (tokens, places, None))
    means = []
    for row, index in enumerate(indices):
        losses = [
            cross_entropy(logits[row, place - 1], tokens[row, place])
            for place in range(1, 12)
            if rows.counts[index, place]
        ]
        means.append(torch.stack(losses).mean())
    return torch.stack(means).mean()


def adapters(engine: model.ModelAndOptimizer) -> dict[str, Parameter]:
    return {name: p for name, p in engine.unwrapped_chunks()[0].named_parameters() if lora.is_adapter(name)}


def reference_optimizer(plan: Plan, weights: dict[str, Parameter]) -> torch.optim.AdamW:
    """Return torch's AdamW; matrices decay, norms' weights and biases do not."""
    r = plan.config.recipe
    matrices, vectors = ([p for p in weights.values() if (p.dim() > 1) == flag] for flag in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": r.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(r.adam_beta1, r.adam_beta2),
        eps=r.adam_eps,
    )


def reference_step(optimizer: torch.optim.AdamW, weights: dict[str, Parameter], *, lr: float, clip: float) -> float:
    """Clip and update as torch does; return the norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm.item()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_sharded", ["true", "false"])
def test_updates_are_those_of_torch_adamw_after_clipping(precision: str, is_sharded: str) -> None:
    """In BF16 updates must not accumulate rounding: the weights are the FP32 weights, rounded once."""
    recipe = ("recipe.weight_decay=0.5", "recipe.clip_grad=2.0", "recipe.adam_beta2=0.9", "model.bias=true")
    layout = (f"precision={precision}", f"parallel.distributed_optimizer={is_sharded}")
    engine = built("task=pretrain_tiny", *recipe, *layout)
    weights = dict(engine.unwrapped_chunks()[0].named_parameters())
    expected = {name: Parameter(p.detach().float().clone()) for name, p in weights.items()}
    assert {p.dim() for p in expected.values()} == {1, 2}
    optimizer, norms = reference_optimizer(engine.plan, expected), []
    for lr, size in ((1e-3, 1e-3), (3e-3, 1.0), (2e-3, 0.1), (1e-3, 0.003), (5e-4, 1.0)):
        for name, weight in weights.items():
            gradient = torch.randn(weight.shape) * size
            weight.main_grad.copy_(gradient)
            expected[name].grad = gradient
        engine.optimizer.step(lr)
        norms.append(reference_step(optimizer, expected, lr=lr, clip=2.0))
    assert min(norms) < 2.0 < max(norms), "some gradients must be clipped, and some not"
    for name, weight in weights.items():
        if precision == "fp32":
            torch.testing.assert_close(weight.detach(), expected[name].detach(), rtol=1e-5, atol=1e-6)
        else:
            assert (weight == expected[name].bfloat16()).float().mean() > 0.99, name


@pytest.mark.long
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_offloaded_moments_give_bitwise_the_same_weights(monkeypatch: pytest.MonkeyPatch, moments: str) -> None:
    monkeypatch.setattr(offload, "PIECE", 1024)
    options = ("task=pretrain_tiny", "model.bias=true", f"recipe.moments={moments}", "recipe.weight_decay=0.5")
    whole, cut = built(*options), built(*options, "recipe.offload_moments=true")
    (resident,), (shard,) = whole.optimizer.pieces, cut.optimizer.shards
    assert len(cut.optimizer.pieces) == math.ceil(len(shard.grad) / 1024) > 2
    for _ in range(2):
        for _ in range(3):
            shard.grad.normal_()
            resident.shard.grad.copy_(shard.grad)
            for engine in (whole, cut):
                engine.optimizer.step(1e-3)
        assert torch.equal(shard.weights, resident.shard.weights)
        for stored, parts in zip(
            resident.moments, zip(*(p.moments for p in cut.optimizer.pieces), strict=True), strict=True
        ):
            assert torch.equal(torch.cat(parts), stored) and stored.any()
        for state in cut.optimizer.states():
            for start, end, weight, offset in state.places:
                assert torch.equal(state.master[start:end], weight.data.flatten()[offset : offset + end - start])
        assert sum(place.end - place.start for state in cut.optimizer.states() for place in state.places) == sum(
            weight.numel() for weight in cut.unwrapped_chunks()[0].parameters()
        )
        for engine in (whole, cut):
            engine.optimizer.reset()
            assert engine.optimizer.num_steps == 0


@pytest.mark.long
def test_training_steps_are_those_of_a_plain_torch_loop() -> None:
    """Two micro-batches a step; two warm-up steps to the learning rate 0.01, then half a cosine over four steps."""
    schedule = ("recipe.lr=0.01", "recipe.lr_warmup_steps=2", "task.training.max_steps=6")
    recipe = ("recipe.weight_decay=0.3", "recipe.clip_grad=0.3", "task.training.lora.dropout=0", "precision=fp32")
    engine, rows = built(*schedule, *recipe), random_rows(10)
    expected = {name: Parameter(p.detach().clone()) for name, p in adapters(engine).items()}
    optimizer = reference_optimizer(engine.plan, expected)
    rates = (0.005, 0.01, 0.01, 0.01 * (1 + math.sqrt(0.5)) / 2)
    for step, (lr, indices) in enumerate(
        zip(rates, ([3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1], [2, 3, 5, 9]), strict=True), 1
    ):
        loss = mean_of_rows(engine, rows, indices, expected)
        optimizer.zero_grad()
        loss.backward()
        share = loop.train_step(engine, rows, np.array(indices), step)
        assert loop.mean_loss(share, 4) == pytest.approx(loss.item(), rel=1e-5)
        assert reference_step(optimizer, expected, lr=lr, clip=0.3) > 0.3, "the gradients must be clipped"
    for name, weight in adapters(engine).items():
        torch.testing.assert_close(weight.detach(), expected[name].detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("indices", [[3, 0, 7, 5], [3, 0, 7, 5, 9, 1, 2, 4]])
def test_step_with_the_rows_of_a_group_that_has_left_is_sgd_on_all_rows(indices: list[int]) -> None:
    """The plan's batch has four rows. SGD is used because Adam is invariant to the scale of gradients."""
    engine, rows = built("task.training.lora.dropout=0", *ranks.SGD), random_rows(10)
    expected = {name: Parameter(p.detach().clone()) for name, p in adapters(engine).items()}
    mean_of_rows(engine, rows, indices, expected).backward()
    torch.optim.SGD(expected.values(), lr=ranks.SGD_RATE).step()
    before = {name: weight.detach().clone() for name, weight in adapters(engine).items()}
    loop.update(engine, rows, np.array(indices), ranks.SGD_RATE * ranks.SGD_EPS)
    for name, weight in adapters(engine).items():
        torch.testing.assert_close(weight.detach(), expected[name].detach(), rtol=0, atol=1e-6)
        assert (weight - before[name]).abs().max() > 1e-4, "more than the tolerance"


@pytest.mark.long
def test_hand_written_fp8_passes_are_those_of_autograd(tmp_path: Path) -> None:
    """With FP32 instead of FP8 and BF16, the hand-written layers train like megatron-core's from one checkpoint."""
    recipe = ("task.training.lora.dropout=0", "recipe.lr=0.01", "recipe.lr_warmup_steps=0")
    plain, rows = built("precision=fp32", *recipe), random_rows(6)
    exact = model.build(composed("precision=fp8", *recipe), 2, ops=TorchOps(torch.float32, torch.float32))
    for adapters_only in (False, True):
        folder = tmp_path / ("adapters" if adapters_only else "base")
        checkpoint.save(plain, folder, adapters=adapters_only)
        checkpoint.load(exact, folder, adapters=adapters_only)
    for step, indices in enumerate(([3, 0, 2, 5], [1, 2, 4, 5], [4, 3, 0, 1]), 1):
        losses = [loop.train_step(engine, rows, np.array(indices), step).item() for engine in (plain, exact)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    trained, same = adapters(plain), adapters(exact)
    assert trained.keys() == same.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(same[name].detach(), weight.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_an_evaluation_is_the_mean_of_the_rows_means_without_dropout() -> None:
    """6 rows in batches of 4 leave two empty places; only training applies dropout to the adapters' inputs."""
    engine, rows = built("task.training.lora.dropout=0.5", "precision=fp32", "recipe.lr=1e-30"), random_rows(6)
    evaluated, trained = [], []
    for _ in range(2):
        trained.append(loop.train_step(engine, rows, np.arange(4), step=1).item() / 4)
        evaluated.append(loop.evaluate(engine, rows))
    engine.unwrapped_chunks()[0].eval()
    with torch.no_grad():
        assert evaluated == pytest.approx([mean_of_rows(engine, rows, [0, 1, 2, 3, 4, 5], {}).item()] * 2, rel=1e-6)
        undropped = mean_of_rows(engine, rows, [0, 1, 2, 3], {}).item()
    assert min(abs(one - two) for one, two in combinations([undropped, *trained], 2)) > 1e-4, (
        "training must apply dropout"
    )


def test_adapters_start_as_lora_defines() -> None:
    """A is uniform within 1 / sqrt(inputs), which is Kaiming's rule with a = sqrt(5); B is zero."""
    wide = ("model.hidden_size=64", "model.num_query_groups=4")
    first, same, other = (adapters(model.build(composed(*wide), seed)) for seed in (1, 1, 2))
    a_weights = {name: p.detach() for name, p in first.items() if name.endswith("lora_a")}
    assert len(a_weights) == 4, "two layers, two adapted linears each"
    for name, a_RI in a_weights.items():
        assert distance_from_uniform(a_RI.flatten() * math.sqrt(64)) < 1.63 / math.sqrt(a_RI.numel()), name
        assert a_RI.abs().max() <= 1 / math.sqrt(64)
        assert torch.equal(a_RI, same[name]) and not torch.equal(a_RI, other[name])
    for one, two in combinations(a_weights, 2):
        assert not torch.equal(a_weights[one], a_weights[two]), f"{one} and {two} have the same initial values"
    assert all(not p.any() for name, p in first.items() if name.endswith("lora_b"))


def distance_from_uniform(values: Tensor) -> float:
    """Return the Kolmogorov-Smirnov statistic for -1 to 1; 1 % of samples of size n exceed 1.63 / sqrt(n)."""
    measured = torch.arange(len(values)) / len(values)
    return (measured - (values.sort().values + 1) / 2).abs().max().item()


class Half:
    """A fake TP group of two ranks, as one of them sees it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank


@pytest.mark.parametrize(
    ("name", "has_sequence_parallel", "is_split"),
    [
        ("linear_qkv", False, False),
        ("linear_qkv", True, True),
        ("linear_proj", False, True),
        ("linear_proj", True, True),
    ],
)
def test_ranks_have_the_same_dropout_only_for_shared_inputs(
    monkeypatch: pytest.MonkeyPatch, name: str, has_sequence_parallel: bool, is_split: bool
) -> None:
    """TP ranks without sequence parallelism share the input of QKV; replicas and stages never share an input."""
    engine = built("task.training.lora.dropout=0.5", "precision=fp32")
    linear = getattr(engine.unwrapped_chunks()[0].train().decoder.layers[0].self_attention, name)
    linear.sequence_parallel = has_sequence_parallel
    alone = ("gather_from_sequence", "copy_to_tensor_model", "reduce_scatter_to_sequence", "reduce_from_tensor_model")
    for collective in alone:
        monkeypatch.setattr(lora, f"{collective}_parallel_region", lambda x, group: x)
    for base in (lora.ColumnParallelLinear, lora.RowParallelLinear):
        monkeypatch.setattr(base, "forward", lambda self, x: (torch.zeros(()), None))

    def output(tp: int, dp: int, pp: int) -> Tensor:
        monkeypatch.setattr(linear, "tp_group", Half(tp))
        monkeypatch.setattr(random, "get_tensor_model_parallel_rank", lambda: tp)
        monkeypatch.setattr(loop.parallel_state, "get_data_parallel_rank", lambda with_context_parallel: dp)
        monkeypatch.setattr(loop.parallel_state, "get_pipeline_model_parallel_rank", lambda: pp)
        model.seed_all(1)
        return linear(torch.ones(12, 2, 32))[0].detach()

    first, same, neighbour, replica, stage = (
        output(*place) for place in ((0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    assert torch.equal(first, same)
    assert torch.equal(first, neighbour) != is_split
    assert not torch.equal(first, replica) and not torch.equal(first, stage)


@pytest.mark.long
def test_warm_up_returns_the_times_of_its_last_step_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first iteration compiles: 60 and 20 s. The second takes 3 and 1."""
    now_s, takes_s = [0.0], iter((60, 20, 3, 1))

    def work(*args: Any, **how: Any) -> None:
        now_s[0] += next(takes_s)

    monkeypatch.setattr(loop, "update", work)
    monkeypatch.setattr(loop, "_forward", work)
    monkeypatch.setattr(loop, "seed_all", lambda seed: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s[0])
    parts: Any = SimpleNamespace(plan=composed(), chunks=[], optimizer=SimpleNamespace(reset=lambda: None))
    assert loop.warm_up(parts, 2, seed=1) == WarmUpTimes(step_s=3, eval_batch_s=1)
    assert loop.warm_up(parts, 0, seed=1) is None
