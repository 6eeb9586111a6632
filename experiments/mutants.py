"""How many small defects the tests find: `python experiments/mutants.py --seed 1 --count 40 --json mutants.json`.

Mutants are drawn at random from the places in bench/ and jobs/ where an operator applies: first a place, then one of
its changes. Tests that train are left out. Those that start no programs run once without a mutant, while coverage.py
records the lines that each of them executes; those that fail are left out, too. Then each mutant is tried in a copy of
the tree, up to the first failure: first the tests that execute its statement, then those that execute another line of
its file. If none executes it, or an import does, then all tests follow. Last are those tests of the same folder that
start programs. A mutant whose tests take too long is killed, too. The JSON file keeps what is known; the same command
continues, and with --retry tries the survivors again.
"""

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
"""{"file: before -> after [in line]": "why no test can detect it"}; others replace these, and they do not count."""
SOURCES = ("bench", "jobs")
OPTIONS = ("-p", "no:cacheprovider", "--hypothesis-profile=few")
IN_PROCESS = ("-m", "not trains and not slurm and not slow and not starts and not faults")
"""The tests of `make fast`, and those with the mark long."""
STARTING = ("-m", "starts and not trains and not slurm and not slow and not faults")
"""Tests that start programs, whose lines are not recorded."""
COPIED = (
    "bench",
    "jobs",
    "conf",
    "sbatch",
    "manifests",
    "tests",
    "containers",
    "docs",
    "experiments",
    "notebooks",
    ".github",
    ".ci",
)
INVERSES = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
COMPARISONS = dict(INVERSES) | {second: first for first, second in INVERSES}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
BOOLEANS: dict[type[ast.boolop], type[ast.boolop]] = {ast.And: ast.Or, ast.Or: ast.And}


@dataclass(frozen=True)
class Mutant:
    """One change: the source text that is replaced, by its place in the file."""

    file: str
    line: int
    operator: str
    start: int
    stop: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


def mutants_of(file: str, text: str) -> Iterator[list[Mutant]]:
    """Yield, for each place in a file where an operator applies, the mutants there."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _mutable(tree):
        changes = [*_changed(node)]
        if changes:
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[start:stop].decode()
            yield [
                Mutant(file, node.lineno, op, start, stop, before, after) for op, after in changes if after != before
            ]


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotations, docstrings, imports, or parts of f-strings, which have no places.

    Options of classes are left out, too, also those of their decorators: most forbid what no code does (frozen=True).
    """
    for name, value in ast.iter_fields(node):
        is_option = name == "decorator_list" or (isinstance(node, ast.ClassDef) and name == "keywords")
        if is_option or name in ("annotation", "returns", "type_params") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_text(child) or isinstance(child, ast.Import | ast.ImportFrom):
                continue
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                yield child
                yield from _mutable(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changed(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (operator, source text) of each change of a node."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            new.ops[0] = COMPARISONS[type(op)]()
            yield "comparison", f"({ast.unparse(new)})"
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _holds_text(new):
            new.op = ARITHMETIC[type(op)]()
            yield "arithmetic", f"({ast.unparse(new)})"
        case ast.BoolOp(op=op):
            new.op = BOOLEANS[type(op)]()
            yield "boolean", f"({ast.unparse(new)})"
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", f"({ast.unparse(new.operand)})"
        case ast.Constant(value=bool(value)):
            yield "boolean", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", f"({value + 1!r})"
            yield "constant", f"({value - 1!r})"
        case ast.Call(func=ast.Name(id="min" | "max")):
            return  # the same in either order
        case ast.Call(args=[first, second, *_]) if not any(isinstance(arg, ast.Starred) for arg in (first, second)):
            new.args[:2] = second, first
            yield "swapped arguments", ast.unparse(new)
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Raise():
            yield "dropped statement", "pass"


def _holds_text(node: ast.BinOp) -> bool:
    """Return whether a string is added or formatted; that change fails at once and says nothing."""
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def sampled(seed: int, count: int, equivalent: dict[str, str]) -> tuple[list[Mutant], int]:
    """Return mutants of distinct places, all places alike likely, and how many equivalent ones were passed over."""
    files = sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py"))
    places = [m for path in files for m in mutants_of(str(path.relative_to(ROOT)), path.read_text()) if m]
    order = random.Random(seed)
    order.shuffle(places)
    chosen: list[Mutant] = []
    num_equivalent = 0
    for mutants in places:
        if len(chosen) == count:
            break
        mutant = order.choice(mutants)
        line = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
        if {mutant.name, f"{mutant.name} in {line}"} & equivalent.keys():
            num_equivalent += 1
        else:
            chosen.append(mutant)
    return chosen, num_equivalent


@dataclass(frozen=True)
class Record:
    """What the tests do without a mutant."""

    tests: list[str]
    lines: dict[str, dict[str, list[int]]]
    """{file: {line: the places in `tests` of those that execute it}}"""
    failed: list[str]
    """Tests that fail, so that they cannot find mutants."""


def recorded(path: Path) -> Record:
    """Return what a file says, if it is newer than the tree; else run all tests, and write the file."""
    files = [file for name in COPIED for file in (ROOT / name).rglob("*") if file.is_file() and file.suffix != ".pyc"]
    if path.exists() and path.stat().st_mtime > max(file.stat().st_mtime for file in files):
        return Record(**json.loads(path.read_text()))
    tests: list[str] = []
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="mutant-") as tmp:
        folder = Path(tmp) / "lines"
        folder.mkdir()
        tree = _copied(Path(tmp))
        variables = {"EXECUTED_LINES": str(folder), "PYTHONPATH": f"{tree}:{Path(__file__).parent}"}
        words = ["-n", "auto", "--dist", "worksteal"]
        failed = _failures(tree, [*IN_PROCESS, "-p", "executed_lines", *words], None, variables)
        failed += _failures(tree, [*STARTING, *words], None, {})
        for process in folder.iterdir():
            of_worker = json.loads(process.read_text())
            for file, executing in of_worker["lines"].items():
                for line, places in executing.items():
                    lines[file][line] += [len(tests) + place for place in places]
            tests += of_worker["tests"]
    if not tests:
        sys.exit(f"the tests did not run: {failed}")
    record = Record(tests, lines, failed)
    path.write_text(json.dumps(vars(record)))
    return record


def tried(mutant: Mutant, record: Record, timeout_s: float) -> str:
    """Return the first test that fails with the mutant; else "timeout" or "survived"."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as tmp:
        tree = _copied(Path(tmp))
        _change(tree / mutant.file, mutant)
        rounds = [(IN_PROCESS, tests) for tests in _rounds(tree, mutant, record)]
        folder = _mirrored(tree, Path(mutant.file))
        if folder != tree / "tests":
            rounds.append((STARTING, [str(folder.relative_to(tree))]))
        for number, (marks, tests) in enumerate(rounds):
            words = Path(tmp) / f"round{number}"
            words.write_text("\n".join(tests))
            options = [*marks, "-x", *(f"--deselect={test}" for test in record.failed), f"@{words}"]
            if failures := _failures(tree, options, timeout_s, {}):
                return failures[0]
        return "survived"


def _copied(folder: Path) -> Path:
    """Return a copy of the tree, with the folder of published logs next to it, as here."""
    tree = folder / "tree"
    for name in (name for name in COPIED if (ROOT / name).exists()):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, tree)
    if (shared := ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to(shared)
    subprocess.run(["git", "init", "-q", tree], check=True)
    return tree


def _change(path: Path, mutant: Mutant) -> None:
    text = path.read_bytes()
    changed = text[: mutant.start] + mutant.after.encode() + text[mutant.stop :]
    ast.parse(changed)
    path.write_bytes(changed)


def _rounds(tree: Path, mutant: Mutant, record: Record) -> list[list[str]]:
    """Return the tests to run one after the other: first those that are most likely to find the mutant."""
    tests_of_line = {
        int(line): {record.tests[place] for place in places}
        for line, places in record.lines.get(mutant.file, {}).items()
    }
    body = ast.parse((ROOT / mutant.file).read_text())
    around = [_lines(node) for node in ast.walk(body) if isinstance(node, ast.stmt) and mutant.line in _lines(node)]
    inner = min(around, key=len, default=range(mutant.line, mutant.line + 1))  # the guard of a `case` has no statement
    executing = set().union(*(tests_of_line.get(line, set()) for line in inner))
    rounds = [executing, set().union(*tests_of_line.values()) - executing]
    folder = str(_mirrored(tree, Path(mutant.file)).relative_to(tree))
    ordered = [sorted(tests, key=lambda test: (not test.startswith(folder), test)) for tests in rounds]
    functions = [node for node in ast.walk(body) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not executing or not any(node.body[0].lineno <= mutant.line <= node.end_lineno for node in functions):
        ordered.append(["tests"])
    return [tests for tests in ordered if tests]


def _lines(statement: ast.stmt) -> range:
    """Return the lines of a statement; of a compound one, such as `if`, those of its head."""
    block = getattr(statement, "body", None) or getattr(statement, "cases", None)
    last = statement.end_lineno if not block else max(statement.lineno, _first_line(block[0]) - 1)
    return range(statement.lineno, last + 1)


def _first_line(node: ast.AST) -> int:
    return min(child.lineno for child in ast.walk(node) if hasattr(child, "lineno"))


def _mirrored(tree: Path, file: Path) -> Path:
    """Return the tests' folder that mirrors the file's, or the nearest one above it."""
    folders = [tree / Path("tests", *file.parts[1:end]) for end in range(len(file.parts) - 1, 1, -1)]
    return next((folder for folder in folders if folder.is_dir()), tree / "tests")


def _failures(tree: Path, words: list[str], timeout_s: float | None, variables: dict[str, str]) -> list[str]:
    """Return the tests that fail, or why the tests ended."""
    argv = [sys.executable, "-m", "pytest", "-q", "--tb=no", *OPTIONS, *words]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    process = subprocess.Popen(
        argv,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        return ["timeout"]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode < 0:
        raise RuntimeError(
            f"signal {-process.returncode} killed the tests, not the mutant; run the same command again to continue"
        )
    if process.returncode in (0, 5):  # 5: no test was collected
        return []
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed or [f"exit code {process.returncode}: {output.strip().splitlines()[-1:]}"]


def main() -> None:
    args = _parser().parse_args()
    equivalent = json.loads(EQUIVALENT.read_text())
    mutants, num_equivalent = sampled(args.seed, args.count, equivalent)
    print(f"seed {args.seed}, {len(mutants)} mutants, not counting {num_equivalent} known to be equivalent", flush=True)
    if args.list:
        print("\n".join(_row(mutant, "") for mutant in mutants))
        return
    record = recorded(args.record)
    print(f"{len(record.tests)} tests in the record", flush=True)
    if record.failed:
        print("left out, because they fail without a mutant:", *record.failed, sep="\n  ", flush=True)
    known = json.loads(args.json.read_text()) if args.json.exists() else {}

    def end(mutant: Mutant) -> str:
        key = f"{mutant.line} {mutant.name}"
        if key not in known or (args.retry and known[key]["found"] == "survived"):
            outcome = tried(mutant, record, args.timeout)
            known[key] = asdict(mutant) | {"seed": args.seed, "found": outcome}
            args.json.write_text(json.dumps(known, indent=1) + "\n")
        print(_row(mutant, known[key]["found"]), flush=True)
        return str(known[key]["found"])

    with ThreadPoolExecutor(args.jobs) as pool:
        outcome = list(pool.map(end, mutants))
    killed = len(outcome) - outcome.count("survived")
    print(f"killed {killed} of {len(outcome)}, {killed / len(outcome):.0%} ({num_equivalent} equivalent left out)")
    lived = Counter(mutant.operator for mutant, end in zip(mutants, outcome, strict=True) if end == "survived")
    print("survived:", ", ".join(f"{number} {operator}" for operator, number in lived.items()) or "none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at the same time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each of a mutant's rounds of tests")
    parser.add_argument("--json", type=Path, default=Path("mutants.json"), help="results so far; read and written")
    parser.add_argument(
        "--record", type=Path, default=Path("executed_lines.json"), help="the lines of each test; written once"
    )
    parser.add_argument("--retry", action="store_true", help="try the mutants that survived again")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    return parser


def _row(mutant: Mutant, outcome: str) -> str:
    return f"{mutant.file}:{mutant.line}  {mutant.operator}  {mutant.name.split(': ', 1)[1]}  {outcome}"


if __name__ == "__main__":
    main()
