"""Device memory traffic of the element-wise kernels in one layer, counted by hand in jobs/engines/megatron."""

from dataclasses import dataclass

from bench.contract.schema import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes per token that the kernels of one layer read and write, without GEMMs and attention."""

    residual: int
    """Per number of the hidden state, in kernels that tp splits only under sp: norms, residual, adapters of qkv."""
    attention: int
    """Per number of the hidden state, in kernels that tp always splits: the adapter of proj."""
    qkv: float
    """Per number of the qkv output."""
    fc1: float
    """Per number of the fc1 output."""


FORWARD = {
    # residual: norm 3, A 1, sum with B 4, residual sum and norm 7, residual sum 6
    # attention: quantize 3, A 2; qkv: sum with B and RoPE 4; fc1: SwiGLU
    Precision.fp8: Traffic(residual=21, attention=5, qkv=4, fc1=4.5),
    # residual: norms 8, residual sums 12, dropout and A 7, scale B and sum 12
    # attention: dropout and A 7; qkv: B 12, RoPE 14; fc1: SwiGLU
    Precision.bf16: Traffic(residual=39, attention=7, qkv=26, fc1=3),
}
BACKWARD = {
    # residual: quantize 3, norms 17, B 4, A 3; attention: A 2, sum 4; qkv: RoPE 5, B 4; fc1: SwiGLU
    Precision.fp8: Traffic(residual=27, attention=6, qkv=9, fc1=4.5),
    # residual: norms 12, residual sums 12, A and dropout 15, B 6; attention: A and dropout 15
    # qkv: RoPE 14, split and concatenate 4, B 6; fc1: SwiGLU
    Precision.bf16: Traffic(residual=45, attention=15, qkv=24, fc1=5),
}
"""With LoRA on qkv and proj. The kernels are fused in FP8; in BF16 they are plain torch, except SwiGLU.

SwiGLU in FP8 reads each row twice, the second time mostly from the cache: 4.5 follows from its time in a step.
"""
