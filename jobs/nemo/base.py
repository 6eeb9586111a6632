"""Load a base checkpoint of ours into NeMo's model; both are megatron-core's distributed checkpoints."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from bench.contract import checkpoint
from bench.contract.schema import Config
from bench.errors import ConfigError
from jobs.weights import checkpoint_metadata

_OUR_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Transformer Engine's layers, and checkpoints for them, hold a norm inside of the linear behind it; ours do not."""


def load(model: Any, folder: Path, config: Config) -> None:
    """Load all weights of megatron-core's model, whatever layout saved them.

    Raises:
        ConfigError: the folder is not a checkpoint of this model, or one in FP8 or NF4, or its metadata could run code.
    """
    folder = checkpoint.located(folder, config)
    checkpoint.require(folder, config)
    checkpoint_metadata.require_plain(folder)
    wanted = {name: part for name, part in model.sharded_state_dict().items() if not name.endswith("_extra_state")}
    for part in wanted.values():
        for theirs, ours in _OUR_NAMES.items():
            part.key = part.key.replace(theirs, ours)
    try:
        model.load_state_dict(dist_checkpointing.load(wanted, str(folder)), strict=False)
    except (OSError, KeyError, ValueError, CheckpointingException, CheckpointException) as error:
        raise ConfigError(
            f"not a checkpoint of {config.model.name}: {str(error).strip().splitlines()[-1]}",
            where=str(folder),
            fix="run jobs.tasks.prepare, or point MODEL at a megatron-core checkpoint of this model",
            rule="CFG-06",
        ) from error
