"""Wrong files of a site: the answer names the file, the key, and what to write instead."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.planning import compose, overrides
from helpers import user_tables

GLOBAL = "# @package _global_\n"
TINY = f"{GLOBAL}defaults:\n  - lora_tiny\n  - _self_\n"
GPU = "name: Mine\nmemory_gib: 10\n"
ON_MINE = "cluster=dgx1 gpu@cluster.gpu=mine"
BRACKETS = "correct this line or one before it: close each bracket and quote, and indent by spaces only"
UNIT = "to this file, with its unit as in the files of conf/"
ALL_KEYS = "to list all keys: runstop launch --cfg job"
WRONG = {
    f"{GLOBAL}cluster: [1\n": (
        "cluster=mine",
        "CFG-09: the file is not valid YAML: expected ',' or ']', but got '<stream end>'",
        "DIR/cluster/mine.yaml, line 3",
        BRACKETS,
    ),
    f"{GLOBAL}\tcluster: {{}}\n": (
        "cluster=mine",
        "CFG-09: the file is not valid YAML: found character '\\t' that cannot start any token",
        "DIR/cluster/mine.yaml, line 2",
        BRACKETS,
    ),
    f"{GLOBAL}cluster: !!python/name:os.system {{}}\n": (
        "cluster=mine",
        "CFG-09: the file is not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'",
        "DIR/cluster/mine.yaml, line 2",
        "write plain YAML: texts, numbers, lists and mappings, without tags such as !!python",
    ),
    f"{GLOBAL}cluster: {{ranks: 8}}\n": (
        "cluster=mine",
        "unknown key 'cluster.ranks'",
        "cluster/mine.yaml",
        f"did you mean cluster.ranks_per_node? {ALL_KEYS}",
    ),
    f"{GLOBAL}cluster: {{gpu: {{memory: 3}}}}\n": (
        "cluster=mine",
        "unknown key 'cluster.gpu.memory'",
        "cluster/mine.yaml",
        f"did you mean cluster.gpu.memory_gib? {ALL_KEYS}",
    ),
    f"{GLOBAL}clusster: {{num_nodes: 1}}\n": ("cluster=mine", "unknown key 'clusster'", "cluster/mine.yaml", ALL_KEYS),
    f"{GLOBAL}cluster: {{num_nodes: many}}\n": (
        "cluster=mine",
        "cluster.num_nodes is 'many', but must be a whole number",
        "cluster/mine.yaml, cluster.num_nodes",
        "write a value such as cluster.num_nodes=1",
    ),
    "name: Mine\n": (ON_MINE, "the key memory_gib is missing", "gpu/mine.yaml", f"add memory_gib {UNIT}"),
    f"{GPU}peak_bf16_tflops: 5\n": (ON_MINE, "the key source is missing", "gpu/mine.yaml", f"add source {UNIT}"),
    f"{GPU}peak_bf16_tflops: fast\n": (
        ON_MINE,
        "cluster.gpu.peak_bf16_tflops is 'fast', but must be a number, or null",
        "gpu/mine.yaml, cluster.gpu.peak_bf16_tflops",
        "write a value such as cluster.gpu.peak_bf16_tflops=0.5",
    ),
    f"{GLOBAL}defaults:\n  - override /model: tiny\n  - lora_tiny\n": (
        "task=mine",
        "`override model` is before lora_tiny in the defaults list, but must be after it",
        "task/mine.yaml",
        "move the line with `override model` to the end of the defaults list",
    ),
    f"{TINY}recipe: {{lrr: 1}}\n": (
        "task=mine",
        "unknown key 'recipe.lrr'",
        "task/mine.yaml",
        f"did you mean recipe.lr? {ALL_KEYS}",
    ),
    f"{TINY}recipe: null\n": (
        "task=mine recipe.lr=1",
        "recipe.lr cannot be set, because the block recipe is null",
        "recipe.lr",
        "set recipe= to a file that has the block recipe",
    ),
}
"""By the text of the file: the words, the problem, the place and the fix."""
FOLDERS = {"cluster=mine": "cluster", ON_MINE: "gpu"}


@pytest.mark.long
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_of_a_site_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_tables.leave_out(monkeypatch)
    words, what, where, fix = WRONG[text]
    file = tmp_path / FOLDERS.get(words, "task") / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose.compose(words.split(), config_dir=tmp_path)
    assert str(refused.value).replace(str(tmp_path), "DIR") == f"{what}\n  where: {where}\n  fix:   {fix}"


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("--task", "lora_tiny", "task=lora_tiny"),
        ("--task", "", "task=NAME"),
        ("--gpu", "h200", "gpu@cluster.gpu=h200"),
        ("--trials", "3", "trials=3"),
        ("--trials", "", "trials=VALUE"),
        ("--dry-run", "", "launch.dry_run=true"),
        ("--dry-run", "false", "launch.dry_run=false"),
        ("--dry-run", "now", "launch.dry_run=true"),
        ("--trackers", "wandb", "launch.trackers=[wandb]"),
        ("--trackers", "[wandb]", "launch.trackers=[wandb]"),
        ("--lr", "0.1", "recipe.lr=0.1"),
        ("--LR", "0.1", "recipe.lr=0.1"),
        ("--nothing", "1", None),
    ],
)
def test_an_unknown_option_means_the_setting_of_its_name(option: str, value: str, meant: str | None) -> None:
    assert overrides.of_option(option, value) == meant
