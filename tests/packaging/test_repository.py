"""What people expect around the code: a site without broken links, hooks that are the linters, one version and URL."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from helpers.paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY: str = PROJECT["urls"]["Repository"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_changelog_has_the_version_at_its_top() -> None:
    """CONTRIBUTING.md, "Release a version": the section has a date once the version is released."""
    version, state = re.findall(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    citation = loaded("CITATION.cff")
    assert version == PROJECT["version"] == citation["version"]
    if state == "unreleased":
        assert "date-released" not in citation
    else:
        assert str(citation["date-released"]) == state


def test_every_file_states_the_same_repository() -> None:
    assert loaded("CITATION.cff")["repository-code"] == REPOSITORY
    assert [url for url in PROJECT["urls"].values() if not f"{url}/".startswith(f"{REPOSITORY}/")] == []
    for link in loaded(".github/ISSUE_TEMPLATE/config.yml")["contact_links"]:
        assert link["url"].startswith(f"{REPOSITORY}/")


def test_the_hooks_before_a_commit_are_the_linters_of_make() -> None:
    recipe = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)[0]
    linters = {line.replace("$(BIN)", ".venv/bin").strip().removesuffix(" .") for line in recipe.splitlines()}
    (repository,) = loaded(".pre-commit-config.yaml")["repos"]
    hooks = {hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]}
    assert repository["repo"] == "local" and hooks == linters
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}, "a hook would download something"


def test_the_workflow_runs_the_commands_of_the_readme() -> None:
    jobs = {name: job for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()}
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = {name for line in commands for name in re.findall(r"\bmake ([a-z]+) PYTHON=", line)}
    assert {"run", "test", "lint", "site"} == targets
    assert [target for target in targets if f"\n{target}:" not in MAKEFILE] == []
    tested = {row["python"] for row in jobs["run"]["strategy"]["matrix"]["include"]}
    stated = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)}
    assert tested == stated and f">={min(stated)}" == PROJECT["requires-python"]


def build(config: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site as `make site` does, into another folder."""
    build = re.findall(r"^site:.*\n\t\$\(BIN\)/mkdocs (.*)$", MAKEFILE, re.M)[0]
    argv = [sys.executable, "-m", "mkdocs", *shlex.split(build), "--config-file", str(config), "--site-dir", str(site)]
    return subprocess.run(argv, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'runstop[docs]'")
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in (tmp_path / "site").glob("**/*.html")}
    written = [path for path in (ROOT / "docs").glob("**/*.md") if path.name != "README.md"]
    assert len(pages) == len(written) + 6  # 404, the index, and four pages at the top of the repository
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken, loaded_from = [], set()
    for path, text in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of a host
        loaded_from |= set(re.findall(r'<(?:script|link rel="stylesheet")[^>]+(?:src|href)="(https?://[^"]+)', text))
        for target in re.findall(r'<(?:a|img)\b[^>]*\b(?:href|src)="([^"]+)"', text):
            url = urlsplit(target)
            if url.scheme:
                inside, _, rest = target.partition(f"{REPOSITORY}/")
                if not inside and re.match(r"(blob|tree)/main/", rest):
                    broken += [target] * (not (ROOT / rest.split("/", 2)[2].partition("#")[0]).exists())
                continue
            there = Path(os.path.normpath(path.parent / unquote(url.path))) if url.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (url.fragment and url.fragment not in anchors.get(there, {url.fragment})):
                broken.append(f"{path.relative_to(tmp_path)}: {target}")
    assert broken == [] and loaded_from == set(), "scripts and styles are files of the site"
    index = pages[tmp_path / "site" / "index.html"]
    assert {"default", "slate"} == set(re.findall(r'data-md-color-scheme="(\w+)"', index))
    assert "Pyxis" in (tmp_path / "site" / "search" / "search_index.json").read_text()


@pytest.mark.slow
def test_a_broken_link_or_a_page_without_an_entry_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'runstop[docs]'")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "docs", tree / "docs")
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "mkdocs.yml"):
        shutil.copy(path, tree)
    with (tree / "docs" / "trackers.md").open("a") as page:
        page.write("\nSee [a](nothing.md), [b](glossary.md#nowhere) and [c](../bench/nothing.py).\n")
    (tree / "docs" / "lonely.md").write_text("# A page that the index does not name\n")
    done = build(tree / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    for wrong in ("'nothing.md'", "#nowhere", "'../bench/nothing.py'", "lonely.md"):
        assert wrong in done.stderr
