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
from jobs.tasks.prepare import prepare_rows_of

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
        values = [setting for setting in summary if setting.split("-")[0] in tiny_reports.FACTS and "-" in setting]
        assert [value.split("-")[0] for value in values] == list(tiny_reports.FACTS)
        assert set(values) <= report


def test_reports_alone_count_everywhere_but_in_padding() -> None:
    tokens, counts = tiny_reports.rows(50, seq_length=96, seed=3, with_summaries=False)
    assert ((tokens != tiny_reports.vocabulary().index(tiny_reports.PAD)) == counts).all()


def test_a_row_too_short_for_a_document_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a generated document may have up to 96 words, but data.seq_length is only 95"
    ):
        tiny_reports.rows(1, seq_length=95, seed=0, with_summaries=True)


def test_a_vocabulary_too_small_for_the_grammar_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = compose.compose([f"cluster.paths.data={tmp_path}", "model.vocab_size=32"])
    with pytest.raises(ConfigError, match="model.vocab_size is 32, but"):
        prepare_rows_of(plan)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Two writing ranks would remove each other's unfinished folder."""
    plan = compose.compose([f"cluster.paths.data={tmp_path}", "data.train_rows=400", "data.eval_rows=8"])
    monkeypatch.setattr(prepare, "broadcast_from_rank_0", lambda choice: False)  # needs other ranks
    with mllog.Writer(None) as log:
        prepare.prepare(plan, Rank(rank, rank, 2, "127.0.0.1", 1), log)
    assert Path(str(plan.data_dir)).is_dir() is (rank == 0)


def test_an_interrupted_preparation_starts_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = compose.compose([f"cluster.paths.data={tmp_path}", "data.train_rows=400", "data.eval_rows=8"])
    part = tmp_path / (plan.data_dir.rpartition("/")[2] + ".part")
    part.mkdir()
    (part / "half_of_something.npy").touch()
    prepare_rows_of(plan)
    names = {f"{split}_{what}.npy" for split in ("train", "eval") for what in ("tokens", "counts", "lengths", "sha256")}
    names |= {"manifest.json"}
    assert {path.name for path in Path(plan.data_dir).iterdir()} == names and not part.exists()
