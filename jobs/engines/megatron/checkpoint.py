"""Base and adapter checkpoints that any layout can load: megatron-core's dist_checkpointing."""

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

from bench.contract import checkpoint
from bench.contract.checkpoint import Stored
from bench.errors import ConfigError
from jobs.engines.megatron.lora import is_adapter
from jobs.engines.megatron.model import Parts
from jobs.weights import checkpoint_reader

PEFT = "adapter_config.json"
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def save(engine: Parts, folder: Path, *, adapters: bool) -> None:
    """Save the adapters, or all other weights, to a folder that appears only when it is complete.

    megatron-core hands the result of a write over through a process of its own, which imports torch for it: seconds at
    the end of each trial. A save that waits writes and reads that result in one process.
    """
    part = folder.with_name(folder.name + ".part")
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    torch.distributed.barrier()
    part.mkdir(parents=True, exist_ok=True)  # the run folder may be each node's own
    filesystem_async._results_queue = SimpleQueue()
    dist_checkpointing.save(_sharded(engine, adapters, Stored.plain), str(part))
    torch.distributed.barrier()
    if rank == 0:
        part.rename(folder)
    torch.distributed.barrier()


def load(engine: Parts, folder: Path, *, adapters: bool) -> None:
    """Load the adapters, or all other weights, whatever layout saved them; of a Hugging Face folder, its conversion.

    Adapters may lie in a PEFT folder too, as other engines save them.

    Raises:
        ConfigError: the folder is not a checkpoint of this model, or is one in FP8 or NF4 that the run does not take;
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
        parts = _parts(engine, adapters, checkpoint.stored(folder))
        is_whole = len(parts) == 1  # the integrity check wants all layers of a checkpoint
        while parts:
            state = dist_checkpointing.load(_in_place(parts.pop()), str(folder), validate_access_integrity=is_whole)
            for i, chunk in enumerate(engine.bare_chunks()):
                chunk.load_state_dict(state.get(f"chunk{i}", {}), strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"not a checkpoint of {engine.plan.config.model.name}: {reason}",
            where=str(folder),
            fix="run jobs.tasks.prepare, or point MODEL at a megatron-core checkpoint of this model",
            rule="CFG-06",
        ) from error
    engine.optimizer.reset()
    engine.refresh_weights()


def _load_peft(engine: Parts, folder: Path) -> None:
    """Load the adapters of a PEFT folder: each rank takes its parts of the whole tensors."""
    from jobs.weights import adapters as peft

    model, lora = engine.plan.config.model, engine.plan.config.training.lora
    assert lora is not None, "the plan trains adapters"
    whole = peft.fused(peft.load(folder, model, lora), model, lora, folder)
    for state in _sharded(engine, True, Stored.plain).values():
        for tensor in state.values():
            extent = (*(1 for _ in range(tensor.prepend_axis_num)), *tensor.local_shape)
            box = tuple(slice(begin, begin + n) for begin, n in zip(tensor.global_offset, extent, strict=True))
            tensor.data.detach().copy_(whole[tensor.key][box].view(tensor.local_shape))
    engine.optimizer.reset()


def _sharded(engine: Parts, adapters: bool, stored: Stored) -> dict[str, dict[str, Any]]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), "stored": stored}
    return {
        f"chunk{i}": {
            key: tensor
            for key, tensor in chunk.sharded_state_dict(metadata=metadata).items()
            if is_adapter(key) == adapters and not key.endswith("_extra_state")
        }
        for i, chunk in enumerate(engine.bare_chunks())
    }


def _parts(engine: Parts, adapters: bool, stored: Stored) -> list[dict[str, dict[str, Any]]]:
    """Return the parts that are loaded one after the other.

    There is one part, unless frozen linears are quantised while they are loaded from BF16. Then each layer is a part,
    and the first has the weights outside of the layers too. All ranks load together, and have the same number of parts.
    A single rank loads all layers at once: megatron-core 0.16.1 requires all shards of a rank then.
    """
    whole = _sharded(engine, adapters, stored)
    is_staged = stored is Stored.plain and checkpoint.wanted(engine.plan.config) is not Stored.plain
    if adapters or not is_staged or engine.plan.world.num_ranks == 1:
        return [whole]
    parts: dict[str, dict[str, dict[str, Any]]] = {}
    for chunk, state in whole.items():
        for key, tensor in state.items():
            layer = _LAYER.match(key)
            name = layer[0] if layer else "decoder.layers.0."
            parts.setdefault(f"{chunk} {name}", {}).setdefault(chunk, {})[key] = tensor
    return list(parts.values())


def _in_place(part: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Load each tensor into its own memory; what is quantised when it is loaded has none, and gets the host's.

    megatron-core would concatenate gates and ups of all layers in a copy; they are halves of one tensor already.
    """
    for state in part.values():
        for tensor in state.values():
            if tensor.data is not None and tensor.data.is_meta:
                tensor.data = torch.empty_like(tensor.data, device="cpu")
            if isinstance(tensor, ShardedTensorFactory):
                tensor.merge_fn = partial(_whole, tensor.data)
    return part


def _whole(weight: torch.Tensor, halves: list[torch.Tensor]) -> torch.Tensor:
    return weight
