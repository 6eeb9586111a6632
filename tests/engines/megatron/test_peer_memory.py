"""Sums and tokens of TP ranks through peer memory; without GPUs, Triton's interpreter runs the kernels."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from bench.backends.local import free_port
from helpers import peer_ranks, ranks, tiny_llama

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron.generation import peer_memory
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
