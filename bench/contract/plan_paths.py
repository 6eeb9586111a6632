"""The paths of a plan, which may contain variables such as $DATADIR, and their expansion on this machine."""

import os
from pathlib import Path

from bench.contract import plan as plans
from bench.contract.model import Weights
from bench.contract.schema import Config, DataSource, Runtime
from bench.contract.training import StartsFrom


def expanded(text: str | None) -> str | None:
    """Expand the variables of a path; None if one of them is not set.

    On Slurm clusters the job's shell expands $DATADIR, $MODEL, $LOGDIR and $CONT, so that one script serves all users.
    """
    full = os.path.expandvars(text or "")
    return None if not full or "$" in full else full


def named_paths(config: Config) -> dict[str, str | None]:
    """Return the paths that a run reads and writes, by their usual variable."""
    named, data, task = {"LOGDIR": config.cluster.paths.logs}, config.data, config.task
    if data is not None and data.source is not DataSource.random and _is_read(config, "data"):
        named = {"DATADIR": config.cluster.paths.data} | named
    starts_from_files = (
        task.training is not None and task.training.starts_from is not StartsFrom.random and _is_read(config, "model")
    )
    if starts_from_files or (data is not None and data.needs_model_folder):
        named["MODEL"] = config.cluster.paths.model
    if task.generation and config.model.weights is not Weights.random:
        named["MODEL"] = config.cluster.paths.model
    if task.serving and task.serving.server.url is None and config.model.weights is not Weights.random:
        named["MODEL"] = task.serving.server.model or config.cluster.paths.model
    if config.container.runtime is not Runtime.none and config.container.image:
        named["CONT"] = config.container.image
    return named


def _is_read(config: Config, placeholder: str) -> bool:
    """Return whether a folder is read: by a program only if a placeholder passes the folder to it."""
    return config.program is None or config.program.uses(placeholder)


def to_prepare(plan: plans.Plan) -> list[str]:
    """Return the folders that the prepare command creates."""
    if plans.command(plan, plans.PREPARE) is None:
        return []
    inputs = plan.inputs
    rows = inputs.rows if inputs.rows_are_prepared else None
    checkpoint = inputs.checkpoint if inputs.checkpoint_is_created else None
    return [path for path in (rows, checkpoint) if path is not None]


def is_prepared(plan: plans.Plan) -> bool:
    """Return whether the prepare command has nothing to do, or the plan has none."""
    return all(Path(path).is_dir() for path in to_prepare(plan))
