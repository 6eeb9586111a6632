"""Save what was trained as Hugging Face folders: a model, or PEFT adapters."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from bench.contract.plan_kinds import TrainingPlan
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface.weights import canonical
from jobs.weights import adapters as peft
from jobs.weights import conversion, families
from jobs.weights.export import SHARD_BYTES
from jobs.weights.source import INDEX, SINGLE


def save_adapters(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the adapters as PEFT does, in FP32."""
    whole = {name: whole_of(p).float().cpu() for name, p in adapters.trained(model).items()}
    if torch.distributed.get_rank() == 0:
        lora, base = plan.config.training.lora, plan.base_dir
        assert lora is not None, "the plan trains adapters"
        peft.write(folder, dict(adapters.written(whole)), lora=lora, base=base)
    torch.distributed.barrier()


def save_model(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the weights as transformers does; inside lies their conversion, which the other engine loads."""
    part, is_writer = folder.with_name(folder.name + ".part"), torch.distributed.get_rank() == 0
    if is_writer:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    files: dict[str, list[str]] = {}
    for number, tensors in enumerate(_files(model, is_writer), 1):
        if is_writer:
            files[f"part-{number}"] = list(tensors)
            save_file(tensors, part / f"part-{number}", metadata={"format": "pt"})
    if is_writer:
        _name(part, files)
        described = families.of(plan.config.model).config(plan.config.model)
        (part / "config.json").write_text(json.dumps(described | {"dtype": "float32"}, indent=2) + "\n")
        if described["model_type"] == "llama":
            conversion.convert(conversion.prepare(part, plan.config.model))
        part.rename(folder)
    torch.distributed.barrier()


def whole_of(parameter: Parameter) -> Tensor:
    """Return the whole weight of which ranks may hold parts; all of them ask."""
    if isinstance(parameter, DTensor):
        whole: Tensor = cast(DTensor, parameter.detach()).full_tensor()
        return whole
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _files(model: Module, is_writer: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file, on the rank that writes; the others only take part."""
    tensors, size = dict[str, Tensor](), 0
    for name, parameter in model.named_parameters():
        if adapters.is_adapter(name):
            continue
        weight = whole_of(parameter)
        size += weight.nbytes
        if tensors and size > SHARD_BYTES:
            yield tensors
            tensors, size = {}, weight.nbytes
        tensors[canonical(name)] = weight.cpu().contiguous() if is_writer else torch.empty(0)
    yield tensors


def _name(folder: Path, files: dict[str, list[str]]) -> None:
    """Give the files the names that transformers looks for, and write their index where there are several."""
    if len(files) == 1:
        (folder / "part-1").rename(folder / SINGLE)
        return
    named = {part: f"model-{n:05}-of-{len(files):05}.safetensors" for n, part in enumerate(files, 1)}
    for part, name in named.items():
        (folder / part).rename(folder / name)
    index = {name: named[part] for part, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")
