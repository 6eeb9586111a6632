"""From a command line to a judged run: `python -m bench.launch task=… cluster=…`."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import bench
from bench import masking, preflight
from bench.contract.plan import Plan
from bench.errors import BenchError, exit_code_of_signals, output_is_written
from bench.planning.compose import CONF, compose, plan_of, register, typed
from bench.planning.compose_errors import explained
from bench.runs.summary import summary, with_overrides

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Run as a Hydra application, and exit with the worst outcome of its runs."""
    _tell_version(sys.argv[1:])
    codes: list[int] = []
    made: list[Path] = []
    with exit_code_of_signals():
        planned = _planned(codes)
        for plan, config, overrides in planned:  # outside of Hydra: errors here are no fault of the command line
            with _shown(codes):
                codes.append(run(plan, config, overrides, made))
        left = [folder for folder in made if folder.exists()]  # what a queue refuses leaves no folder
        if left[1:]:
            with _shown(codes):
                _show_sweep(left)
        sys.exit(max(codes, default=0))


def _planned(codes: list[int]) -> "list[tuple[Plan, DictConfig, list[str]]]":
    """Return the runs that the command line asks for, each with its configuration and overrides, planned by Hydra."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    planned: list[tuple[Plan, DictConfig, list[str]]] = []

    def launch(config: "DictConfig") -> None:
        with _shown(codes), explained():
            overrides = list(HydraConfig.get().overrides.task)
            planned.append((plan_of(typed(config), overrides), config, overrides))

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions, to be explained in our own words
    with _shown(codes), TemporaryDirectory(prefix="bench-") as sweep_dir:
        os.environ["BENCH_SWEEP_DIR"] = sweep_dir  # Hydra wants a folder for every --multirun; nobody reads it
        _check_shown(sys.argv[1:])
        with explained():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="launch")(launch)()
    return planned


@contextmanager
def _shown(codes: list[int]) -> Iterator[None]:
    """Print an error of the block, and keep its exit code."""
    try:
        with output_is_written():
            yield
    except BenchError as error:
        print(masking.masked(str(error)), file=sys.stderr)
        codes.append(error.exit_code)


def _tell_version(argv: Sequence[str]) -> None:
    """Print runstop's version where it is asked for, and exit: Hydra would print its own."""
    if "--version" in argv:
        print(f"runstop {bench.__version__}")
        sys.exit(0)


def _show_sweep(folders: Sequence[Path]) -> None:
    from bench.console import runs as run_sheets
    from bench.console import sheet

    sheet.show(run_sheets.sweep_sheet([summary(folder) for folder in folders]))


def _check_shown(argv: list[str]) -> None:
    """Refuse with --cfg, which composes but never gets to `launch`, what a run would refuse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--config-dir", "-cd", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.cfg:
        compose([word for word in rest if "=" in word or word.startswith("~")], config_dir=known.config_dir)


def run(plan: Plan, config: "DictConfig", overrides: Sequence[str], made: list[Path]) -> int:
    """Return 0 when every log proves that its trial did what the task asks; a dry run shows the plan, touching nothing.

    The run's folder is entered into `made`, whatever comes of it.
    Where jobs wait in a queue, 0 means that this one is queued, unless launch.wait asks for its end.
    """
    from omegaconf import OmegaConf

    from bench.console import plan as plan_sheets
    from bench.launch import start

    if plan.config.launch.dry_run:
        plan_sheets.show_plan(plan, preflight.inspect(plan))
        return 0
    return start.run(plan, with_overrides(OmegaConf.to_yaml(config), overrides), made)


if __name__ == "__main__":
    main()
