"""Base and adapter checkpoints in megatron-core's dist_checkpointing format, which any parallel layout can load."""

import re
import shutil
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from bench.contract import checkpoint, checksums
from bench.contract.checkpoint import Stored
from bench.errors import ConfigError
from jobs.engines.megatron.lora import is_adapter
from jobs.engines.megatron.model import ModelAndOptimizer
from jobs.weights import checkpoint_reader

PEFT = "adapter_config.json"
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def save(engine: ModelAndOptimizer, folder: Path, *, adapters: bool) -> None:
    """Save the adapters, or all other weights, with checksums to a folder that exists only once it is complete.

    megatron-core passes the result of a write through a separate process, whose import of torch takes seconds at the
    end of each trial. A synchronous save needs only a queue in this process.
    """
    part = folder.with_name(folder.name + ".part")
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    torch.distributed.barrier()
    part.mkdir(parents=True, exist_ok=True)  # the run folder may be local to each node
    filesystem_async._results_queue = SimpleQueue()
    dist_checkpointing.save(_sharded_state_dict(engine, adapters, Stored.plain), str(part))
    torch.distributed.barrier()
    if rank == 0:
        checksums.write(part, checksums.weight_files(part))
        part.rename(folder)
    torch.distributed.barrier()


def load(engine: ModelAndOptimizer, folder: Path, *, adapters: bool) -> None:
    """Load the adapters, or all other weights, from any layout; of a Hugging Face folder, its conversion.

    Adapters may also be in a PEFT folder, as other engines save them.

    Raises:
        ConfigError: the folder is not a checkpoint of this model; it is in FP8 or NF4 and the run needs another format;
            or its metadata could run code.
    """
    config = engine.plan.config
    if adapters and (folder / PEFT).is_file():
        _load_peft(engine, folder)
        return
    folder = folder if adapters else checkpoint.located(folder, config)
    checkpoint.require(folder, config)
    checkpoint_reader.require_plain(folder)
    try:
        parts = _load_parts(engine, adapters, checkpoint.stored(folder))
        is_single = len(parts) == 1  # the integrity check needs all layers of a checkpoint
        while parts:
            state = dist_checkpointing.load(
                _prepare_in_place(parts.pop()), str(folder), validate_access_integrity=is_single
            )
            for i, chunk in enumerate(engine.unwrapped_chunks()):
                chunk.load_state_dict(state.get(f"chunk{i}", {}), strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"this is not a checkpoint of {engine.plan.config.model.name}: {reason}",
            where=str(folder),
            fix="run `python -m jobs.tasks.prepare RUN/plan.json` (RUN: the run folder), or set MODEL to a "
            "megatron-core checkpoint of this model",
            rule="CFG-06",
        ) from error
    engine.optimizer.reset()
    engine.refresh_weights()


def _load_peft(engine: ModelAndOptimizer, folder: Path) -> None:
    """Load the adapters of a PEFT folder: each rank copies its parts of the full tensors."""
    from jobs.weights import adapters as peft

    model, lora = engine.plan.config.model, engine.plan.config.training.lora
    assert lora is not None, "the plan trains adapters"
    full = peft.fused(peft.load(folder, model, lora), model, lora, folder)
    for state in _sharded_state_dict(engine, True, Stored.plain).values():
        for tensor in state.values():
            extent = (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)
            box = tuple(slice(begin, begin + n) for begin, n in zip(tensor.global_offset, extent, strict=True))
            tensor.data.detach().copy_(full[tensor.key][box].view(tensor.local_shape))
    engine.optimizer.reset()


def _sharded_state_dict(engine: ModelAndOptimizer, adapters: bool, stored: Stored) -> dict[str, dict[str, Any]]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), "stored": stored}
    return {
        f"chunk{i}": {
            key: tensor
            for key, tensor in chunk.sharded_state_dict(metadata=metadata).items()
            if is_adapter(key) == adapters and not key.endswith("_extra_state")
        }
        for i, chunk in enumerate(engine.unwrapped_chunks())
    }


def _load_parts(engine: ModelAndOptimizer, adapters: bool, stored: Stored) -> list[dict[str, dict[str, Any]]]:
    """Return the parts of the state dict, which are loaded one after another.

    There is one part, unless frozen linears are quantised while they are loaded from BF16. Then each layer is a part,
    and the first part also has the weights outside of the layers. All ranks load together and have the same number of
    parts. A single rank loads all layers at once: in that case megatron-core 0.16.1 requires all shards.
    """
    state_dict = _sharded_state_dict(engine, adapters, stored)
    is_staged = stored is Stored.plain and checkpoint.preferred(engine.plan.config) is not Stored.plain
    if adapters or not is_staged or engine.plan.world.num_ranks == 1:
        return [state_dict]
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    for chunk, state in state_dict.items():
        for key, tensor in state.items():
            layer = _LAYER.match(key)
            name = layer[0] if layer else "decoder.layers.0."
            parts.setdefault(f"{chunk} {name}", {}).setdefault(chunk, {})[key] = tensor
    return list(parts.values())


def _prepare_in_place(part: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Let each tensor be loaded into its own memory; tensors that are quantised on load get host memory.

    megatron-core would copy gate and up of each layer to concatenate them; they already are halves of one tensor.
    """
    for state in part.values():
        for tensor in state.values():
            if tensor.data is not None and tensor.data.is_meta:
                tensor.data = torch.empty_like(tensor.data, device="cpu")
            if isinstance(tensor, ShardedTensorFactory):
                tensor.merge_fn = partial(_keep_merged, tensor.data)
    return part


def _keep_merged(weight: torch.Tensor, halves: list[torch.Tensor]) -> torch.Tensor:
    return weight
