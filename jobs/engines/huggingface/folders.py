"""Save trained weights as Hugging Face folders: a model, or PEFT adapters."""

import json
import shutil
from collections import deque
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
from jobs.engines.huggingface.described import transformers_folder
from jobs.engines.huggingface.weights import canonical
from jobs.weights import adapters as peft
from jobs.weights import conversion
from jobs.weights.source import SHARD_BYTES


def save_adapters(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the adapters as PEFT does, in FP32."""
    tensors = {name: full_tensor(p).float().cpu() for name, p in adapters.trainable(model).items()}
    if torch.distributed.get_rank() == 0:
        lora, base = plan.config.training.lora, plan.base_dir
        assert lora is not None, "the plan trains adapters"
        peft.write(folder, dict(adapters.peft_tensors(tensors, plan)), lora=lora, base=base)
    torch.distributed.barrier()


def save_model(plan: TrainingPlan, model: Module, folder: Path) -> None:
    """Write the weights as transformers does, and inside the folder their conversion for engine=megatron.

    A model that transformers describes has no conversion.
    """
    part, is_writer = folder.with_name(folder.name + ".part"), torch.distributed.get_rank() == 0
    if is_writer:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    described, tensors = plan.config.model.described, _whole(model, is_writer)
    if is_writer and described is not None:
        transformers_folder.write(part, described, tensors, dtype="float32")
    elif is_writer:
        _write(plan, tensors, part)
    else:
        deque(tensors, maxlen=0)  # takes part in the gathers
    if is_writer:
        checksums.write(part, checksums.weight_files(part))
        part.rename(folder)
    torch.distributed.barrier()


def _write(plan: TrainingPlan, tensors: Iterator[tuple[str, Tensor]], part: Path) -> None:
    files: dict[str, list[str]] = {}
    for number, shard in enumerate(_files(tensors), 1):
        files[f"part-{number}"] = list(shard)
        save_file(shard, part / f"part-{number}", metadata={"format": "pt"})
    transformers_folder.rename_shards(part, files)
    config = families.of_model(plan.config.model).config_of(plan.config.model)
    (part / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    conversion.convert(conversion.prepare(part, plan.config.model))


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


def _files(whole: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file."""
    tensors, size = dict[str, Tensor](), 0
    for name, weight in whole:
        size += weight.nbytes
        if tensors and size > SHARD_BYTES:
            yield tensors
            tensors, size = {}, weight.nbytes
        tensors[name] = weight
    yield tensors


def _whole(model: Module, is_writer: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the base by transformers' names: in host memory on the writing rank, else without memory."""
    for name, parameter in model.named_parameters():
        if not adapters.is_adapter(name):
            weight = full_tensor(parameter)
            yield canonical(name), weight.cpu().contiguous() if is_writer else weight.to("meta")
