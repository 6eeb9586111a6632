"""Runs of engine=megatron, which the runs of engine=huggingface are compared with."""

from pathlib import Path

import pytest

from helpers.huggingface_runs import made_by_megatron


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a base and the runs megatron_all and megatron_lora of engine=megatron."""
    folder = tmp_path_factory.mktemp("huggingface")
    made_by_megatron(folder)
    return folder
