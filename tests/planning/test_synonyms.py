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
        ("walltime", "90m", "walltime=90"),
        ("walltime", "1d", "walltime=1440"),
        ("walltime", "2 hours", "walltime=120"),
        ("walltime", "90 mins.", "walltime=90"),
        ("walltime", "10s", "walltime=1"),
        ("walltime", "100s", "walltime=2"),
        ("walltime", "1:30", "walltime=2"),
        ("walltime", "1:2:90", "walltime=64"),
        ("recipe.lr", "1e-3x", "recipe.lr=1"),
        ("recipe.lr", "+.5x", "recipe.lr=.5"),
        ("recipe.lr", "fast", "recipe.lr=0.001"),
        ("recipe.clip_grad", "fast", "recipe.clip_grad=0.5"),
        ("trials", "1e3", "trials=1000"),
        ("trials", "1.9", "trials=1"),
        ("trials", "8k", "trials=8"),
        ("trials", "inf", "trials=1"),
        ("precision", "half", "precision=bf16"),
        ("precision", "other", "precision=fp32"),
        ("launch.trackers", "", "launch.trackers=[wandb]"),
        ("data.files", "", "data.files='data/*.jsonl'"),
        ("task.name", "[a, b]", "task.name=a"),
        ("task.name", "[]", "task.name=TEXT"),
        ("task.generation.lengths", "5", "task.generation.lengths=[5]"),
        ("cluster.gpu", "", "gpu@cluster.gpu=h200"),
        ("launch.stall", "5", "launch.stall.factor=20"),
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
    [("1,2", True), ("[1,2]", False), ("{a:1,b:2}", False), ("'a,b'", False), ("range(1,3)", True), ("a", False)]
    + [("'a',b", True), ('"a,b', False), ("[a],b", True), ("a(1,2)", False), ("", False), ("choice(1,2)", True)]
    + [("[1,2", False), ("x range(1,2)", False), (",", True), ("'a'','b", False), ("{a:[1,2]},b", True)],
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
        ("", False),
        ("recipe.", False),
        ("a.b", False),
        ("cluster.environment", True),
        ("cluster.environment.A.B", True),
        ("cluster.hosts.0", True),
    ],
)
def test_only_a_mapping_has_keys_of_any_name(key: str, exists: bool) -> None:
    assert config_keys.is_known(key) == exists


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("parallel.tensor", "parallel.tp"),
        ("learning-rate", "recipe.lr"),
        ("optimizer.lr", "recipe.lr"),
        ("num_layer", "model.num_layers"),
        ("model.layers", "model.num_layers"),
        ("batch_size", "recipe.global_batch_size"),
        ("cluster.nodes", "cluster.num_nodes"),
        ("gpus", "cluster.ranks_per_node"),
        ("recipe.lr_warmup", "recipe.lr_warmup_steps"),
        ("launch.trackrs", "launch.trackers"),
        ("seed", "seed_base"),
        ("Trials", "trials"),
        ("x.tp", "parallel.tp"),
        ("data.seq_len", "data.seq_length"),
        ("memory", None),
        ("recipe.zzzz", None),
        ("zzzz", None),
        ("recipe.", None),
    ],
)
def test_an_unknown_key_means_the_nearest_one(name: str, key: str | None) -> None:
    assert config_keys.meant(name, config_keys.known()) == key


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trials", "a whole number"),
        ("walltime", "a whole number of minutes, or null"),
        ("recipe.lr", "a number"),
        ("precision", "one of fp32, bf16, fp8"),
        ("launch.trackers", "a list"),
        ("cluster.hosts", "a list, or null"),
        ("cluster.hosts[0]", "a text"),
        ("launch.stall", "a block of keys"),
        ("cluster.environment", "a block of keys"),
        ("task.name", "a text"),
        ("data.files", "a text, or null"),
        ("launch.wait", "true or false"),
        ("nothing", ""),
    ],
)
def test_the_values_of_a_key_are_named(key: str, words: str) -> None:
    assert config_keys.form(key) == words
