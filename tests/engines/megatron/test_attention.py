"""Attention compared with an explicit softmax in FP64; the context-parallel ranks are threads of this process."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from helpers import ranks, thread_ranks
from helpers.gpu_attention import GpuAttention
from helpers.thread_ranks import Group

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.engines.megatron import attention

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # a thread's first product in FP64
S, B, H, D = 480, 2, 4, 64  # chunks of 60 tokens at cp 4: no multiple of any kernel's tile
SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives among threads; gathered tensors arrive only when they are waited for."""
    thread_ranks.install(monkeypatch)


def draw(num_groups: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k and v as views of a fused projection, and the gradient of the output, for the full sequence."""
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(S, B, H, D, generator=generator) for _ in range(2))
    kv = torch.randn(S, B, num_groups, 2 * D, generator=generator)
    return tuple(x.to(ranks.DEVICE, dtype) for x in (q, kv, dout))


def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, by explicit softmax in FP64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    k_SBHD, v_SBHD = (x.repeat_interleave(H // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k_SBHD) * scale
    future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(future, -torch.inf).softmax(3), v_SBHD)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def assert_close(got: Tensor, want: Tensor, name: str) -> None:
    assert got.shape == want.shape
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < TOLERANCE[got.dtype], f"the relative error of {name} is {error:.1e}"


def compare(dtype: torch.dtype, num_groups: int, cp: int) -> None:
    """Compare output and gradients of all ranks with those of an explicit softmax."""
    whole = q, kv, dout = draw(num_groups, dtype)

    def run(group: Group) -> tuple[Tensor, ...]:
        own_q, own_kv, own_dout = (x[attention.positions(S, cp, group.rank())] for x in whole)
        qkv = own_q, *own_kv.split(D, dim=3)
        out, lse = attention.attend(*qkv, scale=SCALE, group=group)
        strided_dout = own_dout.transpose(0, 1).contiguous().transpose(0, 1)
        return out, *attention.attend_backward(strided_dout, *qkv, out, lse, scale=SCALE, group=group)

    by_rank = thread_ranks.run(cp, run)
    order = torch.cat([attention.positions(S, cp, rank) for rank in range(cp)])
    wanted = expected(q, *kv.split(D, dim=3), dout, SCALE)
    for name, want, *got in zip(("out", "dq", "dk", "dv"), wanted, *by_rank, strict=True):
        assert_close(torch.cat(got), want[order], name)


@pytest.mark.long
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("num_groups", [2, H], ids=["gqa", "mha"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.usefixtures("collectives")
def test_output_and_gradients_are_those_of_an_explicit_softmax(dtype: torch.dtype, num_groups: int, cp: int) -> None:
    compare(dtype, num_groups, cp)


@pytest.mark.long
@pytest.mark.skipif(ranks.DEVICE != "cpu", reason="a GPU has the kernels themselves")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "efficient"), (torch.bfloat16, "cudnn")])
@pytest.mark.usefixtures("collectives")
def test_a_gpu_uses_the_kernels_of_its_data_type(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: str, cp: int
) -> None:
    fake = GpuAttention(monkeypatch, attention)
    compare(dtype, 2, cp)
    assert set(fake.calls) == {kernel, f"{kernel} backward"}


@pytest.mark.long
@pytest.mark.parametrize("softmax_scale", [None, SCALE])
def test_the_module_has_gradients(softmax_scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a plain sum is one element with strides of zero."""
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: thread_ranks.groups(1)[0])
    q, kv, _ = draw(2, torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (q, *kv.split(D, dim=3)))
    config = SimpleNamespace(softmax_scale=softmax_scale, kv_channels=D)
    out = attention.Attention(config, 1, None, "self")(q, k, v, None)
    assert out.shape == (S, B, H * D)
    got = out.unflatten(2, (H, D)), *torch.autograd.grad(out.sum(), (q, k, v))
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    for name, *pair in zip(("out", "dq", "dk", "dv"), got, expected(q, k, v, torch.ones_like(q), scale), strict=True):
        assert_close(*pair, name)
