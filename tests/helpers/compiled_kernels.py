"""Compile the kernels of generation for an H100 or H200, without one: `python -m tests.helpers.compiled_kernels`.

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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jobs.engines.megatron.generation import attention_kernels, linear_kernels
from jobs.engines.megatron.generation.linear_kernels import MORE_ROWS, ONE_ROW

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
WEIGHTS = {"bf16": ("*bf16", None), "fp8": ("*fp8e4nv", "*fp32"), "nf4": ("*u8", "*fp32")}
"""Triton's types of values and scales."""


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments, None where an argument is left out, and its constants."""

    name: str
    kernel: Any
    types: dict[str, str | None]
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def variants() -> Iterator[Variant]:
    for precision, (values, scale) in WEIGHTS.items():
        for rows, tile in ((1, ONE_ROW), (32, MORE_ROWS)):
            types = {"x_ptr": "*bf16", "norm_ptr": "*bf16", "values_ptr": values, "scale_ptr": scale}
            types |= {"up_ptr": values if rows > 1 else None, "up_scale_ptr": scale if rows > 1 else None}
            types |= {"levels_ptr": "*fp32", "residual_ptr": "*bf16" if rows == 1 else None, "out_ptr": "*bf16"}
            types |= {"num_rows": "i32", "num_outputs": "i32", "eps": "fp32"}
            stages = 1 if precision == "nf4" else tile.stages
            constants = {"OUTPUTS": max(tile.outputs // 2, 16 if rows > 1 else 1), "INPUTS": tile.inputs}
            constants |= {"STAGES": stages, "ROWS": rows, "WIDTH": 4096, "OVERLAPPED": False}
            options = {"num_warps": tile.num_warps}
            yield Variant(f"linear {precision} {rows} rows", linear_kernels._linear, types, constants, options)
    pointers = ("qkv", "keys", "values", "out")
    types = {f"{name}_ptr": "*bf16" for name in pointers} | {"positions_ptr": "*i64", "done_ptr": "*i32"}
    types |= {f"{name}_ptr": "*fp32" for name in ("angles", "outs", "lses")} | {"scale": "fp32", "room": "i32"}
    for repeats, parts in ((1, 8), (8, 1)):
        constants = {"PARTS": parts, "ROWS": 16, "HALF": 64, "REPEATS": repeats, "KEYS": 64, "OVERLAPPED": False}
        yield Variant(f"attend {repeats} x {parts}", attention_kernels._attend, types, constants)


def compiled(one: Variant) -> str:
    """Return what ptxas says of a kernel."""
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(one.kernel.arg_names):
        kind = None if name in one.constants else one.types[name]
        signature[name] = kind or "constexpr"
        if kind is None:
            constants[(place,)] = one.constants.get(name)
        elif kind.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=one.options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return f"{one.name}: {', '.join(re.findall(r'[0-9]+ (?:registers|bytes spill stores)', said))}"


if __name__ == "__main__":
    for variant in variants():
        print(compiled(variant), flush=True)
