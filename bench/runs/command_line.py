"""The command line of a run, in the first lines of its config.yaml: for readers, and for `runstop rerun`.

# overrides: task=lora_tiny recipe.lr=0.001
# launched: {"overrides": ["task=lora_tiny", "recipe.lr=0.001"], "config_dir": null, "runstop": "0.1.0"}
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.contract import regular_files
from bench.contract.run_files import CONFIG
from bench.errors import ConfigError
from bench.runs.folder import short
from bench.texts import control_character

_OVERRIDES, _LAUNCHED = "# overrides: ", "# launched: "


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The arguments with which a run was launched."""

    overrides: tuple[str, ...]
    config_dir: Path | None
    """The site's own config folder, as an absolute path."""
    runstop: str
    """The version; empty for runs of versions that did not write it."""


def with_overrides(config_yaml: str, overrides: Sequence[str], config_dir: Path | None = None) -> str:
    """Return a config.yaml whose first lines have the arguments that it was composed of."""
    words = "".join(" " if control_character(letter) else letter for letter in " ".join(overrides))
    site = None if config_dir is None else str(config_dir.absolute())
    record = {"overrides": list(overrides), "config_dir": site, "runstop": installed()}
    shown = f"{_OVERRIDES}{words}\n" if words else ""
    return f"{shown}{_LAUNCHED}{json.dumps(record)}\n{config_yaml}"


def installed() -> str:
    """Return the installed version of runstop; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # `runstop runs` needs none of what this imports

    with suppress(PackageNotFoundError):
        return version("runstop")
    return ""


def text(folder: Path) -> str:
    """Return the overrides of a run on one line; empty if they are not known."""
    first = _head(folder)[0]
    return first.removeprefix(_OVERRIDES).strip() if first.startswith(_OVERRIDES) else ""


def read(folder: Path) -> CommandLine:
    """Return the arguments with which a run was launched.

    Raises:
        ConfigError: the run folder does not have them.
    """
    for line in _head(folder):
        if line.startswith(_LAUNCHED):
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                raw = json.loads(line.removeprefix(_LAUNCHED))
                overrides, site = raw["overrides"], raw["config_dir"]
                if isinstance(overrides, list) and all(isinstance(one, str) for one in overrides):
                    site = Path(site) if isinstance(site, str) else None
                    return CommandLine(overrides=tuple(overrides), config_dir=site, runstop=str(raw.get("runstop", "")))
    if (known := text(folder)) and not set(known) & set("'\"[]{}\\"):  # an earlier version wrote only this line
        overrides = known.split(" ")
        if all("=" in one or one.startswith("~") for one in overrides):
            return CommandLine(overrides=tuple(overrides), config_dir=None, runstop="")
    reason = "an earlier version of runstop started the run, and did not record each argument separately"
    fix = f"run `runstop launch` with these arguments, and put quotes around arguments with special characters: {known}"
    if not known:
        reason = f"{CONFIG} of the run has no record of the arguments"
        fix = f"write the arguments yourself; to see the settings of the run: less {short(folder / CONFIG)}"
    raise ConfigError(f"the run cannot be launched again: {reason}", where=str(folder / CONFIG), fix=fix)


def _head(folder: Path) -> list[str]:
    """Return the first two lines of a run's config.yaml; empty texts if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        first, _, rest = regular_files.read_text(folder / CONFIG).partition("\n")
        return [first, rest.partition("\n")[0]]
    return ["", ""]
