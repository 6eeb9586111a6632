"""Llama's layer with frozen FP8 linears, forward and backward written out: what is kept is chosen, nothing else is.

The base is frozen, so the backward pass needs no linear's input for its weight. Kept are the normalised inputs of qkv and
fc1 in FP8 (for the norms' gradients and LoRA's), q, k, v and the attention's output in BF16, gate and up in FP8.
Activations and gradients are quantised row by row, in the kernels that make them.

Shape letters: S sequence and B batch of this rank, M = S * B tokens (under SP this TP rank's only, between the linears),
H hidden, D head dimension, N heads, G key/value groups, R LoRA rank, I and O a linear's input and output on this TP rank.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerLayer
from torch import Tensor
from torch.autograd import Function

from jobs.engines.megatron.attention import attend, attend_backward
from jobs.engines.megatron.fp8 import tensor_parallel
from jobs.engines.megatron.fp8.quantize import Adapted, Dropout, Lora, Quantized

if torch.cuda.is_available():
    from jobs.engines.megatron.fp8 import torch_ops
    from jobs.engines.megatron.fp8.transposed_weights import turned
else:
    from jobs.engines.megatron.fp8 import torch_ops
    from jobs.engines.megatron.fp8.torch_ops import turned


class Fp8Layer(TransformerLayer):
    """megatron-core's layer, its parts and their names, with a forward and a backward pass of our own.

    recompute_qkv, recompute_fc1: what they give is not kept, but made again in the backward pass.
    """

    def __init__(self, *args, recompute_qkv: bool = False, recompute_fc1: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.recompute_qkv, self.recompute_fc1 = recompute_qkv, recompute_fc1

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None, **_unused):
        """Return [S, B, H], and no context."""
        adapters = [getattr(part, name, None) for part in (self.qkv, self.proj) for name in ("lora_a", "lora_b")]
        keep = torch.is_grad_enabled()
        return _Pass.apply(self, keep, rotary_pos_emb, _seeds(), hidden_states, *adapters), None

    @property
    def backward_linears(self) -> list:
        """Those whose transposed weights the backward pass takes, in its order."""
        return [self.mlp.linear_fc2, self.mlp.linear_fc1, self.proj, self.qkv]

    @property
    def qkv(self):
        return self.self_attention.linear_qkv

    @property
    def proj(self):
        return self.self_attention.linear_proj


class Adapter(NamedTuple):
    """A linear's A [R, I] and B [O, R]: y += scale * B A dropout(x)."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    drop: Dropout


@dataclass(slots=True)
class Kept:
    """What the backward pass needs of the forward pass; qkv and gate_up are None where they are made again."""

    normed: Quantized
    rstd_M: Tensor
    qkv_low_MR: Tensor | None
    qkv: tuple[Tensor, Tensor, Tensor] | None
    attended_MO: Tensor
    lse: Tensor
    proj_low_MR: Tensor | None
    mlp_normed: Quantized
    mlp_rstd_M: Tensor
    gate_up: Quantized | None


class _Pass(Function):
    """A pass through a layer, and back."""

    @staticmethod
    def forward(ctx: Any, layer: Fp8Layer, keep: bool, freqs: Tensor, seeds: list[int], x_SBH: Tensor, *weights):
        run = _Run(layer, freqs, x_SBH.shape[1], seeds, weights)
        ctx.layer, ctx.freqs, ctx.seeds = layer, freqs, seeds
        ctx.save_for_backward(*weights)
        x_MH, of_attention = run.attention(x_SBH.flatten(0, 1))
        x_MH, y_MH, of_mlp = run.mlp(x_SBH.flatten(0, 1), x_MH, keep=keep and not layer.recompute_fc1)
        ctx.kept = Kept(*of_attention, *of_mlp)
        return x_MH.view_as(x_SBH) + y_MH.view_as(x_SBH)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor):
        run = _Run(ctx.layer, ctx.freqs, grad_SBH.shape[1], ctx.seeds, ctx.saved_tensors)
        kept, ctx.kept = ctx.kept, None
        grad_MH, grad = run.mlp_backward(grad_SBH.contiguous().flatten(0, 1), kept)
        grad_MH, *of_adapters = run.attention_backward(grad_MH, grad, kept, is_needed=ctx.needs_input_grad[4])
        return None, None, None, None, None if grad_MH is None else grad_MH.view_as(grad_SBH), *of_adapters


class _Run:
    """A layer's weights and what goes along with them, for one micro-batch."""

    def __init__(self, layer: Fp8Layer, freqs: Tensor, batch: int, seeds: list[int], weights):
        self.layer, self.batch, self.eps = layer, batch, layer.config.layernorm_epsilon
        self.freqs_MD = freqs.squeeze(2).expand(-1, batch, -1).flatten(0, 1)
        self.tp = tensor_parallel.TensorParallel(layer.tp_group, layer.config.sequence_parallel)
        self.cp_group = parallel_state.get_context_parallel_group()
        self.qkv = self._adapter(layer.qkv, *weights[:2], seeds[0], is_split=self.tp.sp)
        self.proj = self._adapter(layer.proj, *weights[2:], seeds[1], is_split=self.tp.size > 1)

    def _adapter(self, part, a_RI: Tensor | None, b_OR: Tensor | None, seed: int, *, is_split: bool) -> Adapter | None:
        """Return a linear's adapter; TP ranks that hold different parts of its input drop different numbers."""
        if a_RI is None or b_OR is None:
            return None
        p = self.layer.config.lora.dropout if self.layer.training else 0.0
        return Adapter(a_RI, b_OR, part.scale, Dropout(p, (seed + is_split * self.tp.rank) % 2**31))

    def attention(self, x_MH: Tensor) -> tuple[Tensor, tuple]:
        """Return what attention adds to x, and what to keep of it."""
        normed, rstd_M = torch_ops.norm_quantize(x_MH, self.layer.input_layernorm.weight, self.eps)
        low_MR = self.tp.gather(torch_ops.down(normed, self.qkv.a_RI, self.qkv.drop)) if self.qkv else None
        qkv = self.heads(normed, low_MR)
        attended, lse = attend(*qkv, scale=qkv[0].shape[-1] ** -0.5, group=self.cp_group)
        attended_MO = attended.flatten(2).flatten(0, 1)
        y_MH, proj_low_MR = self.project(attended_MO)
        kept = None if self.layer.recompute_qkv else qkv
        return y_MH, (normed, rstd_M, low_MR, kept, attended_MO, lse, proj_low_MR)

    def heads(self, normed: Quantized, low_MR: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [S, B, N, D], k and v [S, B, G, D], q and k turned by their positions."""
        qkv_MO = torch_ops.matmul(self.tp.gather_quantized(normed), self.layer.qkv.quantized)
        lora = Lora(low_MR, self.qkv.b_OR, self.qkv.scale) if self.qkv else None
        q, k, v = torch_ops.rope(qkv_MO, self.freqs_MD, self.layer.self_attention.num_query_groups_per_partition, lora)
        return self._unflat(q), self._unflat(k), self._unflat(v)

    def project(self, attended_MO: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output projection [M, H], and its adapter's A dropout(x) [M, R]."""
        y_MH = self.tp.reduce(torch_ops.matmul(torch_ops.quantize(attended_MO), self.layer.proj.quantized))
        if self.proj is None:
            return y_MH, None
        low_MR = self.tp.reduce(torch_ops.down(attended_MO, self.proj.a_RI, self.proj.drop))
        return y_MH.addmm_(low_MR, self.proj.b_OR.T, alpha=self.proj.scale), low_MR

    def mlp(self, x_MH: Tensor, y_MH: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, tuple]:
        """Return x + y, what the MLP adds to it, and what to keep."""
        x_MH, normed, rstd_M = torch_ops.add_norm_quantize(x_MH, y_MH, self.layer.pre_mlp_layernorm.weight, self.eps)
        hidden, gate_up = torch_ops.swiglu_quantize(self.fc1(normed), keep=keep)
        y_MH = self.tp.reduce(torch_ops.matmul(hidden, self.layer.mlp.linear_fc2.quantized))
        return x_MH, y_MH, (normed, rstd_M, gate_up)

    def fc1(self, normed: Quantized) -> Tensor:
        """Return gate and up [M, O], gates first."""
        return torch_ops.matmul(self.tp.gather_quantized(normed), self.layer.mlp.linear_fc1.quantized)

    def mlp_backward(self, grad_MH: Tensor, kept: Kept) -> tuple[Tensor, Quantized]:
        """Return the gradient of the MLP's input with the residual's, of this rank's rows, and in FP8 of all TP ranks'."""
        mlp, weight_H = self.layer.mlp, self.layer.pre_mlp_layernorm.weight
        gate_up = kept.gate_up or torch_ops.swiglu_quantize(self.fc1(kept.mlp_normed))[1]
        grad = self.tp.gather_quantized(torch_ops.quantize(grad_MH))
        hidden_grad = torch_ops.matmul(grad, turned(mlp.linear_fc2))
        grad = torch_ops.swiglu_backward_quantize(hidden_grad, gate_up)
        kept.gate_up = gate_up = hidden_grad = None
        normed_grad = self.tp.reduce(torch_ops.matmul(grad, turned(mlp.linear_fc1)))
        grad_MH, grad = torch_ops.norm_backward_quantize(
            normed_grad, grad_MH, kept.mlp_normed, kept.mlp_rstd_M, weight_H
        )
        return grad_MH, self.tp.gather_quantized(grad)

    def attention_backward(self, grad_MH: Tensor, grad: Quantized, kept: Kept, *, is_needed: bool) -> tuple:
        """Return the gradient of the layer's input (None where nobody needs it) and those of A, B of qkv, A, B of proj."""
        attended_grad, *of_proj = self.project_backward(grad_MH, grad, kept)
        q, k, v = kept.qkv or self.heads(kept.normed, kept.qkv_low_MR)
        out = self._unflat(kept.attended_MO.view(len(kept.attended_MO), -1, q.shape[-1]))
        options = {"scale": q.shape[-1] ** -0.5, "group": self.cp_group}
        dq, dk, dv = attend_backward(attended_grad.view_as(q), q, k, v, out, kept.lse, **options)
        del attended_grad, q, k, v, out
        kept.qkv = None
        flat = (x.flatten(0, 1) for x in (dq, dk, dv))
        qkv_grad_MO, qkv_grad = torch_ops.rope_backward(*flat, self.freqs_MD)
        low_grad_MR, of_qkv = None, (None, None)
        if self.qkv:
            low_grad_MR = self.tp.reduce(self.qkv.scale * (qkv_grad_MO @ self.qkv.b_OR))
            b_grad_OR = self.qkv.scale * (qkv_grad_MO.T @ kept.qkv_low_MR)
            of_qkv = torch_ops.down_backward(low_grad_MR, kept.normed, self.qkv.drop), b_grad_OR
        if not is_needed:
            return None, *of_qkv, *of_proj
        normed_grad = self.tp.reduce(torch_ops.matmul(qkv_grad, turned(self.layer.qkv)))
        adapted = Adapted(low_grad_MR @ self.qkv.a_RI, self.qkv.drop) if self.qkv else None
        weight_H = self.layer.input_layernorm.weight
        dx_MH = torch_ops.norm_backward(normed_grad, grad_MH, kept.normed, kept.rstd_M, weight_H, adapted)
        return dx_MH, *of_qkv, *of_proj

    def project_backward(self, grad_MH: Tensor, grad: Quantized, kept: Kept) -> tuple:
        """Return the gradient of the attention's output [M, O], and those of the projection's A and B."""
        attended_grad = torch_ops.matmul(grad, turned(self.layer.proj))
        if self.proj is None:
            return attended_grad, None, None
        low_grad_MR = self.tp.gather(self.proj.scale * (grad_MH @ self.proj.b_OR))
        b_grad_OR = self.proj.scale * (grad_MH.T @ kept.proj_low_MR)
        a_grad_RI = torch_ops.down_backward(low_grad_MR, kept.attended_MO, self.proj.drop)
        attended_grad = torch_ops.add_down_gradient(attended_grad, low_grad_MR, self.proj.a_RI, self.proj.drop)
        return attended_grad, a_grad_RI, b_grad_OR

    def _unflat(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.batch))


def _seeds() -> list[int]:
    """Return seeds for the two adapters' dropout, the same on all TP ranks: drawn on the host, so that nothing waits."""
    return torch.randint(2**31, (2,), device="cpu").tolist()
