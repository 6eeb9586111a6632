"""The examples of the documents run, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench
from bench import rules
from bench.backends.slurm import script
from bench.rules import cluster
from helpers.paths import ROOT

WRITTEN = (
    "docs/api.md",
    "docs/notebooks.md",
    "docs/trackers.md",
    "docs/completion.md",
    "notebooks/LOG.md",
    "CONTRIBUTING.md",
)


def test_every_public_function_has_an_example_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import example_logs

    text = (ROOT / "docs" / "api.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    named: dict[str, Any] = {"bench": bench, "log": example_logs.trial("", tmp_path)}
    (tmp_path / "ten").mkdir()
    named["folder"] = example_logs.trials("", tmp_path / "ten")
    for example in examples:
        exec(compile(example, "docs/api.md", "exec"), named)
    functions = {name for name in bench.__all__ if not isinstance(getattr(bench, name), type)} | {"Follower"}
    shown = {name for name in functions if f"bench.{name}(" in "".join(examples)}
    assert shown == functions
    sys.modules.pop("example_logs")


@pytest.mark.parametrize("name", WRITTEN)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
    assert [line for line in path.read_text().splitlines() if len(line) > 120] == []


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's own folder with the YAML files of CONTRIBUTING.md, as they stand there."""
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "site"


def test_the_recipes_of_contributing_make_a_cluster_and_a_task(site: Path) -> None:
    plan = bench.plan(["task=lora70b_short", "cluster=mine"], config_dir=site)
    assert (plan.name, plan.world.num_ranks, plan.config.recipe.max_steps) == ("lora70b_short-mine", 32, 200)
    assert plan.config.recipe.lr == 4e-4  # of the task that it changes
    text = script.script(plan)
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --gres=gpu:h100:8\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:bench|jobs|conf|tests|docs)/[\w./]*|pyproject\.toml)`", text)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"^    make (\w+)", text, re.M))
    named = {
        "bench/rules/cluster.py": (cluster, "PYX SLU ENR MPI NCC HW"),
        "bench/rules/__init__.py": (rules, "CFG RUN LOG SCO PCK"),
    }
    for path, (module, families) in named.items():
        source = Path(str(module.__file__)).read_text()
        assert f"`{path}` ({', '.join(families.split())})" in " ".join(text.split())
        assert [family for family in families.split() if f'"{family}-01": (' not in source] == []
