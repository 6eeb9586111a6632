"""Save trained weights as Hugging Face folders: a model, or PEFT adapters."""

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

from bench.contract import checksums, families
from bench.contract.plan_kinds import TrainingPlan
from jobs.engines.huggingface import adapters
from jobs.engines.huggingface.weights import canonical
from jobs.weights import adapters as peft
from jobs.weights import conversion
from jobs.weights.export import SHARD_BYTES
from jobs.weights.source import INDEX, SINGLE


def save_adapters(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the adapters as PEFT does, in FP32."""
    tensors = {name: full_tensor(p).float().cpu() for name, p in adapters.trainable(model).items()}
    if torch.distributed.get_rank() == 0:
        lora, base = plan.config.training.lora, plan.base_dir
        assert lora is not None, "the plan trains adapters"
        peft.write(folder, dict(adapters.peft_tensors(tensors, plan)), lora=lora, base=base)
    torch.distributed.barrier()


def save_model(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the weights as transformers does, and inside the folder their conversion for engine=megatron."""
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
        _rename_shards(part, files)
        described = families.of_model(plan.config.model).config_of(plan.config.model)
        (part / "config.json").write_text(json.dumps(described | {"dtype": "float32"}, indent=2) + "\n")
        conversion.convert(conversion.prepare(part, plan.config.model))
        checksums.write(part, checksums.weight_files(part))
        part.rename(folder)
    torch.distributed.barrier()


def full_tensor(parameter: Parameter) -> Tensor:
    """Return the full weight, gathered if it is sharded; all ranks call this together."""
    if isinstance(parameter, DTensor):
        full: Tensor = cast(DTensor, parameter.detach()).full_tensor()
        return full
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _files(model: Module, is_writer: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file on the writing rank; the other ranks take part in the gathers."""
    tensors, size = dict[str, Tensor](), 0
    for name, parameter in model.named_parameters():
        if adapters.is_adapter(name):
            continue
        weight = full_tensor(parameter)
        size += weight.nbytes
        if tensors and size > SHARD_BYTES:
            yield tensors
            tensors, size = {}, weight.nbytes
        tensors[canonical(name)] = weight.cpu().contiguous() if is_writer else torch.empty(0)
    yield tensors


def _rename_shards(folder: Path, files: dict[str, list[str]]) -> None:
    """Rename the files to the names that transformers expects; if there are several, write their index."""
    if len(files) == 1:
        (folder / "part-1").rename(folder / SINGLE)
        return
    named = {part: f"model-{n:05}-of-{len(files):05}.safetensors" for n, part in enumerate(files, 1)}
    for part, name in named.items():
        (folder / part).rename(folder / name)
    index = {name: named[part] for part, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n")
