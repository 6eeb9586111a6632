"""Environment variables that configure the tests: RUNSTOP_*, or the old BENCH_* with a warning."""

import os
import sys


def variable(name: str, default: str = "") -> str:
    """Return the value of RUNSTOP_name, else of BENCH_name, else the default."""
    old, new = f"BENCH_{name}", f"RUNSTOP_{name}"
    if old in os.environ and new not in os.environ:
        print(f"{old} is deprecated: use {new}", file=sys.stderr)
        return os.environ[old]
    return os.environ.get(new, default)
