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
from bench.contract.generation import WeightPrecision
from helpers import peer_ranks, ranks, tiny_llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.generation import peer_memory
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
    pair: Any = Pair()
    memory, why = peer_memory.share(pair, torch.device("cuda", 1))
    assert memory is None and why == reason
