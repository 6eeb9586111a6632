"""In which order the arms of a study run."""

import random
from collections.abc import Sequence

from bench.results.study import PlannedArm


def blocks(arms: Sequence[PlannedArm], *, runs: int, seed: int) -> list[tuple[str, ...]]:
    """Return the arms of each block in their order: drawn in every other block, and turned round in the next one.

    All arms are drawn, those too that do not run and are left out: the others' order is the same once these can run.
    Over two blocks each arm comes as often before another one as after it, so that what drifts with time (heat, other
    jobs) does not favour one of a pair. More runs leave the order of the earlier blocks as it is.
    """
    found: list[tuple[str, ...]] = []
    for block in range(runs):
        if block % 2:
            found.append(found[-1][::-1])
            continue
        drawn = [arm.name for arm in arms]
        random.Random(f"{seed} {block}").shuffle(drawn)
        found.append(tuple(drawn))
    running = {arm.name for arm in arms if arm.runs}
    return [tuple(name for name in block if name in running) for block in found]
