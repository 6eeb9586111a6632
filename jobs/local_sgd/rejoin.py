"""Readmit a restarted group at a weight averaging: it resumes from the state of an active group.

Each rank of a restarted group announces itself in the store. All ranks of a group are readmitted together at the end of
a weight averaging. Group 0 then sends its training state over gloo, from each rank to the rank of the same position.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from bench.errors import BenchError
from jobs.local_sgd.groups import Groups

CHUNK = 2**23
"""Numbers per chunk."""


def waiting(groups: Groups, active: list[int], store: Store) -> dict[int, int]:
    """Return the groups to readmit with their restart counts: those all of whose ranks wait. Only rank 0 calls this."""
    absent = (group for group in range(groups.count) if group not in active)
    restart_counts = {group: _restart_count(groups, group, store) for group in absent}
    return {group: restart_count for group, restart_count in restart_counts.items() if restart_count}


def _restart_count(groups: Groups, group: int, store: Store) -> int:
    """Return the restart count of a waiting group; 0 if it does not wait, or was readmitted with this count."""
    keys = [f"joining/{rank}" for rank in groups.ranks_of(group)]
    of_ranks = {groups.get(key, None, store) for key in keys} if store.check(keys) else set()
    restart_count = of_ranks.pop() if len(of_ranks) == 1 else 0
    if restart_count <= groups.readmitted.get(group, 0):
        return 0
    groups.readmitted[group] = restart_count
    return restart_count


def send_state(
    groups: Groups, group: int, *, restart_count: int, header: Any, tensors: list[Tensor], limit_s: float
) -> int:
    """Send this rank's flat tensors to the rank of the same position in a readmitted group; return the bytes sent.

    Raises:
        RuntimeError: gloo's error if the group failed again.
    """
    prefix = _prefix(group, restart_count, groups.position)
    groups.set(f"{prefix}/header", header)
    link, sent = _link(groups, prefix, 0, limit_s), 0
    for chunk in _chunks(tensors):
        raw = chunk.detach().to("cpu").contiguous().view(torch.uint8)
        link.send([raw], 1, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        sent += len(raw)
    return sent


def receive_state(groups: Groups, *, tensors: list[Tensor], limit_s: float) -> Any:
    """Wait until this group is readmitted, and fill this rank's tensors; return the sender's header.

    Raises:
        BenchError: the other groups have finished, or the transfer failed.
    """
    groups.set(f"joining/{groups.rank}", groups.restart_count)
    prefix = _prefix(groups.number, groups.restart_count, groups.position)
    try:
        header = groups.get(f"{prefix}/header")
        link = _link(groups, prefix, 1, limit_s)
        for chunk in _chunks(tensors):
            raw = torch.empty(chunk.nbytes, dtype=torch.uint8)
            link.recv([raw], 0, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
            chunk.copy_(raw.view(chunk.dtype))
    except RuntimeError as error:
        raise BenchError(
            f"the restarted group {groups.number} could not rejoin the other groups: {str(error).splitlines()[0]}",
            where=f"rank {groups.rank}, recipe.local_sgd.restarts",
            fix="no action is needed if the other groups have finished; otherwise resume the run",
            rule="RUN-19",
        ) from error
    return header


def _prefix(group: int, restart_count: int, position: int) -> str:
    return f"joining/{group}/{restart_count}/{position}"


def _link(groups: Groups, prefix: str, number: int, limit_s: float) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore(prefix, groups.store), number, 2, timedelta(seconds=limit_s))


def _chunks(tensors: list[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        for begin in range(0, len(tensor), CHUNK):
            yield tensor[begin : begin + CHUNK]
