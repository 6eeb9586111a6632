"""The examples of the documents run, and their links lead somewhere."""

import re
import subprocess
import sys
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from types import UnionType
from typing import Any

import pytest

import bench
from bench import cli
from bench.backends.slurm import script
from bench.contract.schema import BackendName, EngineName, Kind
from bench.rules import cluster, mlperf, run
from helpers.page import unpainted
from helpers.paths import ROOT
from jobs.engines import Engine, EngineModule

WRITTEN = tuple(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md", "notebooks/*.md")
    for path in sorted(ROOT.glob(pattern))
)
NOT_BROKEN = ("|", "    ")
"""How lines begin in dated reports that are left as wide as they are: tables, and what a program printed."""


@pytest.mark.long
def test_every_public_function_has_an_example_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import example_logs
    import example_study

    text = (ROOT / "docs" / "api.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    named: dict[str, Any] = {"bench": bench, "log": example_logs.trial("", tmp_path)}
    (tmp_path / "ten").mkdir()
    named["folder"] = example_logs.trials("", tmp_path / "ten")
    named["study"] = example_study.study(tmp_path / "studies")
    with unpainted():
        for example in examples:
            exec(compile(example, "docs/api.md", "exec"), named)
    types = {name for name in bench.__all__ if isinstance(getattr(bench, name), type | UnionType)} - {"Follower"}
    functions = set(bench.__all__) - types
    shown = {name for name in functions if f"bench.{name}(" in "".join(examples)}
    assert shown == functions
    for name in ("example_logs", "example_study"):
        sys.modules.pop(name)


@pytest.mark.parametrize("name", WRITTEN)
def test_links_are_not_broken(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
    wide = [line for line in path.read_text().splitlines() if len(line) > 120]
    if path.parent.name == "results":
        wide = [line for line in wide if not line.startswith(NOT_BROKEN)]
    assert wide == []


def test_every_command_is_one_that_is_installed() -> None:
    (verbs,) = (action.choices for action in cli._parser()._actions if isinstance(action.choices, dict))
    command = re.compile(r"(?:`|^ {4}(?:\$ )?)(runstop|(?:python -m )?bench) ([a-z]+)(?![a-z<])", re.M)  # not re<TAB>
    commands = {(name, *words) for name in WRITTEN for words in command.findall((ROOT / name).read_text())}
    assert len(commands) > 50
    assert {one for one in commands if one[1] == "bench" or one[2] not in verbs} == set()


def table(page: str, first: str) -> list[list[str]]:
    """Return the cells of a page's first table whose first column has this heading."""
    _, _, below = (ROOT / page).read_text().partition(f"\n| {first} |")
    return [re.split(r" ?\| ?", line)[1:-1] for line in below.partition("\n\n")[0].splitlines()[2:]]


def in_full(cell: str) -> set[str]:
    """Return the names in a cell; `_13b` behind `pretrain_7b` is pretrain_13b."""
    first, *others = re.findall(r"`([\w*]+)(?:@[\w.]+)?`", cell)
    return {first, *(first.rsplit("_", name.count("_"))[0] + name if name[0] == "_" else name for name in others)}


def shipped(group: str) -> set[str]:
    return {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}


def test_the_tables_name_every_task_group_and_cluster() -> None:
    tasks = [in_full(row[0]) for row in table("docs/kinds-and-tasks.md", "shipped task")]
    assert set().union(*tasks) == shipped("task")
    groups = table("docs/configuration.md", "group")
    named = [in_full(row[0]) for row in groups if row[0]]
    assert set().union(*named) == {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml")}
    assert set().union(*(in_full(row[1]) for row in groups if row[0] in ("`cluster`", ""))) == shipped("cluster")


def test_the_page_of_published_figures_names_every_file() -> None:
    patterns = {name for row in table("docs/published-figures.md", "files") for name in in_full(row[0])}
    files = shipped("published")
    assert {name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert {pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)} == set()


@pytest.mark.parametrize(("term", "values"), [("backend", BackendName), ("engine", EngineName), ("kind", Kind)])
def test_the_glossary_and_the_seams_name_every_value(term: str, values: type[Enum]) -> None:
    (meaning,) = (row[1] for row in table("docs/glossary.md", "word") if row[0] == term)
    assert set(re.findall(r"`(\w+)`", meaning)) == {value.name for value in values}
    seams = " ".join(row[-1] for row in table("docs/architecture.md", "seam"))
    assert {value.name for value in values} - set(re.findall(r"`(?:jobs/)?(\w+)(?:\.py|/)?`", seams)) == set()


def test_contributing_names_all_engine_methods() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    methods = {name for protocol in (Engine, EngineModule) for name in vars(protocol) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}`" not in text} == set()


def test_the_index_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("**/*.md")} - {"README.md"}
    index = (ROOT / "docs" / "README.md").read_text()
    assert {name for name in pages if f"/{name})" not in index and f"]({name})" not in index} == set()


def test_the_readme_is_short_and_names_every_folder() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    _, _, tree = text.partition("## Where things are")
    for top in ("bench", "jobs", "conf"):
        folders = {path.name for path in (ROOT / top).iterdir() if path.is_dir() and path.name != "__pycache__"}
        _, _, below = tree.partition(f"    {top}/")
        nested = re.findall(r"^ {6}(\w+)/", re.split(r"\n    (?! )", below)[0], re.M)
        assert folders <= {*re.findall(rf"(?:^| ){top}/(\w+)/", tree, re.M), *nested}, top


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's own folder with the YAML files of CONTRIBUTING.md, unchanged."""
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "site"


@pytest.mark.long
def test_the_recipes_of_contributing_make_a_cluster_and_a_task(site: Path) -> None:
    plan = bench.plan(["task=lora70b_short", "cluster=mine"], config_dir=site)
    assert (plan.name, plan.world.num_ranks, plan.max_steps) == ("lora70b_short-mine", 32, 200)
    assert plan.config.recipe.lr == 4e-4  # of the task that it changes
    text = script.script(plan)
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --gres=gpu:h100:8\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_files_named_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:bench|jobs|conf|tests|docs)/[\w./]*|pyproject\.toml)`", text)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in re.findall(r"^    make ([\w-]+)", text, re.M))
    named = {
        "bench/rules/cluster.py": (cluster, "PYX SLU ENR MPI NCC HW"),
        "bench/rules/run.py": (run, "CFG RUN"),
        "bench/rules/mlperf.py": (mlperf, "LOG REC EVL SCO PCK"),
    }
    for path, (module, families) in named.items():
        source = Path(str(module.__file__)).read_text()
        assert f"`{path}` ({', '.join(families.split())})" in " ".join(text.split())
        assert [family for family in families.split() if f'"{family}-01": (' not in source] == []
