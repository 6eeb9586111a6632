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
    """Return the plan of one rank with a few rows, fewer than its schedule needs."""
    planned = ranks.compose(tmp_path, "cluster.ranks_per_node=1", *overrides)
    planned.config.data.train_rows, planned.config.data.eval_rows = 20, 8
    return planned


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of the package jobs, restored after the test."""
    logger = logging.getLogger("jobs")
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    yield logger
    logger.setLevel(level)


def test_rows_are_prepared_once_with_a_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, progress: logging.Logger
) -> None:
    """The log of an interrupted attempt is replaced; existing rows are not changed."""
    planned = composed(tmp_path, ROWS_ONLY)
    assert planned.base is None
    folder = ranks.write(planned, tmp_path / "run")
    (folder / "prepare.txt").write_text("an earlier attempt's")
    rows = Path(str(planned.data_dir))
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
    data = planned.config.data
    for split, actual, seed in (("train", tokens[0], data.seed), ("eval", tokens[1], data.seed + 1_000_003)):
        expected = tiny_reports.rows(
            len(actual), seq_length=data.seq_length, seed=seed, with_summaries=data.answer_only
        )[0]
        assert np.array_equal(actual, expected), split


def test_only_the_first_rank_shows_progress(progress: logging.Logger) -> None:
    prepare._show_progress(Rank(1, 1, 2, "", 0))
    assert progress.handlers == []


def test_a_model_with_fewer_words_than_the_grammar_is_refused(tmp_path: Path) -> None:
    planned = composed(tmp_path, ROWS_ONLY)
    num_words = len(tiny_reports.vocabulary())
    planned.config.model.vocab_size = num_words - 1
    with pytest.raises(
        ConfigError,
        match=f"model.vocab_size is {num_words - 1}, but the generated reports have {num_words} different words",
    ):
        prepare.prepare_rows_of(planned)
    assert not Path(str(planned.data_dir)).exists()
    planned.config.model.vocab_size = num_words
    prepare.prepare_rows_of(planned)


def test_rows_of_the_site_are_only_checked(tmp_path: Path) -> None:
    planned = replace(composed(tmp_path, ROWS_ONLY), data_dir=str(tmp_path / "rows"))
    planned.config.data.source = DataSource.prepared
    with pytest.raises(ConfigError, match="there are no prepared rows of tiny_report") as refused:
        prepare.prepare_rows_of(planned)
    tokens = tmp_path / "rows/train_tokens.npy"
    assert refused.value.where == str(tokens) and refused.value.rule == "CFG-06"
    tokens.parent.mkdir()
    tokens.touch()
    prepare.prepare_rows_of(planned)
    assert list(tokens.parent.iterdir()) == [tokens]


def test_the_other_ranks_wait_for_hours_while_files_are_tokenised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned = composed(tmp_path, ROWS_ONLY)
    outlasted: list[float] = []
    monkeypatch.setattr(process_group, "outlast", outlasted.append)
    with mllog.Writer(None) as log:
        prepare.prepare(planned, Rank(1, 1, 2, "", 0), log)
        assert outlasted == [] and not Path(str(planned.data_dir)).exists()
        planned.config.data.source = DataSource.c4
        monkeypatch.setattr(prepare_rows, "prepare", lambda plan: ["first", plan.name])
        monkeypatch.setattr(prepare_rows, "described", iter)
        with caplog.at_level(logging.INFO, "jobs"):
            prepare.prepare(planned, Rank(0, 0, 2, "", 0), log)
    assert outlasted == [6 * 3600] and caplog.messages == ["first", planned.name]
    assert not Path(str(planned.data_dir)).exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_missing_base_is_trained_and_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool) -> None:
    """By the engine and groups of its own plan; its rows and those of the run are prepared first."""
    did: list[Any] = []
    planned = composed(tmp_path)
    assert planned.base is not None and planned.base_dir is not None
    planned = replace(
        planned, base_dir=str(tmp_path / "base"), base=replace(planned.base, data_dir=str(tmp_path / "its_rows"))
    )
    assert planned.base is not None
    engine = SimpleNamespace(save=lambda folder, adapters: did.append(("saved", folder.name, adapters)))
    module = SimpleNamespace(
        start_ranks=lambda plan, who: did.append(("joined", plan, who)),
        end_ranks=lambda: did.append("left"),
        versions=lambda: {"torch": "2"},
        build=lambda plan, seed: did.append(("built", seed)) or engine,
    )
    who, base, written = Rank(0, 0, 1, "", 0), planned.base, tmp_path / "log"
    stand_ins: dict[str, Any] = {
        "engine_of": lambda plan: did.append(plan) or module,
        "prepare_rows_of": lambda plan: did.append(("rows", plan.data_dir)),
        "describe": lambda plan, trial, versions, log: did.append((plan, trial.seed, versions)),
        "broadcast_from_rank_0": lambda choice: did.append(choice) or choice,
        "train": lambda loop: did.append(("trained", loop.plan, loop.trial, written.read_text().count("MLLOG"))),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(prepare, name, stand_in)
    if is_there:
        (tmp_path / "base").mkdir()
    with mllog.Writer(written) as log, prepare.started(planned, who):
        log.start(mllog.INIT_START)
        prepare.prepare(planned, who, log)
    seed = base.trials[0].seed
    trained = [
        *(base, (base, seed, {"torch": "2"}), ("built", seed), ("trained", base, base.trials[0], 3)),
        ("saved", "base", False),
    ]
    rows = [("rows", planned.data_dir), ("rows", str(tmp_path / "its_rows"))]
    assert did == [base, ("joined", base, who), *rows, not is_there, *([] if is_there else trained), "left"]
    keys = [json.loads(line.split(" ", 1)[1])["key"] for line in written.read_text().splitlines()]
    assert keys == ["init_start", *([] if is_there else ["init_stop", "run_start"])]


def test_rank_0s_choice_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.joined():
        assert prepare.broadcast_from_rank_0(True) is True and prepare.broadcast_from_rank_0(False) is False
        monkeypatch.setattr(torch.distributed, "broadcast", lambda flag, src: flag.fill_(1 - src))
        assert prepare.broadcast_from_rank_0(False) is True


def test_a_cache_is_locked_if_something_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only by rank 0, and not if the site prepares everything."""
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

    monkeypatch.setattr(prepare, "locked_folder", noted)
    first, second = Rank(0, 0, 2, "", 0), Rank(1, 1, 2, "", 0)
    rows = replace(composed(tmp_path, ROWS_ONLY), data_dir="/cache/rows")
    with_base = composed(tmp_path)
    with_base = replace(with_base, data_dir="/cache/rows")
    assert cases(rows, first) == cases(with_base, first) == [Path("/cache")] and locked[1:] == [Path("/cache/free")]
    assert cases(rows, second) == cases(replace(rows, data_dir=None), first) == []
    rows.config.data.source = with_base.config.data.source = DataSource.prepared
    assert cases(rows, first) == [] and cases(with_base, first) == [Path("/cache")]
