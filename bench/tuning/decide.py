"""Decide from the runs of each block which settings are fastest, and which need no further run.

After each block from the second on, the settings with the shortest mean step lead. Others are left out permanently if
the interval of their ratio to the leader is above 1, and count as equivalent if it is within the margin. There are
several comparisons and several looks at the data: each interval has the confidence 1 - 0.05 / (comparisons x looks), so
that all of them together hold at 95 % (Bonferroni).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from bench.results.comparison import Comparison, Verdict, compare
from bench.results.tuning import Outcome

ERROR_RATE = 0.05
"""The probability that any verdict is wrong."""
MARGIN = 0.02
"""Settings whose steps differ by less count as equivalent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the blocks so far say about settings."""

    outcome: Outcome
    comparison: Comparison | None = None
    """With the fastest ones when it was last compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all blocks so far say."""

    best: str = ""
    judged: Mapping[str, Judged]
    num_blocks: int
    """Blocks that are complete: each of the settings that were not left out has a value, or failed."""

    @property
    def alive(self) -> list[str]:
        """The settings that a further block measures."""
        return [name for name, one in self.judged.items() if one.outcome not in (Outcome.slower, Outcome.failed)]

    @property
    def is_final(self) -> bool:
        """Whether a further block would not change the choice; one run of each decides nothing."""
        known = [one.outcome for one in self.judged.values()]
        return self.num_blocks > 1 and Outcome.undecided not in known and Outcome.not_measured not in known


def confidence(num_settings: int, max_blocks: int) -> float:
    """Return the confidence of each interval."""
    return 1 - ERROR_RATE / max(1, num_settings - 1) / max(1, max_blocks - 1)


def decide(
    names: Sequence[str],
    values: Mapping[str, Mapping[int, float]],
    *,
    failed: Mapping[str, int],
    max_blocks: int,
) -> Decision:
    """Return the decision from each setting's value in each block; `failed`: the block in which a setting failed.

    The blocks are replayed one after another, so that an interrupted call continues as if it had not been interrupted.
    """
    judged = {name: Judged(outcome=Outcome.not_measured) for name in names}
    level, best, done = confidence(len(names), max_blocks), "", 0
    for block in range(max_blocks):
        decision = Decision(best=best, judged=judged, num_blocks=done)
        if decision.is_final or not decision.alive:
            break
        for name in decision.alive:
            if failed.get(name, max_blocks) <= block:
                judged = judged | {name: Judged(outcome=Outcome.failed)}
        alive = Decision(judged=judged, num_blocks=done).alive
        if any(block not in values.get(name, {}) for name in alive):
            break
        done = block + 1
        best, judged = _after(done, alive, judged, values, level)
    return Decision(best=best, judged=judged, num_blocks=done)


def _after(
    done: int,
    alive: Sequence[str],
    judged: Mapping[str, Judged],
    values: Mapping[str, Mapping[int, float]],
    level: float,
) -> tuple[str, dict[str, Judged]]:
    """Return the fastest settings and all judgements after so many blocks."""
    now = dict(judged)
    if not alive:
        return "", now
    steps = {name: [values[name][block] for block in range(done)] for name in alive}
    best = min(alive, key=lambda name: fmean(np.log(steps[name])))
    for name in alive:
        now[name] = Judged(outcome=Outcome.fastest) if name == best else _compared(name, best, steps, level)
    return best, now


def _compared(name: str, best: str, steps: Mapping[str, Sequence[float]], level: float) -> Judged:
    comparison = compare(
        steps[name],
        steps[best],
        names=(name, best),
        measurement="step time",
        unit="ms",
        higher_is_better=False,
        margin=MARGIN,
        confidence=level,
    )
    outcome = {
        Verdict.different: Outcome.slower,
        Verdict.equivalent: Outcome.equivalent,
        Verdict.equivalent_different: Outcome.equivalent,
    }.get(comparison.verdict, Outcome.undecided)
    return Judged(outcome=outcome, comparison=comparison)
