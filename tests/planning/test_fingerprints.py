"""Folders of prepared rows and of a trained base: other settings give another folder."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract.model import Norm
from bench.contract.plan import Plan
from bench.contract.schema import Config, Precision
from bench.planning import data_folder
from bench.planning import training as training_plans
from helpers import ranks


@pytest.fixture(scope="module")
def composed() -> Plan:
    return ranks.compose(Path("cache"))


BASE: list[Callable[[Config], object]] = [
    lambda base: setattr(base.recipe, "lr", 1e-3),
    lambda base: setattr(base.task.training, "max_steps", 40),
    lambda base: setattr(base.recipe, "weight_decay", 0.02),
    lambda base: setattr(base.model, "vocab_size", 256),
    lambda base: setattr(base.model, "norm", Norm.LayerNorm),
    lambda base: setattr(base.data, "train_rows", 8192),
    lambda base: setattr(base.data, "answer_only", True),
    lambda base: setattr(base, "seed_base", 2),
    lambda base: setattr(base, "precision", Precision.bf16),
]
ROWS: list[Callable[[Config], object]] = [
    lambda config: setattr(config.data, "seq_length", 64),
    lambda config: setattr(config.data, "eval_rows", 100),
    lambda config: setattr(config.data, "answer_only", False),
    lambda config: setattr(config.data, "version", 2),
    lambda config: setattr(config.data, "seed", 12345),
    lambda config: setattr(config.model, "vocab_size", 256),
]
WORDS: list[Callable[[Config], object]] = [
    lambda config: setattr(config.data, "summary", "another description"),
    lambda config: setattr(config.model, "source", "another reference"),
    lambda config: setattr(config, "trials", 3),
]


def test_a_base_with_another_recipe_has_another_folder(composed: Plan) -> None:
    assert composed.base
    places = {training_plans.base_dir(composed.config, composed.base)}
    for change in BASE:
        base = copy.deepcopy(composed.base)
        change(base.config)
        places.add(training_plans.base_dir(composed.config, base))
    assert len(places) == 1 + len(BASE)


def test_rows_with_other_settings_have_another_folder(composed: Plan) -> None:
    places = {data_folder.data_dir(composed.config)}
    for change in ROWS:
        config = copy.deepcopy(composed.config)
        change(config)
        places.add(data_folder.data_dir(config))
    assert len(places) == 1 + len(ROWS)


def test_descriptions_and_trials_do_not_change_fingerprints(composed: Plan) -> None:
    assert composed.base
    for change in WORDS:
        config, base = copy.deepcopy(composed.config), copy.deepcopy(composed.base)
        change(config)
        change(base.config)
        assert data_folder.data_dir(config) == data_folder.data_dir(composed.config)
        assert training_plans.base_dir(config, base) == training_plans.base_dir(composed.config, composed.base)
