"""What `parse` and `report` do with the logs of tasks that train nothing: whose kind a log is, it says itself."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cli import generation_reading, kernel_reading, serving_reading


def parse(file: Path, *, name: str, as_json: bool) -> bool | None:
    """Print what a log proves, and return whether its task was done; None for the log of a training task."""
    from bench.mlperf import result as results
    from bench.results import generation, kernels, serving

    if (measured := kernels.of_file(file)) is not None:
        return kernel_reading.parse(replace(results.parse(file), file=name), measured, as_json=as_json)
    if (generated := generation.of_file(file)) is not None:
        return generation_reading.parse(replace(results.parse(file), file=name), generated, as_json=as_json)
    if (served := serving.of_file(file)) is not None:
        return serving_reading.parse(replace(results.parse(file), file=name), served, as_json=as_json)
    return None


def report(folders: Sequence[Path], args: argparse.Namespace) -> int | None:
    """Report runs, and return the exit code; None for runs that train."""
    from bench.report import generation, kernels, serving

    if of_kernels := kernels.load(folders):
        return kernel_reading.report(of_kernels, args)
    if of_generation := generation.load(folders):
        return generation_reading.report(of_generation, args)
    if of_servers := serving.load(folders):
        return serving_reading.report(of_servers, args)
    return None
