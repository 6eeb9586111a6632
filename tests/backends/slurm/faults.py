"""The fault matrix: what may happen to a run on a cluster, and what must come out of it.

    make faults                                      play every row on a Slurm of its own, and print the table
    python tests/backends/slurm/faults.py --only rank clock   the rows whose names hold one of these words

Rows that break nodes, partitions or Slurm itself are played alone, the others side by side. pytest plays the same rows
(test_faults.py): some in the gate, the others with -m faults.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for helpers, where no pytest has done so

import rows_of_cluster
import rows_of_runs
from booted import Cluster, running, small_disk
from matrix import play_all, shown_live, table
from user import User, image_of, in_container

from bench.console import sheet

FAULTS = (*rows_of_cluster.ROWS, *rows_of_runs.ROWS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="words of names")
    parser.add_argument("--folder", type=Path, help="a new folder, in which the runs are kept")
    parser.add_argument("--cache", type=Path, help="a folder of rows and base checkpoint, filled if it is not there")
    parser.add_argument("--containers", action="store_true", help="ranks in containers (see test_pyxis.py)")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in args.only)]
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        for name in ("disk", "home"):
            (folder / name).mkdir(parents=True)
        with small_disk(folder / "disk") as disk, running() as cluster:
            user = User(cluster, (args.cache or folder / "cache").resolve(), folder / "home", disk)
            if args.containers:
                user = replace(user, overrides=in_container(required_image(cluster)))
            if not user.cache.exists():
                user.cache.mkdir()
                user.prepare()
            played = list(shown_live(play_all(user, chosen)))
    sheet.show(table(sorted(played, key=lambda one: FAULTS.index(one.fault))))
    return int(any(one.wrong for one in played))


def required_image(cluster: Cluster) -> str:
    image, reason = image_of(cluster)
    if reason:
        sys.exit(f"no containers: {reason}")
    return image


if __name__ == "__main__":
    sys.exit(main())
