"""Preparing rows and a base in this process: what is made, what is left alone, and what the other ranks wait for."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.contract.schema import DataSource
from bench.errors import ConfigError
from helpers import alone, ranks
from jobs.data import prepare_rows, tiny_reports
from jobs.ranks import process_group
from jobs.ranks.identity import Rank
from jobs.tasks import prepare

ROWS_ONLY = "task=pretrain_tiny"


def composed(tmp_path: Path, *overrides: str) -> Plan:
    """Return the plan of one rank with a few rows: fewer than its schedule needs, which nothing here asks for."""
    made = ranks.compose(tmp_path, "cluster.ranks_per_node=1", *overrides)
    made.config.data.train_rows, made.config.data.eval_rows = 20, 8
    return made


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of our own packages, as it was before behind the test."""
    logger = logging.getLogger("jobs")
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    yield logger
    logger.setLevel(level)


def test_rows_are_made_once_below_a_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, progress: logging.Logger
) -> None:
    """The log of an attempt that was interrupted is replaced; rows that are there stay as they are."""
    made = composed(tmp_path, ROWS_ONLY)
    assert made.base is None
    folder = ranks.write(made, tmp_path / "run")
    (folder / "prepare.txt").write_text("an earlier attempt's")
    rows = Path(str(made.data_dir))
    for _ in range(2):
        with alone.started(monkeypatch, folder / "plan.json"):
            prepare.main()
        lines = [json.loads(line.split(" ", 1)[1]) for line in (folder / "prepare.txt").read_text().splitlines()]
        assert [(line["key"], line["value"]) for line in lines] == [("cache_clear", False), ("init_start", None)]
        assert lines[0]["metadata"]["reason"] == "not timed"
        tokens = [np.load(rows / f"{split}_tokens.npy") for split in ("train", "eval")]
        assert [len(split) for split in tokens] == [20, 8] and (rows.parent / ".prepare.lock").exists()
        (rows / "mark").touch()
    first, _ = progress.handlers
    shown = first.format(logging.makeLogRecord({"msg": "so far"}))
    assert shown.endswith(" so far") and shown != " so far" and progress.level == logging.INFO
    data = made.config.data
    for split, found, seed in (("train", tokens[0], data.seed), ("eval", tokens[1], data.seed + 1_000_003)):
        expected = tiny_reports.rows(
            len(found), seq_length=data.seq_length, seed=seed, with_summaries=data.answer_only
        )[0]
        assert np.array_equal(found, expected), split


def test_only_the_first_rank_shows_progress(progress: logging.Logger) -> None:
    prepare._show_progress(Rank(1, 1, 2, "", 0))
    assert progress.handlers == []


def test_a_model_with_fewer_words_than_the_grammar_is_refused(tmp_path: Path) -> None:
    made = composed(tmp_path, ROWS_ONLY)
    num_words = len(tiny_reports.vocabulary())
    made.config.model.vocab_size = num_words - 1
    with pytest.raises(ConfigError, match=f"a vocabulary of {num_words - 1}, and the grammar has {num_words} words"):
        prepare.make_rows(made)
    assert not Path(str(made.data_dir)).exists()
    made.config.model.vocab_size = num_words
    prepare.make_rows(made)


def test_rows_of_the_site_are_only_looked_for(tmp_path: Path) -> None:
    made = replace(composed(tmp_path, ROWS_ONLY), data_dir=str(tmp_path / "rows"))
    made.config.data.source = DataSource.prepared
    with pytest.raises(ConfigError, match="no prepared rows of tiny_report") as refused:
        prepare.make_rows(made)
    tokens = tmp_path / "rows/train_tokens.npy"
    assert refused.value.where == str(tokens) and refused.value.rule == "CFG-06"
    tokens.parent.mkdir()
    tokens.touch()
    prepare.make_rows(made)
    assert list(tokens.parent.iterdir()) == [tokens]


def test_rows_of_files_are_made_of_them_while_the_other_ranks_wait_for_hours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = composed(tmp_path, ROWS_ONLY)
    outlasted: list[float] = []
    monkeypatch.setattr(process_group, "outlast", outlasted.append)
    with mllog.Writer(None) as log:
        prepare.prepare(made, Rank(1, 1, 2, "", 0), log)
        assert outlasted == [] and not Path(str(made.data_dir)).exists()
        made.config.data.source = DataSource.c4
        monkeypatch.setattr(prepare_rows, "make", lambda plan: ["first", plan.name])
        monkeypatch.setattr(prepare_rows, "described", iter)
        with caplog.at_level(logging.INFO, "jobs"):
            prepare.prepare(made, Rank(0, 0, 2, "", 0), log)
    assert outlasted == [6 * 3600] and caplog.messages == ["first", made.name]
    assert not Path(str(made.data_dir)).exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_base_that_is_missing_is_trained_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    """By the engine of its own plan, in whose groups the ranks meet; its rows and those of the run are made first."""
    did: list[Any] = []
    made = composed(tmp_path)
    assert made.base is not None and made.base_dir is not None
    made = replace(made, base_dir=str(tmp_path / "base"), base=replace(made.base, data_dir=str(tmp_path / "its_rows")))
    assert made.base is not None
    engine = SimpleNamespace(save=lambda folder, adapters: did.append(("saved", folder.name, adapters)))
    module = SimpleNamespace(
        start_ranks=lambda plan, who: did.append(("joined", plan, who)),
        end_ranks=lambda: did.append("left"),
        versions=lambda: {"torch": "2"},
        build=lambda plan, seed: did.append(("built", seed)) or engine,
    )
    who, base, written = Rank(0, 0, 1, "", 0), made.base, tmp_path / "log"
    stand_ins: dict[str, Any] = {
        "engine_of": lambda plan: did.append(plan) or module,
        "make_rows": lambda plan: did.append(("rows", plan.data_dir)),
        "describe": lambda plan, trial, versions, log: did.append((plan, trial.seed, versions)),
        "rank_0_says": lambda choice: did.append(choice) or choice,
        "train": lambda loop: did.append(("trained", loop.plan, loop.trial, written.read_text().count("MLLOG"))),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(prepare, name, stand_in)
    if is_there:
        (tmp_path / "base").mkdir()
    with mllog.Writer(written) as log, prepare.started(made, who):
        log.start(mllog.INIT_START)
        prepare.prepare(made, who, log)
    seed = base.trials[0].seed
    trained = [
        *(base, (base, seed, {"torch": "2"}), ("built", seed), ("trained", base, base.trials[0], 3)),
        ("saved", "base", False),
    ]
    rows = [("rows", made.data_dir), ("rows", str(tmp_path / "its_rows"))]
    assert did == [base, ("joined", base, who), *rows, not is_there, *([] if is_there else trained), "left"]
    keys = [json.loads(line.split(" ", 1)[1])["key"] for line in written.read_text().splitlines()]
    assert keys == ["init_start", *([] if is_there else ["init_stop", "run_start"])]


def test_all_ranks_do_what_the_first_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.joined():
        assert prepare.rank_0_says(True) is True and prepare.rank_0_says(False) is False
        monkeypatch.setattr(torch.distributed, "broadcast", lambda flag, src: flag.fill_(1 - src))
        assert prepare.rank_0_says(False) is True


def test_a_cache_is_locked_by_who_creates_something_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By rank 0 alone, and not where a site has prepared everything."""
    locked: list[Path] = []

    @contextmanager
    def noted(root: Path) -> Iterator[None]:
        locked.append(root)
        yield
        locked.append(root / "free")

    def cases(plan: Plan, who: Rank) -> list[Path]:
        locked.clear()
        with prepare.cache_locked(plan, who):
            return [*locked]

    monkeypatch.setattr(prepare, "alone", noted)
    first, second = Rank(0, 0, 2, "", 0), Rank(1, 1, 2, "", 0)
    rows = replace(composed(tmp_path, ROWS_ONLY), data_dir="/cache/rows")
    with_base = composed(tmp_path)
    with_base = replace(with_base, data_dir="/cache/rows")
    assert cases(rows, first) == cases(with_base, first) == [Path("/cache")] and locked[1:] == [Path("/cache/free")]
    assert cases(rows, second) == cases(replace(rows, data_dir=None), first) == []
    rows.config.data.source = with_base.config.data.source = DataSource.prepared
    assert cases(rows, first) == [] and cases(with_base, first) == [Path("/cache")]
