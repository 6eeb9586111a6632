"""Refuse text in the config that a script, a file name or a command line could take for something else (rule CFG-09).

A config may come from somebody else. Its names become names of folders, files and jobs; its other texts stand in
scripts, in JSON and on screens. What no text may hold is refused here, once, for every backend.
"""

import re

from bench import masking, texts
from bench.contract import run_files
from bench.contract.schema import Config
from bench.errors import ConfigError

MAX_NAME, MAX_TEXT = 100, 4096
"""Characters. The name of a run folder has up to two names, and a file system takes 255 bytes; a path has PATH_MAX."""
NAMES = {"task.name", "task.benchmark", "cluster.name", "container.name", "model.name", "data.name"}
"""Texts that become names of folders, files and jobs. What the rest is for, only its key says."""
WORDS = {f"cluster.slurm.{key}" for key in ("partition", "gpu_type", "account", "qos", "reservation")}
PATHS = {*(f"cluster.paths.{key}" for key in ("data", "model", "logs")), "launch.folder", "container.image"}
MOUNTS = "container.mounts["
ENVIRONMENT = "cluster.environment"
SET_BY_JOB = (run_files.ELEMENT_VARIABLE, "PYTHONSAFEPATH")
"""A part of file names, and what keeps modules in the run folder from being imported."""

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
    ({"task.training.base"}, _TASK, "name a file of conf/task, without .yaml"),
)


def check(config: Config) -> None:
    """Raise ConfigError on the first text that is not what its key stands for."""
    for key in config.cluster.environment:
        if not _KEY.fullmatch(key):
            raise _refused(ENVIRONMENT, key, "is no name of a variable", "use letters, digits and _")
        if key in SET_BY_JOB:
            raise _refused(ENVIRONMENT, key, "is set by the job itself", "leave it out")
    for place, _, text in texts.strings(config, ""):
        _check(place.removeprefix("."), text)


def _check(place: str, text: str) -> None:
    """Refuse a text by what its place stands for."""
    if letter := texts.steering(text):
        what = f"holds the control or format character U+{ord(letter):04X}"
        raise _refused(place, text, what, "write it as plain text on one line")
    if len(text) > MAX_TEXT:
        raise _refused(place, text, f"has more than {MAX_TEXT:,} characters", "shorten it")
    for places, pattern, fix in _PATTERNS:
        if place in places:
            _check_name(place, text, pattern, fix)
    if place in PATHS or place.startswith(MOUNTS):
        _check_path(place, text)


def _check_name(place: str, text: str, pattern: re.Pattern[str], fix: str) -> None:
    if len(text) > MAX_NAME:
        raise _refused(place, text, f"has more than {MAX_NAME} characters", "shorten it")
    if not pattern.fullmatch(text):
        raise _refused(place, text, "is not a name that a folder, a job or an option can have", fix)


def _check_path(place: str, text: str) -> None:
    """Refuse what the job's shell, which fills in $DATADIR and its like, would read otherwise than this program."""
    if "$" in _VARIABLE.sub("", text):
        fix = "write a variable as $NAME, in upper case, and nothing else with a dollar sign"
        raise _refused(place, text, "holds a dollar sign that begins no variable's name", fix)
    if place in PATHS and text.startswith("-"):
        raise _refused(place, text, "begins like an option", "begin it with / or ./")


def _refused(place: str, text: str, what: str, fix: str) -> ConfigError:
    shown = texts.quoted(masking.masked(text))
    return ConfigError(f"{shown} {what}", where=place, fix=fix, rule="CFG-09")
