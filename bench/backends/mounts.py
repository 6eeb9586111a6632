"""What ranks in a container see of the file system, at the paths that it has outside."""

from collections.abc import Iterator

from bench.contract import data_files
from bench.contract.plan import Plan
from bench.contract.schema import DataSource

READ_ONLY = ":ro"


def of_files(plan: Plan) -> Iterator[str]:
    """Yield PATH:PATH for the folders that the run fills, and PATH:PATH:ro for what it only reads."""
    paths = plan.config.cluster.paths
    data = plan.config.data
    made = {paths.data} if data.source.is_made else set()
    made |= {paths.data, paths.model} if plan.base or data.source is DataSource.grammar else set()
    needs_model = plan.base_dir or data.needs_model_folder
    needed = [paths.data if plan.data_dir else None, paths.model if needs_model else None, *data_files.outside(data)]
    for path in dict.fromkeys(filter(None, needed)):
        yield f"{path}:{path}" if path in made else f"{path}:{path}{READ_ONLY}"
