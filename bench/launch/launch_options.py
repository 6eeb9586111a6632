"""The options of `runstop launch`: Hydra's own, --dry-run, and what to write instead of all others."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bench.errors import ConfigError
from bench.planning import compose, overrides
from bench.texts import nearest

DRY_RUN = "--dry-run"
HINTS = {
    **dict.fromkeys(
        ("--quiet", "-q", "--silent"), "results go to stdout and messages to stderr: append 2> /dev/null to drop these"
    ),
    "--json": "for the plan as JSON: runstop plan --json; for the result: runstop parse --json",
    **dict.fromkeys(("--verbose", "-v", "-vv", "--debug"), "the verb plan logs its steps: runstop plan -v"),
    **dict.fromkeys(("--resume", "--restart"), "runstop resume RUN"),
}
"""By option: what to do instead."""


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a command line."""

    overrides: list[str]
    cfg: str | None
    config_dir: Path | None
    is_sweep: bool
    unknown: list[str]
    """Options that neither Hydra nor runstop has."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        option = re.match(r"argument (--[\w-]+)", message)
        if (wrong := re.search(r"invalid choice: '.*' \(choose from (.*)\)$", message)) and option:
            choices = re.findall(r"[\w-]+", wrong[1])
            what = f"the value of {option[1]} must be one of {', '.join(choices)}"
            fix = f"choose one of these values, such as {option[1]} {choices[0]}"
            raise ConfigError(what, where="command line", fix=fix)
        fix = "run `runstop launch --help` to list all options and settings"
        raise ConfigError(message, where="command line", fix=fix)


def _parser() -> argparse.ArgumentParser:
    """Return a parser with Hydra's options. Source: hydra/_internal/utils.py of Hydra 1.3, get_args_parser."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("--help", "-h"), ("--hydra-help",), ("--version",), ("--resolve",), ("--run", "-r")):
        parser.add_argument(*names, action="store_true")
    for names in (("--multirun", "-m"), ("--shell-completion", "-sc"), (DRY_RUN,)):
        parser.add_argument(*names, action="store_true")
    for names in (("--package", "-p"), ("--config-path", "-cp"), ("--config-name", "-cn"), ("--experimental-rerun",)):
        parser.add_argument(*names)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--config-dir", "-cd", type=Path)
    return parser


def read(argv: Sequence[str]) -> Given:
    """Return the arguments of a command line.

    Raises:
        ConfigError: an option lacks its value, or has a wrong one.
    """
    args, rest = _parser().parse_known_args(argv)
    return Given(
        overrides=[argument for argument in rest if not argument.startswith("-")],
        cfg=args.cfg,
        config_dir=args.config_dir,
        is_sweep=args.multirun,
        unknown=[argument for argument in rest if argument.startswith("-")],
    )


def understood(argv: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: without --dry-run, which becomes launch.dry_run=true.

    Raises:
        ConfigError: an option or an override is wrong.
    """
    given = read(argv)
    for argument in given.unknown:
        raise _unknown_option(argument, argv)
    compose.search_path(given.config_dir)  # refuses a folder that does not exist
    overrides.check(given.overrides, sweeps=given.is_sweep, config_dir=given.config_dir)
    if given.is_sweep:
        overrides.require_several(given.overrides)
    if DRY_RUN not in argv:
        return list(argv)
    return [*(argument for argument in argv if argument != DRY_RUN), "launch.dry_run=true"]


def _unknown_option(argument: str, argv: Sequence[str]) -> ConfigError:
    """Return the error of an option that does not exist; the fix is the override that it means, if there is one."""
    option, _, value = argument.partition("=")
    after = argv[argv.index(argument) + 1 :]
    if not value and after and "=" not in after[0] and not after[0].startswith("-"):
        value = after[0]
    hint = HINTS.get(option)
    if hint is None and (meant := overrides.of_option(option, value)) is not None:
        hint = f"write {meant}"
    if hint is None and (near := nearest(option, _parser()._option_string_actions, likeness=0.6)) is not None:
        hint = f"did you mean {near}?"
    return ConfigError(
        f"launch has no option {option}",
        where="command line",
        fix=hint or "run `runstop launch --help` to list all options and settings",
    )
