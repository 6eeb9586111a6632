"""Load NeMo's weights, and save the trained adapters as a PEFT folder, which every engine can load.

NeMo's adapters of megatron-core's linears have the layout of engine=megatron: one A for q, k and v, and B in the order
of linear_qkv's rows. TP splits their weights along other axes, which are attributes of the weights.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from bench.contract import checkpoint
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config
from bench.contract.training import Lora
from bench.errors import ConfigError
from jobs.weights import adapters as peft
from jobs.weights import checkpoint_reader

PARTS = {"lora_a": "linear_in", "lora_b": "linear_out"}
Place = tuple[int, str, str]
"""Layer from 0, linear and part."""
Piece = tuple[int, int | None, Tensor]
"""TP rank, the axis that TP splits, and the rank's part."""


def save(plan: TrainingPlan, chunks: list[Any], folder: Path) -> None:
    """Write the adapters of megatron-core's model, chunk by chunk; all ranks call this together, and rank 0 writes."""
    lora = plan.config.training.lora
    assert lora is not None, "the plan trains adapters"
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    is_first_replica = parallel_state.get_data_parallel_rank() == 0
    own = list(_pieces(chunks, lora)) if is_first_replica else []
    gathered: list[list[tuple[Place, Piece]]] | None = [[] for _ in range(size)] if rank == 0 else None
    torch.distributed.gather_object(own, gathered)
    if gathered is not None:
        whole = _whole([one for pieces in gathered for one in pieces])
        stacked = _stacked(whole, lora, plan.config.model.num_layers)
        tensors = {f"{peft.IN_PEFT}{name}": x for name, x in peft.split(stacked, plan.config.model)}
        peft.write(folder, tensors, lora=lora, base=plan.base_dir)
    torch.distributed.barrier()


def _pieces(chunks: list[Any], lora: Lora) -> Iterator[tuple[Place, Piece]]:
    """Yield this rank's parts, in FP32 on the host."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for linear in lora.target_modules:
                adapter = getattr(layer.self_attention, linear).adapter
                for part, name in PARTS.items():
                    weight = getattr(adapter, name).weight
                    axis = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None
                    yield (layer.layer_number - 1, linear, part), (rank, axis, weight.detach().float().cpu())


def _whole(pieces: list[tuple[Place, Piece]]) -> dict[Place, Tensor]:
    """Return the whole tensors from the parts of all TP ranks."""
    by_place: dict[Place, list[Piece]] = {}
    for place, piece in pieces:
        by_place.setdefault(place, []).append(piece)
    whole = {}
    for place, parts in by_place.items():
        parts.sort(key=lambda piece: piece[0])
        axis, tensors = parts[0][1], [tensor for _, _, tensor in parts]
        whole[place] = tensors[0] if axis is None else torch.cat(tensors, dim=axis)
    return whole


def _stacked(whole: dict[Place, Tensor], lora: Lora, num_layers: int) -> dict[str, Tensor]:
    """Return the adapters of all layers, [L, R, I] and [L, O, R], by the names of our engine's checkpoints."""
    return {
        f"{peft.PREFIX}{linear}.{part}": torch.stack([whole[layer, linear, part] for layer in range(num_layers)])
        for linear in lora.target_modules
        for part in PARTS
    }


_OUR_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine stores a norm in the linear that follows it; our checkpoints do not."""


def load(model: Any, folder: Path, config: Config) -> None:
    """Load all weights of megatron-core's model from a checkpoint of any layout.

    Raises:
        ConfigError: not a checkpoint of this model, or in FP8 or NF4, or its metadata could run code.
    """
    folder = checkpoint.located(folder, config)
    checkpoint.require(folder, config)
    checkpoint_reader.require_plain(folder)
    wanted = {name: part for name, part in model.sharded_state_dict().items() if not name.endswith("_extra_state")}
    for part in wanted.values():
        for theirs, ours in _OUR_NAMES.items():
            part.key = part.key.replace(theirs, ours)
    try:
        model.load_state_dict(dist_checkpointing.load(wanted, str(folder)), strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        raise ConfigError(
            f"this is not a checkpoint of {config.model.name}: {str(error).strip().splitlines()[-1]}",
            where=str(folder),
            fix="run `python -m jobs.tasks.prepare RUN/plan.json` (RUN: the run folder), or set MODEL to a "
            "megatron-core checkpoint of this model",
            rule="CFG-06",
        ) from error
