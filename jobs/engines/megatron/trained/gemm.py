"""GEMMs on a GPU that accumulate the gradient of a weight in an FP32 buffer in place, by cuBLASLt."""

import ctypes
import logging
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jobs.engines.megatron.trained.fp8_weights import tokens_last
from jobs.engines.megatron.trained.ops import Operand

COMPUTE_32F = 68
"""cublasComputeType_t: CUBLAS_COMPUTE_32F."""
DATA_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
"""cudaDataType_t: CUDA_R_32F, CUDA_R_16BF, CUDA_R_8F_E4M3."""
OP_N, OP_T = 0, 1
"""cublasOperation_t: CUBLAS_OP_N, CUBLAS_OP_T."""
DESC_TRANSA, DESC_TRANSB, DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_FAST_ACCUM = 3, 4, 17, 18, 25
"""cublasLtMatmulDescAttributes_t: CUBLASLT_MATMUL_DESC_..."""
PREF_MAX_WORKSPACE_BYTES, PREF_MIN_ALIGNMENT_A_BYTES = 1, 5
"""cublasLtMatmulPreferenceAttributes_t: CUBLASLT_MATMUL_PREF_...; those of B, C and D are 6, 7 and 8."""
WORKSPACE_BYTES = 32 * 2**20
"""What NVIDIA recommends for Hopper (cuBLAS documentation, cublasSetWorkspace)."""


class CublasError(RuntimeError):
    """A function of cuBLASLt failed."""


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and its requirements."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Layout(NamedTuple):
    """A column-major matrix: its stored rows and columns, and the stride of its columns in elements."""

    rows: int
    columns: int
    stride: int


class Problem(NamedTuple):
    """The key of a GEMM of cuBLASLt, one algorithm each; alignments are in bytes, of a, b and d (in cuBLAS's order)."""

    dtype: torch.dtype
    a: Layout
    b: Layout
    d: Layout
    transposes: tuple[int, int]
    alignments: tuple[int, int, int]
    fast_accumulation: bool


def problem(out_OI: Tensor, left: Tensor, right: Tensor, *, fast_accumulation: bool) -> Problem:
    """Return the cuBLASLt GEMM of `add_matmul`."""
    a, b, d = (Layout(x.shape[1], x.shape[0], x.stride(0)) for x in (right, left, out_OI))
    is_fp8 = left.dtype is torch.float8_e4m3fn
    transposes = (OP_T, OP_N) if is_fp8 else (OP_N, OP_T)
    alignments = alignment(right.data_ptr()), alignment(left.data_ptr()), alignment(out_OI.data_ptr())
    return Problem(left.dtype, a, b, d, transposes, alignments, fast_accumulation and is_fp8)


def alignment(address: int) -> int:
    """Return the largest power of two, at most 256, that divides an address."""
    return min(256, address & -address) if address else 256


def loaded_library(maps: str, cuda: str | None) -> str | None:
    """Return the path of the libcublasLt that a process has loaded, from its /proc/PID/maps.

    cuda: torch's version of CUDA; of several loaded libraries, the one of this version is chosen.
    """
    paths = [line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libcublasLt.so" in line]
    matching = [path for path in paths if f"libcublasLt.so.{(cuda or '').split('.')[0]}" in path]
    return next(iter([*matching, *paths]), None)


@cache
def load() -> "CublasLt | None":
    """Return cuBLASLt on the current device; None if torch has not loaded it."""
    path = loaded_library(Path("/proc/self/maps").read_text(), torch.version.cuda)
    return CublasLt(ctypes.CDLL(path)) if path else None


@dataclass
class Plan:
    """The descriptors of a GEMM, and the algorithm that cuBLASLt chose for it before its first call."""

    matmul: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    heuristic: Heuristic | None = None


@dataclass
class CublasLt:
    """cuBLASLt with a handle. Descriptors are never destroyed, because there are few shapes."""

    library: Any
    handle: c_void_p = field(default_factory=c_void_p)
    plans: dict[Problem, Plan] = field(default_factory=dict)
    workspaces: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        declare(self.library)
        self._call("cublasLtCreate", byref(self.handle))

    def add_matmul(
        self,
        out_OI: Tensor,
        left: Tensor,
        right: Tensor,
        scales: tuple[Tensor, Tensor] | None = None,
        *,
        beta: float = 1.0,
        fast_accumulation: bool = False,
    ) -> None:
        """Compute out = beta * out + the product; scales [1]: of left and right, on the device.

        Raises:
            CublasError: cuBLASLt returned an error status, or has no algorithm for these shapes.
        """
        key = problem(out_OI, left, right, fast_accumulation=fast_accumulation)
        plan = self.plans.get(key) or self._plan(key)
        if scales is not None:
            self._set(plan.matmul, DESC_A_SCALE_POINTER, c_void_p(scales[1].data_ptr()))
            self._set(plan.matmul, DESC_B_SCALE_POINTER, c_void_p(scales[0].data_ptr()))
        plan.heuristic = plan.heuristic or self._heuristic(key, plan)
        stream, (a, b, d) = torch.cuda.current_stream().cuda_stream, plan.layouts
        workspace = self._workspace(out_OI.device, stream)
        self._call(
            "cublasLtMatmul", self.handle, plan.matmul, byref(c_float(1)), right.data_ptr(), a, left.data_ptr(), b,
            byref(c_float(beta)), out_OI.data_ptr(), d, out_OI.data_ptr(), d, byref(plan.heuristic.algorithm),
            workspace.data_ptr(), workspace.numel(), stream, problem=key,
        )  # fmt: skip

    def _plan(self, problem: Problem) -> Plan:
        matmul = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(matmul), COMPUTE_32F, DATA_TYPES[torch.float32], problem=problem)
        for attribute, value in zip((DESC_TRANSA, DESC_TRANSB), problem.transposes, strict=True):
            self._set(matmul, attribute, c_int32(value))
        if problem.fast_accumulation:
            self._set(matmul, DESC_FAST_ACCUM, c_int8(1))
        a, b = self._layout(problem.a, problem.dtype), self._layout(problem.b, problem.dtype)
        self.plans[problem] = Plan(matmul, (a, b, self._layout(problem.d, torch.float32)))
        return self.plans[problem]

    def _layout(self, layout: Layout, dtype: torch.dtype) -> c_void_p:
        created = c_void_p()
        self._call("cublasLtMatrixLayoutCreate", byref(created), DATA_TYPES[dtype], *layout)
        return created

    def _heuristic(self, problem: Problem, plan: Plan) -> Heuristic:
        preference, best, count = c_void_p(), Heuristic(), c_int()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        preferences: dict[int, c_uint64 | c_uint32] = {PREF_MAX_WORKSPACE_BYTES: c_uint64(WORKSPACE_BYTES)}
        a, b, d = problem.alignments
        preferences |= {PREF_MIN_ALIGNMENT_A_BYTES + i: c_uint32(bytes_) for i, bytes_ in enumerate((a, b, d, d))}
        for attribute, value in preferences.items():
            size = ctypes.sizeof(value)
            self._call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), size)
        layouts = (*plan.layouts, plan.layouts[-1])
        args = (self.handle, plan.matmul, *layouts, preference, 1, byref(best), byref(count))
        self._call("cublasLtMatmulAlgoGetHeuristic", *args, problem=problem)
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        if count.value == 0:
            raise CublasError(f"cuBLASLt has no algorithm for this GEMM: {problem}")
        return best

    def _workspace(self, device: torch.device, stream: int) -> Tensor:
        """Return the workspace of the GEMMs of one stream."""
        if (device, stream) not in self.workspaces:
            self.workspaces[device, stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self.workspaces[device, stream]

    def _set(self, matmul: c_void_p, attribute: int, value: Any) -> None:
        self._call("cublasLtMatmulDescSetAttribute", matmul, attribute, byref(value), ctypes.sizeof(value))

    def _call(self, name: str, *args: Any, problem: Problem | None = None) -> None:
        status = getattr(self.library, name)(*args)
        if status:
            meaning = self.library.cublasLtGetStatusName(status).decode()
            raise CublasError(f"{name} returned {meaning} ({status})" + (f" for {problem}" if problem else ""))


SIGNATURES = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}
"""Argument types: handles, descriptors and addresses are pointers."""


def declare(library: Any) -> None:
    """Declare the argument types for ctypes, which would truncate 64-bit integers otherwise."""
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
    library.cublasLtGetStatusName.restype = c_char_p


log = logging.getLogger(__name__)


def add_weight_gradient(main_grad_OI: Tensor, grad: Operand, x: Operand, *, fast_accumulation: bool = False) -> None:
    """Add grad^T x to the FP32 gradient, for grad [M, O] and x [M, I], both in BF16 or both in FP8.

    fast_accumulation: FP8 GEMMs accumulate in the tensor cores only (about 14 bits), without promotion to FP32.
    """
    if grad.scale is None:
        # cuBLAS computes the product in FP32 and adds it: self and out are the same tensor, which torch 2.10 allows.
        torch.addmm(main_grad_OI, grad.values.T, x.values, out_dtype=torch.float32, out=main_grad_OI)
    else:
        fp8_gemm()(main_grad_OI, tokens_last(grad), tokens_last(x), fast_accumulation)


Fp8Gemm = Callable[[Tensor, Operand, Operand, bool], None]
"""Adds left right^T to the gradient [O, I], for left [O, M] and right [I, M]; last argument: fast accumulation."""


@cache
def fp8_gemm() -> Fp8Gemm:
    """Return the GEMM of cuBLASLt, or torch's if the library is not loaded."""
    library = load()
    if library is None:
        log.warning(
            "torch has not loaded libcublasLt: FP8 weight gradients are accumulated by a separate, slower kernel"
        )
        return add_by_torch

    def add(main_grad_OI: Tensor, left: Operand, right: Operand, fast_accumulation: bool) -> None:
        assert left.scale is not None and right.scale is not None
        scales = (left.scale, right.scale)
        library.add_matmul(main_grad_OI, left.values, right.values, scales, fast_accumulation=fast_accumulation)

    return add


def add_by_torch(main_grad_OI: Tensor, left: Operand, right: Operand, fast_accumulation: bool) -> None:
    """Add left right^T to the gradient with a GEMM and a separate addition, without cuBLASLt."""
    assert left.scale is not None and right.scale is not None
    main_grad_OI += torch._scaled_mm(
        left.values,
        right.values.T,
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=torch.float32,
        use_fast_accum=fast_accumulation,
    )
