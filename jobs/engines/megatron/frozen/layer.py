"""A layer with frozen linears in FP8, BF16 or NF4, with hand-written passes that save memory and time.

It is Llama's layer: RMSNorm, SwiGLU, RoPE. q, k and v may have biases (Qwen2), and the heads of q and k norms (Qwen3).

The base is frozen, so no linear needs its input for a weight gradient. The layer saves the normalised inputs of qkv and
fc1 in FP8 (for the gradients of the norms and of LoRA), q, k, v and the output of attention in BF16, and gate and up in
FP8. The kernels that compute activations and gradients also quantise them, each row with its own scale. With BF16
operations everything is in BF16; NF4 weights are dequantised to BF16 just before each GEMM.

Shape letters: S sequence and B batch of this rank, M = S * B tokens (between the linears under SP: those of this TP
rank), H hidden, D head dimension, N heads, G key/value groups, R LoRA rank, I and O input and output of a linear on
this TP rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd import Function

from bench.contract.modules import Part, Phase
from jobs.engines.megatron import tensor_parallel
from jobs.engines.megatron.attention import attend, attend_backward
from jobs.engines.megatron.frozen.ops import Fp8Ops, FrozenWeights
from jobs.engines.megatron.hand_written_layer import HandWrittenLayer
from jobs.engines.megatron.head_norms import head_norms
from jobs.engines.megatron.quantize import Adapted, Dropout, Lora, Quantized
from jobs.profiles.ranges import profile_range

Seeds = list[int] | Tensor
"""Dropout seeds of the two adapters: drawn by the host, or a tensor [2] in device memory."""


class Fp8Layer(HandWrittenLayer):
    """The layer with frozen linears and LoRA adapters."""

    ops: Fp8Ops
    weights: FrozenWeights
    """Shared by all layers of a rank; `model.build` sets it before the first pass."""

    device_seeds: Tensor | None = None
    """Drawn by `graphs` before each captured pass; None: each pass draws its seeds on the host."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output [S, B, H], and None as the context that megatron-core expects."""
        adapters = [getattr(part, name, None) for part in (self.qkv, self.proj) for name in ("lora_a", "lora_b")]
        keep = torch.is_grad_enabled()
        seeds = _seeds() if self.device_seeds is None else self.device_seeds
        y_SBH: Tensor = _LayerFunction.apply(  # type: ignore[no-untyped-call]  # torch's
            self, keep, rotary_pos_emb, packed_seq_params, seeds, hidden_states, *adapters
        )
        return y_SBH, None


class Adapter(NamedTuple):
    """A linear's A [R, I] and B [O, R]: y += scale * B A dropout(x)."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    drop: Dropout


Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v, with RoPE applied to q and k."""
SavedHeads = Heads | tuple[Tensor]
"""Heads, or with norms of the heads the rows of qkv [M, O] that the norms read: q and k are made from them again."""


@dataclass(slots=True)
class SavedActivations:
    """The activations that the forward pass saves for the backward pass; qkv and gate_up are None if recomputed."""

    normed: Quantized
    rstd_M: Tensor
    qkv_low_MR: Tensor | None
    qkv: SavedHeads | None
    attended_MO: Tensor
    lse: Tensor
    proj_low_MR: Tensor | None
    mlp_normed: Quantized
    mlp_rstd_M: Tensor
    gate_up: Quantized | None


SavedByAttention = tuple[Quantized, Tensor, Tensor | None, SavedHeads | None, Tensor, Tensor, Tensor | None]
SavedByMlp = tuple[Quantized, Tensor, Quantized | None]
"""The first seven of `SavedActivations`, and the last three."""


class _LayerFunction(Function):
    """The layer as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Fp8Layer,
        keep: bool,
        freqs: Tensor,
        documents: PackedSeqParams | None,
        seeds: Seeds,
        x_SBH: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        layer_pass = _LayerPass(layer, freqs, documents, x_SBH.shape[1], seeds, weights)
        ctx.layer, ctx.freqs, ctx.documents, ctx.seeds = layer, freqs, documents, seeds
        ctx.save_for_backward(*weights)
        y_MH, saved_by_attention = layer_pass.attention(x_SBH.flatten(0, 1))
        y_MH, saved_by_mlp = layer_pass.mlp(x_SBH.flatten(0, 1), y_MH, keep=keep and not layer.recompute_fc1)
        if keep:
            layer.save_activations(ctx, SavedActivations(*saved_by_attention, *saved_by_mlp))
        return y_MH.view_as(x_SBH)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[Tensor | None, ...]:
        layer_pass = _LayerPass(ctx.layer, ctx.freqs, ctx.documents, grad_SBH.shape[1], ctx.seeds, ctx.saved_tensors)
        saved = ctx.layer.load_activations(ctx)
        grad_MH, grad = layer_pass.mlp_backward(grad_SBH.contiguous().flatten(0, 1), saved)
        is_needed = ctx.needs_input_grad[5]
        dx_MH, *adapter_grads = layer_pass.attention_backward(grad_MH, grad, saved, is_needed=is_needed)
        return *[None] * 5, None if dx_MH is None else dx_MH.view_as(grad_SBH), *adapter_grads


class _LayerPass:
    """One forward or backward pass of a micro-batch through the layer, with its adapters and process groups."""

    def __init__(
        self,
        layer: Fp8Layer,
        freqs: Tensor,
        documents: PackedSeqParams | None,
        batch: int,
        seeds: Seeds,
        weights: Sequence[Tensor | None],
    ) -> None:
        self.layer, self.ops, self.batch, self.eps = layer, layer.ops, batch, layer.config.layernorm_epsilon
        self.weights, self.norms = layer.weights, head_norms(layer.self_attention, self.eps)
        self.freqs_MD = freqs.squeeze(2).expand(-1, batch, -1).flatten(0, 1)
        self.tp = tensor_parallel.TensorParallel(layer.tp_group, layer.config.sequence_parallel)
        self.attention_options = {"group": parallel_state.get_context_parallel_group(), "documents": documents}
        p = layer.config.lora.dropout if layer.config.lora and layer.training else 0.0
        qkv_drop = rank_dropout(p, seeds[0], tp_rank=self.tp.rank, is_split=self.tp.sp)
        proj_drop = rank_dropout(p, seeds[1], tp_rank=self.tp.rank, is_split=self.tp.size > 1)
        qkv_a, qkv_b, proj_a, proj_b = weights
        self.qkv = _adapter(layer.qkv, qkv_a, qkv_b, qkv_drop)
        self.proj = _adapter(layer.proj, proj_a, proj_b, proj_drop)

    def attention(self, x_MH: Tensor) -> tuple[Tensor, SavedByAttention]:
        """Return the output of attention, without the residual x, and the activations to save."""
        with profile_range(Part.norm):
            normed, rstd_M = self.ops.norm_quantize(x_MH, self.layer.input_layernorm.weight, self.eps)
        with profile_range(Part.adapters):
            low_MR = self.tp.gather(self.ops.down(normed, self.qkv.a_RI, self.qkv.drop)) if self.qkv else None
        qkv, to_save = self.heads(normed, low_MR)
        with profile_range(Part.attention):
            attended, lse = attend(*qkv, scale=qkv[0].shape[-1] ** -0.5, **self.attention_options)
        attended_MO = attended.flatten(2).flatten(0, 1)
        y_MH, proj_low_MR = self.project(attended_MO)
        saved_qkv = None if self.layer.recompute_qkv else to_save
        return y_MH, (normed, rstd_M, low_MR, saved_qkv, attended_MO, lse, proj_low_MR)

    def heads(self, normed: Quantized, low_MR: Tensor | None) -> tuple[Heads, SavedHeads]:
        """Return q [S, B, N, D], k and v [S, B, G, D], with RoPE applied to q and k; and what to save of them."""
        with profile_range(Part.qkv):
            qkv_MO = self.ops.matmul(self.tp.gather_quantized(normed), self.weights.forward(self.layer.qkv))
        lora = Lora(low_MR, self.qkv.b_OR, self.qkv.scale) if self.qkv and low_MR is not None else None
        heads = self.split(qkv_MO, lora, self.layer.qkv.bias)
        return heads, heads if self.norms is None else (qkv_MO,)

    def split(self, qkv_MO: Tensor, lora: Lora | None = None, bias_O: Tensor | None = None) -> Heads:
        """Return q, k and v of the rows; with norms, the rows get the adapter's output and the bias."""
        groups = self.layer.self_attention.num_query_groups_per_partition
        with profile_range(Part.rope):
            q, k, v = self.ops.rope(qkv_MO, self.freqs_MD, groups, lora, bias_O, self.norms)
        return self._unflat(q), self._unflat(k), self._unflat(v)

    def project(self, attended_MO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output projection [M, H], and its adapter's A dropout(x) [M, R]."""
        with profile_range(Part.output):
            weight = self.weights.forward(self.layer.proj)
            y_MH = self.tp.reduce(self.ops.matmul(self.ops.quantize(attended_MO), weight))
        if self.proj is None:
            return y_MH, None
        with profile_range(Part.adapters):
            low_MR = self.tp.reduce(self.ops.down(attended_MO, self.proj.a_RI, self.proj.drop))
            return y_MH.addmm_(low_MR, self.proj.b_OR.T, alpha=self.proj.scale), low_MR

    def mlp(self, x_MH: Tensor, y_MH: Tensor, *, keep: bool) -> tuple[Tensor, SavedByMlp]:
        """Return x + y + MLP(x + y), and the activations to save; keep: also save gate and up."""
        norm_weight = self.layer.pre_mlp_layernorm.weight
        with profile_range(Part.norm):
            x_MH, normed, rstd_M = self.ops.add_norm_quantize(x_MH, y_MH, norm_weight, self.eps)
        with profile_range(Part.activation):
            hidden, gate_up = self.ops.swiglu_quantize(self.fc1(normed), keep=keep)
        with profile_range(Part.fc2):
            y_MH = self.tp.reduce(self.ops.matmul(hidden, self.weights.forward(self.layer.mlp.linear_fc2)))
        with profile_range(Part.residual):
            return x_MH + y_MH, (normed, rstd_M, gate_up)

    def fc1(self, normed: Quantized) -> Tensor:
        """Return gate and up [M, O]; gates are the first half."""
        with profile_range(Part.fc1):
            return self.ops.matmul(self.tp.gather_quantized(normed), self.weights.forward(self.layer.mlp.linear_fc1))

    def mlp_backward(self, grad_MH: Tensor, saved: SavedActivations) -> tuple[Tensor, Quantized]:
        """Return the gradient of x + y, residual included: this rank's rows, and the rows of all TP ranks in FP8."""
        mlp, weights = self.layer.mlp, self.weights
        gate_up = saved.gate_up
        if gate_up is None:
            with profile_range(Phase.recomputation), profile_range(Part.activation):
                gate_up = self.ops.swiglu_quantize(self.fc1(saved.mlp_normed))[1]
        with profile_range(Part.fc2):
            grad = self.tp.gather_quantized(self.ops.quantize(grad_MH))
            hidden_grad = self.ops.matmul(grad, weights.backward(mlp.linear_fc2))
        with profile_range(Part.activation):
            assert gate_up is not None
            grad = self.ops.swiglu_backward_quantize(hidden_grad, gate_up)
        saved.gate_up = None
        del gate_up, hidden_grad
        with profile_range(Part.fc1):
            normed_grad = self.tp.reduce(self.ops.matmul(grad, weights.backward(mlp.linear_fc1)))
        with profile_range(Part.norm):
            grad_MH, grad = self.ops.norm_backward_quantize(
                normed_grad, grad_MH, saved.mlp_normed, saved.mlp_rstd_M, self.layer.pre_mlp_layernorm.weight
            )
        return grad_MH, self.tp.gather_quantized(grad)

    def attention_backward(
        self, grad_MH: Tensor, grad: Quantized, saved: SavedActivations, *, is_needed: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the layer's input (None unless needed), and of A and B of qkv and of proj."""
        attended_grad, *proj_grads = self.project_backward(grad_MH, grad, saved)
        heads, kept = self.saved_heads(saved)
        q, k, v = heads
        del heads
        out = self._unflat(saved.attended_MO.view(len(saved.attended_MO), -1, q.shape[-1]))
        options = {"scale": q.shape[-1] ** -0.5, **self.attention_options}
        with profile_range(Part.attention):
            dq, dk, dv = attend_backward(attended_grad.view_as(q), q, k, v, out, saved.lse, **options)
        del attended_grad, q, k, v, out
        with profile_range(Part.rope):
            flat = dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
            if self.norms is None:
                qkv_grad_MO, qkv_grad = self.ops.rope_backward(*flat, self.freqs_MD)
            else:
                qkv_grad_MO, qkv_grad = self.ops.normed_rope_backward(*flat, self.freqs_MD, kept[0], self.norms)
            del flat, kept
        low_grad_MR: Tensor | None = None
        qkv_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.qkv:
            assert saved.qkv_low_MR is not None
            with profile_range(Part.adapters):
                low_grad_MR = self.tp.reduce(self.qkv.scale * (qkv_grad_MO @ self.qkv.b_OR))
                b_grad_OR = self.qkv.scale * (qkv_grad_MO.T @ saved.qkv_low_MR)
                qkv_grads = self.ops.down_backward(low_grad_MR, saved.normed, self.qkv.drop), b_grad_OR
        if not is_needed:
            return None, *qkv_grads, *proj_grads
        with profile_range(Part.qkv):
            normed_grad = self.tp.reduce(self.ops.matmul(qkv_grad, self.weights.backward(self.layer.qkv)))
        with profile_range(Part.adapters):
            adapted = None
            if self.qkv and low_grad_MR is not None:
                adapted = Adapted(low_grad_MR @ self.qkv.a_RI, self.qkv.drop)
        weight_H = self.layer.input_layernorm.weight
        with profile_range(Part.norm):
            dx_MH = self.ops.norm_backward(normed_grad, grad_MH, saved.normed, saved.rstd_M, weight_H, adapted)
        return dx_MH, *qkv_grads, *proj_grads

    def saved_heads(self, saved: SavedActivations) -> tuple[Heads, SavedHeads]:
        """Return q, k and v again, and what was saved of them, which is freed; recompute what was not saved."""
        kept, saved.qkv = saved.qkv, None
        if kept is None:
            with profile_range(Phase.recomputation):
                return self.heads(saved.normed, saved.qkv_low_MR)
        return (self.split(*kept), kept) if len(kept) == 1 else (kept, kept)

    def project_backward(
        self, grad_MH: Tensor, grad: Quantized, saved: SavedActivations
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the attention output [M, O] and of the projection's A and B."""
        with profile_range(Part.output):
            attended_grad = self.ops.matmul(grad, self.weights.backward(self.layer.proj))
        if self.proj is None:
            return attended_grad, None, None
        assert saved.proj_low_MR is not None
        with profile_range(Part.adapters):
            low_grad_MR = self.tp.gather(self.proj.scale * (grad_MH @ self.proj.b_OR))
            b_grad_OR = self.proj.scale * (grad_MH.T @ saved.proj_low_MR)
            a_grad_RI = self.ops.down_backward(low_grad_MR, saved.attended_MO, self.proj.drop)
            attended_grad = self.ops.add_down_gradient(attended_grad, low_grad_MR, self.proj.a_RI, self.proj.drop)
        return attended_grad, a_grad_RI, b_grad_OR

    def _unflat(self, x: Tensor) -> Tensor:
        by_batch: Tensor = x.unflatten(0, (-1, self.batch))
        return by_batch


def _adapter(linear: Any, a_RI: Tensor | None, b_OR: Tensor | None, drop: Dropout) -> Adapter | None:
    return None if a_RI is None or b_OR is None else Adapter(a_RI, b_OR, linear.scale, drop)


def rank_dropout(p: float, seed: int | Tensor, *, tp_rank: int, is_split: bool) -> Dropout:
    """Return a TP rank's dropout; ranks that hold different parts of the tensor (is_split) get different masks."""
    return Dropout(p, (seed + tp_rank) % 2**31 if is_split and tp_rank else seed)


def _seeds() -> list[int]:
    """Return dropout seeds for the two adapters, the same on all TP ranks.

    They are drawn on the CPU, so that the host does not wait for the device.
    """
    seeds: list[int] = torch.randint(2**31, (2,), device="cpu").tolist()
    return seeds
