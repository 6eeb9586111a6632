"""The folders of a run's rows and initial weights."""

from bench.contract import data_files
from bench.contract.plan import fingerprint
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config, DataSource
from bench.contract.training import StartsFrom


def data_dir(config: Config) -> str | None:
    """Return the folder of the rows; None for random rows, which exist in memory only.

    Prepared rows have one folder per data config and vocabulary size, so that they never mix.
    """
    root, source = config.cluster.paths.data, config.training_data.source
    if source is DataSource.random:
        return None
    if root is None or source in (DataSource.prepared, DataSource.megatron, DataSource.program):
        return root
    return data_files.rows_dir(root, config.training_data, config.model.vocab_size)


def base_dir(config: Config, base: TrainingPlan | None) -> str | None:
    """Return the folder of the checkpoint that training starts from; None for random weights."""
    root = config.cluster.paths.model
    if root is None or config.training.starts_from is StartsFrom.random:
        return None
    if base is None:
        return root
    b = base.config
    return (
        f"{root}/{b.task.name}-{fingerprint(b.model, b.data, b.training_recipe, b.training, b.seed_base, b.precision)}"
    )
