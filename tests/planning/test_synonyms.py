"""Every suggestion is a key, choice or value that exists, and each form has a valid example."""

import pytest

from bench.cli import _parser, _verbs
from bench.errors import ConfigError
from bench.planning import compose, config_keys, overrides, synonyms


def test_every_synonym_is_of_something_that_exists() -> None:
    keys = set(config_keys.known())
    assert set(synonyms.KEYS.values()) <= keys and not keys & {*synonyms.KEYS} - {*synonyms.KEYS.values()}
    for group, names in synonyms.CHOICES.items():
        assert set(names.values()) <= set(overrides.choices(group)), group
    assert all(overrides.is_group(group) for group in (*synonyms.GROUPS.values(), *synonyms.CHOICE_FIXES))
    for key, values in synonyms.VALUES.items():
        assert all(value in config_keys.form(key) for value in values.values()), key
    known = {*_verbs(_parser()), "--help", "--version", "rm"}
    assert set(synonyms.VERBS.values()) <= known and not {*synonyms.VERBS} & known


@pytest.mark.parametrize(
    ("key", "wrong", "example"),
    [
        ("walltime", "2h", "walltime=120"),
        ("walltime", "1-00:00:00", "walltime=1440"),
        ("walltime", "00:10:00", "walltime=10"),
        ("walltime", "45:30", "walltime=46"),
        ("walltime", "1-12:30", "walltime=2190"),
        ("walltime", "soon", "walltime=60"),
        ("recipe.lr", "1,5", "recipe.lr=1.5"),
        ("trials", "3x", "trials=3"),
        ("trials", "three", "trials=1"),
        ("launch.wait", "yes please", "launch.wait=true"),
        ("precision", "float8", "precision=fp8"),
        ("launch.trackers", "mlflow", "launch.trackers=[mlflow]"),
        ("cluster.hosts", "", "cluster.hosts=[rig0,rig1]"),
        ("cluster.gpu", "l40s", "gpu@cluster.gpu=l40s"),
    ],
)
def test_an_example_is_close_to_the_wrong_value(key: str, wrong: str, example: str) -> None:
    assert config_keys.example(key, wrong) == example
    overrides.check([example])


@pytest.mark.parametrize(
    ("value", "several"),
    [("1,2", True), ("[1,2]", False), ("{a:1,b:2}", False), ("'a,b'", False), ("range(1,3)", True), ("a", False)],
)
def test_several_values_are_outside_of_brackets_and_quotes(value: str, several: bool) -> None:
    assert overrides.has_several(value) == several


@pytest.mark.long
def test_an_old_name_is_no_unknown_one() -> None:
    overrides.check(["task=pretrain_7b_apart", "recipe.max_steps=3", "hydra.verbose=true"])
    with pytest.raises(ConfigError, match="recipe.max_steps was renamed to task.training.max_steps"):
        compose.compose(["recipe.max_steps=3"])


def test_choices_of_another_folder_are_left_to_hydra() -> None:
    with pytest.raises(ConfigError, match="task=mine does not exist"):
        overrides.check(["task=mine"])
    overrides.check(["hydra.searchpath=[file:///site]", "task=mine"])


@pytest.mark.parametrize(
    ("key", "exists"),
    [
        ("recipe.lr", True),
        ("cluster.environment.NCCL_DEBUG", True),
        ("recipe.lr.x", False),
        ("recipe.x", False),
        ("x", False),
    ],
)
def test_only_a_mapping_has_keys_of_any_name(key: str, exists: bool) -> None:
    assert config_keys.is_known(key) == exists
