"""Hugging Face folders whose weights are headers only: a sparse file of the right size."""

import json
from pathlib import Path
from typing import Any

from bench.contract import families
from bench.contract.model import Model

BYTES = 4


def write(folder: Path, model: Model, **changes: Any) -> Path:
    """Write config.json, with changes, and the header of model.safetensors in FP32; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    family = families.of_model(model)
    (folder / "config.json").write_text(json.dumps(family.config_of(model) | changes))
    write_header(folder / "model.safetensors", family.tensors(model))
    return folder


def write_header(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of zeros that take no space."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = BYTES
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
