"""What the snapshots of all engines share: a rank's files, its generators, and host memory for copies."""

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

ROOM = 0.8
"""The share of the free host memory that copies of all ranks of a node may take."""


def write(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write this rank's file, and then the record that says so."""
    rank = torch.distributed.get_rank()
    record = checkpoint_writer.write(folder / f"rank_{rank}.distcp", pieces)
    atomic_files.write(folder / f"rank_{rank}.json", record)


def has_room(plan: Plan, num_bytes: int) -> bool:
    """Return whether each rank of a node, whatever its group, may copy so many bytes into the host's memory."""
    room: float = ROOM * psutil.virtual_memory().available
    return plan.config.cluster.ranks_per_node * num_bytes <= room


def host_memory(tensor: Tensor) -> Tensor:
    """Return host memory of a tensor's size and type, page-locked for copies from a GPU; keep it, for it stays so."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.is_cuda:  # torch's own allocator of such memory would round up to a power of two
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    return memory


def generators(more: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the bits of this rank's generators: torch's, and those that its engine has more."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: bits.cpu().clone() for name, bits in (states | dict(more or {})).items()}


def generator_pieces(states: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield the bits as they are saved, under this rank's own names."""
    for name, bits in states.items():
        yield Piece(_key(name), tuple(bits.shape), (0,), bits)


def restore_generators(reader: Reader, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set torch's generators to where they were when the same layout saved them; return the bits of the engine's own.

    `states` are the bits of now, which are overwritten.
    """
    reader.read(Wanted(_key(name), tuple(bits.shape), (0,), bits) for name, bits in states.items())
    torch.set_rng_state(states.pop("cpu"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    return states


def _key(name: str) -> str:
    return f"rng_state.{name}.{torch.distributed.get_rank()}"
