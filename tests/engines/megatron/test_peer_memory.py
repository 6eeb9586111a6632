"""Sums and tokens of TP ranks through peer memory; without GPUs, Triton's interpreter runs the kernels."""

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from bench.backends.local import free_port
from bench.contract.generation import Sampling, WeightPrecision
from helpers import peer_ranks, ranks, tiny_llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.generation import kv_cache, peer_kernels, peer_memory, sampling_kernels
    from jobs.engines.megatron.generation import ranks as generation_ranks
    from jobs.engines.megatron.generation.ranks import Ranks
    from jobs.engines.megatron.generation.sampling import next_tokens


@pytest.mark.trains
def test_two_ranks_have_the_sums_tokens_and_logits_of_one(tmp_path: Path) -> None:
    model = tiny_llama.model(num_layers=1)
    theirs = tiny_llama.write(tmp_path / "hf", model)
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    for code, output in ranks.ended_in(tmp_path, ("tests.helpers.peer_ranks", str(tmp_path)), environments):
        assert code == 0, output
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for number, (first, second) in enumerate(zip(results[0]["sums"], results[1]["sums"], strict=True)):
        expected = peer_ranks.addends(0, number) + peer_ranks.addends(1, number)
        assert torch.equal(first, expected) and torch.equal(second, expected)
    for number, sampling in enumerate(peer_ranks.SAMPLINGS):
        seeds_B = torch.arange(peer_ranks.SLOTS)
        expected_BT = torch.stack(
            [
                next_tokens(peer_ranks.logits(at), sampling, Ranks(), seeds_B, torch.full_like(seeds_B, at + 1))
                for at in range(3)
            ],
            dim=1,
        )
        assert all(torch.equal(result["tokens"][number], expected_BT) for result in results)
    with torch.no_grad():
        expected_TV = theirs(torch.tensor([peer_ranks.PROMPT])).logits[0, -2:]
    got_TV = torch.cat([result["logits"] for result in results], dim=1)
    assert (got_TV - expected_TV).norm() / expected_TV.norm() < 0.03


class Pair:
    """A fake group of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def buffers(most: int) -> peer_memory.PeerMemory:
    buffer = peer_memory.Buffer((0, 0), torch.zeros(1, dtype=torch.int32), most)
    return peer_memory.PeerMemory(1, 2, buffer, buffer)


def test_only_small_sums_in_bf16_use_peer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    by_nccl: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: by_nccl.append(x))
    monkeypatch.setattr(peer_memory.PeerMemory, "sum_", lambda _self, x: x.fill_(5))
    rows, most = torch.zeros(4, 512), peer_memory.most_values(2)
    some = Ranks(Pair(), buffers(1024))  # type: ignore[arg-type]
    for x in (rows[:2].bfloat16(), rows[:2], rows.bfloat16(), rows.bfloat16()[:, :8]):
        some.sum(x)
    assert [x.shape for x in by_nccl] == [(2, 512), (4, 512), (4, 8)], "FP32, too large, not contiguous"
    assert most * 2 == 2**20 and peer_memory.most_values(8) * 2 * 7 <= 2**20
    assert most // peer_memory.VALUES <= 512, "programs that wait for each other must fit on a GPU"


@pytest.mark.parametrize(
    ("device", "peer_memory", "precision", "reason"),
    [
        ("cpu", True, WeightPrecision.bf16, "the ranks have no GPUs"),
        ("cuda", False, WeightPrecision.bf16, "task.generation.peer_memory is false"),
        ("cuda", True, WeightPrecision.fp32, "sums are in FP32"),
    ],
)
def test_ranks_without_peer_memory_say_why(
    monkeypatch: pytest.MonkeyPatch, device: str, peer_memory: bool, precision: WeightPrecision, reason: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _group: "nccl")
    settings = SimpleNamespace(generation=SimpleNamespace(peer_memory=peer_memory))
    plan: Any = SimpleNamespace(weights=precision, config=SimpleNamespace(task=settings))
    pair: Any = Pair()
    assert generation_ranks.connect(plan, pair, torch.device(device)).facts() == {
        "all_reduce": "nccl",
        "no_peer_memory": reason,
    }


MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def without_multicast_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variable that `share` sets. It is set first, so that there is something to restore."""
    monkeypatch.setenv(MULTICAST, "0")
    monkeypatch.delenv(MULTICAST)


@pytest.mark.parametrize(
    ("can_access", "error", "reason"),
    [
        (False, None, "GPU 1 cannot access the memory of GPU 0"),
        (True, RuntimeError("driver error: 1\nmore"), "torch cannot share memory: driver error: 1"),
    ],
)
def test_ranks_agree_that_they_cannot_share_memory(
    monkeypatch: pytest.MonkeyPatch, can_access: bool, error: Exception | None, reason: str
) -> None:
    """The other rank of the fake group has the same answers, and is on GPU 0."""

    def shared(_group: object, _device: object) -> None:
        assert error is not None
        raise error

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _own, _other: can_access)
    monkeypatch.setattr(peer_memory, "_gathered", lambda _group, value: [0 if isinstance(value, int) else value, value])
    monkeypatch.setattr(peer_memory, "_shared", shared)
    without_multicast_setting(monkeypatch)
    pair: Any = Pair()
    memory, why = peer_memory.share(pair, torch.device("cuda", 1))
    assert memory is None and why == reason


MOST, RANKS = 2048, 3
on_cpu = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one process has the memory of all ranks")
each_rank = pytest.mark.parametrize("rank", range(RANKS))


class Memories:
    """The memory of all ranks, and the view that one of them has of it."""

    def __init__(self, rank: int, dtype: torch.dtype, most: int, programs: int) -> None:
        self.rank, self.empty, self.calls = rank, peer_kernels.EMPTY[dtype], 0
        self.of_rank = torch.full((RANKS, 2, RANKS, most), self.empty, dtype=dtype)
        addresses = tuple(one.data_ptr() for one in self.of_rank)
        buffer = peer_memory.Buffer(addresses, torch.zeros(programs, dtype=torch.int32), most)
        self.peers = peer_memory.PeerMemory(rank, RANKS, buffer, buffer)

    def receive(self, values: list[Tensor]) -> None:
        """Write what the other ranks send in the next call."""
        for other in set(range(RANKS)) - {self.rank}:
            self.of_rank[self.rank, self.calls % 2, other, : len(values[other])] = values[other]

    def check(self, sent: Tensor) -> None:
        """Compare what the call left: it sends to all others, and empties its own memory. Then the others empty theirs.

        Each call uses the other half.
        """
        expected = torch.full_like(self.of_rank, self.empty)
        expected[:, self.calls % 2, self.rank, : len(sent)] = sent
        expected[self.rank] = self.empty
        assert torch.equal(self.of_rank, expected)
        self.of_rank.fill_(self.empty)
        self.calls += 1
        assert set(self.peers.sums.counts.tolist()) == {self.calls}


@on_cpu
@each_rank
@pytest.mark.usefixtures("interpreter_that_rounds")
def test_a_sum_is_added_in_the_order_of_the_ranks(rank: int) -> None:
    num_values = peer_memory.VALUES + 300
    memories = Memories(rank, torch.int16, MOST, programs=2)
    for call in range(3):
        x = torch.randn(RANKS, num_values, generator=torch.Generator().manual_seed(call)).bfloat16()
        x[:, 5], x[0, 7] = torch.tensor([2.0**25, 1, -(2.0**25)]), -0.0
        bits = torch.where(x == 0, 0, x.view(torch.int16))  # -0.0 is sent as 0.0: its bits mean that nothing is there
        memories.receive(list(bits))
        own = x[rank].clone()
        assert memories.peers.sum_(own) is own
        assert torch.equal(own, (x[0].float() + x[1].float() + x[2].float()).bfloat16())
        assert own[5] == 0, "FP32 has no 2^25 + 1; another order would give 1"
        memories.check(bits[rank])


@on_cpu
@each_rank
@pytest.mark.usefixtures("interpreter_that_rounds")
def test_a_token_is_the_best_of_all_ranks(rank: int) -> None:
    """The slots: the last rank is best, the middle one, all are equal, two are equal, all scores are negative."""
    best = torch.tensor([[1.0, 2, 3], [1, 3, 2], [2, 2, 2], [-1, 4, 4], [-3, -1, -2]]).T.contiguous()
    token = torch.arange(RANKS * 5).view(RANKS, 5) % 7
    vocab_size, room = 9, 64
    sent = (best.view(torch.int32).long() << 32) | (token + vocab_size * torch.arange(RANKS)[:, None])
    memories = Memories(rank, torch.int64, 5, programs=5)
    for _ in range(3):
        logits = torch.full((5, vocab_size), -9.0)
        logits[torch.arange(5), token[rank]] = best[rank]
        memories.receive(list(sent))
        batch = kv_cache.empty(5, room, layers=1, groups=1, dim=16, like=logits)
        sampling_kernels.append(logits, batch, Sampling(), memories.peers)
        winners = torch.tensor([2, 1, 0, 1, 1])
        assert batch.tokens_B.tolist() == (token[winners, torch.arange(5)] + vocab_size * winners).tolist()
        memories.check(sent[rank])


@on_cpu
@each_rank
@pytest.mark.usefixtures("interpreter_that_rounds")
def test_a_rank_draws_with_the_noise_of_its_own_tokens(rank: int) -> None:
    vocab_size, slots, sampling = 50, 4, Sampling(temperature=0.7)
    logits = torch.randn(slots, vocab_size, generator=torch.Generator().manual_seed(rank))
    memories = Memories(rank, torch.int64, slots, programs=slots)
    low = torch.tensor([-1e30] * slots)  # of the others, so that this rank's token is chosen
    memories.receive([low.view(torch.int32).long() << 32] * RANKS)
    batch = kv_cache.empty(slots, 64, layers=1, groups=1, dim=16, like=logits)
    batch.seeds_B.copy_(torch.arange(slots))
    whole = torch.full((slots, RANKS * vocab_size), -1e30)
    whole[:, rank * vocab_size :][:, :vocab_size] = logits
    expected = next_tokens(whole, sampling, Ranks(), batch.seeds_B, batch.positions_B + 1)
    sampling_kernels.append(logits, batch, sampling, memories.peers)
    assert torch.equal(batch.tokens_B, expected)


def test_shared_memory_is_empty_and_has_the_addresses_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of torch's symmetric memory: this rank's tensors begin 256 bytes into what is mapped."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    pair: Any = Pair()

    def rendezvous(own: Tensor, group: object) -> SimpleNamespace:
        assert group is pair
        return SimpleNamespace(buffer_ptrs=[4096, own.data_ptr() - 256])

    monkeypatch.setattr(symmetric_memory, "empty", torch.zeros)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda _values, _value, group: None)
    without_multicast_setting(monkeypatch)
    memory, reason = peer_memory.share(pair, torch.device("cpu"))
    assert memory is not None and reason == "" and os.environ[MULTICAST] == "1"
    assert (memory.rank, memory.size, memory.most_bytes) == (1, 2, 2**20)
    buffers = zip((memory.sums, memory.best), memory.own, strict=True)
    for (buffer, own), (most, programs, dtype, empty) in zip(
        buffers, [(2**19, 512, torch.int16, -(2**15)), (512, 512, torch.int64, -1)], strict=True
    ):
        assert buffer.most == most and buffer.addresses == (4096 + 256, own.data_ptr())
        assert buffer.counts.dtype is torch.int32 and buffer.counts.tolist() == [0] * programs
        assert own.shape == (2 * 2 * most,) and own.dtype is dtype and own.unique().tolist() == [empty]
