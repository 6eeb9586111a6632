"""Fill in the number of training rows that were counted before a run is planned."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.contract import data_files
from bench.contract.data import Data, DataSource
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError
from bench.planning import model_folder, npy_header, to_prepare

TRAIN_TOKENS = "train_tokens.npy"
"""The file of prepared rows whose first dimension is their number."""


def with_train_rows(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with data.train_rows; if it is null, with the number of the prepared rows on this machine.

    The overrides, with --config-dir if it was set, are shown in the error's command.

    Raises:
        ConfigError: it is null, and there are no prepared rows; or MODEL has other weights, or a tokenizer that
            cannot prepare the rows.
    """
    data = config.data
    if data is None or data.train_rows is not None or not _is_countable(data):
        return config
    root = expanded(config.cluster.paths.data)
    rows = None if root is None else _rows_in(Path(root), config)
    if rows is None:
        raise _uncounted(config, root, overrides)
    return replace(config, data=replace(data, train_rows=rows))


def _is_countable(data: Data) -> bool:
    """Return whether there are rows to count; otherwise the checks of the config refuse it."""
    return (data.source.reads_files and data.sample is None) or data.source is DataSource.prepared


def _rows_in(root: Path, config: Config) -> int | None:
    data = config.training_data
    if data.source is not DataSource.prepared:
        counted = data_files.counted_rows(root, data, config.model.vocab_size)
        return None if counted is None else counted[1]
    try:
        return npy_header.read(root / TRAIN_TOKENS).shape[0]
    except (OSError, ValueError, IndexError):
        return None


def _uncounted(config: Config, root: str | None, overrides: Sequence[str]) -> ConfigError:
    data, number = config.training_data, "data.train_rows to the number of training rows"
    what = f"data.train_rows is null, and this machine has no prepared rows of {data.name} to count"
    if data.source is DataSource.prepared:
        fix = f"set {number}, or set DATADIR to a folder with prepared rows"
    elif root is not None and (unreadable := _unreadable(Path(root), data)) is None:
        if (folder := to_prepare.source(config)) is not None:
            model_folder.check_weights(folder, config)
        data_files.checked_tokenizer(config, None)
        fix = f"run this command first: {to_prepare.command(overrides)}; or set {number}"
    else:
        what += f"; the files cannot be read: {unreadable}" if root is not None else "; DATADIR is not set"
        fix = f"set {number}; or run `runstop prepare` with the same settings on a machine that can read the files"
    return ConfigError(what, where=f"data.train_rows, {root or config.cluster.paths.data or 'DATADIR'}", fix=fix)


def _unreadable(root: Path, data: Data) -> str | None:
    """Return why the files of a source cannot be read here; None if they can."""
    try:
        files = data_files.find(root, data)
    except BenchError as error:
        return f"{error.what} ({error.where})"
    return next((f"no permission ({path})" for path in files if not os.access(path, os.R_OK)), None)
