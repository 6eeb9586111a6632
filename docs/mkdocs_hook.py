"""What the documentation site adds to docs/*.md, which stay as GitHub shows them: a hook of mkdocs.yml.

- The menu is read from the tables of docs/README.md.
- README.md, CONTRIBUTING.md and the other pages at the top of the repository become pages of the site.
- A link to any other file outside of docs/ leads to that file in the repository, whose URL pyproject.toml states.
"""

import re
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

ROOT = Path(__file__).parents[1]
TOP = {"README.md": "project.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
TOP |= {"CHANGELOG.md": "changelog.md"}
"""Pages at the top of the repository, and their names on the site, where README.md is docs/README.md."""

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A link in Markdown to a path: what is before the path, the path, what is after it."""


def on_config(config: Any) -> Any:
    """Set the repository and the menu."""
    config.repo_url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    config.repo_name = config.repo_url.rpartition("/")[2]
    config.nav = menu((ROOT / "docs" / "README.md").read_text())
    return config


def menu(index: str) -> list[dict[str, Any]]:
    """Return the pages that the tables of docs/README.md list, by heading; dated reports are only on that page."""
    sections: list[dict[str, Any]] = [{"Home": "README.md"}]
    for section in index.split("\n## ")[1:]:
        heading, _, table = section.partition("\n")
        rows = re.findall(r"^\| \[([^]]+)\]\(([^)]+)\)", table, re.M)
        if rows:
            pages = [{title[0].upper() + title[1:]: site_path("docs", path)} for title, path in rows]
            sections.append({heading: pages})
    return sections


def site_path(folder: str, target: str) -> str:
    """Return a link's path from docs/; `target` is relative to a folder of the repository."""
    path = normpath(join(folder, target))
    return TOP.get(path) or relpath(path, "docs")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the top of the repository."""
    from mkdocs.structure.files import File

    for path, name in TOP.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links that lead out of docs/, and all links of the pages at the top of the repository."""
    tops = {name: path for path, name in TOP.items()}
    source = tops.get(page.file.src_uri, join("docs", page.file.src_uri))

    def rewritten(match: "re.Match[str]") -> str:
        before, target, after = match.groups()
        path = normpath(join(dirname(source), target))
        name = site_path(dirname(source), target)
        if files.get_file_from_path(name) is not None:
            return before + relpath(name, dirname(page.file.src_uri) or ".") + after
        if not (ROOT / path).exists():
            return match[0]  # mkdocs warns
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{before}{config.repo_url}/{kind}/main/{path}{after}"

    return LINK.sub(rewritten, markdown)
