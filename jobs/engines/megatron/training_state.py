"""The training state of a rank in files: master weights, both moments, and the generators; not the data's order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from jobs.engines import rank_state
from jobs.engines.megatron import checkpoint_optimizer
from jobs.engines.megatron.adam import State
from jobs.engines.megatron.checkpoint_optimizer import NAMES, Box
from jobs.engines.megatron.model import Parts, seed_all
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

if TYPE_CHECKING:
    from jobs.local_sgd.outer import Outer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank as it was, or as it is, where the host has no room for a copy."""

    boxes: list[list[Box]]
    states: list[State]
    generators: dict[str, Tensor]
    outer: dict[str, list[Tensor]]
    """Of a group that trains apart: more tensors of each shard, by what stands before a weight's key."""
    is_copy: bool
    """Whether training may go on while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, and then the record that says so."""
        rank_state.write(folder, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        for state, boxes in zip(self.states, self.boxes, strict=True):
            for box in (box for box in boxes if box.is_saved):
                for name, prefix in NAMES.items():
                    yield Piece(prefix + box.key, box.whole, box.offset, box.of(getattr(state, name)).cpu())
        for prefix, tensors in self.outer.items():
            for tensor, boxes in zip(tensors, self.boxes, strict=True):
                for box in (box for box in boxes if box.is_saved):
                    yield Piece(prefix + box.key, box.whole, box.offset, box.of(tensor))
        yield from rank_state.generator_pieces(self.generators)


class Snapshots:
    """Takes snapshots into host memory, which is kept from one to the next."""

    def __init__(self, engine: Parts, outer: "Outer | None" = None) -> None:
        self._engine, self._outer, self._boxes = engine, outer, checkpoint_optimizer.boxes(engine)
        self._copies: list[State] | None = None

    @property
    def num_bytes(self) -> int:
        """How much this rank writes."""
        outer = sum(tensor.nbytes for tensors in _outer(self._outer).values() for tensor in tensors)
        return outer + sum(
            box.of(getattr(state, name)).nbytes
            for state, boxes in zip(self._engine.optimizer.states(), self._boxes, strict=True)
            for box in boxes
            if box.is_saved
            for name in NAMES
        )

    def take(self) -> Snapshot:
        """Return the state of this moment; the one before must have been written."""
        states, copies = self._engine.optimizer.states(), self._room()
        if copies is not None:
            for state, copy in zip(states, copies, strict=True):
                for name in NAMES:
                    getattr(copy, name).copy_(getattr(state, name), non_blocking=True)
        torch.cuda.synchronize()
        outer = {prefix: [one.clone() for one in tensors] for prefix, tensors in _outer(self._outer).items()}
        return Snapshot(self._boxes, copies or states, _generators(), outer, copies is not None)

    def _room(self) -> list[State] | None:
        """Return memory for a copy, made for the first snapshot; None if the host has too little for its ranks."""
        if self._copies is None:
            states = self._engine.optimizer.states()
            need = sum(getattr(state, name).nbytes for state in states for name in NAMES)
            if not rank_state.has_room(self._engine.plan, need):
                return None
            copies: list[dict[str, Any]] = [
                {name: rank_state.host_memory(getattr(state, name)) for name in NAMES} for state in states
            ]
            self._copies = [state._replace(**copy) for state, copy in zip(states, copies, strict=True)]
        return self._copies


def load(engine: Parts, folder: Path, *, step: int, seed: int, same_layout: bool, outer: "Outer | None" = None) -> None:
    """Go on from a checkpoint of any layout; of groups that train apart, with their outer weights.

    In another layout generators are seeded anew: it draws other numbers.

    Raises:
        ConfigError: it is not a checkpoint of this model's training.
    """
    reader, optimizer = Reader(folder), engine.optimizer
    all_boxes, states = checkpoint_optimizer.boxes(engine), optimizer.states()
    by_prefix = {prefix: [getattr(state, name) for state in states] for name, prefix in NAMES.items()}
    reader.read(
        Wanted(prefix + box.key, box.whole, box.offset, box.of(tensor))
        for prefix, tensors in (by_prefix | _outer(outer)).items()
        for tensor, boxes in zip(tensors, all_boxes, strict=True)
        for box in boxes
    )
    optimizer.resume(step)
    engine.refresh_weights()
    if same_layout:
        _restore_generators(reader)
    else:
        seed_all(seed + step)


def _outer(outer: "Outer | None") -> dict[str, list[Tensor]]:
    """Return the tensors of outer weights and their momentum, by what stands before a weight's key."""
    named = {"outer.": outer.weights, "outer.momentum.": outer.momentum} if outer else {}
    return {prefix: tensors for prefix, tensors in named.items() if tensors}


def _generators() -> dict[str, Tensor]:
    """Return the bits of this rank's generators: torch's, and those by which TP ranks differ."""
    return rank_state.generators(get_cuda_rng_tracker().get_states())


def _restore_generators(reader: Reader) -> None:
    get_cuda_rng_tracker().set_states(rank_state.restore_generators(reader, _generators()))
