"""Base and adapter checkpoints that any layout can load: megatron-core's dist_checkpointing."""

import shutil
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from bench import converted
from bench.errors import ConfigError
from jobs.megatron.lora import is_adapter
from jobs.megatron.model import Engine


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
        state = dist_checkpointing.load(_sharded(engine, adapters), str(folder))
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"not a checkpoint of {engine.plan.config.model.name}: {reason}",
            where=str(folder),
            fix="run the prepare step, or point MODEL at a megatron-core checkpoint of this model",
        ) from error
    for i, chunk in enumerate(engine.bare_chunks()):
        chunk.load_state_dict(state[f"chunk{i}"], strict=False)
    engine.optimizer.reload_model_params()


def _sharded(engine: Engine, adapters: bool) -> dict:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {
        f"chunk{i}": {
            key: tensor
            for key, tensor in chunk.sharded_state_dict(metadata=metadata).items()
            if is_adapter(key) == adapters and not key.endswith("_extra_state")
        }
        for i, chunk in enumerate(engine.bare_chunks())
    }
