"""What is composed from what was kept: the same as Hydra makes of it, every time."""

import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from bench.errors import ConfigError
from bench.planning import compose, overrides

WORDS = (
    (),
    ("task=lora70b", "cluster=dgx2"),
    ("parallel.tp=2", "cluster=dgx2", "recipe.lr=1e-4", "task=lora70b", "parallel={tp: 4, pp: null}"),
    ("task=lora70b", "cluster=dgx2", "container.mounts=['/a b:/c', /d:/e]"),
    ("gpu@cluster.gpu=h200", "cluster=local", "cluster.gpu.memory_gib=9", "walltime=${trials}", "launch.stall=null"),
    ("task=serve_7b", "cluster=dgx1", "container=none", "gpu@cluster.gpu=a800", "engine=huggingface", "server=vllm"),
    ("cluster=dgx1", "+cluster.environment.B=c", "cluster.environment.B=d", "task.training.max_steps=777"),
)
"""Choices of groups and values, mixed, and keys that are added."""


@cache
def of_hydra_alone(words: tuple[str, ...]) -> str:
    compose.register()
    with initialize_config_dir(str(compose.CONF), version_base="1.3"):
        config = hydra_compose("launch", overrides=list(words))
    return OmegaConf.to_yaml(config)


@pytest.mark.long
def test_cached_composition_equals_hydras() -> None:
    for words in (*WORDS, *reversed(WORDS)):
        alone = of_hydra_alone(words)
        if "device: auto" in alone:  # this machine has no GPU
            alone = of_hydra_alone(("cluster.device=cpu", *words))
        assert compose.for_run(words)[1] == alone, words


@pytest.mark.long
def test_the_run_folder_is_independent_of_the_task() -> None:
    """Any cluster can be chosen for any task; the tests themselves put their configs together in this way."""
    for path in compose.CONF.glob("*/*.yaml"):
        is_place, text = path.parent.name in ("cluster", "gpu", "container"), path.read_text()
        content = yaml.safe_load(text) or {}
        chosen = [key for entry in content.pop("defaults", []) if isinstance(entry, dict) for key in entry]
        allowed = ("/gpu@cluster.gpu", "/container") if is_place else ("/model", "/data", "/server", "/engine")
        assert {key.removeprefix("override ") for key in chosen} <= set(allowed), path
        if text.startswith("# @package _global_"):
            assert all((key in ("cluster", "container")) == is_place for key in content), path


@pytest.mark.long
@pytest.mark.parametrize("override", ["seed_base=1,2", "parallel.tpp=1", "task=nothing", "recipe.lr=fast", "trials=[1"])
def test_errors_are_the_same_with_and_without_the_cache(override: str) -> None:
    with pytest.raises(ConfigError) as first:
        compose.compose(["task=lora70b", "cluster=dgx2", "hydra.verbose=false", override])
    with pytest.raises(ConfigError) as kept:
        compose.compose(["task=lora70b", "cluster=dgx2", override])
    assert str(kept.value) == str(first.value)


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        ("trials=2 task = lora70b", "task = lora70b"),
        ("task= lora70b trials=2", "task= lora70b"),
        ("trials=2 task =lora70b", "task =lora70b"),
        ("task=lora70b recipe.lr= 0.1", "recipe.lr= 0.1"),
    ],
)
def test_spaces_around_the_equals_sign_are_named(words: str, pieces: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides.check(words.split())
    assert refused.value.what == f"there are spaces around = in {pieces}"
    assert refused.value.fix == f"write {pieces.replace(' ', '')}, without spaces"


@pytest.mark.parametrize("words", ["task=lora70b model.name=", "recipe.lr= trials=2", "recipe.lr= ~launch.stall"])
def test_an_empty_value_is_not_taken_for_a_space(words: str) -> None:
    overrides.check(words.split())


@pytest.mark.parametrize("override", ["parallel.tpp=1", "recipe.lr=fast", "recipe.local_sgd={every_step: 1}"])
def test_errors_are_the_same_under_a_debugger(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    """There, and with OC_CAUSE=1, an error of OmegaConf can be its own cause."""
    errors = []
    for keeps_causes in ("0", "1"):
        monkeypatch.setenv("OC_CAUSE", keeps_causes)
        with pytest.raises(ConfigError) as refused:
            compose.compose([override])
        errors.append(str(refused.value))
    assert errors[0] == errors[1]


@pytest.mark.long
def test_a_changed_config_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "CONF", Path(shutil.copytree(compose.CONF, tmp_path / "conf")))
    assert "precision: fp32" in compose.for_run([])[1]
    root = tmp_path / "conf" / "launch.yaml"
    changed_ns = root.stat().st_mtime_ns + 1
    root.write_text(root.read_text().replace("precision: fp32", "precision: bf16"))
    os.utime(root, ns=(changed_ns, changed_ns))
    assert "precision: bf16" in compose.for_run([])[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "override",
    [
        "task.summary=${oc.env:SITE_THING}",
        "+cluster.environment.A=${oc.env:SITE_THING}",
    ],
)
def test_a_config_does_not_copy_other_variables_of_the_environment(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a plan nor the config of another person's run folder."""
    monkeypatch.setenv("SITE_THING", "words to keep private")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    words = ["task=lora_tiny", "cluster=local"]
    with pytest.raises(ConfigError, match=r"CFG-07: \$\{oc.env:.* is not allowed, because it would copy") as refused:
        compose.compose([*words, override])
    assert "private" not in str(refused.value)
    plan, config_yaml = compose.for_run([*words, "cluster.paths.data=${oc.env:SCRATCH}/data"])
    assert plan.config.cluster.paths.data == "/scratch/me/data"
    with pytest.raises(ConfigError, match="CFG-07: .* would copy"):
        compose.read(config_yaml.replace("name: lora_tiny", "name: ${oc.decode:${oc.env:SITE_THING}}"))
