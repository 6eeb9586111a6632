"""Simulate how often `history --check 2` is right about systems whose true change is known, for docs/comparing.md.

    python experiments/regressions.py [--checks N]

Each check compares new runs with ten earlier ones; all of them vary by the same spread (normal logarithms). The
verdicts are those of bench.history.regression.judge itself.
"""

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np

from bench.history.measured_trials import ValidTrial
from bench.history.regression import Change, HistoryRun, TaskHistory, judge
from bench.results.measurement import Measurement

TOLERANCE = 0.02
NUM_EARLIER = 10
SPREADS = (0.005, 0.01, 0.02)
"""Standard deviation from run to run, as a share."""
SLOWER = (0.0, 0.01, 0.02, 0.03, 0.05)
"""True differences: how much slower the new runs are, as a share."""
NUM_NEW = (1, 3, 5, 10)
SPEED = Measurement(name="throughput", unit="samples/s", value=1.0)


def history(speeds: np.ndarray) -> TaskHistory:
    """Return a history with one run of one trial for each speed, the oldest first."""
    runs = tuple(
        HistoryRun(
            folder=Path(str(number)),
            trials=(
                ValidTrial(
                    folder=Path(str(number)),
                    trial=0,
                    log_sha256="",
                    began_ms=number,
                    task="simulated",
                    measurements={"throughput": Measurement(name="throughput", unit="samples/s", value=float(speed))},
                    facts={},
                    logged={},
                    planned={},
                ),
            ),
        )
        for number, speed in enumerate(speeds)
    )
    return TaskHistory(task="simulated", hardware="", settings="", runs=runs)


def shares(slower: float, *, spread: float, num_new: int, num_checks: int) -> dict[Change, float]:
    """Return how often each verdict is reached on new runs that are slower by this share."""
    rng = np.random.default_rng([round(1e4 * slower), round(1e4 * spread), num_new])
    logs = rng.normal(0, spread, (num_checks, NUM_EARLIER + num_new))
    logs[:, NUM_EARLIER:] += math.log1p(-slower)
    verdicts = Counter(judge(history(np.exp(row)), SPEED, tolerance=TOLERANCE, newest=num_new).change for row in logs)
    return {change: verdicts[change] / num_checks for change in Change}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=2000, help="checks for each number (default: 2000)")
    args = parser.parse_args()
    print(f"Called a regression above {TOLERANCE:.0%}, and no regression, in percent of {args.checks:,} checks each.")
    print("| spread | new runs |" + "".join(f" {slower:.0%} slower |" for slower in SLOWER))
    print("| ---: | ---: |" + " ---: |" * len(SLOWER))
    for spread in SPREADS:
        for num_new in NUM_NEW:
            row = [shares(slower, spread=spread, num_new=num_new, num_checks=args.checks) for slower in SLOWER]
            cells = [f" {100 * each[Change.regression]:.1f}, {100 * each[Change.none]:.0f} |" for each in row]
            print(f"| {spread:.1%} | {num_new} |{''.join(cells)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
