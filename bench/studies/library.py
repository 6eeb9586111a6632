"""The studies and published figures that there are, in conf/ and in a site's own folder, read and checked."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench.errors import ConfigError
from bench.planning.compose import CONF
from bench.results import published as figures
from bench.results.published import PublishedTable
from bench.studies import checks, yaml_files
from bench.studies.spec import Study

STUDIES, PUBLISHED = "study", "published"
"""Folders of conf/, and of the folder that --config-dir names."""


def names(*, config_dir: Path | None = None) -> list[str]:
    """Return the names of all studies."""
    return sorted(_files(STUDIES, config_dir))


def titles(config_dir: Path | None = None) -> list[tuple[str, Study]]:
    """Return all studies by name."""
    return [(name, load(name, config_dir=config_dir)) for name in names(config_dir=config_dir)]


def load(name: str, *, config_dir: Path | None = None) -> Study:
    """Return a study that contradicts itself nowhere.

    Raises:
        ConfigError: there is none of this name, or its file, or one that it names, is wrong.
    """
    path = _file(STUDIES, name, config_dir)
    study = msgspec.structs.replace(yaml_files.load(path, Study), axes_first=yaml_files.is_before(path, "axes", "arms"))
    checks.check(study, where=str(path))
    publications(study, config_dir=config_dir)
    return study


def with_runs(study: Study, runs: int) -> Study:
    """Return the study with another number of runs of each arm; raise ConfigError for one that nobody means."""
    checks.check_runs(runs, where="--runs")
    return msgspec.structs.replace(study, runs=runs)


def publications(study: Study, *, config_dir: Path | None = None) -> dict[str, PublishedTable]:
    """Return the published tables that a study names."""
    return {name: published(name, config_dir=config_dir) for name in study.published}


def published(name: str, *, config_dir: Path | None = None) -> PublishedTable:
    """Return the published figures in conf/published/NAME.yaml."""
    path = _file(PUBLISHED, name, config_dir)
    table = figures.read(path)
    checks.check_published(table, where=str(path))
    return table


def _files(group: str, config_dir: Path | None) -> Mapping[str, Path]:
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError("no such folder", where=f"--config-dir {config_dir}", fix="name the folder that has study/")
    folders = [CONF / group, *([config_dir / group] if config_dir else [])]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _file(group: str, name: str, config_dir: Path | None) -> Path:
    files = _files(group, config_dir)
    if name not in files:
        checks.refuse_unknown(name, list(files), noun=f"{group} file" if group == PUBLISHED else group, where=group)
    return files[name]
