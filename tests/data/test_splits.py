"""The documents of each split, and the rows that they fill, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.contract.data import Data
from bench.errors import ConfigError
from bench.planning import compose
from jobs.data import splits

LENGTHS = np.array([[4, 1], [8, 2], [12, 3], [8, 1], [2, 1]])


@pytest.fixture(scope="module")
def data() -> Data:
    """Rows of 8 tokens: one for evaluation and three for training."""
    composed = compose.compose(["task=finetune_tiny_dolly", "cluster=local"]).config.training_data
    return replace(composed, seq_length=8, eval_rows=1, train_rows=3, test_split=None, packing=False, answer_only=False)


@pytest.mark.parametrize(
    ("settings", "train", "evaluation"),
    [
        ({}, [1, 2, 3, 4], [0]),
        ({"eval_rows": 2}, [2, 3, 4], [0, 1]),
        ({"packing": True}, [2, 3, 4], [0, 1]),
        ({"packing": True, "eval_rows": 2}, [3, 4], [0, 1, 2]),
    ],
)
def test_the_first_documents_fill_the_rows_for_evaluation(
    data: Data, settings: dict[str, Any], train: list[int], evaluation: list[int]
) -> None:
    chosen = splits.choose(LENGTHS, replace(data, **settings))
    assert (np.flatnonzero(chosen.train).tolist(), np.flatnonzero(chosen.eval).tolist()) == (train, evaluation)


def test_a_share_of_the_documents_is_sampled_by_the_seed(data: Data) -> None:
    documents = np.tile(LENGTHS[:2], (10, 1))
    shared = [splits.choose(documents, replace(data, test_split=0.3, seed=seed)) for seed in (1, 1, 2)]
    assert [(int(one.train.sum()), int(one.eval.sum())) for one in shared] == [(14, 6)] * 3
    assert not (shared[0].train & shared[0].eval).any()
    assert (shared[0].eval == shared[1].eval).all() and (shared[0].eval != shared[2].eval).any()


def test_the_rows_that_documents_fill(data: Data) -> None:
    assert splits.num_rows(LENGTHS, data) == 5
    assert splits.num_rows(LENGTHS, replace(data, packing=True)) == 4, "34 tokens fill four rows of 8"


@pytest.mark.parametrize(
    ("settings", "num_tokens", "num_documents", "enough"),
    [
        ({}, 0, 4, True),
        ({}, 99, 3, False),
        ({"answer_only": True}, 99, 4, False),
        ({"packing": True}, 37, 0, True),
        ({"packing": True}, 36, 9, False),
        ({"train_rows": None}, 99, 99, False),
        ({"test_split": 0.5}, 99, 99, False),
    ],
)
def test_files_are_read_until_all_rows_are_full(
    data: Data, settings: dict[str, Any], num_tokens: int, num_documents: int, enough: bool
) -> None:
    """The end of the longest document, here of 5 tokens, may be wasted."""
    counts = {"num_tokens": num_tokens, "num_documents": num_documents, "longest": 5}
    assert splits.are_enough(replace(data, **settings), **counts) == enough


@pytest.mark.parametrize(
    ("available", "settings", "what", "fix"),
    [
        ({"train": 3, "eval": 1}, {}, None, ""),
        ({"train": 1, "eval": 1}, {"train_rows": None}, None, ""),
        (
            {"train": 2, "eval": 1},
            {},
            "data.train_rows is 3, but the files have only 2 rows for training and 1",
            "to 2 or",
        ),
        (
            {"train": 9, "eval": 1},
            {"eval_rows": 2000},
            "data.eval_rows is 2,000, but",
            "set data.eval_rows to 1 or less",
        ),
        ({"train": 0, "eval": 1}, {"train_rows": None}, "data.train_rows is 1, but", "lower data.eval_rows"),
        ({"train": 2, "eval": 0}, {}, "data.eval_rows is 1, but", "lower data.eval_rows"),
    ],
)
def test_too_few_rows_are_refused(
    data: Data, available: dict[str, int], settings: dict[str, Any], what: str | None, fix: str
) -> None:
    if what is None:
        splits.require(available, replace(data, **settings), "folder")
        return
    with pytest.raises(ConfigError, match=what) as raised:
        splits.require(available, replace(data, **settings), "folder")
    assert (raised.value.rule, raised.value.where) == ("CFG-06", "folder") and fix in raised.value.fix


def test_the_lengths_of_documents_and_those_that_are_cut(data: Data) -> None:
    chosen = splits.Splits(np.array([True, False, True, False, False]), np.array([False] * 3 + [True, False]))
    known = {"documents": 5, "cut": 1, "lengths_by_decile": [2, 3, 4, 5, 6, 8, 8, 8, 9, 10, 12]}
    assert splits.described(LENGTHS, chosen, data) == known
    assert splits.described(LENGTHS, chosen, replace(data, packing=True)) == known | {"cut": 0}
    empty = splits.described(np.empty((0, 2)), splits.Splits(np.zeros(0, bool), np.zeros(0, bool)), data)
    assert empty == {"documents": 0, "cut": 0, "lengths_by_decile": []}
