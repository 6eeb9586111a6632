"""Compile the kernels of generation and of heads for an H100 or H200, without one: `python -m
tests.helpers.compiled_kernels`.

What Triton's interpreter forgives (two types of one variable, a return inside a branch) stops its compiler. It runs in
a process of its own, since Triton decides when it is imported whether kernels are interpreted. Prints the registers and
spilled bytes of each.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jobs.engines.megatron import head_norm_kernels, rope_kernels
from jobs.engines.megatron.generation import (
    attention_kernels,
    embedding_kernels,
    few_rows_kernels,
    one_row_kernels,
    peer_kernels,
    sampling_kernels,
)

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
WEIGHTS = {"bf16": ("*bf16", None), "fp8": ("*fp8e4nv", "*fp32"), "nf4": ("*u8", "*fp32")}
"""Triton's types of values and scales."""
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nf4": torch.uint8}


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments, None where an argument is left out, and its constants."""

    name: str
    kernel: Any
    types: dict[str, str | tuple[str, ...] | None]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def variants() -> Iterator[Variant]:
    for precision, (values, scale) in WEIGHTS.items():
        common = {"values_ptr": values, "scale_ptr": scale, "levels_ptr": "*fp32", "residual_ptr": "*bf16"}
        common |= {"out_ptr": "*bf16", "num_outputs": "i32", "up_ptr": None, "up_scale_ptr": None}
        types = common | {"x_ptr": "*bf16", "norm_ptr": "*bf16", "eps": "fp32"}
        sample = torch.empty(0, 4096, dtype=DTYPES[precision]), None, None, None
        tile = one_row_kernels.tile_of(sample, has_norm=True)
        constants = {"OUTPUTS": tile.outputs, "INPUTS": tile.inputs, "WIDTH": 4096, "OVERLAPPED": True}
        constants["STAGES"] = tile.stages
        yield Variant(f"one row {precision}", one_row_kernels._linear, types, constants, {"num_warps": tile.num_warps})
        x, low, x_scale = ("*fp8e4nv", "*fp8e4nv", "*fp32") if precision == "fp8" else ("*bf16", None, None)
        types = common | {"x_ptr": x, "low_ptr": low, "x_scale_ptr": x_scale, "sums_ptr": "*fp32", "done_ptr": "*i32"}
        types |= {"num_rows": "i32", "up_ptr": values, "up_scale_ptr": scale}
        tile = few_rows_kernels.TILES[DTYPES[precision], True]
        constants = {"OUTPUTS": 64, "INPUTS": tile.inputs, "STAGES": tile.stages, "ROWS": 32, "WIDTH": 4096, "PARTS": 2}
        constants |= {"STEPS": 2048 // tile.inputs, "OVERLAPPED": True}
        yield Variant(f"few rows {precision}", few_rows_kernels._product_kernel, types, constants)
        norm = {"norm_ptr": "*bf16", "eps": "fp32"}
        types = norm | {"x_ptr": "*bf16", "high_ptr": x, "low_ptr": low, "scale_ptr": x_scale}
        constants = {"WIDTH": 4096, "SIZE": 4096, "OVERLAPPED": True}
        yield Variant(f"rows for {precision}", few_rows_kernels._rows_kernel, types, constants)
    pointers = ("qkv", "keys", "values", "out")
    types = {f"{name}_ptr": "*bf16" for name in pointers} | {"positions_ptr": "*i64", "done_ptr": "*i32"}
    types |= {f"{name}_ptr": "*fp32" for name in ("angles", "outs", "lses")} | {"scale": "fp32", "capacity": "i32"}
    types |= {"eps": "fp32"}
    for repeats, parts, added in ((1, 8, None), (8, 1, None), (7, 8, "*bf16")):
        constants = {"PARTS": parts, "ROWS": 16, "HALF": 64, "REPEATS": repeats, "KEYS": 64, "OVERLAPPED": True}
        own = {f"{name}_ptr": added for name in ("bias", "q_norm", "k_norm")}
        what = " with bias and norms" if added else ""
        yield Variant(f"attend {repeats} x {parts}{what}", attention_kernels._attend, types | own, constants)
    yield from of_heads()
    types = {f"{name}_ptr": "*i64" for name in ("tokens", "positions", "rows", "seeds")} | {"done_ptr": "*i32"}
    types |= {"logits_ptr": "*fp32", "best_ptr": "*fp32", "best_token_ptr": "*i32"}
    types |= {"vocab_size": "i32", "capacity": "i32", "temperature": "fp32"}
    for is_drawn, num_ranks in ((False, 1), (True, 1), (True, 2)):
        constants = {"TOKENS": 2048, "SIZE": 16, "IS_DRAWN": is_drawn, "RANK": 0, "RANKS": num_ranks, "MOST": 512}
        shared = {"addresses": ("i64",) * num_ranks, "counts_ptr": "*i32"} if num_ranks > 1 else {}
        own = types | {"addresses": None, "counts_ptr": None} | shared
        yield Variant(f"append {is_drawn} {num_ranks}", sampling_kernels._append, own, constants)
    types = {"x_ptr": "*i16", "counts_ptr": "*i32", "num_values": "i32"}
    for num_ranks in (2, 8):
        types["addresses"] = ("i64",) * num_ranks
        constants = {"RANK": 1, "RANKS": num_ranks, "MOST": 65536, "VALUES": 1024, "OVERLAPPED": True}
        yield Variant(f"sum over {num_ranks} ranks", peer_kernels.sum_over_ranks, types, constants)
    types = {"tokens_ptr": "*i64", "table_ptr": "*bf16", "out_ptr": "*bf16", "first": "i32", "num_rows": "i32"}
    yield Variant("embedding", embedding_kernels._own_rows, types, {"WIDTH": 4096, "SIZE": 4096})


def of_heads() -> Iterator[Variant]:
    """Yield the kernels of training between qkv and attention, for Llama and with biases and norms."""
    shared = {"freqs_ptr": "*fp32", "eps": "fp32", "num_rows": "i32"}
    types = shared | {f"{name}_ptr": "*bf16" for name in ("qkv", "low", "b", "q", "k", "v")}
    types |= {"lora_scale": "fp32", "rank": "i32"}
    for rank, added in ((16, None), (16, "*bf16"), (64, None), (64, "*bf16")):
        tile = rope_kernels._tile(8192, 8, rank)
        options = {name: tile.pop(name) for name in ("num_warps", "maxnreg") if name in tile}
        constants = tile | {"repeats": 4, "HALF": 64, "RANK": rank, "OVERWRITE": added is not None}
        own = {f"{name}_ptr": added for name in ("bias", "q_weight", "k_weight")}
        what = " with bias and norms" if added else ""
        yield Variant(f"rope rank {rank}{what}", rope_kernels._rope, types | own, constants, options)
    types = shared | {f"{name}_ptr": "*bf16" for name in ("dq", "dk", "dv", "qkv", "q_weight", "k_weight", "out")}
    types |= {"groups": "i32", "repeats": "i32", "out_q_ptr": "*fp8e4nv", "out_scale_ptr": "*fp32"}
    constants = {"QUERIES": 32, "GROUPS": 8, "HALF": 64, "QUANTIZE": True, "POWERS": False}
    yield Variant("backward of rope", rope_kernels._rope_backward, types, constants)
    for rows, parts in ((1, None), (8, "*fp32")):
        own = {"parts_ptr": parts, "out_ptr": None if parts else "*bf16"}
        what = f"backward of rope and norms, {rows} rows"
        options = {"num_warps": 8 if parts else 4}
        yield Variant(what, head_norm_kernels._backward, types | own, constants | {"ROWS": rows}, options)


def compiled(one: Variant) -> str:
    """Return what ptxas says of a kernel."""
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(one.kernel.arg_names):
        kind = None if name in one.constants else one.types[name]
        signature[name] = kind or "constexpr"
        if kind is None:
            constants[(place,)] = one.constants.get(name)
        elif isinstance(kind, str) and kind.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=one.options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return f"{one.name}: {', '.join(re.findall(r'[0-9]+ (?:registers|bytes spill stores)', report))}"


if __name__ == "__main__":
    for variant in variants():
        print(compiled(variant), flush=True)
