"""The prepared call of each point: its tensors and its implementation; parts of torch that need a GPU are replaced."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contract.kernels import AttentionBackend, Point
from bench.errors import SubmitError
from jobs.kernels import attention, collectives, gemm, memcpy

CPU, META = torch.device("cpu"), torch.device("meta")


def point(family: str, operation: str, variant: str, sizes: list[int], ranks: int = 1) -> Point:
    more: dict[str, Any] = {"name": "p", "kernel": "k", "is_sustained": False, "work": 1.0, "peak": None, "limit": None}
    return Point(family=family, operation=operation, variant=variant, sizes=sizes, unit="GB/s", ranks=ranks, **more)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Record whether each host buffer is pinned, because pinning needs a driver."""
    pinned_calls, empty = [], torch.empty

    def noted(*size: int, pin_memory: bool | None = None, **others: Any) -> Tensor:
        pinned_calls.extend([] if pin_memory is None else [pin_memory])
        return empty(*size, **others)

    monkeypatch.setattr(torch, "empty", noted)
    return pinned_calls


@pytest.mark.parametrize(("operation", "variant"), [("host_to_device", "pinned"), ("device_to_host", "pageable")])
def test_bytes_are_copied_to_or_from_one_buffer_of_the_host(pinned: list[bool], operation: str, variant: str) -> None:
    """The buffer is filled by repeating one block of random bytes; the last block is truncated."""
    size = memcpy.BLOCK + 3
    prepared = memcpy.prepare(point("memcpy", operation, variant, [size]), CPU)
    held = dict(zip(prepared.call.__code__.co_freevars, prepared.call.__closure__, strict=True))
    source, target = (held[name].cell_contents for name in ("source", "target"))
    on_host = source if operation == "host_to_device" else target
    assert torch.equal(on_host[-3:], on_host[:3]) and len(on_host[: memcpy.BLOCK].unique()) == 256
    assert pinned == [variant == "pinned"] and prepared.implementation == "torch.Tensor.copy_"
    assert not torch.equal(source, target) and len(source) == len(target) == size
    assert prepared.call() is target and torch.equal(source, target) and source.dtype is torch.uint8


def test_bytes_go_to_the_next_gpu_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last GPU copies to the first one, if they have peer access."""
    links = {(0, 1), (1, 0), (3, 0)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: (own, other) in links)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert memcpy._next_gpu(torch.device("cuda", 3)) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [memcpy._next_gpu(torch.device("cuda", own)).index for own in (0, 1)] == [1, 0]
    monkeypatch.setattr(memcpy, "_next_gpu", lambda device: META)
    target = memcpy.prepare(point("memcpy", "peer", "", [16]), CPU).call()
    assert target.device == META and memcpy.prepare(point("memcpy", "device", "", [16]), CPU).call().device == CPU


@pytest.mark.parametrize(("count", "sees"), [(1, True), (4, False)])
def test_missing_peer_access_is_refused(monkeypatch: pytest.MonkeyPatch, count: int, sees: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: sees)
    with pytest.raises(
        SubmitError, match=rf"GPU 0 has no peer access to another GPU \({count} GPUs are visible"
    ) as refused:
        memcpy._next_gpu(torch.device("cuda", 0))
    assert refused.value.rule == "HW-03" and refused.value.where == "cluster.slurm.gpu_request"


SHAPES = {
    "all_reduce": ([[32]], "2 (n - 1) / n"),
    "all_gather": ([[32], [8]], "(n - 1) / n"),
    "reduce_scatter": ([[8], [32]], "(n - 1) / n"),
    "reduce": ([[32]], "1"),
    "all_to_all": ([[32], [32]], "(n - 1) / n"),
}
CALLED = {"all_gather": "_ALL_GATHER", "reduce_scatter": "_REDUCE_SCATTER", "all_to_all": "all_to_all_single"}


@pytest.mark.parametrize("operation", SHAPES)
@pytest.mark.parametrize(("variant", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_a_collective_has_its_size_as_nccl_tests_count_it(
    monkeypatch: pytest.MonkeyPatch, operation: str, variant: str, itemsize: int
) -> None:
    """32 elements over 4 ranks; the full tensor is the result of all-gather and the input of reduce-scatter."""
    called: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = []

    def noted(name: str) -> Any:
        return lambda *tensors, **others: called.append((name, tensors, others))

    names = {name: noted(name) for name in ("all_reduce", "reduce", "all_to_all_single")}
    monkeypatch.setattr(collectives, "distributed", SimpleNamespace(**names))
    for name in ("_ALL_GATHER", "_REDUCE_SCATTER"):
        monkeypatch.setattr(collectives, name, noted(name))
    group: Any = object()
    prepared = collectives.prepare(point("collectives", operation, variant, [32 * itemsize], 4), CPU, group)
    prepared.call()
    ((name, tensors, others),) = called
    shapes, factor = SHAPES[operation]
    assert (name, [list(x.shape) for x in tensors]) == (CALLED.get(operation, operation), shapes)
    assert {x.dtype.itemsize for x in tensors} == {itemsize} and len({x.data_ptr() for x in tensors}) == len(tensors)
    assert others == {"group": group} | ({"dst": 0} if operation == "reduce" else {})
    assert prepared.implementation == f"gloo; bus bandwidth = {factor} x size / time"


def test_nccl_is_reported_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    for name in collectives.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert collectives.algorithm(torch.device("cuda")) == "NCCL 2.27.3, default algorithm"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert collectives.algorithm(torch.device("cuda")) == "NCCL 2.27.3, NCCL_ALGO=Ring, NCCL_NVLS_ENABLE=0"


def test_gemm_multiplies_its_random_operands() -> None:
    torch.manual_seed(3)
    prepared = gemm.prepare(point("gemm", "gemm", "fp32", [5, 7, 11]), CPU)
    torch.manual_seed(3)
    x_MK, w_NK = torch.randn(5, 11), torch.randn(7, 11)
    out = prepared.call()
    torch.testing.assert_close(out, x_MK @ w_NK.T)
    assert prepared.call() is out and prepared.implementation == "torch.mm", "into the same memory"


def test_fp8_gemm_applies_the_row_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **others: Any) -> Tensor:
        assert a.dtype is b.dtype is torch.float8_e4m3fn and scale_a.shape == (5, 1) and scale_b.shape == (1, 7)
        assert others == {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return (a.float() * scale_a) @ (b.float() * scale_b)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    torch.manual_seed(3)
    prepared = gemm.prepare(point("gemm", "gemm", "fp8", [5, 7, 64]), CPU)
    torch.manual_seed(3)
    x_MK, w_NK = (torch.randn(rows, 64, dtype=torch.bfloat16).float() for rows in (5, 7))
    torch.testing.assert_close(prepared.call(), x_MK @ w_NK.T, rtol=0, atol=1.5)
    assert prepared.implementation == "torch._scaled_mm, one scale per row, fast accumulation"


def test_keys_and_values_are_repeated_for_a_backend_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 rows, 4 query heads, 2 key/value heads; repeating is not timed."""
    monkeypatch.setitem(attention.BACKENDS, AttentionBackend.efficient, attention.SDPBackend.MATH)
    monkeypatch.setattr(attention, "_require", lambda fused, backend: f"{backend.name} {fused}")
    sizes = [2, 4, 2, 8, 16]
    prepared = attention.prepare(point("attention", "forward", "efficient", sizes), CPU)
    assert prepared.implementation == "efficient , keys and values repeated 2 times"
    assert not prepared.call().requires_grad
    gradients = attention.prepare(point("attention", "backward", "efficient", sizes), CPU).call()
    assert [tuple(g.shape) for g in gradients] == [(2, 4, 8, 16)] * 3
    k_BGSD = torch.randn(2, 2, 8, 16, requires_grad=True)
    repeated = attention._repeat_heads(k_BGSD, 2, is_backward=True)
    assert torch.equal(repeated, k_BGSD[:, [0, 0, 1, 1]]) and repeated.is_leaf and repeated.requires_grad
    assert attention._repeat_heads(k_BGSD, 1, is_backward=True) is k_BGSD
    assert not attention._repeat_heads(k_BGSD, 2, is_backward=False).requires_grad
