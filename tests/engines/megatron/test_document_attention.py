"""Attention within documents, compared with an explicit softmax in FP64; the GPU's kernel is a fake with its rules."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import ranks
from helpers.gpu_attention import GpuAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import attention

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's, in a thread without a context
S, H, D, SCALE = 24, 4, 16, 0.3
ALONE: Any = SimpleNamespace(size=lambda: 1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LENGTHS = st.lists(st.integers(0, S - 1), max_size=S).map(lambda cuts: cut(sorted({0, *cuts})))


def cut(starts: list[int]) -> list[int]:
    """Return the lengths of the documents of a row that begin at these places."""
    return [end - start for start, end in zip(starts, [*starts[1:], S], strict=True)]


def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: list[list[int]]) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, by explicit softmax in FP64 under an explicit mask."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    k_SBHD, v_SBHD = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k_SBHD) * SCALE
    document = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows], device=q.device)
    is_seen = (document[:, :, None] == document[:, None, :]) & torch.ones(S, S, device=q.device).tril().bool()
    out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(3), v_SBHD)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def compare(rows: list[list[int]], *, groups: int, dtype: torch.dtype) -> None:
    """Compare output and gradients of rows with documents of these lengths; k and v are views of one tensor."""
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(S, len(rows), H, D, generator=generator).to(ranks.DEVICE, dtype) for _ in range(2))
    k, v = torch.randn(S, len(rows), groups, 2 * D, generator=generator).to(ranks.DEVICE, dtype).split(D, dim=3)
    lengths = torch.tensor([length for row in rows for length in row])
    options: Any = {"scale": SCALE, "group": ALONE, "documents": attention.packed_seq_params(lengths, q.device)}
    out, lse = attention.attend(q, k, v, **options)
    got = out, *attention.attend_backward(dout, q, k, v, out, lse, **options)
    for name, one, want in zip(("out", "dq", "dk", "dv"), got, expected(q, k, v, dout, rows), strict=True):
        assert one.shape == want.shape and one.dtype is dtype
        assert (one.double() - want).norm() <= TOLERANCE[dtype] * want.norm(), name


@pytest.mark.long
@given(rows=st.lists(LENGTHS, min_size=1, max_size=3), groups=st.sampled_from((1, 2, H)))
@settings(max_examples=25, deadline=None)
def test_attention_is_that_of_an_explicit_mask(rows: list[list[int]], groups: int) -> None:
    compare(rows, groups=groups, dtype=torch.float32)


class FakeFlash:
    """FlashAttention for variable lengths, in FP64; it refuses what the kernel refuses."""

    def __init__(self) -> None:
        self.longest: list[int] = []

    def _check(self, q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
        assert q.ndim == k.ndim == 3 and q.stride(-1) == k.stride(-1) == 1
        assert cu_q.dtype is cu_k.dtype is torch.int32 and cu_q.is_contiguous()
        assert cu_q[0] == 0 and cu_q[-1] == len(q) and torch.equal(cu_q, cu_k)
        assert max_q == max_k == int(cu_q.diff().max()), "a larger grid costs time, a smaller one computes wrongly"
        self.longest.append(max_q)

    def _documents(self, cu: Tensor) -> list[slice]:
        return [slice(start, end) for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for part in self._documents(cu):
            ours = [x[part].repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, k, v)]
            scores = torch.einsum("shd,thd->hst", ours[0], ours[1]) * scale
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
            outs.append(torch.einsum("hst,thd->shd", scores.softmax(2), ours[2]))
            lses.append(scores.logsumexp(2))
        return torch.cat(outs), torch.cat(lses, dim=1)

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *words: Any,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert words == (0.0, True, False), "no dropout, causal, no debug mask"
        self._check(q, k, cu_q, cu_k, max_q, max_k)
        out, lse = self._attend(q.double(), k.double(), v.double(), cu_q, scale)
        return out.to(q.dtype), lse.float(), torch.empty(2), torch.empty(0), torch.empty(0)

    def _flash_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
        max_q: int, max_k: int, *words: Any, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert words[:2] == (0.0, True) and words[2].dtype is torch.uint64
        self._check(q, k, cu_q, cu_k, max_q, max_k)
        assert dout.shape == out.shape == q.shape and out.stride(-1) == dout.stride(-1) == 1
        with torch.enable_grad():
            inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
            own, own_lse = self._attend(*inputs, cu_q, scale)
        torch.testing.assert_close(out.double(), own.detach(), rtol=0, atol=0.02)
        torch.testing.assert_close(lse, own_lse.detach().float())
        return tuple(x.to(q.dtype) for x in torch.autograd.grad(own, inputs, dout.double()))


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="a GPU has the kernel itself")
@pytest.mark.parametrize("rows", [[[7, 1, 16]], [[24], [1, 1, 22], [12, 12]]], ids=["one row", "three rows"])
@pytest.mark.parametrize("groups", [1, 2, H])
def test_gpu_passes_documents_to_flash_attention(
    rows: list[list[int]], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeFlash()
    monkeypatch.setattr(attention, "_aten", fake)
    monkeypatch.setattr(attention, "_is_cudnn", lambda x: True)
    compare(rows, groups=groups, dtype=torch.bfloat16)
    assert fake.longest == [max(map(max, rows))] * 2, "once forward, once backward"


@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="a GPU has the kernel itself")
def test_gpu_computes_one_document_at_a_time_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = GpuAttention(monkeypatch, attention)
    compare([[24], [1, 1, 22], [12, 12]], groups=2, dtype=torch.float32)
    assert fake.calls == ["efficient"] * 6 + ["efficient backward"] * 6


@pytest.mark.skipif(ranks.DEVICE != "cuda", reason="the kernel itself")
@pytest.mark.parametrize("groups", [1, 2, H])
def test_flash_attention_of_a_gpu(groups: int) -> None:
    compare([[24], [1, 1, 22], [12, 12]], groups=groups, dtype=torch.bfloat16)
