"""torch's attention kernels of a GPU in FP64, for tests on a CPU. They require what the kernels require.

Shape letters: B batch, H heads, G key/value groups, S queries, T keys, D head dimension.
"""

from typing import Any

import pytest
import torch
from torch import Tensor


class GpuAttention:
    """cuDNN's kernels, which support GQA, and the memory-efficient ones, in place of `torch.ops.aten`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(module, "_aten", self)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)

    def _scaled_dot_product_cudnn_attention(self, q: Tensor, k: Tensor, v: Tensor, *words: Any, scale: float) -> Any:
        *options, causal = words
        assert options == [None, True, 0.0], "no bias, with lse, no dropout"
        self.calls.append("cudnn")
        out, lse = _forward(q, k, v, causal, scale)
        return out.to(q.dtype), lse.float()[..., None], None, None, q.shape[2], k.shape[2], None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *words: Any, scale: float
    ) -> tuple[Tensor, ...]:
        seed, offset, *options, causal = words
        assert seed.shape == offset.shape == () and seed.dtype is torch.int64
        assert options == [None, None, None, q.shape[2], k.shape[2], 0.0] and lse.shape == (*q.shape[:3], 1)
        assert dout.permute(2, 0, 1, 3).is_contiguous(), "the key of its plans ignores the strides"
        self.calls.append("cudnn backward")
        return _backward(dout, q, k, v, out, lse[..., 0], causal, scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *words: Any, scale: float
    ) -> tuple[Tensor, ...]:
        *options, causal = words
        assert options == [None, True, 0.0] and q.shape[1] == k.shape[1] == v.shape[1], "GQA is not supported"
        self.calls.append("efficient")
        out, lse = _forward(q, k, v, causal, scale)
        padded = torch.nn.functional.pad(lse.float(), (0, -q.shape[2] % 32), value=torch.inf)
        return out.to(q.dtype), padded, torch.empty(0), torch.empty(0)

    def _scaled_dot_product_efficient_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor, *words: Any,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        seed, offset, *options, causal = words
        assert bias is None and seed.shape == offset.shape == () and seed.dtype is torch.int64
        assert options == [0.0, (True, True, True, False)] and q.shape[1] == k.shape[1]
        assert out.transpose(1, 2).is_contiguous() and lse.shape == (*q.shape[:2], -(-q.shape[2] // 32) * 32)
        assert (lse[:, :, q.shape[2] :] == torch.inf).all()
        self.calls.append("efficient backward")
        return *_backward(dout, q, k, v, out, lse[:, :, : q.shape[2]], causal, scale), torch.empty(0)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) * scale
    return scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf) if causal else scores


def _repeated(q: Tensor, *of_groups: Tensor) -> list[Tensor]:
    return [x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in of_groups]


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    keys, values = _repeated(q, k, v)
    scores = _scores(q.double(), keys, causal, scale)
    return torch.einsum("bhst,bhtd->bhsd", scores.softmax(3), values), scores.logsumexp(3)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHS: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v; lse and out may be those of more keys than k."""
    keys, values = _repeated(q, k, v)
    weights = (_scores(q.double(), keys, causal, scale) - lse_BHS.double()[..., None]).exp()
    of_weights = torch.einsum("bhsd,bhtd->bhst", dout.double(), values)
    of_scores = weights * (of_weights - (dout.double() * out.double()).sum(3, keepdim=True)) * scale
    dq = torch.einsum("bhst,bhtd->bhsd", of_scores, keys)
    dk = torch.einsum("bhst,bhsd->bhtd", of_scores, q.double())
    dv = torch.einsum("bhst,bhsd->bhtd", weights, dout.double())
    by_group = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype) for x in (dq, *by_group))
