"""Train a plan eagerly and captured, with a fake CUDA graph: `python -m tests.helpers.captured plan.json` on each rank.

A replay of the fake graph computes the pass again, with the arguments of the capture, in the same memory. As during a
real capture, it cannot read the state of a generator.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Precision
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import from_environment

REPLAYS = 5
"""Micro-batches but the first one, in three steps of two."""


class Graph:
    """A fake CUDA graph."""

    num_replays = 0

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        from megatron.core.tensor_parallel import random

        result = torch.full((), float("nan"))

        def replay() -> None:
            self.num_replays += 1
            read, random._get_cuda_rng_state = random._get_cuda_rng_state, _refuse
            result.copy_(run())
            random._get_cuda_rng_state = read

        return replay, result


def _refuse(*args: Any, **options: Any) -> None:
    raise RuntimeError("the state of a generator was read during a capture")


def main() -> None:
    plan = plan_kinds.required(plan_kinds.load(Path(sys.argv[1])), TrainingPlan)
    start_ranks(plan, from_environment())
    from jobs.engines.megatron import graphs

    graph = Graph()
    graphs.capture = graph.capture  # type: ignore[assignment]
    plain, captured = trained(plan), trained(replace(plan, cuda_graph=True))
    assert graph.num_replays == REPLAYS
    assert plain[0] == captured[0], "losses"
    assert all(torch.equal(one, other) for one, other in zip(plain[1], captured[1], strict=True)), "weights"
    print("losses", plain[0])
    end_ranks()


def trained(plan: TrainingPlan) -> tuple[list[float], list[Tensor]]:
    """Return the losses of three steps, and the weights after them; FP8 layers compute in FP32."""
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop, model
    from jobs.engines.megatron.frozen.torch_ops import TorchOps

    is_fp8 = plan.config.precision is Precision.fp8
    engine = model.build(plan, 1, ops=TorchOps(torch.float32, torch.float32) if is_fp8 else None)
    torch.manual_seed(0)
    for name, weight in engine.unwrapped_chunks()[0].named_parameters():
        if name.endswith("lora_b"):
            weight.data.normal_(std=0.3)
    engine.optimizer.reset()
    model.seed_all(3)
    size, length = plan.batch.global_batch_size, plan.config.training_data.seq_length
    tokens, counts, _ = rows_of.rows(3 * size, length, vocab_size=plan.config.model.vocab_size, seed=5)
    rows = rows_of.Rows(tokens, counts)
    losses = [
        loop.mean_loss(loop.train_step(engine, rows, np.arange(size) + step * size, step + 1), size)
        for step in range(3)
    ]
    return losses, [weight.detach().clone() for weight in engine.chunks[0].parameters()]


if __name__ == "__main__":
    main()
