"""The tiny tasks' data: always the same, and summaries that say what the report says."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from bench.contract import mllog
from bench.errors import ConfigError
from bench.planning import compose
from jobs.data import tiny_reports
from jobs.ranks.identity import Rank
from jobs.tasks import prepare
from jobs.tasks.prepare import make_rows

ROWS_OF_VERSION = {1: "888130cb0265b096"}


def test_rows_stay_what_their_version_says() -> None:
    """Cached rows are found by conf/data/tiny_report.yaml's version: a changed grammar needs the next one."""
    tokens, counts = tiny_reports.rows(64, seq_length=96, seed=0, with_summaries=True)
    digest = hashlib.sha256(tokens.tobytes() + counts.tobytes()).hexdigest()[:16]
    assert digest == ROWS_OF_VERSION[compose.compose([]).config.data.version]


def test_a_summary_restates_the_facts_of_its_report() -> None:
    """In rows of one document and in rows of two."""
    words = np.array(tiny_reports.vocabulary())
    tokens, counts = (
        part.reshape(-1, 96) for part in tiny_reports.rows(50, seq_length=192, seed=3, with_summaries=True)
    )
    for row, counted in zip(words[tokens], counts, strict=True):
        report, summary = set(row[~counted]), list(row[counted])
        values = [word for word in summary if word.split("-")[0] in tiny_reports.FACTS and "-" in word]
        assert [value.split("-")[0] for value in values] == list(tiny_reports.FACTS)
        assert set(values) <= report


def test_reports_alone_count_everywhere_but_in_padding() -> None:
    tokens, counts = tiny_reports.rows(50, seq_length=96, seed=3, with_summaries=False)
    assert ((tokens != tiny_reports.vocabulary().index(tiny_reports.PAD)) == counts).all()


def test_a_row_too_short_for_a_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="a document has 96 words, and a row 95"):
        tiny_reports.rows(1, seq_length=95, seed=0, with_summaries=True)


def test_a_vocabulary_too_small_for_the_grammar_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = compose.compose([f"cluster.paths.data={tmp_path}", "model.vocab_size=32"])
    with pytest.raises(ConfigError, match="the model has a vocabulary of 32, and the grammar has"):
        make_rows(made)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Two ranks that both write would take each other's unfinished folder away."""
    made = compose.compose([f"cluster.paths.data={tmp_path}", "data.train_rows=400", "data.eval_rows=8"])
    monkeypatch.setattr(prepare, "rank_0_says", lambda choice: False)  # it needs the other ranks
    with mllog.Writer(None) as log:
        prepare.prepare(made, Rank(rank, rank, 2, "127.0.0.1", 1), log)
    assert Path(str(made.data_dir)).is_dir() is (rank == 0)


def test_what_an_interrupted_preparation_left_is_made_anew(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = compose.compose([f"cluster.paths.data={tmp_path}", "data.train_rows=400", "data.eval_rows=8"])
    part = tmp_path / (made.data_dir.rpartition("/")[2] + ".part")
    part.mkdir()
    (part / "half_of_something.npy").touch()
    make_rows(made)
    names = {f"{split}_{what}.npy" for split in ("train", "eval") for what in ("tokens", "counts", "lengths")}
    assert {path.name for path in Path(made.data_dir).iterdir()} == names and not part.exists()
