"""Words that a line must hold before any sign can match it, derived from the patterns of the signs.

A plain search for a few words is much faster than all the regular expressions. Nothing is listed twice: a new sign
brings its words along.
"""

from collections.abc import Iterable
from functools import cache
from re import _parser  # type: ignore[attr-defined]  # private, and the only parser that agrees with re's own
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from bench.rules.signs import SIGNS

FOLD = bytes.maketrans(ascii_uppercase.encode() + b"23456789", ascii_lowercase.encode() + b"22222222")
"""To small letters, and most digits to one, so that lines that differ in numbers only become alike."""
_SHARED = tuple(
    b"error|fail|nccl warn|pyxis|no such|killed|srun:|exit code|invalid|enroot|cannot |can't |unable to |could not "
    b"|timed out|not found|memory|watchdog|is not |cuda|no space left|insufficient|mismatch|gated repo|fatal"
    b"|oom".split(b"|")
)
"""Found in so many patterns that one search for it saves a dozen; only those that patterns need are used."""
_EVERYWHERE = (b"rank", b"loss")
"""Most lines of a healthy run hold these: they tell nothing, and are the last choice."""
_MIN_LETTERS = 3
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


@cache
def of_signs(others: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """Return words, folded: each line that a sign or one of the other patterns matches holds at least one.

    Raises:
        ValueError: a pattern can match without any word, and would have to see every line.
    """
    found: set[bytes] = set()
    for pattern in (*(sign.pattern for sign in SIGNS), *others):
        if not (words := of_pattern(pattern)):
            raise ValueError(f"this pattern has no word to look for: {pattern!r}")
        found |= words
    return tuple(sorted(word for word in found if not any(other != word and other in word for other in found)))


def of_pattern(pattern: bytes) -> frozenset[bytes]:
    """Return words of which each match of a pattern holds one; none if it can match without."""
    return _of_sequence(_parser.parse(pattern))


def _of_sequence(items: Iterable[tuple[Any, Any]], run: bytes = b"") -> frozenset[bytes]:
    """Return the best choice of words that a sequence offers: literal runs, or the words of one of its parts."""
    choices = []
    for kind, value in items:
        if letter := _letter(str(kind), value):
            run += letter
            continue
        choices += [_word(run), _of_part(str(kind), value, run)]
        run = b""
    return max((*choices, _word(run)), key=_merit)


def _of_part(kind: str, value: Any, run: bytes) -> frozenset[bytes]:
    """Return the words of a part; `run` stands just before it, where re has taken out what alternatives begin with."""
    if kind == "SUBPATTERN":
        return _of_sequence(value[-1])
    if kind in _REPEATS and value[0] > 0:
        return _of_sequence(value[2])
    if kind == "BRANCH":
        parts = [_of_sequence(part, run) for part in value[1]]
        return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def _letter(kind: str, value: Any) -> bytes:
    """Return what stands at one place once it is folded, such as `e` for [Ee]; nothing if that can differ."""
    options = [("LITERAL", value)] if kind == "LITERAL" else value if kind == "IN" else []
    if not options or any(str(option) != "LITERAL" for option, _ in options):
        return b""
    folded = {bytes([code]).translate(FOLD) for _, code in options}
    return folded.pop() if len(folded) == 1 else b""


def _word(run: bytes) -> frozenset[bytes]:
    if len(run) < _MIN_LETTERS:
        return frozenset()
    return frozenset({next((word for word in _SHARED if word in run), run)})


def _merit(words: frozenset[bytes]) -> tuple[int, int]:
    """Return a sort key: shared words first, then long ones; a choice is as good as its worst word."""
    ranks = [((word in _SHARED) - (word in _EVERYWHERE), len(word)) for word in words]
    return min(ranks, default=(-2, 0))
