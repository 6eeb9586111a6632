"""Train and evaluate: steps in, losses out. Knows nothing of logs, targets or clocks."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from bench.plan import learning_rate
from jobs.megatron import data
from jobs.megatron.model import Engine, seed_all


def train_step(engine: Engine, rows: data.Rows, indices: np.ndarray, step: int) -> Tensor:
    """Update the weights with one global batch; return this rank's share of the sum of the rows' losses.

    Nothing here waits for the device; `mean_loss` does.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate(engine.plan.config.recipe, step)
    for chunk in engine.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    share = _forward(engine, rows, indices, forward_only=False)
    engine.optimizer.step()
    return share


def mean_loss(share: Tensor, num_rows: int) -> float:
    """Return the mean loss over the rows of all ranks, the same on every rank; waits for the device."""
    torch.distributed.all_reduce(share)
    return share.item() / num_rows


def evaluate(engine: Engine, rows: data.Rows) -> float:
    """Return the mean over all evaluation rows of each row's mean loss (nats per token that counts)."""
    for chunk in engine.chunks:
        chunk.eval()
    shares = [_forward(engine, rows, indices, forward_only=True) for indices in data.eval_order(engine.plan)]
    return mean_loss(torch.stack(shares).sum(), engine.plan.config.data.eval_rows)


def warm_up(engine: Engine, iterations: int, seed: int) -> None:
    """Train and evaluate on made-up rows, then put weights, optimizer and generators back as they were."""
    trained = [p for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    rows = data.synthetic(engine.plan)
    indices = np.arange(engine.plan.batch.global_batch_size)
    for _ in range(iterations):
        train_step(engine, rows, indices, step=1)
        _forward(engine, rows, indices, forward_only=True)
    for parameter, value in zip(trained, before, strict=True):
        parameter.data.copy_(value)
    engine.optimizer.reload_model_params()
    for optimizer in _inner_optimizers(engine):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group.pop("step", None)
    seed_all(seed)


def _forward(engine: Engine, rows: data.Rows, indices: np.ndarray, *, forward_only: bool) -> Tensor:
    """Run megatron-core's schedule over the batch; return this rank's share of the sum of the rows' losses."""
    plan = engine.plan
    batches = data.micro_batches(plan, rows, indices)
    iterators: list[Iterator[data.MicroBatch]] = [iter(batches) for _ in engine.chunks]
    run = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        reported = run(
            forward_step_func=partial(_forward_step, plan.batch.micro_batch_size),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=engine.chunks if len(engine.chunks) > 1 else engine.chunks[0],
            num_microbatches=len(batches),
            seq_length=plan.config.data.seq_length,
            micro_batch_size=plan.batch.micro_batch_size,
            forward_only=forward_only,
        )
    share = torch.zeros((), dtype=torch.float32, device=engine.device)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # TP ranks hold the same losses: count them once
        for losses in reported:
            share = share + losses
    return share


def _forward_step(micro_batch_size: int, iterator: Iterator[data.MicroBatch], model: torch.nn.Module):
    """Return the chunk's output and, for the last stage, how it becomes a loss; megatron-core's interface."""
    batch = next(iterator)
    output = model(batch.tokens, batch.position_ids, None, labels=batch.labels)

    def loss(losses_BS: Tensor) -> tuple[Tensor, Tensor]:
        total = (losses_BS.float() * batch.weights).sum()
        return total / micro_batch_size, total.detach()

    return output, loss


def _inner_optimizers(engine: Engine) -> list[torch.optim.Optimizer]:
    chained = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [optimizer.optimizer for optimizer in chained]
