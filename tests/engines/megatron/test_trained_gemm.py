"""GEMMs that accumulate weight gradients in place: on a GPU compared with FP64; elsewhere the calls of cuBLASLt."""

import ctypes
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ranks
from jobs.engines.megatron.trained import gemm
from jobs.engines.megatron.trained.gemm import CublasError, CublasLt, Layout
from jobs.engines.megatron.trained.ops import Operand

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from jobs.engines.megatron.trained.gpu_ops import Bf16GpuOps, Fp8GpuOps

DEVICE = ranks.DEVICE
FP8 = torch.float8_e4m3fn
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="cuBLAS is for GPUs")
FP8_TOLERANCE = 1e-3
"""Hopper's tensor cores accumulate FP8 products with fewer bits than FP32; and small rows become subnormal."""
TOKENS, OUT, IN = 200, 96, 160
"""A number of tokens that is padded for FP8, and different sizes, so that swapped arguments are detected."""


def operands(is_fp8: bool) -> tuple[Operand, Operand]:
    """Return the gradient of a linear's output and the linear's input."""
    torch.manual_seed(0)
    pair = []
    for width in (OUT, IN):
        x = torch.randn(TOKENS, width, device=DEVICE) * 100
        scale = torch.linspace(-4, 3, TOKENS, device=DEVICE).round().exp2()
        pair.append(Operand(x.clamp(-448, 448).to(FP8), scale) if is_fp8 else Operand(x.bfloat16()))
    return pair[0], pair[1]


def fp64(x: Operand) -> Tensor:
    return x.values.double() if x.scale is None else x.values.double() * x.scale.double()[:, None]


def check(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert ((got.double() - expected).norm() / expected.norm()).item() <= tolerance


@pytest.fixture
def chosen_anew() -> Iterator[None]:
    gemm.fp8_gemm.cache_clear()
    yield
    gemm.fp8_gemm.cache_clear()


@pytest.mark.usefixtures("interpreter_that_rounds", "chosen_anew")
@pytest.mark.parametrize("offset", [0, 12])
@pytest.mark.parametrize("is_fp8", [pytest.param(False, id="BF16", marks=on_gpu), pytest.param(True, id="FP8")])
def test_gradients_are_accumulated(is_fp8: bool, offset: int) -> None:
    """Without a GPU, torch's GEMM is used instead of cuBLASLt's.

    offset: of the gradient in numbers, since one in megatron-core's buffers may begin anywhere.
    """
    grad, x = operands(is_fp8)
    ops = Fp8GpuOps() if is_fp8 else Bf16GpuOps()
    buffer = torch.randn(offset + OUT * IN, device=DEVICE) * 1e6
    main_grad = buffer[offset:].view(OUT, IN)
    expected = main_grad.double()
    for _ in range(2):
        ops.add_weight_gradient(main_grad, grad, x)
        expected = expected + fp64(grad).T @ fp64(x)
    check(main_grad, expected, FP8_TOLERANCE if is_fp8 else 1e-5)


@on_gpu
@pytest.mark.parametrize("fast", [False, True], ids=["FP32 sums", "fast accumulation"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_cublaslt_and_torch_compute_the_same(fast: bool, beta: float) -> None:
    library = gemm.load()
    assert library is not None
    left, right = (gemm.tokens_last(x) for x in operands(is_fp8=True))
    expected = left.scale.double() * right.scale.double() * (left.values.double() @ right.values.double().T)
    out = torch.full((OUT, IN), 1e6, device=DEVICE)
    library.add_matmul(out, left.values, right.values, (left.scale, right.scale), beta=beta, fast_accumulation=fast)
    check(out, expected + beta * 1e6, FP8_TOLERANCE)
    out.fill_(beta * 1e6)
    gemm.add_by_torch(out, left, right, fast)
    check(out, expected + beta * 1e6, FP8_TOLERANCE)


@on_gpu
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_cublaslt_computes_bf16_with_tokens_first(beta: float) -> None:
    library, (grad, x) = gemm.load(), operands(is_fp8=False)
    assert library is not None
    out = torch.full((OUT, IN), 1e5, device=DEVICE)
    library.add_matmul(out, grad.values, x.values, beta=beta)
    check(out, fp64(grad).T @ fp64(x) + beta * 1e5, 1e-5)


def test_forward_and_backward_gemms() -> None:
    for is_fp8, ops in ((False, Bf16GpuOps()), (True, Fp8GpuOps())):
        x, weight = operands(is_fp8)[1], operands(is_fp8)[1]
        weight = Operand(weight.values[:OUT], torch.full((1,), 0.37, device=DEVICE) if is_fp8 else None)
        weight_64 = weight.values.double() * (0.37 if is_fp8 else 1)
        check(ops.matmul(x, weight), fp64(x) @ weight_64.T, 5e-3)


@on_gpu
def test_unsupported_gemm_raises_with_its_sizes() -> None:
    library = gemm.load()
    odd = torch.zeros(7, 9, dtype=FP8, device=DEVICE)
    with pytest.raises(CublasError, match=r"float8_e4m3fn.*rows=9, columns=7"):
        library.add_matmul(torch.zeros(7, 7, device=DEVICE), odd, odd)


MAPS = """\
7f00-7f01 r-xp 00000000 00:00 1  /usr/lib/libc.so.6
7f02-7f03 r--p 00000000 00:00 2  /opt/other tools/libcublasLt.so.12.8.4
7f04-7f05 r--p 00000000 00:00 3  /venv/nvidia/cu13/lib/libcublasLt.so.13
7f06-7f07 r-xp 00001000 00:00 3  /venv/nvidia/cu13/lib/libcublasLt.so.13
"""


@pytest.mark.parametrize(
    ("cuda", "path"),
    [
        ("13.0", "/venv/nvidia/cu13/lib/libcublasLt.so.13"),
        ("12.8", "/opt/other tools/libcublasLt.so.12.8.4"),
        ("14.0", "/opt/other tools/libcublasLt.so.12.8.4"),
    ],
)
def test_the_library_is_the_one_of_torchs_cuda(cuda: str, path: str) -> None:
    assert gemm.loaded_library(MAPS, cuda) == path
    assert gemm.loaded_library(MAPS.splitlines()[0], cuda) is None


def test_matrices_are_passed_as_column_major() -> None:
    out, left, right = torch.zeros(OUT, IN), torch.zeros(OUT, 208, dtype=FP8), torch.zeros(IN, 208, dtype=FP8)
    key = gemm.problem(out, left, right, fast_accumulation=True)
    assert (key.a, key.b, key.d) == (Layout(208, IN, 208), Layout(208, OUT, 208), Layout(IN, OUT, IN))
    assert key.transposes == (1, 0) and key.fast_accumulation
    left, right = torch.zeros(TOKENS, OUT).bfloat16(), torch.zeros(TOKENS, IN).bfloat16()
    key = gemm.problem(out, left, right, fast_accumulation=True)
    assert (key.a, key.b, key.d) == (Layout(IN, TOKENS, IN), Layout(OUT, TOKENS, OUT), Layout(IN, OUT, IN))
    assert key.transposes == (0, 1) and not key.fast_accumulation
    assert [gemm.alignment(address) for address in (4096, 48, 4, 0)] == [256, 16, 4, 256]


class FakeLibrary:
    """A fake cuBLASLt that records calls, and fails in the function `failing`."""

    def __init__(self, *, failing: str = "", status: int = 15, num_algorithms: int = 1) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing, self.status, self.num_algorithms = failing, status, num_algorithms
        for name in gemm.SIGNATURES:
            setattr(self, name, self._function(name))
        self.cublasLtGetStatusName = lambda status: b"CUBLAS_STATUS_NOT_SUPPORTED"

    def _function(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            assert len(args) == len(gemm.SIGNATURES[name]), name
            self.calls.append((name, args))
            if name == "cublasLtMatmulAlgoGetHeuristic":
                args[-1]._obj.value = self.num_algorithms
            return self.status if name == self.failing else 0

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeLibrary]:
    """Add the same GEMM twice with a fake library."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=99))
    monkeypatch.setattr(gemm, "WORKSPACE_BYTES", 64)

    def run(library: FakeLibrary) -> FakeLibrary:
        out, left, right = torch.zeros(OUT, IN), torch.zeros(OUT, 208, dtype=FP8), torch.zeros(IN, 208, dtype=FP8)
        cublas, scales = CublasLt(library), (torch.ones(1), torch.ones(1))
        for _ in range(2):
            cublas.add_matmul(out, left, right, scales)
        library.addresses = [x.data_ptr() for x in (right, left, out)]
        library.scales = [x.data_ptr() for x in scales]
        return library

    return run


def test_an_algorithm_is_chosen_once_and_the_scales_are_set_for_each_call(add: Callable[..., FakeLibrary]) -> None:
    library = add(FakeLibrary())
    assert len(library.named("cublasLtMatmulAlgoGetHeuristic")) == 1
    matmuls = library.named("cublasLtMatmul")
    assert len(matmuls) == 2
    a, b, c, d = (matmuls[0][i] for i in (3, 5, 8, 10))
    assert [a, b, d] == library.addresses and c == d, "the accumulated matrix is the output"
    assert matmuls[0][-2:] == (64, 99)
    attributes = [(args[1], args[2]._obj.value) for args in library.named("cublasLtMatmulDescSetAttribute")]
    left, right = library.scales
    assert attributes == [(3, 1), (4, 0), (17, right), (18, left), (17, right), (18, left)]


def test_errors_contain_function_status_and_matrices(add: Callable[..., FakeLibrary]) -> None:
    sizes = rf".*columns={IN}.*columns={OUT}"
    with pytest.raises(CublasError, match=rf"cublasLtMatmul returned CUBLAS_STATUS_NOT_SUPPORTED \(15\) for {sizes}"):
        add(FakeLibrary(failing="cublasLtMatmul"))
    with pytest.raises(CublasError, match=rf"no algorithm for this GEMM: {sizes}"):
        add(FakeLibrary(num_algorithms=0))
    with pytest.raises(CublasError, match=r"cublasLtCreate returned CUBLAS_STATUS_NOT_SUPPORTED \(15\)$"):
        add(FakeLibrary(failing="cublasLtCreate"))


@pytest.mark.usefixtures("chosen_anew")
def test_without_the_library_torch_adds_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gemm, "load", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert [gemm.fp8_gemm() for _ in range(2)] == [gemm.add_by_torch] * 2
    assert [record.message for record in caplog.records] == [
        "torch has not loaded libcublasLt: FP8 weight gradients are accumulated by a separate, slower kernel"
    ]


def shown(arg: Any) -> Any:
    """Return the number behind an argument; an address is left out unless it is an attribute's value."""
    value = getattr(arg, "_obj", arg)
    return "..." if isinstance(value, ctypes.Structure | ctypes.Array) else getattr(value, "value", value)


def test_calls_of_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of NVIDIA's headers: data types 0 (FP32), 14 (BF16), 28 (E4M3); 68: sums in FP32."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=99))
    workspaces: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: workspaces.append(size) or torch.zeros(8))
    monkeypatch.setattr(gemm, "alignment", lambda address: {1: 16, 2: 32, 3: 64}[address])
    library = FakeLibrary()
    cublas = CublasLt(library)
    for dtype, rows in ((FP8, 208), (torch.bfloat16, TOKENS)):
        shapes = ((OUT, rows), (IN, rows)) if dtype is FP8 else ((rows, OUT), (rows, IN))
        (left, right), out = (torch.zeros(shape, dtype=dtype) for shape in shapes), torch.zeros(OUT, IN)
        for address, tensor in ((1, right), (2, left), (3, out)):
            tensor.data_ptr = lambda address=address: address
        for beta in (1.0, 0.5):
            cublas.add_matmul(out, left, right, beta=beta, fast_accumulation=True)
    calls = [(name.removeprefix("cublasLt"), *map(shown, args)) for name, args in library.calls]
    preferences = [(1, 32 * 2**20, 8), (5, 16, 4), (6, 32, 4), (7, 64, 4), (8, 64, 4)]
    chosen = [
        ("MatmulPreferenceCreate", None),
        *(("MatmulPreferenceSetAttribute", None, *one) for one in preferences),
        ("MatmulAlgoGetHeuristic", None, None, None, None, None, None, None, 1, "...", 1),
        ("MatmulPreferenceDestroy", None),
    ]
    workspace = calls[-1][-3]
    matmuls = [
        ("Matmul", None, None, 1.0, 1, None, 2, None, beta, 3, None, 3, None, "...", workspace, 8, 99)
        for beta in (1.0, 0.5)
    ]
    assert calls == [
        ("Create", None),
        ("MatmulDescCreate", None, 68, 0),
        ("MatmulDescSetAttribute", None, 3, 1, 4),
        ("MatmulDescSetAttribute", None, 4, 0, 4),
        ("MatmulDescSetAttribute", None, 25, 1, 1),
        ("MatrixLayoutCreate", None, 28, 208, IN, 208),
        ("MatrixLayoutCreate", None, 28, 208, OUT, 208),
        ("MatrixLayoutCreate", None, 0, IN, OUT, IN),
        *chosen,
        *matmuls,
        ("MatmulDescCreate", None, 68, 0),
        ("MatmulDescSetAttribute", None, 3, 0, 4),
        ("MatmulDescSetAttribute", None, 4, 1, 4),
        ("MatrixLayoutCreate", None, 14, IN, TOKENS, IN),
        ("MatrixLayoutCreate", None, 14, OUT, TOKENS, OUT),
        ("MatrixLayoutCreate", None, 0, IN, OUT, IN),
        *chosen,
        *matmuls,
    ]
    assert workspaces == [32 * 2**20], "one for each stream"


def test_types_of_arguments_are_those_of_cublaslt() -> None:
    """p: a pointer; i: an int; z: a size; q: 64 bits."""
    letters = {ctypes.c_void_p: "p", ctypes.c_int: "i", ctypes.c_size_t: "z", ctypes.c_int64: "q"}
    assert {name: "".join(letters[one] for one in types) for name, types in gemm.SIGNATURES.items()} == {
        "cublasLtCreate": "p",
        "cublasLtMatmulDescCreate": "pii",
        "cublasLtMatmulDescSetAttribute": "pipz",
        "cublasLtMatrixLayoutCreate": "pizzq",  # uint64 and size_t are the same type here
        "cublasLtMatmulPreferenceCreate": "p",
        "cublasLtMatmulPreferenceSetAttribute": "pipz",
        "cublasLtMatmulPreferenceDestroy": "p",
        "cublasLtMatmulAlgoGetHeuristic": "p" * 7 + "ipp",
        "cublasLtMatmul": "p" * 14 + "zp",
    }


@pytest.mark.usefixtures("chosen_anew")
@pytest.mark.parametrize("fast", [False, True])
def test_fp8_gradients_are_added_by_cublaslt_with_their_scales(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    calls: list[tuple[Any, ...]] = []
    library = SimpleNamespace(add_matmul=lambda *args, **options: calls.append((*args, options)))
    monkeypatch.setattr(gemm, "load", lambda: library)
    out, (left, right) = torch.zeros(OUT, IN), operands(is_fp8=True)
    gemm.fp8_gemm()(out, left, right, fast)
    ((*tensors, scales, options),) = calls
    assert all(one is other for one, other in zip(tensors, (out, left.values, right.values), strict=True))
    assert scales[0] is left.scale and scales[1] is right.scale and options == {"fast_accumulation": fast}


def headers() -> list[Path]:
    """Return the headers of CUDA, if there are any."""
    places = [Path(folder) / "nvidia" for folder in sys.path] + [Path("/usr/local/cuda")]
    return [path for place in places for name in ("cublasLt.h", "cublas_api.h") for path in place.glob(f"**/{name}")]


@pytest.mark.skipif(not headers(), reason="no CUDA headers here")
def test_constants_match_the_cuda_headers() -> None:
    text = "\n".join(header.read_text() for header in headers())
    own = {
        "CUBLAS_COMPUTE_32F": gemm.COMPUTE_32F,
        "CUBLAS_OP_N": gemm.OP_N,
        "CUBLAS_OP_T": gemm.OP_T,
        "CUBLASLT_MATMUL_DESC_TRANSA": gemm.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_TRANSB": gemm.DESC_TRANSB,
        "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER": gemm.DESC_A_SCALE_POINTER,
        "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER": gemm.DESC_B_SCALE_POINTER,
        "CUBLASLT_MATMUL_DESC_FAST_ACCUM": gemm.DESC_FAST_ACCUM,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": gemm.PREF_MAX_WORKSPACE_BYTES,
        "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES": gemm.PREF_MIN_ALIGNMENT_A_BYTES,
    }
    assert {name: int(re.search(rf"\b{name}\s*=\s*(\d+)", text)[1]) for name in own} == own


def test_size_of_the_heuristic_result_is_that_of_cublaslt() -> None:
    assert ctypes.sizeof(gemm.Heuristic) == 8 * 8 + 8 + 4 + 4 + 4 * 4
