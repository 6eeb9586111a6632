"""Refuse words of a private dialect in names and prose: `python tests/words/check.py [PATH …]`, as `make lint` does.

private_words.yaml beside this file lists them, each with the field's word; allowed.yaml lists the exceptions, each with
its reason. Dated reports (docs/results) and the dated list of failed attempts (notebooks/LOG.md) keep the words of
their day.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MOST_EXCEPTIONS = 30
DATED = re.compile(r"docs/results/|notebooks/LOG\.md|tests/words/|LICENSE|tests/report/golden/|.*\.(png|json|csv|txt)$")
PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
ENGLISH = re.compile(r"[A-Za-z]{2,}.*\s.*[A-Za-z]{2,}", re.DOTALL)


def words_of(identifier: str) -> Iterator[str]:
    """Yield the words of snake_case and CamelCase, in lower case."""
    for part in PARTS.findall(identifier):
        yield part.lower()


class Dialect:
    """The private words, ready to be searched for."""

    def __init__(self, lists: dict[str, dict[str, str]], allowed: list[dict[str, str]]) -> None:
        self.whole, self.parts = lists["identifiers"], lists["identifier_parts"]
        self.phrases = [
            (re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), better) for phrase, better in lists["phrases"].items()
        ]
        self.allowed, self.used = allowed, set[int]()

    def names(self, identifier: str) -> Iterator[str]:
        """Yield what is wrong with an identifier."""
        if identifier in self.whole:
            yield f"{identifier}: {self.whole[identifier]}"
        for word in words_of(identifier):
            if word in self.parts:
                yield f"{identifier}: {self.parts[word]}"

    def prose(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the line (from 0) and what is wrong with it."""
        for pattern, better in self.phrases:
            for match in pattern.finditer(text):
                yield text.count("\n", 0, match.start()), f'"{match[0]}": {better}'

    def is_allowed(self, path: str, line: str) -> bool:
        """Whether an exception covers a line; an exception without `text` covers its whole file."""
        for number, exception in enumerate(self.allowed):
            if re.fullmatch(exception["path"], path) and exception.get("text", "") in line:
                self.used.add(number)
                return True
        return False


def of_python(dialect: Dialect, text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers (from 1) and problems of names, comments, docstrings and messages of two words and more."""
    seen: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in seen:
            seen.add(token.string)
            for what in dialect.names(token.string):
                yield token.start[0], what
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and ENGLISH.search(token.string)):
            for line, what in dialect.prose(token.string):
                yield token.start[0] + line, what


def problems(dialect: Dialect, path: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers (from 1) and what is wrong with one file."""
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.endswith(".py"):
        hits = of_python(dialect, text)
    else:
        hits = ((line + 1, what) for line, what in dialect.prose(text))
    lines = text.splitlines()
    for number, what in sorted(set(hits)):
        if not dialect.is_allowed(path, lines[number - 1]):
            yield number, what


def main(arguments: list[str]) -> int:
    """Print every private word; return 1 if there is one."""
    lists = yaml.safe_load((HERE / "private_words.yaml").read_text())
    allowed = yaml.safe_load((HERE / "allowed.yaml").read_text()) or []
    dialect = Dialect(lists, allowed)
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    count = 0
    for path in listed.stdout.splitlines():
        if DATED.match(path) or not (ROOT / path).is_file():
            continue
        for name in sorted(set(dialect.names(Path(path).stem))):
            print(f"{path}: file name {name}")
            count += 1
        for number, what in problems(dialect, path):
            print(f"{path}:{number}: {what}")
            count += 1
    if len(allowed) > MOST_EXCEPTIONS:
        print(f"allowed.yaml has {len(allowed)} exceptions; at most {MOST_EXCEPTIONS} are allowed")
        count += 1
    if not arguments:
        for number in sorted(set(range(len(allowed))) - dialect.used):
            print(f"allowed.yaml: no line needs the exception {allowed[number]}")
            count += 1
    if count:
        print(f"{count} private words; tests/words/private_words.yaml names the field's")
    return int(bool(count))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
