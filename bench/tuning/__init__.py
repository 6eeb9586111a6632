"""Find the fastest settings of a training task on a cluster: rank them by the model, measure the best in blocks."""

from bench.tuning.measure import Request, dry_run, tune

__all__ = ["Request", "dry_run", "tune"]
