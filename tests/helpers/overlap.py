"""Steps of a plan on random rows in both schedules, once per rank: `python -m tests.helpers.overlap plan.json`.

Each rank prints JSON of the plain and of the overlapped schedule: the losses, a checksum of its weights and optimizer
states, and what overlapped in the last step.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.contract import plan_kinds
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import from_environment

STEPS, STEPS_AFTER_RESUMING = 4, 2
LENGTH = 16


def main() -> None:
    plan = plan_kinds.load(Path(sys.argv[1]))
    start_ranks(plan, from_environment())
    results = []
    for overlap in (False, True):
        plan.config.parallel.overlap = overlap
        results.append(_train(plan))
    print(json.dumps(results))
    end_ranks()


def _train(plan: Any) -> dict[str, Any]:
    from jobs.data.rows import Rows
    from jobs.engines.megatron import loop, model

    rng = np.random.default_rng(1)
    vocabulary, batch = plan.config.model.vocab_size, plan.batch.global_batch_size
    rows = Rows(rng.integers(vocabulary, size=(64, LENGTH), dtype=np.int32), np.ones((64, LENGTH), dtype=bool))
    engine = model.build(plan, seed=3)
    groups = engine.updated_weights.groups
    losses, reduced, late = [], 0, 0

    def counting(*args: Any, **others: Any) -> None:
        nonlocal reduced
        reduced = sum(group.grad_reduce_handle is not None for group in groups)
        model.reduce_gradients(*args, **others)

    with patch.object(loop, "reduce_gradients", counting):
        engine.chunks[0].config.finalize_model_grads_func = counting
        for step in range(1, STEPS + STEPS_AFTER_RESUMING + 1):
            share = loop.train_step(engine, rows, rng.permutation(64)[:batch], step)
            late = sum(group.param_gather_handle is not None for group in groups)
            losses.append(loop.mean_loss(share, batch))
            if step == STEPS // 2:
                losses.append(loop.evaluate(engine, rows))
            if step == STEPS:
                engine.optimizer.resume(STEPS)  # as after a checkpoint
                engine.refresh_weights()
    bits = {"losses": [loss.hex() for loss in losses], "sha256": _sha256(engine)}
    return bits | {"reduced_early": reduced, "arrive_late": late, "groups": len(groups)}


def _sha256(engine: Any) -> str:
    """Return the checksum of the bits of all weights and optimizer states of this rank."""
    import torch

    tensors = [weight for chunk in engine.unwrapped_chunks() for weight in chunk.parameters()]
    for state in engine.optimizer.states():
        tensors += [state.master, state.exp_avg, state.exp_avg_sq]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
