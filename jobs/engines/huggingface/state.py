"""The training state of a rank in files: master weights, both moments, and the generators; not the data's order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from bench.contract import json_files
from bench.contract.plan import Plan
from jobs.engines.huggingface.shards import NAMES, Shard
from jobs.weights import checkpoint_writer
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

GENERATORS = "rng_state."
ROOM = 0.8
"""The share of the free host memory that copies of all ranks of a node may take."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank as it was, or as it is, where the host has no room for a copy."""

    shards: list[Shard]
    generators: dict[str, Tensor]
    is_copy: bool
    """Whether training may go on while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, and then the record that says so."""
        rank = torch.distributed.get_rank()
        record = checkpoint_writer.write(folder / f"rank_{rank}.distcp", self._pieces(rank))
        json_files.write(folder / f"rank_{rank}.json", record)

    def _pieces(self, rank: int) -> Iterator[Piece]:
        for shard in self.shards:
            for offset, shape, where in shard.boxes():
                for key, prefix in NAMES.items():
                    yield Piece(prefix + shard.name, shard.whole, offset, shard.state[key][where].view(shape).cpu())
        for name, bits in self.generators.items():
            yield Piece(f"{GENERATORS}{name}.{rank}", tuple(bits.shape), (0,), bits)


def num_bytes(shards: list[Shard]) -> int:
    """Return how much a rank writes."""
    return sum(tensor.nbytes for shard in shards if shard.is_saved for tensor in shard.state.values())


def take(plan: Plan, shards: list[Shard]) -> Snapshot:
    """Return the state of this moment, copied into host memory where there is room for the ranks of a node."""
    saved = [shard for shard in shards if shard.is_saved]
    has_room = plan.world.ranks_per_node * num_bytes(saved) <= ROOM * psutil.virtual_memory().available
    if has_room:
        saved = [_copied(shard) for shard in saved]
    return Snapshot(saved, _generators(), has_room)


def _copied(shard: Shard) -> Shard:
    state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in shard.state.items()}
    return Shard(shard.name, shard.whole, shard.begin, state, shard.is_saved)


@torch.no_grad()
def load(reader: Reader, shards: list[Shard]) -> None:
    """Overwrite what this rank updates by a checkpoint of any layout."""
    reader.read(
        Wanted(prefix + shard.name, shard.whole, offset, shard.state[key][where].view(shape))
        for shard in shards
        for offset, shape, where in shard.boxes()
        for key, prefix in NAMES.items()
    )


def restore_generators(reader: Reader) -> None:
    """Set this rank's generators to where they were when the same layout saved them."""
    states, rank = _generators(), torch.distributed.get_rank()
    reader.read(Wanted(f"{GENERATORS}{name}.{rank}", tuple(bits.shape), (0,), bits) for name, bits in states.items())
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: bits.cpu().clone() for name, bits in states.items()}
