"""Find the signs of rules in a log of any size, encoding and content, and the lines that say most where there are none.

Logs are read in chunks. A line is looked at only if it holds one of a few words that some sign needs; most lines never
meet a regular expression.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from io import FileIO
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # private, and the only parser that agrees with re's own
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from bench.errors import with_rule
from bench.mlperf.reader import printable
from bench.rules import RULES
from bench.rules.signs import EVENTS, SIGNS, Weight

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


LABEL = rb"(?: {0,6}\d{1,6}: ?|\[\S{1,80}\]:? ?){0,3}"
"""What srun -l and torch put before each line of a rank."""
_FRAME = re.compile(rb'  File "(?P<path>[^"]{1,400})", line (?P<line>\d{1,7})(?:, in (?P<name>.{1,200}))?')
_LABELLED = re.compile(b"(?P<label>%b)(?P<rest>.*)" % LABEL)
_INSTALLED = (b"/site-packages/", b"/dist-packages/", b"/lib/python3", b"<frozen ", b"<string>")
"""Parts of the paths of code that a user did not write."""
LOOK_BACK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One place in a traceback."""

    path: bytes
    line: bytes
    name: bytes

    @property
    def is_own(self) -> bool:
        """Whether the user wrote this code, as far as its path tells."""
        return not any(part in self.path for part in _INSTALLED)

    def __str__(self) -> str:
        where = f"{self.path.decode(errors='replace')}:{self.line.decode()}"
        return f"{where} in {self.name.decode(errors='replace')}" if self.name else where


def innermost(before: bytes, raised: bytes) -> Frame | None:
    """Return the innermost frame of the user's code, else of any code, in the traceback that ends before a line.

    Lines of other ranks may stand between those of the traceback; they differ in their label.
    """
    found = _LABELLED.match(raised)
    label = found["label"].strip() if found else b""
    frames = []
    for line in reversed(before[-LOOK_BACK_BYTES:].split(b"\n")):
        parts = _LABELLED.match(line)
        if parts is None or parts["label"].strip() != label or not line.strip():
            continue
        rest = parts["rest"]
        if not rest.startswith(b" "):  # the head of the traceback, or output that belongs to none
            break
        if place := _FRAME.match(rest):
            frames.append(Frame(place["path"], place["line"], place["name"] or b""))
    return next((frame for frame in frames if frame.is_own), frames[0] if frames else None)


BEFORE, AFTER = 1000, 3000
"""How much of a long line is looked at, around the word."""
_MAX_DULL = 1 << 16


def suspects(flat: bytes, dull: set[bytes], words: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the places of lines that hold one of the words, in order; of a long line, what stands around each word.

    `words` are folded (see `folded`). Most lines of a log differ from others in numbers only: those that
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


@dataclass(frozen=True, slots=True)
class Clue:
    """A line that is a sign of a rule."""

    rule: str
    weight: Weight
    file: str
    line: int
    text: str
    fix: str | None = None
    """The fix that the message itself names; None if the rule's fix applies."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found in one file."""

    clues: tuple[Clue, ...]
    """The first clue of each rule; clues that explain most come first."""
    lines: tuple[str, ...]
    """The last lines that report trouble, then the end of the file."""
    has_records: bool
    """Whether the file has MLPerf log lines."""
    earlier: tuple[Clue, ...] = ()
    """What cut earlier starts of a job short, in order: the last start got over it."""


_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 400
_FORGIVEN_RECORDS = 10
"""Training goes on for more records than these behind a sign only if the run got over it, or was started again."""

_PATTERNS = tuple((sign, re.compile(sign.pattern)) for sign in SIGNS)
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_=>])")
_PROGRESS = re.compile(rb'"(?:train_loss ?|tracked_stats|eval_accuracy|eval_stop)"')
_MESSAGE = re.compile(
    rb"^(?P<what>[^\n]{1,2000})\n{1,2}%b  where: (?P<where>[^\n]{0,1000})\n{1,2}%b  fix:   (?P<fix>[^\n]{1,1000})$"
    % (LABEL, LABEL),
    re.MULTILINE,
)
"""How bench.errors prints an error."""
_RAISED = re.compile(rb"^%b(?:[\w.]{1,100}\.)?(?P<name>[A-Z]\w{0,60}(?:Error|Exception))(?:: |$)" % LABEL)
"""How Python ends a traceback."""
_FOLLOWING = re.compile(
    rb"(?:BrokenPipe|Connection(?:Reset|Refused|Aborted)?|EOF|ChildFailed|DistNetwork)Error|SignalException"
)
"""Exceptions that say no more than that somebody else is gone."""
_TROUBLE = re.compile(
    rb"\b(?:ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]atal)\b\]?:? |Exited with exit code [1-9]|\bBroken pipe|Connection reset"
)
_EXITED = re.compile(rb"Exited with exit code [1-9]")
_RESTART = re.compile(rb"^job [^\s,]{1,400}, (?:life|restart|attempt) [1-9]\d*, on ")
"""How a batch script, a runner or a driver on Ray begins when its job has been started anew."""
_SCRIPT = re.compile(rb"^(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )?(?P<rule>(?:SLU-|CFG-|HST-|RAY-)\d\d): ")
"""How one of them says why it ends, or that it refuses to start."""
_TASK_ENDS = re.compile(rb"srun: error: .{1,80}: tasks? [\d,-]{1,200}: ")
"""Slurm on tasks that have ended."""
_STEP_ENDS = re.compile(rb"srun: .{0,40}Terminating (?:StepId|job step)|STEP .{1,60} CANCELLED|srun: Job step aborted")
"""Slurm on tasks that it ends, because of others or because of the whole job."""
_TERMINATED = re.compile(rb": (?:Terminated|Exited with exit code 143)\b")
_EXITED_143 = re.compile(rb": Exited with exit code 143\b")
"""A rank of ours that got SIGTERM; from srun only once that has said that it ends the step."""
_WATCHED = (_RAISED, _TROUBLE, _EXITED, _RESTART, _SCRIPT, _TASK_ENDS, _STEP_ENDS, re.compile(b":::MLLOG"))
"""What lines are looked at for beside the signs."""
_KNOWN = re.compile(r"(?:\d+: ?)?([A-Z]{2,3}-\d\d): ")


def scan(path: Path) -> Scan:
    """Return the signs in a file; OSError if it cannot be read, and no content makes this fail."""
    reader, rest = _Reader(str(path)), b""
    with FileIO(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data = rest + chunk
            end = data.rfind(b"\n") + 1 or max(0, len(data) - AFTER) * (len(data) > _MAX_LINE_BYTES)
            rest = data[end:]
            reader.feed(data[:end])
    reader.feed(rest)
    return reader.finish()


def of_rule(rule: str, what: str, fix: str | None, *, file: str, line: int = 1) -> Clue:
    """Return the clue in an error of our own that names its rule; it weighs as much as the rule's best sign."""
    weight = max((sign.weight for sign in RULES[rule].signs), default=Weight.CAUSE)
    weight = Weight.CAUSE if weight is Weight.HINT else weight  # a hint is what runs that are fine print too
    return Clue(rule, weight, file, line, shown(with_rule(rule, what).encode(errors="replace")), fix)


def read_message(what: str, fix: str, *, file: str, line: int = 1, otherwise: str = "RUN-10") -> Clue:
    """Return the clue in the text of an error of our own: the rule that it begins with, else the one that it shows."""
    raw = what.encode(errors="replace")
    text = shown(raw)
    if (known := _KNOWN.match(text)) and known[1] in RULES:
        return Clue(known[1], Weight.CAUSE, file, line, text, fix)
    rule, weight, _ = _recognise(raw[:AFTER]) or (otherwise, Weight.CAUSE, 0)
    return Clue(rule, weight, file, line, text, fix)


def read_text(text: str, *, file: str, line: int = 1) -> Scan:
    """Return the signs in a text that stands in a file, at one of its lines."""
    reader = _Reader(file)
    reader.feed(text.encode(errors="replace"))
    found = reader.finish()
    return replace(found, clues=tuple(replace(clue, line=line) for clue in found.clues))


def ranked(clues: Iterable[Clue]) -> list[Clue]:
    """Return the clues of one file, those that explain most first; events explain those that follow them."""
    return sorted(clues, key=lambda clue: (-(max(EVENTS) if clue.weight in EVENTS else clue.weight), clue.line))


def shown(raw: bytes) -> str:
    """Return a line as one can print it."""
    text = printable(_ESCAPES.sub(b"", raw).decode(errors="replace").strip())
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


@lru_cache(maxsize=4096)
def _recognise(text: bytes) -> tuple[str, Weight, int] | None:
    """Return the rule that a line shows, its weight, and where in the line; cached: ranks repeat each other's lines."""
    for sign, pattern in _PATTERNS:
        if found := pattern.search(text):
            return sign.rule, sign.weight, found.start()
    return None


class _Reader:
    """Collects clues from a stream of whole lines."""

    def __init__(self, file: str) -> None:
        self._file, self._line, self._progress = file, 1, 0
        self._first: dict[tuple[str, Weight], tuple[Clue, int]] = {}
        """The clue, and how much progress was logged before it."""
        self._failing = False
        """Whether a program has failed since the last record."""
        self._task_ends = self._step_ends = False
        """Whether Slurm has reported the end of a task, and whether it then ends the others of the step."""
        self._has_records = False
        self._earlier: list[Clue] = []
        self._dull: set[bytes] = set()
        self._raised, self._trouble, self._end = b"", deque[bytes](maxlen=3), b""

    def feed(self, data: bytes) -> None:
        text = data.replace(b"\0", b"")
        if b"\x1b" in text:
            text = _ESCAPES.sub(b"", text)
        flat = text.replace(b"\r", b"\n")  # as long as before: places agree
        counted = 0
        for start, end in suspects(flat, self._dull, _words()):
            self._line += text.count(b"\n", counted, start)
            counted = start
            self._look(flat[start:end], flat, start)
        self._line += text.count(b"\n", counted)
        if b"  fix:   " in flat:
            self._read_messages(flat, text)
        if flat.strip():
            self._end = flat[-2 * AFTER :]
            if len(self._end) < len(flat):  # it may begin within a line
                self._end = self._end.partition(b"\n")[2].strip() or self._end

    def finish(self) -> Scan:
        found = []
        for clue, before in self._first.values():
            forgiven = self._progress - before > _FORGIVEN_RECORDS
            found.append(replace(clue, weight=Weight.HINT) if forgiven else clue)
        last = [line for line in self._end.split(b"\n") if line.strip() and b":::MLLOG" not in line][-3:]
        lines = dict.fromkeys(shown(line) for line in (self._raised, *self._trouble, *last) if line.strip())
        return Scan(tuple(ranked(found)), tuple(lines), self._has_records, tuple(self._earlier))

    def _look(self, line: bytes, flat: bytes, start: int) -> None:
        if _RESTART.match(line):  # the run recovered from what came before
            self._earlier += ranked(clue for clue, _ in self._first.values())
            self._first.clear()
            self._failing = self._task_ends = self._step_ends = False
            self._raised, self._trouble = b"", deque(maxlen=3)
            return
        if b":::MLLOG" in line:
            self._failing, self._has_records = False, True
            self._progress += bool(_PROGRESS.search(line))
            return
        raised = _RAISED.match(line)
        if (script := _SCRIPT.match(line)) and (rule := script["rule"].decode()) in RULES:
            self._add(Clue(rule, Weight.CAUSE, self._file, self._line, shown(line)))
        elif known := _recognise(line):
            self._add_known(line, *known, frame=self._frame(line, flat, start) if raised else None)
        elif raised and not _FOLLOWING.fullmatch(raised["name"]):
            frame = self._frame(line, flat, start)
            weight = Weight.DEATH if frame else Weight.END  # without its traceback it may have been caught
            self._add(Clue("RUN-13", weight, self._file, self._line, _with_place(shown(line), frame)))
        self._step_ends |= bool(_STEP_ENDS.search(line))
        self._task_ends |= self._step_ends or bool(_TASK_ENDS.search(line))
        if raised:
            self._raised, self._failing = line, True
        elif _TROUBLE.search(line):
            self._trouble.append(line)
            self._failing |= bool(_EXITED.search(line))

    def _add_known(self, line: bytes, rule: str, weight: Weight, place: int, *, frame: Frame | None) -> None:
        if rule == "SLU-08" and self._failing:  # srun also cancels what is left of a step that failed
            return
        if weight is Weight.DEATH and b"srun: error: " in line:
            first_to_exit = _EXITED_143.search(line) and not self._step_ends
            if self._task_ends and _TERMINATED.search(line) and not first_to_exit:  # srun ends the rest of the step
                return
            weight = Weight.CAUSE if first_to_exit or not self._task_ends else weight
        shift = max(0, place - _MAX_SHOWN // 2) if len(line) > _MAX_SHOWN else 0
        self._add(Clue(rule, weight, self._file, self._line, _with_place(shown(line[shift:]), frame)))

    def _frame(self, line: bytes, flat: bytes, start: int) -> Frame | None:
        """Return the place that raised the exception on a line; its traceback may begin in the chunk before."""
        before = flat[max(0, start - LOOK_BACK_BYTES) : start]
        if start < LOOK_BACK_BYTES:
            before = self._end + b"\n" + before
        return innermost(before, line)

    def _add(self, clue: Clue) -> None:
        self._first.setdefault((clue.rule, clue.weight), (clue, self._progress))

    def _read_messages(self, flat: bytes, text: bytes) -> None:
        first_line = self._line - text.count(b"\n")
        for found in _MESSAGE.finditer(flat):
            line = first_line + text.count(b"\n", 0, found.start())
            clue = read_message(shown(found["what"]), shown(found["fix"]), file=self._file, line=line)
            seen = self._first.get((clue.rule, clue.weight))
            if seen is None or seen[0].fix is None:  # the same line, seen as any other before
                self._first[clue.rule, clue.weight] = clue, self._progress


def _with_place(text: str, frame: Frame | None) -> str:
    return f"{text} (at {shown(str(frame).encode())})" if frame else text


def _words() -> tuple[bytes, ...]:
    """Return what to search for: every line that is looked at holds one of these, once folded."""
    return of_signs(tuple(pattern.pattern for pattern in _WATCHED))
