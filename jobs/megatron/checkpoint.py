"""Base and adapter checkpoints that any layout can load: megatron-core's dist_checkpointing."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from bench import converted
from bench.errors import ConfigError
from bench.schema import Precision
from jobs.megatron.lora import is_adapter
from jobs.megatron.model import Engine

_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def save(engine: Engine, folder: Path, *, adapters: bool) -> None:
    """Write the adapters, or everything but them, to a folder that appears only when it is complete."""
    part = folder.with_name(folder.name + ".part")
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save({f"chunk{i}": s for i, (_, s) in enumerate(_sharded(engine, adapters))}, str(part))
    torch.distributed.barrier()
    if rank == 0:
        part.rename(folder)
    torch.distributed.barrier()


def load(engine: Engine, folder: Path, *, adapters: bool) -> None:
    """Load the adapters, or everything but them, whatever layout wrote them; of a Hugging Face folder, its conversion.

    Raises:
        ConfigError: the folder is not a checkpoint of this model.
    """
    folder = folder if adapters else converted.located(folder)
    converted.require_model(folder, engine.plan.config.model)
    try:
        for chunk, part in _parts(engine, adapters):
            # A part of a model is no whole, which is what the integrity check looks for.
            state = dist_checkpointing.load(_with_memory(part), str(folder), validate_access_integrity=False)
            chunk.load_state_dict(state, strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"not a checkpoint of {engine.plan.config.model.name}: {reason}",
            where=str(folder),
            fix="run the prepare step, or point MODEL at a megatron-core checkpoint of this model",
        ) from error
    engine.optimizer.reset()


def _sharded(engine: Engine, adapters: bool) -> Iterator[tuple[GPTModel, dict[str, Any]]]:
    """Yield each chunk and what it holds."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in engine.bare_chunks():
        state = chunk.sharded_state_dict(metadata=metadata).items()
        wanted = {key: x for key, x in state if is_adapter(key) == adapters and not key.endswith("_extra_state")}
        yield chunk, wanted


def _parts(engine: Engine, adapters: bool) -> Iterator[tuple[GPTModel, dict[str, Any]]]:
    """Yield what is loaded at once: all of a chunk; of frozen FP8 linears, which come in BF16, one layer.

    A single rank takes all of them: megatron-core 0.16.1 wants every layer of it.
    """
    is_layered = engine.plan.config.precision is Precision.fp8 and engine.plan.world.num_ranks > 1
    for chunk, state in _sharded(engine, adapters):
        parts: dict[str, dict[str, Any]] = {}
        for key, tensor in state.items():
            layer = _LAYER.match(key) if is_layered else None
            parts.setdefault(layer[0] if layer else "", {})[key] = tensor
        for part in parts.values():
            yield chunk, part


def _with_memory(part: dict[str, Any]) -> dict[str, Any]:
    """Give tensors that have none (frozen FP8 weights, in a checkpoint's dtype) the host's memory to be loaded into."""
    for tensor in part.values():
        if tensor.data is not None and tensor.data.is_meta:
            tensor.data = torch.empty_like(tensor.data, device="cpu")
    return part
