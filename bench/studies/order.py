"""In which order the arms of a study run."""

import random
from collections.abc import Sequence


def blocks(arms: Sequence[str], *, runs: int, seed: int) -> list[tuple[str, ...]]:
    """Return the arms of each block in their order: drawn in every other block, and turned round in the next one.

    Over two blocks each arm comes as often before another one as after it, so that what drifts with time (heat, other
    jobs) does not favour one of a pair. More runs leave the order of the earlier blocks as it is.
    """
    found: list[tuple[str, ...]] = []
    for block in range(runs):
        if block % 2:
            found.append(found[-1][::-1])
            continue
        drawn = list(arms)
        random.Random(f"{seed} {block}").shuffle(drawn)
        found.append(tuple(drawn))
    return found
