"""Find the lines of a log that are worth a closer look: those that hold one of a few words."""

from collections.abc import Iterator, Sequence

from bench.diagnosis.words import FOLD

BEFORE, AFTER = 1000, 3000
"""How much of a long line is looked at, around the word."""
_MAX_DULL = 1 << 16


def suspects(flat: bytes, dull: set[bytes], words: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the places of lines that hold one of the words, in order; of a long line, what stands around each word.

    `words` are folded (see `bench.diagnosis.words`). Most lines of a log differ from others in numbers only: those that
    hold no word are kept in `dull`, folded.
    """
    lines, start = flat.translate(FOLD).split(b"\n"), 0
    fresh = set(lines) - dull
    telling = _telling(b"\n".join(fresh), words)
    for line in lines:
        if line in telling:
            yield from ((start + first, start + end) for first, end in _around_words(line, words))
        start += len(line) + 1
    if len(dull) > _MAX_DULL:
        dull.clear()
    dull |= {line for line in fresh - telling if len(line) <= BEFORE}


def _telling(text: bytes, words: Sequence[bytes]) -> set[bytes]:
    """Return the lines that hold one of the words."""
    found = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            end = text.find(b"\n", at)
            end = end if end >= 0 else len(text)
            found.add(text[text.rfind(b"\n", 0, at) + 1 : end])
            at = text.find(word, end)
    return found


def _around_words(line: bytes, words: Sequence[bytes]) -> list[tuple[int, int]]:
    if len(line) <= BEFORE:
        return [(0, len(line))]
    places = set()
    for word in words:
        at = line.find(word)
        while at >= 0:
            end = min(len(line), at + AFTER)
            places.add((max(0, at - BEFORE), end))
            at = line.find(word, end)
    return sorted(places)
