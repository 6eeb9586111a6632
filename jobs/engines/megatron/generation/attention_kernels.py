"""Decode attention in Triton, for one new token per slot: bias, norms of the heads, RoPE, KV cache, flash decoding.

A program processes the queries of one group of one slot and a part of its keys (split-K), so that a few slots also
occupy the full GPU. The program of the first part reads the new key and value from the linear's output and writes them
to the cache; the other programs do not need them. The program that finishes last merges all parts by their log-sum-exp.

Shape letters: B slots, G key/value groups, R queries of a group, T tokens of a slot, D head dimension, P parts.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jobs.engines.megatron import rope_kernels
from jobs.engines.megatron.generation.one_row_kernels import launch_options
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.triton_target import FACTOR

_KEYS = 64
"""Keys of a tile."""
_PROGRAMS = 264
"""Target number of programs: two per multiprocessor of an H100 or H200."""
_MOST_PARTS = 16


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    angles: Tensor,
    *,
    bias: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Return the output [B, G * R * D] for qkv [B, G * (R + 2) * D] and keys, values [B, G, T, D].

    positions [B]: of the new tokens, whose keys and values are written to the cache; angles [T, D]: RoPE's angles.
    bias [G * (R + 2) * D] is added to qkv; norms normalise the heads of q and k before RoPE.
    """
    num_slots, (_, groups, capacity, dim) = len(qkv), keys.shape
    repeats = qkv.shape[1] // (groups * dim) - 2
    parts, rows = num_parts(num_slots * groups, capacity), max(16, triton.next_power_of_2(repeats))
    out = qkv.new_empty(num_slots, groups * repeats * dim)
    outs = torch.empty(num_slots, groups, parts, rows, dim, dtype=torch.float32, device=qkv.device)
    lses = torch.empty(num_slots, groups, parts, rows, dtype=torch.float32, device=qkv.device)
    options = {"PARTS": parts, "ROWS": rows, "HALF": dim // 2, "REPEATS": repeats, "KEYS": _KEYS, "num_warps": 4}
    options |= launch_options()
    inputs = (qkv, bias, *(norms or rope_kernels.NO_NORMS), keys, values, positions, angles)
    outputs = (out, outs, lses, _counters(qkv.device))
    _attend[(parts, groups, num_slots)](*inputs, *outputs, dim**-0.5, capacity, **options)
    return out


def is_supported(dim: int) -> bool:
    """Return whether the kernel supports heads of this size: halves of 16 or more, for tensor cores."""
    return dim >= 32 and rope_kernels.is_supported(dim)


def num_parts(num_groups: int, capacity: int) -> int:
    """Return the number of parts of a group's keys, a power of two."""
    target: int = min(_MOST_PARTS, _PROGRAMS // num_groups, triton.cdiv(capacity, _KEYS))
    return 1 << max(0, target.bit_length() - 1)


@cache
def _counters(device: torch.device) -> Tensor:
    """Return counters of finished parts per group; the last program resets them to 0. All layers share them."""
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit
def _halves(ptr, head, column, inside, HALF: tl.constexpr):
    """Return both halves of heads in FP32; head: [R, 1] or a scalar."""
    at = ptr + head * (2 * HALF) + column
    low = tl.load(at, inside, other=0.0).to(tl.float32)
    return low, tl.load(at + HALF, inside, other=0.0).to(tl.float32)


@triton.jit
def _prepared(ptr, bias_ptr, norm_ptr, eps, head, half, inside, HALF: tl.constexpr):
    """Return both halves of heads in FP32, with the bias added, and normalised."""
    low, high = _halves(ptr, head, half, inside, HALF)
    if bias_ptr is not None:
        bias_low, bias_high = _halves(bias_ptr, head, half, inside, HALF)
        low, high = low + bias_low, high + bias_high
    if norm_ptr is not None:
        rstd = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low *= rstd * tl.load(norm_ptr + half).to(tl.float32)
        high *= rstd * tl.load(norm_ptr + HALF + half).to(tl.float32)
    return low, high


@triton.jit
def _apply_rope(low, high, cos, sin, ptr):
    """Return both halves of heads with RoPE applied, rounded to the data type of the cache."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    return (low * cos - high * sin).to(DTYPE), (high * cos + low * sin).to(DTYPE)


@triton.jit
def _prefetch(ptr, row, num_rows, WIDTH: tl.constexpr):
    """Prefetch rows of the cache into L2, before the queries are available."""
    LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # of L2: 128 bytes
    line = tl.arange(0, WIDTH // LINE)[None, :] * LINE
    at = ptr + tl.minimum(row, num_rows - 1)[:, None] * WIDTH + line
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _merge(
    out, most, total, out_at, outs_ptr, lses_ptr, done_ptr, index, part, row, column,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Store the output of this part; the program that finishes last merges all parts and stores the result."""
    first, lse_at = index * PARTS, tl.arange(0, ROWS)
    at = outs_ptr + (first + part) * (ROWS * 2 * HALF) + row * (2 * HALF) + column
    tl.store(at, out / tl.maximum(total, 1e-30)[:, None], row < REPEATS)
    tl.store(lses_ptr + (first + part) * ROWS + lse_at, most + tl.log(total))  # -inf for a part without keys
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + index, 1) == PARTS - 1:
        highest, sums = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        merged = tl.zeros((ROWS, 2 * HALF), tl.float32)
        for other in tl.static_range(PARTS):
            lse = tl.load(lses_ptr + (first + other) * ROWS + lse_at, cache_modifier=".cg")
            highest = tl.maximum(highest, lse)
        for other in tl.static_range(PARTS):
            lse = tl.load(lses_ptr + (first + other) * ROWS + lse_at, cache_modifier=".cg")
            weight = tl.exp(lse - highest)
            at = outs_ptr + (first + other) * (ROWS * 2 * HALF) + row * (2 * HALF) + column
            merged += tl.load(at, row < REPEATS, other=0.0, cache_modifier=".cg") * weight[:, None]
            sums += weight
        tl.store(out_at, merged / sums[:, None], row < REPEATS)
        tl.store(done_ptr + index, 0)


@triton.jit
def _own(
    new_ptr, bias_ptr, norm_ptr, eps, keys_ptr, values_ptr, own_at, q_low, q_high, cos, sin, scale, half, column,
    HALF: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Write the new token's key and value to the cache; return its scores and its value."""
    low, high = _prepared(new_ptr, bias_ptr, norm_ptr, eps, REPEATS, half, half < HALF, HALF)
    low, high = _apply_rope(low, high, cos, sin, keys_ptr)
    v = tl.load(new_ptr + (REPEATS + 1) * (2 * HALF) + column)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + (REPEATS + 1) * (2 * HALF) + column)
        v = (v.to(tl.float32) + bias.to(tl.float32)).to(values_ptr.dtype.element_ty)
    tl.store(keys_ptr + own_at + half, low)
    tl.store(keys_ptr + own_at + HALF + half, high)
    tl.store(values_ptr + own_at + column, v)
    product = q_low.to(tl.float32) * low.to(tl.float32) + q_high.to(tl.float32) * high.to(tl.float32)
    return tl.sum(product, 1) * scale, v.to(tl.float32)


@triton.jit
def _with_keys(
    out, most, total, keys_ptr, values_ptr, slot_at, begin, position, q_low, q_high, scale, half, column,
    HALF: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Update the output with a tile of keys and values; return it, the highest score and the sum of exponentials."""
    key = begin + tl.arange(0, KEYS)[:, None]
    is_key, at = key < position, slot_at + key * (2 * HALF)
    k_low = tl.load(keys_ptr + at + half, is_key, other=0.0).to(FACTOR)
    k_high = tl.load(keys_ptr + at + HALF + half, is_key, other=0.0).to(FACTOR)
    scores = tl.dot(q_low.to(FACTOR), tl.trans(k_low))
    scores = tl.dot(q_high.to(FACTOR), tl.trans(k_high), scores) * scale
    scores = tl.where(tl.trans(is_key), scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
    v = tl.load(values_ptr + at + column, is_key, other=0.0).to(FACTOR)
    out = tl.dot(weights.to(FACTOR), v, out * shrunk[:, None])
    return out, higher, total * shrunk + tl.sum(weights, 1)


@triton.jit
def _attend(
    qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, eps, keys_ptr, values_ptr, positions_ptr, angles_ptr, out_ptr, outs_ptr,
    lses_ptr, done_ptr, scale, capacity,
    PARTS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REPEATS: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    part, index, DIM = tl.program_id(0), tl.program_id(2) * tl.num_programs(1) + tl.program_id(1), 2 * HALF
    half, column, row = tl.arange(0, HALF)[None, :], tl.arange(0, 2 * HALF)[None, :], tl.arange(0, ROWS)[:, None]
    position = tl.load(positions_ptr + tl.program_id(2)).to(tl.int32)
    angle = tl.load(angles_ptr + position * DIM + half)
    cos, sin, slot_at = tl.cos(angle), tl.sin(angle), index.to(tl.int64) * capacity * DIM
    per_part, new_ptr = tl.cdiv(tl.cdiv(position, PARTS), KEYS) * KEYS, qkv_ptr + index * (REPEATS + 2) * DIM
    if bias_ptr is not None:
        bias_ptr += tl.program_id(1) * (REPEATS + 2) * DIM
    if OVERLAPPED:
        first = part * per_part + tl.arange(0, KEYS)
        _prefetch(keys_ptr + slot_at, first, capacity, 2 * HALF)
        _prefetch(values_ptr + slot_at, first, capacity, 2 * HALF)
        gdc_wait()
    low, high = _prepared(new_ptr, bias_ptr, q_norm_ptr, eps, row, half, row < REPEATS, HALF)
    q_low, q_high = _apply_rope(low, high, cos, sin, keys_ptr)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, 2 * HALF), tl.float32)
    if part == 0:
        most, own_v = _own(
            new_ptr, bias_ptr, k_norm_ptr, eps, keys_ptr, values_ptr, slot_at + position * DIM, q_low, q_high, cos, sin,
            scale, half, column, HALF, REPEATS,
        )  # fmt: skip
        out, total = out + own_v, total + 1.0
    for begin in range(part * per_part, tl.minimum(position, (part + 1) * per_part), KEYS):
        out, most, total = _with_keys(
            out, most, total, keys_ptr, values_ptr, slot_at, begin, position, q_low, q_high, scale, half, column,
            HALF, KEYS,
        )  # fmt: skip
    if OVERLAPPED:
        gdc_launch_dependents()
    out_at = out_ptr + (index * REPEATS + row) * DIM + column
    if PARTS == 1:
        tl.store(out_at, out / total[:, None], row < REPEATS)
    else:
        _merge(
            out, most, total, out_at, outs_ptr, lses_ptr, done_ptr, index, part, row, column, PARTS, ROWS, HALF, REPEATS
        )
