"""Device memory traffic of the element-wise kernels in one layer, counted by hand from jobs/engines/megatron."""

from dataclasses import dataclass, replace

from bench.contract.layers import Layer, has_head_kernels, layer_of
from bench.contract.model import Activation, Model
from bench.contract.schema import Config, Precision
from bench.contract.training import Trains
from bench.planning.estimates.activations import quantized_bytes
from bench.planning.estimates.parameters import linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per token that the kernels of one layer read and write, without GEMMs and attention."""

    residual: int
    """Per element of the hidden state, in kernels that tp splits only under sp: norms, residual, adapters of qkv."""
    attention: int
    """Per element of the output of attention, in kernels that tp always splits: the adapter of proj."""
    qkv: float
    """Per element of the qkv output."""
    fc1: float
    """Per element of the fc1 output."""


_FORWARD = {
    # residual: norm 3, A 1, sum with B 4, residual sum and norm 7, residual sum 6
    # attention: quantize 3, A 2; qkv: sum with B and RoPE 4; fc1: SwiGLU
    (Layer.frozen, Precision.fp8): Traffic(residual=21, attention=5, qkv=4, fc1=3.9),
    # the same, with norms of 4 and 8 that A reads with 2, and nothing quantized
    (Layer.frozen, Precision.bf16): Traffic(residual=24, attention=2, qkv=4, fc1=3),
    # residual: norms 8, residual sums 12, dropout and A 7, scale B and sum 12
    # attention: dropout and A 7; qkv: B 12, RoPE 14; fc1: SwiGLU
    (Layer.megatron, Precision.bf16): Traffic(residual=39, attention=7, qkv=26, fc1=3),
    # residual: norm 3, residual sum and norm 7, residual sum 6; attention: quantize 3; qkv: RoPE 4; fc1: SwiGLU
    (Layer.trained, Precision.fp8): Traffic(residual=16, attention=3, qkv=4, fc1=3.9),
    (Layer.trained, Precision.bf16): Traffic(residual=18, attention=0, qkv=4, fc1=3),
}
_BACKWARD = {
    # residual: quantize 3, norms 17, B 4, A 3; attention: A 2, sum 4; qkv: RoPE 5, B 4; fc1: SwiGLU
    (Layer.frozen, Precision.fp8): Traffic(residual=27, attention=6, qkv=9, fc1=3.9),
    # residual: norms 18, B 4, A 4; attention: A 2, sum 4; qkv: RoPE 4, B 4; fc1: SwiGLU
    (Layer.frozen, Precision.bf16): Traffic(residual=26, attention=6, qkv=8, fc1=5),
    # residual: norms 12, residual sums 12, A and dropout 15, B 6; attention: A and dropout 15
    # qkv: RoPE 14, split and concatenate 4, B 6; fc1: SwiGLU
    (Layer.megatron, Precision.bf16): Traffic(residual=45, attention=15, qkv=24, fc1=5),
    # residual: quantize 3, norms again 6, norms 17, transpose the operands of the weights' gradients 8
    # attention: quantize 3, transpose 2; qkv: RoPE 3, transpose 2; fc1: SwiGLU with its output again 5, transpose 3
    (Layer.trained, Precision.fp8): Traffic(residual=34, attention=5, qkv=5, fc1=8),
    # residual: norms again 8, norms 16; qkv: RoPE 4; fc1: SwiGLU with its output again 6
    (Layer.trained, Precision.bf16): Traffic(residual=24, attention=0, qkv=4, fc1=6),
}
"""Frozen and megatron layers have LoRA on qkv and proj. The kernels are fused; megatron-core's are plain torch, except
SwiGLU.

SwiGLU in FP8 reads each row twice, the second time mostly from the cache: 3.9 follows from its time in a step.
"""
_GELU_FORWARD = {Precision.fp8: 4.0, Precision.bf16: 4.0}
_GELU_BACKWARD = {Precision.fp8: 9.0, Precision.bf16: 8.0}
"""For the trained layer instead of SwiGLU: fc1's output is as wide as the activation. FP8 includes transposing."""


_HEAD_NORMS_FORWARD = {Layer.frozen: 2, Layer.megatron: 4, Layer.trained: 0}
_HEAD_NORMS_BACKWARD = {Layer.frozen: 6, Layer.megatron: 6, Layer.trained: 6}
"""Per element of the qkv output, for norms on the heads of q and k: with an adapter, the sum with B is also written;
the backward pass reads it, and makes q and k from it again. megatron-core has two norms in plain torch."""


def forward_traffic(config: Config) -> Traffic:
    """Return the traffic of a layer's forward pass."""
    return _of_heads(config, _traffic(config, _FORWARD, _GELU_FORWARD), _FORWARD, _HEAD_NORMS_FORWARD)


def backward_traffic(config: Config) -> Traffic:
    """Return the traffic of a layer's backward pass; the gradient of a bias reads that of the linear's output."""
    m = config.model
    counted = _of_heads(config, _traffic(config, _BACKWARD, _GELU_BACKWARD), _BACKWARD, _HEAD_NORMS_BACKWARD)
    if layer_of(config) is not Layer.trained or not (m.bias or m.qkv_bias):
        return counted
    read = quantized_bytes(config)
    counted = replace(counted, qkv=counted.qkv + read)
    return replace(counted, residual=counted.residual + 2 * read, fc1=counted.fc1 + read) if m.bias else counted


def relative_to_fused(config: Config) -> float:
    """Return the bytes of a layer's element-wise kernels relative to runstop's own layer with all its kernels."""
    fused = Layer.trained if config.training.trains is Trains.all else Layer.frozen
    norms = (_HEAD_NORMS_FORWARD[fused] + _HEAD_NORMS_BACKWARD[fused]) * config.model.qk_norm
    passes, model = (_FORWARD[fused, config.precision], _BACKWARD[fused, config.precision]), config.model
    expected = sum(bytes_per_token(model, one) for one in passes) + norms * linears(model)["linear_qkv"].num_out
    counted = (forward_traffic(config), backward_traffic(config))
    return sum(bytes_per_token(model, one) for one in counted) / expected


def bytes_per_token(model: Model, traffic: Traffic) -> float:
    """Return the bytes per token of one pass through a layer, without tensor parallelism."""
    sizes = {name: linear.num_out for name, linear in linears(model).items()}
    of_linears = traffic.qkv * sizes["linear_qkv"] + traffic.fc1 * sizes["linear_fc1"]
    return of_linears + traffic.residual * model.hidden_size + traffic.attention * model.q_size


def _of_heads(
    config: Config, counted: Traffic, by_layer: dict[tuple[Layer, Precision], Traffic], norms: dict[Layer, int]
) -> Traffic:
    """Return the traffic with norms of heads, and without kernels for heads of this size, as megatron-core's layer."""
    qkv = counted.qkv if has_head_kernels(config.model) else by_layer[Layer.megatron, Precision.bf16].qkv
    return replace(counted, qkv=qkv + norms[layer_of(config)] * config.model.qk_norm)


def _traffic(
    config: Config, by_layer: dict[tuple[Layer, Precision], Traffic], of_gelu: dict[Precision, float]
) -> Traffic:
    layer = layer_of(config)
    counted = by_layer[layer, config.precision]
    if layer is not Layer.trained or config.model.activation is Activation.swiglu:
        return counted
    return replace(counted, fc1=of_gelu[config.precision])
