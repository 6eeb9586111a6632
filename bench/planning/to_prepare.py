"""What `runstop prepare` does before a run: its command, and the weights of a Hugging Face folder that it converts."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract import checkpoint
from bench.contract.data import Data
from bench.contract.model import Weights
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config
from bench.contract.training import StartsFrom
from bench.errors import ConfigError


def command(words: Sequence[str]) -> str:
    """Return the command that prepares a run, for a fix. `words` are the overrides and options of its command line.

    Without words, as for a run of a study, the text says which overrides to use.
    """
    own = [one for one in words if not one.startswith("hydra.")]
    return shlex.join(["runstop", "prepare", *own]) if own else "runstop prepare, with the overrides of this run"


def site_words(config_dir: Path | None) -> list[str]:
    """Return the option that names a site's own config folder."""
    return [] if config_dir is None else ["--config-dir", str(config_dir)]


def files_to_rows(config: Config) -> Data | None:
    """Return the data of a run whose rows are made from the user's files; None for all other runs."""
    data = config.data
    is_read = config.task.training is not None and data is not None and data.source.reads_files
    return data if is_read and data is not None and data.sample is None else None


@dataclass(frozen=True, slots=True)
class Conversion:
    """The weights of a Hugging Face folder that a run's engine reads from a converted checkpoint."""

    source: Path
    folder: Path
    """The converted checkpoint, in `source`."""

    @property
    def is_done(self) -> bool:
        """Return whether the checkpoint is complete: it gets its name only then."""
        return (self.folder / checkpoint.METADATA).exists()

    @property
    def fix(self) -> str:
        """What to do first if this user may not write into the folder; empty if the user may."""
        if os.access(self.source, os.W_OK | os.X_OK):
            return ""
        links = f"mkdir DIR && ln -s {shlex.quote(str(self.source))}/* DIR/ && export MODEL=DIR"
        return f"create your own folder with links to these files: {links}"

    def require_writable(self) -> None:
        """Raise ConfigError if this user may not write the checkpoint into the folder."""
        if self.fix:
            raise ConfigError(
                "runstop cannot write the converted weights into this folder: this user has no write permission",
                where=str(self.source),
                fix=f"{self.fix}; then run the same command again",
                rule="CFG-08",
            )


def source(config: Config) -> Path | None:
    """Return the Hugging Face folder of the weights that a run trains or generates with; None if there is none here."""
    task = config.task
    reads_weights = (
        task.training.starts_from is StartsFrom.checkpoint
        if task.training is not None
        else task.generation is not None and config.model.weights is not Weights.random
    )
    path = expanded(config.cluster.paths.model)
    return Path(path) if reads_weights and path is not None and checkpoint.is_source(Path(path)) else None


def conversion(config: Config) -> Conversion | None:
    """Return the conversion that a run needs, also if it is done; None if it needs none, or MODEL is elsewhere."""
    if (folder := source(config)) is None:
        return None
    located = checkpoint.located(folder, config)
    if located == folder:  # this engine reads the folder itself
        return None
    own = folder / checkpoint.FOLDERS[checkpoint.preferred(config)]
    return Conversion(folder, located if located.exists() else own)
