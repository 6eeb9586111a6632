"""From a command line to a judged run: `python -m bench.launch task=… cluster=…`."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import bench
from bench import preflight
from bench.contract.plan import Plan
from bench.contract.schema import Scheduler
from bench.errors import BenchError, interrupt_exit_code

if TYPE_CHECKING:
    from omegaconf import DictConfig
from bench.planning.compose import CONF, compose, explained, plan_of, register, typed


def main() -> None:
    """Run as a Hydra application, and exit with the worst outcome of its runs."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    planned: list[tuple[Plan, DictConfig]] = []
    codes: list[int] = []

    @contextmanager
    def shown() -> Iterator[None]:
        try:
            yield
        except BenchError as error:
            print(error, file=sys.stderr)
            codes.append(error.exit_code)

    def launch(config: "DictConfig") -> None:
        with shown(), explained():
            planned.append((plan_of(typed(config), list(HydraConfig.get().overrides.task)), config))

    if "--version" in sys.argv[1:]:  # Hydra would print its own
        print(f"runstop {bench.__version__}")
        sys.exit(0)
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions, to be explained in our own words
    try:
        with shown(), TemporaryDirectory(prefix="bench-") as sweep_dir:
            os.environ["BENCH_SWEEP_DIR"] = sweep_dir  # Hydra wants a folder for every --multirun; nobody reads it
            _check_shown(sys.argv[1:])
            with explained():
                hydra.main(version_base="1.3", config_path=str(CONF), config_name="launch")(launch)()
        for plan, config in planned:  # outside of Hydra: what goes wrong here is no fault of the command line
            with shown():
                codes.append(run(plan, config))
    except KeyboardInterrupt as stop:
        codes.append(interrupt_exit_code(stop))
    sys.exit(max(codes, default=0))


def _check_shown(argv: list[str]) -> None:
    """Refuse with --cfg, which composes but never gets to `launch`, what a run would refuse."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--config-dir", "-cd", type=Path)
    known, rest = parser.parse_known_args(argv)
    if known.cfg:
        compose([word for word in rest if "=" in word or word.startswith("~")], config_dir=known.config_dir)


def run(plan: Plan, config: "DictConfig") -> int:
    """Return 0 when every log proves that its trial did what the task asks; a dry run shows the plan, touching nothing.

    On a Slurm cluster 0 means that the job is queued, unless launch.wait asks for its end.
    """
    from omegaconf import OmegaConf

    from bench.console import plan as plan_sheets
    from bench.launch import run_local, run_queued
    from bench.watch import trackers

    is_local = plan.config.cluster.scheduler is Scheduler.local
    if plan.config.launch.dry_run:
        plan_sheets.show_plan(plan, preflight.inspect(plan))
        return 0
    trackers.require(plan.config.launch.trackers)
    findings = preflight.inspect(plan) if is_local else preflight.before_submission(plan)
    if not plan.config.launch.force:
        preflight.require(findings)
    config_yaml = OmegaConf.to_yaml(config)
    return run_local.run(plan, config_yaml) if is_local else run_queued.run(plan, config_yaml, findings)


if __name__ == "__main__":
    main()
