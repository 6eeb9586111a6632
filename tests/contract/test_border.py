"""The border between bench and jobs: an allow-list, read from the code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ERRORS = "bench.errors"


def modules() -> dict[str, Path]:
    """Return every module of bench and jobs, by its name."""
    paths = [path for top in ("bench", "jobs") for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of bench and jobs that a file imports, wherever in it."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{name.name}" for name in node.names} | {node.module}
    return imported & known.keys()


@pytest.mark.long
def test_jobs_imports_the_contract_and_the_contract_has_nothing_else() -> None:
    known = modules()
    graph = {name: imported(path, known) for name, path in known.items()}
    reached: set[str] = set()
    waiting = [name for name in known if name.startswith("jobs")]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    of_bench = {name for name in reached if name.startswith("bench")}
    contract = {name for name in known if name.startswith("bench.contract")}
    assert len(contract) > 15 and of_bench == contract | {ERRORS}
