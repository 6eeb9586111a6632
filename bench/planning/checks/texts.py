"""Checks of texts in the config that could inject options, paths or shell syntax (rule CFG-09).

A config may come from another person. Its names become names of folders, files and jobs; its other texts appear in
scripts, in JSON and on screens. This module refuses unsafe texts for all backends.
"""

import re

from bench import masking, texts
from bench.contract import run_files
from bench.contract.schema import Config
from bench.errors import ConfigError

MAX_NAME, MAX_TEXT = 100, 4096
"""Characters. A run folder's name contains up to two names, and file systems allow 255 bytes; for paths PATH_MAX."""
CONFIG_JSON, MAX_CONFIG_JSON = "model.described.config_json", 65536
"""Only ranks read it, as JSON."""
NAMES = {"task.name", "task.benchmark", "cluster.name", "container.name", "model.name", "data.name"}
"""Texts that become names of folders, files and jobs."""
WORDS = {f"cluster.slurm.{key}" for key in ("partition", "gpu_type", "account", "qos", "reservation")}
PATHS = {*(f"cluster.paths.{key}" for key in ("data", "model", "logs")), "launch.folder", "container.image"}
MOUNTS = "container.mounts["
ENVIRONMENT = "cluster.environment"
SET_BY_JOB = (run_files.ARRAY_TASK_VARIABLE, "PYTHONSAFEPATH")
"""The first is part of file names; the second prevents imports from the run folder."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_TASK = re.compile(rf"{_NAME.pattern}(/{_NAME.pattern})*")
"""The file of a task below conf/task."""
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@=/-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$[A-Z_][A-Z0-9_]*(?![A-Za-z0-9_])")
"""Variables of the site. The script's own variables are lower-case."""
_PATTERNS = (
    (NAMES, _NAME, "use letters, digits and _ . + - and begin with a letter or a digit"),
    (WORDS, _WORD, "use letters, digits and _ . , : + @ = / - and begin with a letter or a digit"),
    ({"task.training.base"}, _TASK, "use the name of a file in conf/task, without .yaml"),
)


def check(config: Config) -> None:
    """Raise ConfigError for the first text that is not valid for its key."""
    for key in config.cluster.environment:
        if not _KEY.fullmatch(key):
            raise _refused(
                ENVIRONMENT,
                key,
                "is not a valid name of an environment variable",
                "use letters, digits and _ and begin with a letter or _",
            )
        if key in SET_BY_JOB:
            raise _refused(
                ENVIRONMENT,
                key,
                "cannot be set, because the job sets this variable itself",
                f"remove {key} from {ENVIRONMENT}",
            )
    for place, _, text in texts.strings(config, ""):
        _check(place.removeprefix("."), text)


def _check(place: str, text: str) -> None:
    """Refuse a text that is not valid for its key."""
    if letter := texts.control_character(text):
        raise _refused(
            place,
            text,
            f"contains the control or format character U+{ord(letter):04X}",
            "write a text of printable characters on one line",
        )
    max_characters = MAX_CONFIG_JSON if place == CONFIG_JSON else MAX_TEXT
    if len(text) > max_characters:
        raise _refused(place, text, f"has more than {max_characters:,} characters", "write a shorter text")
    for places, pattern, fix in _PATTERNS:
        if place in places:
            _check_name(place, text, pattern, fix)
    if place in PATHS or place.startswith(MOUNTS):
        _check_path(place, text)


def _check_name(place: str, text: str, pattern: re.Pattern[str], fix: str) -> None:
    if len(text) > MAX_NAME:
        raise _refused(place, text, f"has more than {MAX_NAME} characters", "write a shorter text")
    if not pattern.fullmatch(text):
        raise _refused(place, text, "is not a valid name of a folder, a job or an option", fix)


def _check_path(place: str, text: str) -> None:
    """Refuse paths that the job's shell, which expands $DATADIR, would read differently from this program."""
    if "$" in _VARIABLE.sub("", text):
        raise _refused(
            place,
            text,
            "contains a dollar sign without the name of a variable",
            "write a dollar sign only before the name of a variable in upper case, such as $NAME",
        )
    if place in PATHS and text.startswith("-"):
        raise _refused(place, text, "starts with a dash, so it looks like an option", "begin the path with / or ./")


def _refused(place: str, text: str, what: str, fix: str) -> ConfigError:
    shown = texts.quoted(masking.masked(text))
    return ConfigError(f"{shown} {what}", where=place, fix=fix, rule="CFG-09")
