"""The training state of a rank in files: master weights, both moments, and the generators; not the data's order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.contract.plan import Plan
from jobs.engines import rank_state
from jobs.engines.huggingface.shards import NAMES, Shard
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank as it was, or as it is, where the host has no room for a copy."""

    shards: list[Shard]
    generators: dict[str, Tensor]
    is_copy: bool
    """Whether training may go on while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, and then the record that says so."""
        rank_state.write(folder, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        for shard in self.shards:
            for offset, shape, where in shard.boxes():
                for key, prefix in NAMES.items():
                    yield Piece(prefix + shard.name, shard.whole, offset, shard.state[key][where].view(shape).cpu())
        yield from rank_state.generator_pieces(self.generators)


def num_bytes(shards: list[Shard]) -> int:
    """Return how much a rank writes."""
    return sum(tensor.nbytes for shard in shards if shard.is_saved for tensor in shard.state.values())


def take(plan: Plan, shards: list[Shard]) -> Snapshot:
    """Return the state of this moment, copied into host memory where there is room for the ranks of a node."""
    saved = [shard for shard in shards if shard.is_saved]
    has_room = rank_state.has_room(plan, num_bytes(saved))
    if has_room:
        saved = [_copied(shard) for shard in saved]
    return Snapshot(saved, rank_state.generators(), has_room)


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
