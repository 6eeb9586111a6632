"""Train steps and evaluation: batches in, losses out. Logging, targets and timing are in `jobs.tasks`."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from bench.contract.modules import Part, Phase
from bench.contract.plan_kinds import TrainingPlan, learning_rate
from bench.contract.schema import ProfileKind
from jobs.data import rows as rows_of
from jobs.data.micro_batches import cut, document_lengths, targets
from jobs.data.rows import Rows
from jobs.engines import WarmUpTimes
from jobs.engines.megatron.attention import packed_seq_params, positions
from jobs.engines.megatron.graphs import CapturedPass, MicroBatch, summed_loss
from jobs.engines.megatron.model import ModelAndOptimizer, reduce_gradients, seed_all
from jobs.profiles import Profile, recording
from jobs.profiles.ranges import profile_range
from jobs.ranks import rank_times
from jobs.ranks.timing import device_time_s


def micro_batches(plan: TrainingPlan, rows: Rows, indices: np.ndarray) -> list[MicroBatch]:
    """Return this rank's micro-batches of the rows; index -1 is an empty row."""
    parts = cut(plan, indices, replica=parallel_state.get_data_parallel_rank())
    return [micro_batch(plan, rows, part) for part in parts]


def micro_batch(plan: TrainingPlan, rows: Rows, indices: np.ndarray) -> MicroBatch:
    """Return this context-parallel rank's part of the rows, on the device."""
    whole = targets(rows, indices)
    device = torch.cuda.current_device()
    documents = packed_seq_params(document_lengths(whole[-1]), device) if rows.document_mask else None
    mine = positions(whole[0].shape[1], plan.world.cp, parallel_state.get_context_parallel_rank())
    tokens, labels, weights, position_ids = (x[:, mine].to(device, non_blocking=True) for x in whole)
    return MicroBatch(tokens, labels, weights, position_ids, documents)


PARTS = {
    "embedding": Part.embedding,
    "rotary_pos_emb": Part.rope,
    "input_layernorm": Part.norm,
    "pre_mlp_layernorm": Part.norm,
    "final_layernorm": Part.norm,
    "self_attention": Part.rope,
    "linear_qkv": Part.qkv,
    "core_attention": Part.attention,
    "linear_proj": Part.output,
    "mlp": Part.activation,
    "linear_fc1": Part.fc1,
    "linear_fc2": Part.fc2,
    "output_layer": Part.head,
}
"""By a module's name. Kernels outside of all submodules belong to the module: heads and RoPE of self_attention."""


def parts_of(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Part]]:
    """Yield the modules that the profile shows as parts. A layer itself is the part that adds residuals."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            parent, _, own = name.rpartition(".")
            if own in PARTS:
                yield module, PARTS[own]
            elif parent.endswith("layers") and own.isdigit():
                yield module, Part.residual


def train_step(engine: ModelAndOptimizer, rows: rows_of.Rows, indices: np.ndarray, step: int) -> Tensor:
    """Update the weights with one global batch; return this rank's share of the sum of the rows' losses.

    Nothing here waits for the device; `mean_loss` does.
    """
    return update(engine, rows, indices, learning_rate(engine.plan, step))


def update(engine: ModelAndOptimizer, rows: rows_of.Rows, indices: np.ndarray, lr: float) -> Tensor:
    """Update the weights like `train_step`, at this learning rate."""
    with profile_range(Phase.optimizer), profile_range(Part.zero_gradients):
        for chunk in engine.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
    share = _forward(engine, rows, indices, forward_only=False)
    with profile_range(Phase.optimizer):
        _scale_gradients(engine, len(indices))
        engine.optimizer.step(lr)
        with profile_range(Part.weights):
            engine.updated_weights.after_update()
    return share


def _scale_gradients(engine: ModelAndOptimizer, num_rows: int) -> None:
    """Rescale gradients if the batch has more rows than planned, because a local SGD group has left.

    A training pass divides by the planned number of micro-batches; a pipeline schedule by the actual number.
    """
    planned = engine.plan.batch.global_batch_size
    if num_rows != planned and engine.training_pass is not None:
        for shard in engine.optimizer.shards:
            shard.grad.mul_(planned / num_rows)


def mean_loss(share: Tensor, num_rows: int) -> float:
    """Return the mean loss over the rows of all ranks, the same on every rank; this waits for the device."""
    with rank_times.waiting():
        torch.distributed.all_reduce(share)
    return share.item() / num_rows


def evaluate(engine: ModelAndOptimizer, rows: rows_of.Rows) -> float:
    """Return the mean over all evaluation rows of each row's mean loss (nats per token that counts)."""
    for chunk in engine.chunks:
        chunk.eval()
    shares = [_forward(engine, rows, indices, forward_only=True) for indices in rows_of.eval_order(engine.plan)]
    return mean_loss(torch.stack(shares).sum(), engine.plan.config.training_data.eval_rows)


def warm_up(
    engine: ModelAndOptimizer, iterations: int, seed: int, *, profile: Profile | None = None
) -> WarmUpTimes | None:
    """Train and evaluate on synthetic rows, then reset optimizer and generators; return the last iteration's times.

    The learning rate is 0, so the weights do not change. Rank 0 profiles the last step (kernels), or three more steps
    after it (modules). With a CUDA graph these three steps come first, while there is memory for their activations.
    """
    times = None
    rows = rows_of.synthetic(engine.plan)
    indices = np.arange(engine.plan.batch.global_batch_size)
    step = partial(update, engine, rows, indices, lr=0.0)
    kernels = profile.kernels if profile and profile.kind is ProfileKind.kernels else None
    modules = profile if profile and profile.kind is ProfileKind.modules else None
    if modules and engine.plan.cuda_graph:
        _profile_modules(engine, step, modules)
    for left in reversed(range(iterations)):
        start_s = device_time_s()
        with recording.profile_kernels(None if left else kernels):
            step()
        trained_s = device_time_s()
        _forward(engine, rows, indices, forward_only=True)
        times = WarmUpTimes(step_s=trained_s - start_s, eval_batch_s=device_time_s() - trained_s)
    if modules and not engine.plan.cuda_graph:
        _profile_modules(engine, step, modules)
    engine.optimizer.reset()
    seed_all(seed)
    return times


def _profile_modules(engine: ModelAndOptimizer, step: Callable[[], Tensor], profile: Profile) -> None:
    """Profile the time of a step by module, without a CUDA graph: kernels of a graph have no module ranges."""
    graph = engine.training_pass
    if isinstance(graph, CapturedPass):
        engine.training_pass = graph.eager
        step()  # compiles the kernels
    modules = parts_of(engine.chunks)
    recording.record(step, profile, modules=modules, is_eager=engine.training_pass is not graph)
    engine.training_pass = graph


def _forward(engine: ModelAndOptimizer, rows: rows_of.Rows, indices: np.ndarray, *, forward_only: bool) -> Tensor:
    """Run the forward and, in training, the backward pass; return this rank's share of the sum of the rows' losses."""
    with profile_range(Phase.forward), profile_range(Part.input), rank_times.loading():
        batches = micro_batches(engine.plan, rows, indices)
    schedule = _no_pipeline if engine.training_pass else _pipelined
    with torch.set_grad_enabled(not forward_only):
        losses_by_batch = schedule(engine, batches, forward_only=forward_only)
    share = torch.zeros((), dtype=torch.float32, device=engine.device)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # TP ranks hold the same losses: count them once
        for losses in losses_by_batch:
            share = share + losses
    return share


def _no_pipeline(engine: ModelAndOptimizer, micro_batches: list[MicroBatch], *, forward_only: bool) -> list[Tensor]:
    """Run the micro-batches one after another; return the sum of the rows' losses of each."""
    if forward_only:
        return [summed_loss(engine.chunks[0], batch) for batch in micro_batches]
    assert engine.training_pass is not None
    *others, last = micro_batches
    with engine.chunks[0].no_sync():  # the gradients are reduced once they are complete
        losses = [engine.training_pass(batch) for batch in others]
    losses.append(engine.training_pass(last))
    with profile_range(Phase.backward):
        reduce_gradients(engine.chunks)
    return losses


def _pipelined(engine: ModelAndOptimizer, micro_batches: list[MicroBatch], *, forward_only: bool) -> list[Tensor]:
    """Run megatron-core's pipeline schedule; return the same as `_no_pipeline`, on the last stage."""
    plan = engine.plan
    iterators: list[Iterator[MicroBatch]] = [iter(micro_batches) for _ in engine.chunks]
    with profile_range(Phase.backward):  # everything except `_forward_step`
        losses: list[Tensor] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, plan.batch.micro_batch_size),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=engine.chunks if len(engine.chunks) > 1 else engine.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=plan.config.training_data.seq_length,
            micro_batch_size=plan.batch.micro_batch_size,
            forward_only=forward_only,
        )
    return losses


def _forward_step(
    micro_batch_size: int, iterator: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return the chunk's output and the loss function of the last stage, as megatron-core's schedules expect."""
    batch = next(iterator)
    with profile_range(Phase.forward):
        output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=batch.documents)

    def loss(losses_BS: Tensor) -> tuple[Tensor, Tensor]:
        with profile_range(Phase.forward), profile_range(Part.loss):
            total = batch.summed(losses_BS)
        return total / micro_batch_size, total.detach()

    return output, loss
