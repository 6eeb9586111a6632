"""The folder of a run's rows."""

from bench.contract import data_files
from bench.contract.schema import Config, DataSource


def data_dir(config: Config) -> str | None:
    """Return the folder of the rows; None for random rows, which exist in memory only.

    Prepared rows have one folder per data config and vocabulary size, so that they never mix.
    """
    root, source = config.cluster.paths.data, config.training_data.source
    if source is DataSource.random:
        return None
    if root is None or source is DataSource.prepared:
        return root
    return data_files.rows_dir(root, config.training_data, config.model.vocab_size)
