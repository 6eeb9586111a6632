"""Each notebook runs from top to bottom, on synthetic and on published logs, and is stored without outputs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import CORPUS, ROOT

pytestmark = pytest.mark.starts

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SYNTHETIC = {
    "1_read_and_judge": ["valid: True, 22.17 minutes", "3,072 samples to target", "ruleset 5.1.0: passed"],
    "2_score_of_ten": ["10 runs, 0 failed; valid score: True", "RCP factor 1.0511", "3072: 7, 3456: 1}"],
    "3_forecast_replayed": ["evaluation 4 (0.9263 at 2,688 samples):\n    target reached at (3072, 3072, 3456)"],
    "5_submit": ["fp32: 2 trials, valid: True", "bf16: 2 trials, valid: True", "step time: "],
    "4_study": ["bf16, step time: 96.66 ± 0.98 ms, n = 6", "throughput: fp32 is 19.4–20.8 % slower than bf16"],
}
"""Text in each notebook's outputs: 384 steps of 3.1 s and 5 evaluations of 28 s are 22.17 minutes."""
TRAINING = "5_submit"
"""The notebook that trains four trials."""
PUBLISHED = {
    "1_read_and_judge": ["valid: True, 25.21 minutes", "3,456 samples to target"],
    "3_forecast_replayed": ["based on 1,359 published runs"],
}
"""Text in the outputs for a log of round v4.1; the corpus has no ten logs of one system."""


def outputs(path: Path) -> Iterator[str]:
    """Run a notebook and yield the text of each output."""
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(FOLDER)}})
    client.coalesce_streams = True  # one print may arrive in several pieces
    client.execute()
    for cell in book.cells:
        for output in cell.get("outputs", []):
            yield output.get("text") or output["data"].get("text/plain", "")
            assert output.get("name") != "stderr", output["text"]


@pytest.mark.filterwarnings("default")  # warnings of Jupyter
@pytest.mark.parametrize(
    "name",
    [pytest.param(path.stem, marks=pytest.mark.slow if path.stem == TRAINING else ()) for path in NOTEBOOKS],
)
def test_notebook_runs_on_synthetic_logs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RUNSTOP_LOGS", raising=False)
    text = "\n".join(outputs(FOLDER / f"{name}.ipynb"))
    assert [expected for expected in (*SYNTHETIC[name], "<Figure size") if expected not in text] == []


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of logs is not installed")
@pytest.mark.parametrize("name", PUBLISHED)
def test_notebook_runs_on_published_logs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RUNSTOP_LOGS", str(CORPUS))
    text = "\n".join(outputs(FOLDER / f"{name}.ipynb"))
    assert [expected for expected in (*PUBLISHED[name], "<Figure size") if expected not in text] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
