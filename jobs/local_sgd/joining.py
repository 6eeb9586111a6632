"""Let a group that was started again join those that train, at a merge: it goes on as a copy of a living group.

Each of its ranks says by the store that it is there. The merge lets all ranks of a group in together, and a living
group sends what it trains, rank by rank of the same position, in pieces and over gloo.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from bench.errors import BenchError
from jobs.local_sgd.groups import Groups

PIECE = 2**23
"""Numbers of a piece."""


def waiting(groups: Groups, living: list[int], store: Store) -> dict[int, int]:
    """Return the groups that wait to be let in, each with its life, once all of its ranks do; rank 0 asks."""
    absent = (group for group in range(groups.count) if group not in living)
    lives = {group: _life(groups, group, store) for group in absent}
    return {group: life for group, life in lives.items() if life}


def _life(groups: Groups, group: int, store: Store) -> int:
    """Return in which life a group waits; 0 if it does not, or has been let in."""
    keys = [f"joining/{rank}" for rank in groups.of(group)]
    lives = {groups.told(key, None, store) for key in keys} if store.check(keys) else set()
    life = lives.pop() if len(lives) == 1 else 0
    if life <= groups.let_in.get(group, 0):
        return 0
    groups.let_in[group] = life
    return life


def give(groups: Groups, group: int, *, life: int, about: Any, tensors: list[Tensor], limit_s: float) -> int:
    """Send this rank's flat tensors to the rank of the same position in a group that is let in; return the bytes.

    Raises:
        RuntimeError: the group is gone again, as gloo has it.
    """
    place = _place(group, life, groups.position)
    groups.tell(f"{place}/about", about)
    link, sent = _link(groups, place, 0, limit_s), 0
    for piece in _pieces(tensors):
        raw = piece.detach().to("cpu").contiguous().view(torch.uint8)
        link.send([raw], 1, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        sent += len(raw)
    return sent


def take(groups: Groups, *, tensors: list[Tensor], limit_s: float) -> Any:
    """Wait until this group is let in, and fill this rank's tensors; return what the giver says about them.

    Raises:
        BenchError: the others have finished, or what is sent breaks off.
    """
    groups.tell(f"joining/{groups.rank}", groups.life)
    place = _place(groups.number, groups.life, groups.position)
    try:
        about = groups.told(f"{place}/about")
        link = _link(groups, place, 1, limit_s)
        for piece in _pieces(tensors):
            raw = torch.empty(piece.nbytes, dtype=torch.uint8)
            link.recv([raw], 0, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
            piece.copy_(raw.view(piece.dtype))
    except RuntimeError as error:
        raise BenchError(
            f"group {groups.number} was started again and does not join: {str(error).splitlines()[0]}",
            where=f"rank {groups.rank}, recipe.local_sgd.restarts",
            fix="none is needed where the others have finished without it",
            rule="RUN-19",
        ) from error
    return about


def _place(group: int, life: int, position: int) -> str:
    return f"joining/{group}/{life}/{position}"


def _link(groups: Groups, place: str, number: int, limit_s: float) -> ProcessGroupGloo:
    return ProcessGroupGloo(PrefixStore(place, groups.store), number, 2, timedelta(seconds=limit_s))


def _pieces(tensors: list[Tensor]) -> Iterator[Tensor]:
    for one in tensors:
        for begin in range(0, len(one), PIECE):
            yield one[begin : begin + PIECE]
