"""Shared by the snapshots of all engines: a rank's files, its random generators, and host memory for copies."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor

from bench.contract import atomic_files
from bench.contract.plan import Plan
from jobs.weights import checkpoint_writer
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.checkpoint_writer import Piece

MAX_HOST_MEMORY_SHARE = 0.8
"""The copies of all ranks of a node may take this share of the free host memory."""


def write(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write this rank's file, then the record that marks it as complete."""
    rank = torch.distributed.get_rank()
    record = checkpoint_writer.write(folder / f"rank_{rank}.distcp", pieces)
    atomic_files.write(folder / f"rank_{rank}.json", record)


def has_room(plan: Plan, num_bytes: int) -> bool:
    """Return whether each rank of a node can copy `num_bytes` into host memory, in whatever group it trains."""
    available: float = MAX_HOST_MEMORY_SHARE * psutil.virtual_memory().available
    return plan.config.cluster.ranks_per_node * num_bytes <= available


def host_memory(tensor: Tensor) -> Tensor:
    """Return host memory of a tensor's shape and type, page-locked for a GPU's tensor. It is never unregistered."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.is_cuda:  # torch's own allocator of such memory would round up to a power of two
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return memory


def generators(more: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the states of this rank's random generators: torch's, and `more` of the engine."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: bits.cpu().clone() for name, bits in (states | dict(more or {})).items()}


def generator_pieces(states: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield the generator states to save, under names that contain this rank."""
    for name, bits in states.items():
        yield Piece(_key(name), tuple(bits.shape), (0,), bits)


def restore_generators(reader: Reader, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore torch's generators from a checkpoint of the same layout; return the states of the engine's own.

    `states`: the current states, which are overwritten.
    """
    reader.read(Wanted(_key(name), tuple(bits.shape), (0,), bits) for name, bits in states.items())
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    return states


def _key(name: str) -> str:
    return f"rng_state.{name}.{torch.distributed.get_rank()}"
