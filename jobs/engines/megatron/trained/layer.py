"""The transformer layer that trains all weights. Its hand-written forward and backward passes support every precision.

Llama has RMSNorm, SwiGLU, RoPE and GQA without biases; Qwen2 has biases of q, k and v, and Qwen3 norms of the heads of
q and k; GPT-3 has LayerNorm, exact GELU and biases. Weight gradients are added directly to `weight.main_grad`, the FP32
buffers of megatron-core's DistributedDataParallel. Autograd only gets the gradient of the layer's input. The inputs of
qkv and fc1 are recomputed from the inputs of the norms, the input of fc2 from the input of its activation function.

These tensors are saved for the backward pass; hidden width h, Q width n, K or V width k, MLP width f, p bytes per
element (2 in BF16 and FP8, 4 in FP32), q bytes per element of a GEMM operand (1 in FP8, else p):

| saved tensor                       | bytes per token                | split over           |
| ---------------------------------- | ------------------------------ | -------------------- |
| inputs of the two norms            | 2 p h                          | tp if sp             |
| 1 / rms of both; LayerNorm's means | 8; 8 more                      | not split            |
| q, k, v; with their norms, qkv     | p (n + 2 k)                    | tp; 0 if recomputed  |
| output of attention                | p n                            | tp                   |
| softmax statistics                 | 4 heads                        | tp                   |
| gate and up, or the input of GELU  | 2 q f or q f                   | tp; 0 if recomputed  |
| their scales, in FP8               | 8 or 4                         | not split; likewise  |

The input of the first norm is the output of the previous layer, so each layer holds two hidden states, not three.

Shape letters: S sequence and B batch of this rank, M = S * B tokens (between the linears under SP: those of this TP
rank), H hidden, D head dimension, O output of a linear on this TP rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from bench.contract.modules import Part, Phase
from jobs.engines.megatron.attention import attend, attend_backward
from jobs.engines.megatron.hand_written_layer import HandWrittenLayer
from jobs.engines.megatron.head_norms import head_norms
from jobs.engines.megatron.tensor_parallel import ParallelLinear, Pending, TensorParallel
from jobs.engines.megatron.trained.ops import LinearWeights, NormStats, NormWeights, Operand, TrainedOps
from jobs.profiles.ranges import profile_range


class TrainedLayer(HandWrittenLayer):
    """The transformer layer that trains all weights."""

    ops: TrainedOps
    linear_weights: LinearWeights
    """Shared by all layers of a rank; `model.build` sets it, `data_parallel.UpdatedWeights` updates it."""
    after_backward: Callable[[], None] | None = None
    """Called when a backward pass has added all gradients of this layer; `data_parallel.wrap` sets it."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> tuple[Tensor, None]:
        """Return the layer's output [S, B, H], and None as the context that megatron-core expects."""
        y_SBH: Tensor = _LayerFunction.apply(  # type: ignore[no-untyped-call]  # torch's
            self, torch.is_grad_enabled(), rotary_pos_emb, packed_seq_params, hidden_states
        )
        return y_SBH, None


Heads = tuple[Tensor, Tensor, Tensor]
"""q, k and v, with RoPE applied to q and k."""
SavedHeads = Heads | tuple[Tensor]
"""Heads, or with norms of the heads the rows of qkv [M, O] that the norms read: q and k are made from them again."""


@dataclass(slots=True)
class SavedActivations:
    """The activations saved for the backward pass; qkv and activation are None if they are recomputed."""

    input_MH: Tensor
    stats: NormStats
    qkv: SavedHeads | None
    attended_MO: Tensor
    lse: Tensor
    mlp_input_MH: Tensor
    mlp_stats: NormStats
    activation: Operand | None


SavedByAttention = tuple[NormStats, SavedHeads | None, Tensor, Tensor]
SavedByMlp = tuple[Tensor, NormStats, Operand | None]
"""Fields of `SavedActivations`: stats to lse, and the last three."""
Norm = torch.nn.RMSNorm | torch.nn.LayerNorm


class _LayerFunction(Function):
    """The layer as an autograd function."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: TrainedLayer,
        keep: bool,
        freqs: Tensor | None,
        documents: PackedSeqParams | None,
        x_SBH: Tensor,
    ) -> Tensor:
        layer_pass = _LayerPass(layer, freqs, documents, x_SBH.shape[1])
        y_MH, saved_by_attention = layer_pass.attention(x_SBH.flatten(0, 1), keep=keep)
        x_MH, y_MH, saved_by_mlp = layer_pass.mlp(x_SBH.flatten(0, 1), y_MH, keep=keep)
        if keep:
            ctx.layer, ctx.freqs, ctx.documents = layer, freqs, documents
            layer.save_activations(ctx, SavedActivations(x_SBH.flatten(0, 1), *saved_by_attention, *saved_by_mlp))
        return x_MH.view_as(x_SBH) + y_MH.view_as(x_SBH)

    @staticmethod
    def backward(ctx: Any, grad_SBH: Tensor) -> tuple[None, None, None, None, Tensor]:
        layer_pass = _LayerPass(ctx.layer, ctx.freqs, ctx.documents, grad_SBH.shape[1])
        saved = ctx.layer.load_activations(ctx)
        grad_MH, grad = layer_pass.mlp_backward(grad_SBH.contiguous().flatten(0, 1), saved)
        dx_MH = layer_pass.attention_backward(grad_MH, grad, saved)
        if ctx.layer.after_backward is not None:
            ctx.layer.after_backward()
        return None, None, None, None, dx_MH.view_as(grad_SBH)


class _LayerPass:
    """One forward or backward pass of a micro-batch through the layer, with its process groups."""

    def __init__(
        self, layer: TrainedLayer, freqs: Tensor | None, documents: PackedSeqParams | None, batch: int
    ) -> None:
        self.layer, self.ops, self.weights, self.batch = layer, layer.ops, layer.linear_weights, batch
        self.fc1, self.fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
        self.freqs_MD = None if freqs is None else freqs.squeeze(2).expand(-1, batch, -1).flatten(0, 1)
        self.tp = TensorParallel(layer.tp_group, layer.config.sequence_parallel)
        self.norms = head_norms(layer.self_attention, layer.config.layernorm_epsilon)
        self.attention_options = {
            "scale": layer.self_attention.hidden_size_per_attention_head**-0.5,
            "group": parallel_state.get_context_parallel_group(),
            "documents": documents,
        }

    def attention(self, x_MH: Tensor, *, keep: bool) -> tuple[Tensor, SavedByAttention]:
        """Return the output of attention (without proj's bias and the residual x), and the activations to save."""
        with profile_range(Part.norm):
            normed, stats = self.ops.norm(x_MH, self.norm_weights(self.layer.input_layernorm))
        qkv, to_save = self.heads(self.tp.gather_quantized(normed))
        with profile_range(Part.attention):
            attended, lse = attend(*qkv, **self.attention_options)
        attended_MO = attended.flatten(2).flatten(0, 1)
        saved_qkv = to_save if keep and not self.layer.recompute_qkv else None
        del normed, attended, qkv, to_save
        with profile_range(Part.output):
            y_MH = self.ops.matmul(self.ops.operand(attended_MO), self.weights.forward(self.layer.proj))
        return self.tp.reduce(y_MH), (stats, saved_qkv, attended_MO, lse)

    def heads(self, normed: Operand) -> tuple[Heads, SavedHeads]:
        """Return q [S, B, N, D], k and v [S, B, G, D], with RoPE applied to q and k; and what to save of them."""
        linear = self.layer.qkv
        with profile_range(Part.qkv):
            qkv_MO = self.ops.matmul(normed, self.weights.forward(linear))
        heads = self.split(qkv_MO, linear.bias)
        return heads, heads if self.norms is None else (qkv_MO,)

    def split(self, qkv_MO: Tensor, bias_O: Tensor | None = None) -> Heads:
        """Return q, k and v of the rows; with norms, the bias is added to the rows."""
        attention = self.layer.self_attention
        shape = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        with profile_range(Part.rope):
            q, k, v = self.ops.split_heads(qkv_MO, bias_O, self.freqs_MD, *shape, self.norms)
        return self._unflat(q), self._unflat(k), self._unflat(v)

    def mlp(self, x_MH: Tensor, y_MH: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, SavedByMlp]:
        """Return x + y with proj's bias, the output of the MLP, and the activations to save."""
        norm_weights = self.norm_weights(self.layer.pre_mlp_layernorm)
        with profile_range(Part.norm):
            x_MH, normed, stats = self.ops.add_norm(x_MH, y_MH, self.layer.proj.bias, norm_weights)
        activation: Operand | None
        hidden, activation = self.activate(self.tp.gather_quantized(normed))
        if not keep or self.layer.recompute_fc1:
            activation = None
        del normed
        with profile_range(Part.fc2):
            y_MH = self.tp.reduce(self.ops.matmul(hidden, self.weights.forward(self.fc2)))
            if self.fc2.bias is not None:
                y_MH.add_(self.fc2.bias)
        return x_MH, y_MH, (x_MH, stats, activation)

    def activate(self, normed: Operand) -> tuple[Operand, Operand]:
        """Return the input of fc2, and the saved tensor for the backward pass of the activation function."""
        with profile_range(Part.fc1):
            fc1_MO = self.ops.matmul(normed, self.weights.forward(self.fc1))
        with profile_range(Part.activation):
            if self.layer.config.gated_linear_unit:
                return self.ops.swiglu(fc1_MO)
            return self.ops.gelu(fc1_MO, self.fc1.bias)

    def mlp_backward(self, grad_MH: Tensor, saved: SavedActivations) -> tuple[Tensor, Operand]:
        """Return the gradient of x + y, residual included: this rank's rows, and all TP ranks' rows as an operand."""
        norm = self.layer.pre_mlp_layernorm
        with profile_range(Part.fc2):
            self.add_bias_gradient(self.fc2.bias, grad_MH)
            grad = self.tp.gather_quantized(self.ops.operand(grad_MH))
        normed: Pending[Operand] | None = None
        if saved.activation is None:
            normed = self.start_recompute_norm(saved.mlp_input_MH, saved.mlp_stats, norm)
            with profile_range(Phase.recomputation):
                saved.activation = self.activate(normed.wait())[1]
        fc1_grad, hidden = self.activation_backward(grad, saved)
        with profile_range(Part.fc2):
            self.ops.add_weight_gradient(main_grad(self.fc2.weight), grad, hidden)
        del grad, hidden
        normed = normed or self.start_recompute_norm(saved.mlp_input_MH, saved.mlp_stats, norm)
        with profile_range(Part.fc1):
            normed_grad = self.linear_backward(self.fc1, fc1_grad, normed)
        del fc1_grad, normed
        grad_MH, grad = self.norm_backward(normed_grad, grad_MH, saved.mlp_input_MH, saved.mlp_stats, norm)
        return grad_MH, self.tp.gather_quantized(grad)

    def activation_backward(self, grad: Operand, saved: SavedActivations) -> tuple[Operand, Operand]:
        """Return the gradient of fc1's output and the recomputed input of fc2; free the saved activation."""
        with profile_range(Part.fc2):
            hidden_grad = self.ops.matmul(grad, self.weights.backward(self.fc2))
        activation, saved.activation = saved.activation, None
        assert activation is not None
        with profile_range(Part.activation):
            if self.layer.config.gated_linear_unit:
                return self.ops.swiglu_backward(hidden_grad, activation)
            return self.ops.gelu_backward(hidden_grad, activation)

    def attention_backward(self, grad_MH: Tensor, grad: Operand, saved: SavedActivations) -> Tensor:
        """Return the gradient of the layer's input, from the results of `mlp_backward`."""
        norm, x_MH = self.layer.input_layernorm, saved.input_MH
        with profile_range(Part.output):
            self.add_bias_gradient(self.layer.proj.bias, grad_MH)
            attended_grad = self.ops.matmul(grad, self.weights.backward(self.layer.proj))
            self.ops.add_weight_gradient(main_grad(self.layer.proj.weight), grad, self.ops.operand(saved.attended_MO))
        del grad
        normed: Pending[Operand] | None = None
        kept, saved.qkv = saved.qkv, None
        if kept is None:
            normed = self.start_recompute_norm(x_MH, saved.stats, norm)
            with profile_range(Phase.recomputation):
                qkv, kept = self.heads(normed.wait())
        else:
            qkv = self.split(*kept) if len(kept) == 1 else kept
        out = self._unflat(saved.attended_MO.view(len(saved.attended_MO), -1, qkv[0].shape[-1]))
        with profile_range(Part.attention):
            grads = attend_backward(attended_grad.view_as(out), *qkv, out, saved.lse, **self.attention_options)
        del attended_grad, qkv, out
        normed = normed or self.start_recompute_norm(x_MH, saved.stats, norm)
        qkv_grad = self.merge(grads, kept)
        del grads, kept
        with profile_range(Part.qkv):
            normed_grad = self.linear_backward(self.layer.qkv, qkv_grad, normed)
        del qkv_grad, normed
        return self.norm_backward(normed_grad, grad_MH, x_MH, saved.stats, norm)[0]

    def merge(self, grads: Heads, kept: SavedHeads) -> Operand:
        """Return the gradient of the qkv rows, and add those of the norms of the heads, which read the rows `kept`."""
        dq, dk, dv = (x.flatten(0, 1) for x in grads)
        with profile_range(Part.rope):
            if self.norms is None:
                return self.ops.merge_heads(dq, dk, dv, self.freqs_MD)
            grad, gradients = self.ops.merge_normed_heads(dq, dk, dv, self.freqs_MD, kept[0], self.norms)
            attention = self.layer.self_attention
            main_grad(attention.q_layernorm.weight).add_(gradients.q_D)
            main_grad(attention.k_layernorm.weight).add_(gradients.k_D)
            return grad

    def linear_backward(self, linear: ParallelLinear, grad: Operand, normed: Pending[Operand]) -> Tensor:
        """Add the weight gradients of qkv or fc1; return the gradient of its input (under SP, of this rank's rows).

        Collectives overlap with GEMMs: normed is gathered during the first GEMM, the result is reduced during the
        second.
        """
        normed_grad = self.tp.start_reduce(self.ops.matmul(grad, self.weights.backward(linear)))
        self.ops.add_weight_gradient(main_grad(linear.weight), grad, normed.wait())
        self.add_bias_gradient(linear.bias, grad)
        return normed_grad.wait()

    def add_bias_gradient(self, bias: Parameter | None, grad: Tensor | Operand) -> None:
        """Add the gradient of a linear's bias, if it has one, from the gradient of the linear's output."""
        if bias is not None:
            main_grad(bias).add_(self.ops.column_sum(grad))

    def norm_backward(
        self, grad_MH: Tensor, residual_MH: Tensor, x_MH: Tensor, stats: NormStats, norm: Norm
    ) -> tuple[Tensor, Operand]:
        """Add the gradients of a norm's weights; return residual + the gradient of its input, also as an operand."""
        weights = self.norm_weights(norm)
        with profile_range(Part.norm):
            dx_MH, dx, gradients = self.ops.norm_backward(grad_MH, residual_MH, x_MH, stats, weights)
            main_grad(norm.weight).add_(gradients.weight_H)
            if gradients.bias_H is not None:
                assert isinstance(norm.bias, Parameter)
                main_grad(norm.bias).add_(gradients.bias_H)
        return dx_MH, dx

    def start_recompute_norm(self, x_MH: Tensor, stats: NormStats, norm: Norm) -> Pending[Operand]:
        """Recompute the output of a norm, and start to gather the rows of all TP ranks."""
        with profile_range(Part.norm):
            return self.tp.start_gather_quantized(self.ops.recompute_norm(x_MH, stats, self.norm_weights(norm)))

    def norm_weights(self, norm: Norm) -> NormWeights:
        return NormWeights(norm.weight, getattr(norm, "bias", None), self.layer.config.layernorm_epsilon)

    def _unflat(self, x: Tensor) -> Tensor:
        by_batch: Tensor = x.unflatten(0, (-1, self.batch))
        return by_batch


def main_grad(weight: Parameter) -> Tensor:
    """Return the FP32 buffer of a weight's gradient.

    Raises:
        RuntimeError: the model is not wrapped in DistributedDataParallel.
    """
    grad: Tensor | None = getattr(weight, "main_grad", None)
    if grad is None:
        raise RuntimeError(
            "the weight has no main_grad: wrap the model in megatron-core's DistributedDataParallel before training"
        )
    return grad
