"""Causal attention by one of the backends of torch's scaled_dot_product_attention.

B rows of S tokens, H heads of D numbers, G heads of keys and values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from bench.contract.kernels import AttentionBackend, Point
from bench.errors import BenchError
from jobs.kernels.timing import Prepared

BACKENDS = {
    AttentionBackend.math: SDPBackend.MATH,
    AttentionBackend.efficient: SDPBackend.EFFICIENT_ATTENTION,
    AttentionBackend.flash: SDPBackend.FLASH_ATTENTION,
    AttentionBackend.cudnn: SDPBackend.CUDNN_ATTENTION,
}
FUSED = "_scaled_dot_product_"
"""The prefix of the operator of every backend except math, which consists of several operators."""


def prepare(point: Point, device: torch.device) -> Prepared:
    """Return the forward or backward pass of a point.

    Raises:
        RuntimeError: torch does not support the backend for this device and these sizes.
        BenchError: torch used another backend than the requested one.
    """
    batch, heads, groups, length, head = point.sizes
    backend = AttentionBackend[point.variant]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_backward = point.operation == "backward"
    q_BHSD = torch.randn(batch, heads, length, head, dtype=dtype, device=device, requires_grad=is_backward)
    k_BGSD, v_BGSD = (
        torch.randn(batch, groups, length, head, dtype=dtype, device=device, requires_grad=is_backward)
        for _ in range(2)
    )
    repeats = heads // groups if backend is AttentionBackend.efficient else 1  # this backend does not support GQA
    k, v = (_repeat_heads(tensor, repeats, is_backward=is_backward) for tensor in (k_BGSD, v_BGSD))

    def forward() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return scaled_dot_product_attention(q_BHSD, k, v, is_causal=True, enable_gqa=k.shape[1] != heads)

    with FusedOperator() as observed:
        out_BHSD = forward()
    implementation = _require(observed.name, backend) + (f", keys and values repeated {repeats} times" * (repeats > 1))
    if not is_backward:
        return Prepared(forward, implementation)
    grad_BHSD = torch.randn_like(out_BHSD)
    return Prepared(lambda: torch.autograd.grad(out_BHSD, (q_BHSD, k, v), grad_BHSD, retain_graph=True), implementation)


class FusedOperator(TorchDispatchMode):
    """Records the fused attention operator that is called inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.name = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.name = name if name.startswith(FUSED) else self.name
        return function(*args, **(kwargs or {}))


def _repeat_heads(tensor: Tensor, repeats: int, *, is_backward: bool) -> Tensor:
    if repeats == 1:
        return tensor
    return tensor.detach().repeat_interleave(repeats, dim=1).requires_grad_(is_backward)


def _require(fused: str, backend: AttentionBackend) -> str:
    """Return the name of the operator that ran; raise BenchError if it does not belong to the requested backend."""
    if backend.name in (fused or AttentionBackend.math.name):
        return f"aten.{fused}" if fused else "math: several operators"
    raise BenchError(
        f"torch used {fused or 'math'} attention instead of the requested backend {backend.name}",
        where="task.kernels.attention.backends",
        fix=f"remove {backend.name} from the list: this version of torch does not support this backend on this device",
    )
