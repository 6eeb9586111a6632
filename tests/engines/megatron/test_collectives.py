"""What TP ranks compute together is what one rank computes; the ranks are threads of this process."""

import threading
import warnings

import pytest
import torch
from torch import Tensor

from bench.contract.generation import Sampling, WeightPrecision
from helpers import ranks, thread_ranks, tiny_llama
from helpers.thread_ranks import Group, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import loss
    from jobs.engines.megatron.generation import weights
    from jobs.engines.megatron.generation.ranks import Ranks
    from jobs.engines.megatron.generation.sampling import next_tokens
    from jobs.engines.megatron.quantize import Quantized
    from jobs.engines.megatron.tensor_parallel import TensorParallel

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the ranks are threads")


@pytest.fixture(autouse=True)
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return thread_ranks.install(monkeypatch)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("starts", [False, True], ids=["at once", "concurrently"])
def test_rows_are_gathered_and_sums_are_split(collectives: list[str], size: int, sp: bool, starts: bool) -> None:
    """Without SP, all ranks have all rows, so nothing is gathered; a sum over one rank is the tensor itself."""
    parts = torch.arange(size * 24, dtype=torch.float32).view(size, 6, 4) ** 2
    values, scales = (parts / 64).to(torch.float8_e4m3fn), torch.rand(size, 6)

    def of_rank(group: Group) -> tuple[Tensor, Tensor, Quantized, Quantized]:
        tp, own = TensorParallel(group, sp), parts[group.rank()].clone()
        strided = own.T.contiguous().T
        quantized = Quantized(values[group.rank()], scales[group.rank()])
        if not starts:
            plain = tp.gather_quantized(Quantized(strided, None))
            return tp.gather(strided), tp.reduce(own), tp.gather_quantized(quantized), plain
        pending = (
            *(tp.start_gather(strided), tp.start_reduce(own)),
            *(tp.start_gather_quantized(quantized), tp.start_gather_quantized(Quantized(strided))),
        )
        return tuple(one.wait() for one in pending)

    for rank, (gathered, summed, quantized, plain) in enumerate(run(size, of_rank)):
        total = parts.sum(0)
        assert torch.equal(gathered, parts.flatten(0, 1) if sp else parts[rank])
        assert torch.equal(summed, total.chunk(size)[rank] if sp else total)
        assert torch.equal(quantized.values.float(), (values.flatten(0, 1) if sp else values[rank]).float())
        assert torch.equal(quantized.scale, scales.flatten() if sp else scales[rank])
        assert plain.scale is None and torch.equal(plain.values, gathered)
    reduction = [] if size == 1 else ["reduce_scatter" if sp else "all_reduce"]
    expected = [*["all_gather"] * (4 if sp else 0), *reduction] * size
    assert sorted(collectives) == sorted(f"{name} async" if starts else name for name in expected)


def test_the_loss_of_a_split_vocabulary_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    size, own = 3, threading.local()
    monkeypatch.setattr(loss.parallel_state, "get_tensor_model_parallel_group", lambda: own.group)
    torch.manual_seed(0)
    logits, labels, grad = torch.randn(11, size * 7) * 5, torch.randint(size * 7, (11,)), torch.randn(11)
    logits[3] += 200  # no exponential overflows
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    expected.backward(grad.double())

    def of_rank(group: Group) -> tuple[Tensor, Tensor, Quantized]:
        own.group = group
        part = logits.chunk(size, dim=1)[group.rank()].contiguous()
        quantized = loss.quantized_gradient(part, loss.statistics(part, labels), grad, dtype=torch.float32)
        leaf = part.requires_grad_()
        losses = loss.cross_entropy(leaf.clone(), labels)
        losses.backward(grad)
        return losses.detach(), leaf.grad, quantized

    all_losses, grads, quantized = zip(*run(size, of_rank), strict=True)
    for losses in all_losses:
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(torch.cat(grads, dim=1).double(), exact.grad, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(one.scale, quantized[0].scale) for one in quantized)
    values = torch.cat([one.values * one.scale[:, None] for one in quantized], dim=1)
    torch.testing.assert_close(values.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quantized[0].scale.double() * 448, exact.grad.abs().amax(1), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(), Sampling(temperature=0.8), Sampling(temperature=0.8, top_k=3)),
        *(Sampling(temperature=2.0, top_k=40), Sampling(temperature=1, top_p=0.5)),
        Sampling(temperature=1.5, top_p=0.9),
    ],
    ids=str,
)
def test_tokens_of_a_split_vocabulary_are_those_of_one_rank(sampling: Sampling) -> None:
    size, seeds, positions = 4, torch.arange(64) % 5, torch.arange(64) // 5 + 9
    logits = torch.randn(64, size * 13, generator=torch.Generator().manual_seed(1))
    logits[2, [20, 40]] = 9.0  # the lower one is chosen
    expected = next_tokens(logits, sampling, Ranks(), seeds, positions)
    assert set((expected // 13).tolist()) == set(range(size)), "each rank has some of the tokens"
    if sampling.temperature == 0:
        assert expected.tolist() == [*logits[:2].argmax(1).tolist(), 20, *logits[3:].argmax(1).tolist()]

    def of_rank(group: Group) -> Tensor:
        own = logits.chunk(size, dim=1)[group.rank()].contiguous()
        return next_tokens(own, sampling, Ranks(group), seeds, positions)

    assert all(torch.equal(tokens, expected) for tokens in run(size, of_rank))


def test_sums_and_columns_of_generation() -> None:
    x = torch.randn(3, 2, 5)

    def of_rank(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        tp, own = Ranks(group), x[group.rank()].clone()
        assert tp.no_peers == "" and tp.peers is None and (tp.size, tp.rank) == (3, group.rank())
        return tp.gather(own.T.contiguous().T), tp.gather_columns(own), tp.sum(own)

    for gathered, columns, summed in run(3, of_rank):
        assert torch.equal(gathered, x) and torch.equal(columns, torch.cat(list(x), dim=1))
        torch.testing.assert_close(summed, x.sum(0))
    assert torch.equal(Ranks().gather(x), x[None]) and Ranks().gather_columns(x) is x and Ranks().sum(x) is x
    assert Ranks().facts() == {}


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_of_tp_ranks(tied: bool) -> None:
    """Each rank draws its own numbers, with the deviation sqrt(2 / (5 H)); norms are 1, and biases of qkv are 0."""
    model = tiny_llama.model(num_layers=2, qkv_bias=True, qk_norm=True, tied_embeddings=tied)
    dim, ffn, hidden = model.head_size, model.ffn_hidden_size, model.hidden_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    own = [
        weights.random_weights(model, weights.Place(WeightPrecision.fp32, Ranks(one), torch.device("cpu")), seed=5)
        for one in thread_ranks.groups(2)
    ]
    for one in own:
        assert one.embedding_VH.shape == (model.vocab_size // 2, hidden) == one.head.shape
        assert (one.head.values is one.embedding_VH) == tied
        assert torch.equal(one.norm_H, torch.ones(hidden))
        for layer in one.layers:
            shapes = [part.shape for part in (layer.qkv, layer.proj, layer.fc1, layer.fc2)]
            width = heads * dim // 2
            assert shapes == [(width + groups * dim, hidden), (hidden, width), (ffn, hidden), (hidden, ffn // 2)]
            assert torch.equal(layer.qkv_bias_O, torch.zeros(width + groups * dim))
            assert torch.equal(layer.q_norm_D, torch.ones(dim)) and torch.equal(layer.k_norm_D, torch.ones(dim))
        linears = hidden * (2 * width + groups * dim + ffn + ffn // 2) + model.vocab_size // 2 * hidden // 2
        assert one.bytes_per_step == 4 * 2 * linears, "FP32; half of the head for each of both layers"
        sampled = torch.cat([one.embedding_VH.flatten(), one.layers[1].fc1.values.flatten()])
        assert sampled.std() == pytest.approx((2 / (5 * hidden)) ** 0.5, rel=0.05) and abs(sampled.mean()) < 0.01
    assert not torch.equal(own[0].embedding_VH, own[1].embedding_VH)
