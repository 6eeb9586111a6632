"""Base and adapter checkpoints that any layout can load: megatron-core's dist_checkpointing."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
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
    dist_checkpointing.save(_sharded(engine, adapters), str(part))
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
        parts = _parts(engine, adapters)
        for part in parts:
            # One layer of many is no whole, which is what the integrity check looks for.
            state = dist_checkpointing.load(_with_memory(part), str(folder), validate_access_integrity=len(parts) == 1)
            for i, chunk in enumerate(engine.bare_chunks()):
                chunk.load_state_dict(state.get(f"chunk{i}", {}), strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"not a checkpoint of {engine.plan.config.model.name}: {reason}",
            where=str(folder),
            fix="run the prepare step, or point MODEL at a megatron-core checkpoint of this model",
        ) from error
    engine.optimizer.reset()


def _sharded(engine: Engine, adapters: bool) -> dict[str, dict[str, Any]]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {
        f"chunk{i}": {
            key: tensor
            for key, tensor in chunk.sharded_state_dict(metadata=metadata).items()
            if is_adapter(key) == adapters and not key.endswith("_extra_state")
        }
        for i, chunk in enumerate(engine.bare_chunks())
    }


def _parts(engine: Engine, adapters: bool) -> list[dict[str, dict[str, Any]]]:
    """Return what is loaded at once: all; of frozen FP8 linears, which come in BF16, one layer.

    A single rank takes all of them: megatron-core 0.16.1 wants every layer of it.
    """
    whole = _sharded(engine, adapters)
    if adapters or engine.plan.config.precision is not Precision.fp8 or engine.plan.world.num_ranks == 1:
        return [whole]
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    for chunk, state in whole.items():
        for key, tensor in state.items():
            layer = _LAYER.match(key)
            part = parts.setdefault(f"{chunk} {layer[0]}" if layer else chunk, {})
            part.setdefault(chunk, {})[key] = tensor
    return list(parts.values())


def _with_memory(part: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Give tensors that have none (frozen FP8 weights, in a checkpoint's dtype) the host's memory to be loaded into."""
    for state in part.values():
        for tensor in state.values():
            if tensor.data is not None and tensor.data.is_meta:
                tensor.data = torch.empty_like(tensor.data, device="cpu")
    return part
