"""Train steps and evaluation: batches in, losses out. Logging, targets and timing are in `jobs.tasks`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from bench.contract.engine import Attention
from bench.contract.modules import Part, Phase
from bench.contract.plan_kinds import TrainingPlan, learning_rate
from bench.contract.schema import ProfileKind
from jobs.data import rows as rows_of
from jobs.data.micro_batches import cut, document_lengths, targets
from jobs.data.rows import Rows
from jobs.engines import WarmUpTimes
from jobs.engines.huggingface import offload
from jobs.engines.huggingface.packages import settings
from jobs.engines.huggingface.placement import Placement
from jobs.profiles import Profile, recording
from jobs.profiles.ranges import profile_range
from jobs.ranks import rank_times
from jobs.ranks.timing import device_time_s


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass: tensors [B, S]; for the weights see `targets`."""

    tokens_BS: Tensor
    labels_BS: Tensor
    weights_BS: Tensor
    documents: dict[str, Any] = field(default_factory=dict)
    """With a document mask: the arguments of the model that give the documents (`document_arguments`)."""

    def summed_loss(self, model: torch.nn.Module) -> Tensor:
        """Return the sum of the rows' losses in FP32, with the cross-entropy that transformers uses.

        No padding mask is needed: padding comes after the tokens, and attention is causal.
        """
        logits_BSV = model(input_ids=self.tokens_BS, use_cache=False, **self.documents).logits
        with profile_range(Part.loss):
            labels_M = self.labels_BS.flatten().to(logits_BSV.device)
            losses_M = cross_entropy(logits_BSV.flatten(0, 1).float(), labels_M, reduction="none")
            return (losses_M * self.weights_BS.flatten().to(losses_M.device)).sum()


def micro_batches(plan: TrainingPlan, rows: Rows, indices: np.ndarray, device: torch.device) -> list[MicroBatch]:
    """Return this rank's micro-batches of the rows; index -1 is an empty row."""
    parts = cut(plan, indices, replica=torch.distributed.get_rank() if plan.world.dp > 1 else 0)
    batches = []
    for part in parts:
        tokens, labels, weights, positions = targets(rows, part)
        documents = document_arguments(plan, positions, device) if rows.document_mask else {}
        tokens, labels, weights = (x.to(device, non_blocking=True) for x in (tokens, labels, weights))
        batches.append(MicroBatch(tokens, labels, weights, documents))
    return batches


def document_arguments(plan: TrainingPlan, positions_BS: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the arguments by which transformers masks documents.

    From positions that restart, transformers makes a mask [B, 1, S, S] for sdpa and eager. FlashAttention 2 gets the
    lengths; from positions alone it would know the documents only of a single row.
    """
    arguments = {"position_ids": positions_BS.to(device, non_blocking=True)}
    if settings(plan).attention is not Attention.flash_attention_2:
        return arguments
    lengths = document_lengths(positions_BS)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(device, non_blocking=True)
    longest = int(lengths.max())
    lengths_of = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return arguments | lengths_of


FUSED = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
}
"""The kernels that torch's scaled_dot_product_attention chooses from, by operator name."""
FLASH_ATTENTION_2 = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")


class OperatorRecorder(TorchDispatchMode, AbstractContextManager[Any]):
    """Records the operators that a block calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.add(func.name().split(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def attention(self, requested: str) -> str:
        """Return the fused kernel that attention used; without one, math (for sdpa) or the requested implementation."""
        fused = [name for operation, name in FUSED.items() if operation in self.operations]
        if self.operations.intersection(FLASH_ATTENTION_2):
            fused.append("flash_attention_2")
        if fused:
            return " and ".join(sorted(set(fused)))
        return "math" if requested == "sdpa" else requested


PARTS = {
    "embed_tokens": Part.embedding,
    "wte": Part.embedding,
    "wpe": Part.embedding,
    "rotary_emb": Part.rope,
    "input_layernorm": Part.norm,
    "post_attention_layernorm": Part.norm,
    "norm": Part.norm,
    "ln_1": Part.norm,
    "ln_2": Part.norm,
    "ln_f": Part.norm,
    "self_attn": Part.attention,
    "attn": Part.attention,
    "q_proj": Part.qkv,
    "k_proj": Part.qkv,
    "v_proj": Part.qkv,
    "c_attn": Part.qkv,
    "o_proj": Part.output,
    "attn.c_proj": Part.output,
    "mlp": Part.activation,
    "gate_proj": Part.fc1,
    "up_proj": Part.fc1,
    "c_fc": Part.fc1,
    "down_proj": Part.fc2,
    "mlp.c_proj": Part.fc2,
    "lora_A": Part.adapters,
    "lora_B": Part.adapters,
    "lm_head": Part.head,
}
"""By the last words of a module's name. Kernels outside of all submodules belong to the module: attention has RoPE."""


def parts_of(model: Module) -> Iterator[tuple[Module, Part]]:
    """Yield the modules that the profile shows as parts. A layer itself is the part that adds residuals."""
    for name, module in model.named_modules():
        words = name.removesuffix(".default").split(".")
        part = PARTS.get(".".join(words[-2:])) or PARTS.get(words[-1])
        if part is not None:
            yield module, part
        elif words[-1].isdigit():
            yield module, Part.residual


NO_CONTEXT = nullcontext()


class Loop:
    """Trains and evaluates a distributed model."""

    def __init__(self, plan: TrainingPlan, placement: Placement, device: torch.device) -> None:
        self.plan, self.placement, self.device = plan, placement, device
        self.observed = OperatorRecorder()

    def train_step(self, rows: rows_of.Rows, indices: np.ndarray, step: int) -> Tensor:
        """Update the weights with one global batch; return this rank's share of the sum of the rows' losses."""
        return self.update(rows, indices, learning_rate(self.plan, step))

    def update(
        self, rows: rows_of.Rows, indices: np.ndarray, lr: float, around: AbstractContextManager[Any] = NO_CONTEXT
    ) -> Tensor:
        """Update the weights at this learning rate; each forward pass runs inside the context `around`."""
        self.placement.module.train()
        with profile_range(Phase.forward), profile_range(Part.input), rank_times.loading():
            batches = micro_batches(self.plan, rows, indices, self.device)
        share = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self.placement.accumulating(is_last=number == len(batches)):
                with profile_range(Phase.forward), self._storing(), around:
                    total = batch.summed_loss(self.placement.module)
                with profile_range(Phase.backward):
                    self.placement.pass_backward(total / self.plan.batch.micro_batch_size)
                    rank_times.wait_until_here()
            share += total.detach().to(self.device)
        with profile_range(Phase.optimizer):
            self.placement.update(lr)
        return share

    def _storing(self) -> AbstractContextManager[Any]:
        """Return the context that stores activations on the device or in host memory."""
        if not settings(self.plan).offload_activations:
            return NO_CONTEXT
        return offload.save_activations_on_cpu(self.placement.model)

    def evaluate(self, rows: rows_of.Rows) -> float:
        """Return the mean over all evaluation rows of each row's mean loss (nats per token that counts)."""
        shares = [self.loss_share(rows, indices) for indices in rows_of.eval_order(self.plan)]
        return mean_loss(torch.stack(shares).sum(), self.plan.config.training_data.eval_rows, self.plan)

    @torch.no_grad()
    def loss_share(self, rows: rows_of.Rows, indices: np.ndarray) -> Tensor:
        """Return this rank's share of the sum of the rows' losses, without training on them."""
        self.placement.module.eval()
        share = torch.zeros((), device=self.device)
        for batch in micro_batches(self.plan, rows, indices, self.device):
            share += batch.summed_loss(self.placement.module).to(self.device)
        return share

    def warm_up(self, iterations: int, profile: Profile | None) -> list[WarmUpTimes]:
        """Train and evaluate on synthetic rows at learning rate 0; return the times of each iteration."""
        times, rows = [], rows_of.synthetic(self.plan)
        indices = np.arange(self.plan.batch.global_batch_size)
        step = partial(self.update, rows, indices, lr=0.0)
        kernels = profile.kernels if profile and profile.kind is ProfileKind.kernels else None
        if iterations:
            self._observe(step)
        for left in reversed(range(iterations)):
            start_s = device_time_s()
            with recording.profile_kernels(None if left else kernels):
                step()
            trained_s = device_time_s()
            self.loss_share(rows, indices)
            times.append(WarmUpTimes(step_s=trained_s - start_s, eval_batch_s=device_time_s() - trained_s))
        if profile and profile.kind is ProfileKind.modules:
            recording.record(step, profile, modules=list(parts_of(self.placement.model)))
        return times

    def _observe(self, step: Callable[..., Tensor]) -> None:
        """Run one eager step and record its operators."""
        with torch.compiler.set_stance("force_eager"):
            step(around=self.observed)


def mean_loss(share: Tensor, num_rows: int, plan: TrainingPlan) -> float:
    """Return the mean loss over the rows of all ranks, the same on every rank; this waits for the device."""
    if plan.world.dp > 1:
        with rank_times.waiting():
            torch.distributed.all_reduce(share)
    return share.item() / num_rows
