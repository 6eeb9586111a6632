"""Our engine's runs, which those of Hugging Face are compared with."""

from pathlib import Path

import pytest

from helpers.huggingface_runs import made_by_megatron


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache holds rows and a base that our engine has trained; megatron_all, megatron_lora."""
    folder = tmp_path_factory.mktemp("huggingface")
    made_by_megatron(folder)
    return folder
