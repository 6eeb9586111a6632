"""The fault matrix: faults of runs on a cluster, and their expected results.

    make faults                                      run every row on a separate Slurm, and print the table
    python tests/backends/slurm/faults.py --only rank clock   the rows whose names contain one of these words

Rows that break nodes, partitions or Slurm itself run alone, the others concurrently. pytest runs the same rows
(test_faults.py): some in the gate, the others with -m faults.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for helpers, when not run by pytest

import cluster_faults
import run_faults
from fault_matrix import play_all, shown_live, table
from slurm_cluster import Cluster, running, small_disk
from user import User, image_of, in_container

from bench.console import sheet

FAULTS = (*cluster_faults.ROWS, *run_faults.ROWS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of row names")
    parser.add_argument("--folder", type=Path, help="a new folder for the runs")
    parser.add_argument(
        "--cache", type=Path, help="folder of prepared rows and base checkpoint; created if it does not exist"
    )
    parser.add_argument("--containers", action="store_true", help="ranks in containers (see test_pyxis.py)")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if any(text in fault.name for text in args.only)]
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
