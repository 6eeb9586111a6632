"""A rank's training state in a checkpoint: master weights, Adam moments and random generators, not the data order."""

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
from jobs.engines.megatron.model import ModelAndOptimizer, seed_all
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

if TYPE_CHECKING:
    from jobs.local_sgd.outer_optimizer import OuterOptimizer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of this rank: a copy, or the live tensors if host memory has no room for a copy."""

    boxes: list[list[Box]]
    states: list[State]
    generators: dict[str, Tensor]
    outer: dict[str, list[Tensor]]
    """With local SGD: the tensors of the outer optimizer for each shard, by the prefix of a weight's key."""
    is_copy: bool
    """Whether training may continue while it is written."""

    def write(self, folder: Path) -> None:
        """Write this rank's file, then the record that marks it as complete."""
        rank_state.write(folder, self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        for state, boxes in zip(self.states, self.boxes, strict=True):
            for box in (box for box in boxes if box.is_saved):
                for name, prefix in NAMES.items():
                    yield Piece(prefix + box.key, box.global_shape, box.offset, box.view_of(getattr(state, name)).cpu())
        for prefix, tensors in self.outer.items():
            for tensor, boxes in zip(tensors, self.boxes, strict=True):
                for box in (box for box in boxes if box.is_saved):
                    yield Piece(prefix + box.key, box.global_shape, box.offset, box.view_of(tensor))
        yield from rank_state.generator_pieces(self.generators)


class SnapshotBuffers:
    """Host memory for snapshots, which is used again for each snapshot."""

    def __init__(self, engine: ModelAndOptimizer, outer: "OuterOptimizer | None" = None) -> None:
        self._engine, self._outer, self._boxes = engine, outer, checkpoint_optimizer.boxes(engine)
        self._copies: list[State] | None = None

    @property
    def num_bytes(self) -> int:
        """How many bytes this rank writes."""
        outer = sum(tensor.nbytes for tensors in _outer(self._outer).values() for tensor in tensors)
        return outer + sum(
            box.view_of(getattr(state, name)).nbytes
            for state, boxes in zip(self._engine.optimizer.states(), self._boxes, strict=True)
            for box in boxes
            if box.is_saved
            for name in NAMES
        )

    def take_snapshot(self) -> Snapshot:
        """Return the current state; the snapshot before must have been written."""
        states, copies = self._engine.optimizer.states(), self._host_copies()
        if copies is not None:
            for state, copy in zip(states, copies, strict=True):
                for name in NAMES:
                    getattr(copy, name).copy_(getattr(state, name), non_blocking=True)
        torch.cuda.synchronize()
        outer = {prefix: [one.clone() for one in tensors] for prefix, tensors in _outer(self._outer).items()}
        return Snapshot(self._boxes, copies or states, _generators(), outer, copies is not None)

    def _host_copies(self) -> list[State] | None:
        """Return memory for a copy, allocated for the first snapshot; None if host memory has no room for all ranks."""
        if self._copies is None:
            states = self._engine.optimizer.states()
            num_bytes = sum(getattr(state, name).nbytes for state in states for name in NAMES)
            if not rank_state.has_room(self._engine.plan, num_bytes):
                return None
            copies: list[dict[str, Any]] = [
                {name: rank_state.host_memory(getattr(state, name)) for name in NAMES} for state in states
            ]
            self._copies = [state._replace(**copy) for state, copy in zip(states, copies, strict=True)]
        return self._copies


def load(
    engine: ModelAndOptimizer,
    folder: Path,
    *,
    step: int,
    seed: int,
    same_layout: bool,
    outer: "OuterOptimizer | None" = None,
) -> None:
    """Resume from a checkpoint of any layout; with local SGD, including the outer weights.

    In another layout generators are seeded anew: it draws other numbers.

    Raises:
        ConfigError: it is not a checkpoint of this model's training.
    """
    reader, optimizer = Reader(folder), engine.optimizer
    all_boxes, states = checkpoint_optimizer.boxes(engine), optimizer.states()
    by_prefix = {prefix: [getattr(state, name) for state in states] for name, prefix in NAMES.items()}
    reader.read(
        Wanted(prefix + box.key, box.global_shape, box.offset, box.view_of(tensor))
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


def _outer(outer: "OuterOptimizer | None") -> dict[str, list[Tensor]]:
    """Return the outer weights and their momentum, by the prefix of a weight's key."""
    tensors_by_prefix = {"outer.": outer.weights, "outer.momentum.": outer.momentum} if outer else {}
    return {prefix: tensors for prefix, tensors in tensors_by_prefix.items() if tensors}


def _generators() -> dict[str, Tensor]:
    """Return the states of this rank's generators: torch's, and megatron-core's tensor-parallel one."""
    return rank_state.generators(get_cuda_rng_tracker().get_states())


def _restore_generators(reader: Reader) -> None:
    get_cuda_rng_tracker().set_states(rank_state.restore_generators(reader, _generators()))
