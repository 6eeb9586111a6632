"""engine=nemo where NeMo is not installed: its program reads the plan and says so."""

from importlib import metadata
from pathlib import Path

import pytest

from bench.contract.engine import NEMO, VERSION
from helpers import ranks


def has_nemo() -> bool:
    try:
        return bool(metadata.version("nemo_toolkit"))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.trains
@pytest.mark.skipif(has_nemo(), reason="this interpreter has NeMo")
def test_a_rank_without_nemo_says_what_is_missing(tmp_path: Path) -> None:
    plan = ranks.compose(tmp_path, "engine=nemo", "engine.nemo.python=python", "cluster.ranks_per_node=1")
    folder = ranks.write(plan, tmp_path / "run")
    (folder / "rank_logs").mkdir()
    [(code, output)] = ranks.ended(plan, folder, "jobs.nemo.train", "plan.json", "--trial", "0")
    assert code == 2
    assert f"{NEMO} {VERSION} is required, but none is installed" in output
