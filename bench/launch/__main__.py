"""The command `runstop launch task=… cluster=…`: plan a run, check it, run it and judge it."""

from bench import installed

if __name__ == "__main__":
    installed.require()

# ruff: noqa: E402
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import bench
from bench import hints
from bench.contract import regular_files
from bench.contract.plan import Plan
from bench.errors import BenchError, every_character_is_written, exit_code_of_signals, output_is_written
from bench.history.avoid import bad_nodes
from bench.launch import launch_options
from bench.planning import overrides as overrides_of
from bench.planning import to_prepare
from bench.planning.compose import (
    CONF,
    completed,
    compose,
    plan_of,
    register,
    search_path,
    typed,
    with_new_options,
)
from bench.planning.compose_errors import explained
from bench.runs.command_line import with_overrides
from bench.runs.summary import summary

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main() -> None:
    """Plan the runs with Hydra, run them, and exit with the highest exit code of all runs."""
    every_character_is_written()
    regular_files.keep_others_from_writing()
    _print_version(sys.argv[1:])
    codes: list[int] = []
    created: list[Path] = []
    with exit_code_of_signals():
        planned = _planned(codes)
        if _fit_arrays([plan for plan, _, _ in planned]):
            with _shown(codes):
                codes += _run_several(planned, created)
            planned = []
        for plan, config, overrides in planned:  # outside of Hydra, which would blame the command line
            with _shown(codes):
                codes.append(run(plan, config, overrides, created))
        left = [folder for folder in created if folder.exists()]  # runs that a queue refused have no folder
        if left[1:]:
            with _shown(codes):
                _show_sweep(left)
        sys.exit(max(codes, default=0))


def _fit_arrays(plans: Sequence[Plan]) -> bool:
    """Return whether the runs of a sweep are submitted together."""
    from bench import backends
    from bench.backends.protocol import SubmitsArrays

    is_dry = any(plan.config.launch.dry_run for plan in plans)
    return len(plans) > 1 and not is_dry and all(isinstance(backends.for_plan(p), SubmitsArrays) for p in plans)


def _run_several(planned: "Sequence[tuple[Plan, DictConfig, list[str]]]", created: list[Path]) -> list[int]:
    from omegaconf import OmegaConf

    from bench.launch import start

    texts = [
        (
            plan,
            with_overrides(OmegaConf.to_yaml(config), overrides, _site()),
            [*overrides, *to_prepare.site_words(_site())],
        )
        for plan, config, overrides in planned
    ]
    return start.run_several(texts, created)


def _planned(codes: list[int]) -> "list[tuple[Plan, DictConfig, list[str]]]":
    """Return the plans that the command line requests, each with its config and overrides, composed by Hydra."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    planned: list[tuple[Plan, DictConfig, list[str]]] = []

    def launch(config: "DictConfig") -> None:
        # Resolving ${name} in the text of an override could fail here, outside of `explained`.
        overrides: list[str] = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)  # type: ignore[assignment]
        with _shown(codes), explained(overrides):
            words = [*own_folder, *overrides]
            complete = completed(config, words)
            plan = plan_of(typed(complete), words, config_dir=_site(), bad_nodes=bad_nodes)
            planned.append((plan, complete, overrides))

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors, so that runstop prints them
    with _shown(codes), TemporaryDirectory(prefix="bench-") as sweep_dir:
        sys.argv[1:] = with_new_options(launch_options.understood(overrides_of.of_files(sys.argv[1:])))
        own_folder = search_path()
        sys.argv[1:] = [*own_folder, *sys.argv[1:]]
        os.environ["RUNSTOP_SWEEP_DIR"] = sweep_dir  # --multirun needs a folder; it is not used
        _check_shown(sys.argv[1:])
        with explained(sys.argv[1:]):
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="launch")(launch)()
    return planned


@contextmanager
def _shown(codes: list[int]) -> Iterator[None]:
    """Print an error of the block and collect its exit code."""
    try:
        with output_is_written():
            yield
    except BenchError as error:
        hints.print_error(error)
        codes.append(error.exit_code)


def _print_version(argv: Sequence[str]) -> None:
    """Handle --version before Hydra does, which would print its own version."""
    if "--version" in argv:
        print(f"runstop {bench.__version__}")
        sys.exit(0)


def _show_sweep(folders: Sequence[Path]) -> None:
    from bench.console import runs as run_sheets
    from bench.console import sheet

    sheet.show(run_sheets.sweep_sheet([summary(folder) for folder in folders]))


def _check_shown(argv: list[str]) -> None:
    """Compose with --cfg as a run would, so that it reports the same errors; Hydra does not call `launch` then."""
    given = launch_options.read(argv)
    if given.cfg:
        compose(given.overrides, config_dir=given.config_dir)


def _site() -> Path | None:
    """Return the site's own config folder, if the command line names one."""
    return launch_options.read(sys.argv[1:]).config_dir


def run(plan: Plan, config: "DictConfig", overrides: Sequence[str], created: list[Path]) -> int:
    """Return 0 if every trial is valid; a dry run only shows the plan, and returns 2 if a launch would refuse it.

    The run's folder is appended to `created`, also if the run fails. With a queue, 0 means that the job is queued;
    with launch.wait it means that every trial is valid.
    """
    from omegaconf import OmegaConf

    from bench.launch import start

    words = [*overrides, *to_prepare.site_words(_site())]
    if plan.config.launch.dry_run:
        return start.dry_run(plan, words)
    return start.run(plan, with_overrides(OmegaConf.to_yaml(config), overrides, _site()), created, words)


if __name__ == "__main__":
    main()
