"""Find the signs of rules in a log of any size, encoding and content; without signs, the most informative lines.

Logs are read in chunks. A line is searched with regular expressions only if it contains one of a few keywords that the
signs need. Most lines contain none.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # private, but it is the parser of re itself
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from bench.contract import regular_files
from bench.errors import with_rule
from bench.mlperf.reader import printable
from bench.rules import RULES
from bench.rules.signs import EVENTS, SIGNS, Weight

FOLD = bytes.maketrans(ascii_uppercase.encode() + b"23456789", ascii_lowercase.encode() + b"22222222")
"""To lower case, and digits 2 to 9 to `2`: lines that differ only in numbers become equal."""
_SHARED = tuple(
    b"error|fail|nccl warn|pyxis|no such|killed|srun:|exit code|invalid|enroot|cannot |can't |unable to |could not "
    b"|timed out|not found|memory|watchdog|is not |cuda|no space left|insufficient|mismatch|gated repo|fatal"
    b"|oom".split(b"|")
)
"""Keywords that many patterns contain: one search replaces many. Only those that a pattern needs are used."""
_EVERYWHERE = (b"rank", b"loss")
"""Keywords that most lines of a healthy run contain: used only if a pattern has no other."""
_MIN_LETTERS = 3
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


@cache
def keywords_of_signs(others: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """Return keywords, folded: each line that matches a sign or one of the other patterns contains at least one.

    Raises:
        ValueError: a pattern has no keyword, so it would have to search every line.
    """
    keywords: set[bytes] = set()
    for pattern in (*(sign.pattern for sign in SIGNS), *others):
        if not (words := keywords_of_pattern(pattern)):
            raise ValueError(f"this pattern has no keyword: {pattern!r}")
        keywords |= words
    return tuple(sorted(key for key in keywords if not any(other != key and other in key for other in keywords)))


def keywords_of_pattern(pattern: bytes) -> frozenset[bytes]:
    """Return keywords such that each match of a pattern contains one; none if a match can do without."""
    return _of_sequence(_parser.parse(pattern))


def _of_sequence(items: Iterable[tuple[Any, Any]], run: bytes = b"") -> frozenset[bytes]:
    """Return the best choice of keywords in a sequence: literal text, or the keywords of one of its parts."""
    choices = []
    for kind, value in items:
        if letter := _letter(str(kind), value):
            run += letter
            continue
        choices += [_keyword(run), _of_part(str(kind), value, run)]
        run = b""
    return max((*choices, _keyword(run)), key=_rank)


def _of_part(kind: str, value: Any, run: bytes) -> frozenset[bytes]:
    """Return the keywords of a part; `run` is the literal text before it, to which re moves common prefixes."""
    if kind == "SUBPATTERN":
        return _of_sequence(value[-1])
    if kind in _REPEATS and value[0] > 0:
        return _of_sequence(value[2])
    if kind == "BRANCH":
        parts = [_of_sequence(part, run) for part in value[1]]
        return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def _letter(kind: str, value: Any) -> bytes:
    """Return the folded letter of one position, such as `e` for [Ee]; empty if it is not unique."""
    options = [("LITERAL", value)] if kind == "LITERAL" else value if kind == "IN" else []
    if not options or any(str(option) != "LITERAL" for option, _ in options):
        return b""
    folded = {bytes([code]).translate(FOLD) for _, code in options}
    return folded.pop() if len(folded) == 1 else b""


def _keyword(run: bytes) -> frozenset[bytes]:
    if len(run) < _MIN_LETTERS:
        return frozenset()
    return frozenset({next((keyword for keyword in _SHARED if keyword in run), run)})


def _rank(words: frozenset[bytes]) -> tuple[int, int]:
    """Return a sort key: shared keywords first, then long ones; a choice ranks by its worst keyword."""
    ranks = [((keyword in _SHARED) - (keyword in _EVERYWHERE), len(keyword)) for keyword in words]
    return min(ranks, default=(-2, 0))


LABEL = rb"(?: {0,6}\d{1,6}: ?|\[\S{1,80}\]:? ?){0,3}"
"""The prefix of srun -l and torch on each line of a rank."""
_FRAME = re.compile(rb'  File "(?P<path>[^"]{1,400})", line (?P<line>\d{1,7})(?:, in (?P<name>.{1,200}))?')
_LABELLED = re.compile(b"(?P<label>%b)(?P<rest>.*)" % LABEL)
_INSTALLED = (b"/site-packages/", b"/dist-packages/", b"/lib/python3", b"<frozen ", b"<string>")
"""Path parts of installed code, which is not the user's."""
LOOK_BACK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One place in a traceback."""

    path: bytes
    line: bytes
    name: bytes

    @property
    def is_own(self) -> bool:
        """Whether the user wrote this code, by its path."""
        return not any(part in self.path for part in _INSTALLED)

    def __str__(self) -> str:
        where = f"{self.path.decode(errors='replace')}:{self.line.decode()}"
        return f"{where} in {self.name.decode(errors='replace')}" if self.name else where


def innermost(before: bytes, raised: bytes) -> Frame | None:
    """Return the innermost frame of the user's code, else of any code, in the traceback that ends before a line.

    Lines of other ranks, with another label, may be mixed into the traceback.
    """
    labelled = _LABELLED.match(raised)
    label = labelled["label"].strip() if labelled else b""
    frames = []
    for line in reversed(before[-LOOK_BACK_BYTES:].split(b"\n")):
        parts = _LABELLED.match(line)
        if parts is None or parts["label"].strip() != label or not line.strip():
            continue
        rest = parts["rest"]
        if not rest.startswith(b" "):  # the first line of the traceback, or other output
            break
        if place := _FRAME.match(rest):
            frames.append(Frame(place["path"], place["line"], place["name"] or b""))
    return next((frame for frame in frames if frame.is_own), frames[0] if frames else None)


BEFORE, AFTER = 1000, 3000
"""How many bytes of a long line are searched around a keyword."""
_MAX_BORING = 1 << 16


def candidate_lines(flat: bytes, seen_boring: set[bytes], words: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each line that contains a keyword; of a long line, of the bytes around each keyword.

    `words` are folded keywords (see FOLD). Most lines of a log differ only in numbers. Folded lines without a keyword
    are kept in `seen_boring`, so that each is searched once.
    """
    lines, start = flat.translate(FOLD).split(b"\n"), 0
    fresh = set(lines) - seen_boring
    matching = _lines_with(b"\n".join(fresh), words)
    for line in lines:
        if line in matching:
            yield from ((start + first, start + end) for first, end in _around_words(line, words))
        start += len(line) + 1
    if len(seen_boring) > _MAX_BORING:
        seen_boring.clear()
    seen_boring |= {line for line in fresh - matching if len(line) <= BEFORE}


def _lines_with(text: bytes, words: Sequence[bytes]) -> set[bytes]:
    """Return the lines that contain a keyword."""
    matches = set()
    for keyword in words:
        at = text.find(keyword)
        while at >= 0:
            end = text.find(b"\n", at)
            end = end if end >= 0 else len(text)
            matches.add(text[text.rfind(b"\n", 0, at) + 1 : end])
            at = text.find(keyword, end)
    return matches


def _around_words(line: bytes, words: Sequence[bytes]) -> list[tuple[int, int]]:
    if len(line) <= BEFORE:
        return [(0, len(line))]
    places = set()
    for keyword in words:
        at = line.find(keyword)
        while at >= 0:
            end = min(len(line), at + AFTER)
            places.add((max(0, at - BEFORE), end))
            at = line.find(keyword, end)
    return sorted(places)


@dataclass(frozen=True, slots=True)
class Clue:
    """A line that shows a broken rule."""

    rule: str
    weight: Weight
    file: str
    line: int
    text: str
    fix: str | None = None
    """The fix in the message itself; None if the rule's fix applies."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of scanning one file."""

    clues: tuple[Clue, ...]
    """The first clue of each rule; clues that explain most come first."""
    lines: tuple[str, ...]
    """The last error lines, then the end of the file."""
    has_records: bool
    """Whether the file has MLPerf log lines."""
    earlier: tuple[Clue, ...] = ()
    """What ended earlier starts of a restarted job, in order."""


_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 20
_MAX_SHOWN = 400
_FORGIVEN_RECORDS = 10
"""If training logs more records than this after a sign, the run recovered from it or was restarted."""

_PATTERNS = tuple((sign, re.compile(sign.pattern)) for sign in SIGNS)
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b\n]{0,400}(?:\x07|\x1b\\)|[@-Z\\^_=>])")
_PROGRESS = re.compile(rb'"(?:train_loss ?|tracked_stats|eval_accuracy|eval_stop)"')
_MESSAGE = re.compile(
    rb"^(?P<what>[^\n]{1,2000})\n{1,2}%b  where: (?P<where>[^\n]{0,1000})\n{1,2}%b  fix:   (?P<fix>[^\n]{1,1000})$"
    % (LABEL, LABEL),
    re.MULTILINE,
)
"""An error as bench.errors prints it."""
_RAISED = re.compile(rb"^%b(?:[\w.]{1,100}\.)?(?P<name>[A-Z]\w{0,60}(?:Error|Exception))(?:: |$)" % LABEL)
"""The last line of a Python traceback."""
_FOLLOWING = re.compile(
    rb"(?:BrokenPipe|Connection(?:Reset|Refused|Aborted)?|EOF|ChildFailed|DistNetwork)Error|SignalException"
)
"""Exceptions that only show that another process has died; a program (RUN-20) that ends with one was not the first."""
_ABOUT_OTHERS = re.compile(
    rb"(?i:timed? ?out|connection|\bpeer\b|nccl|gloo|process ?group|barrier|store\b|\brank \d|exit (?:code|status)"
    rb"|CalledProcessError|RayTaskError|worker)"
)
"""Exceptions that another process may have caused. Any other one with a traceback is a cause of its own."""
_IGNORED = re.compile(rb"^%bException ignored (?:in|on)" % LABEL)
"""Python prints such a traceback while a rank ends, whatever the reason."""
_TROUBLE = re.compile(
    rb"\b(?:ERROR|FATAL|CRITICAL|[Ee]rror|[Ff]atal)\b\]?:? |Exited with exit code [1-9]|\bBroken pipe|Connection reset"
)
_EXITED = re.compile(rb"Exited with exit code [1-9]")
_RESTART = re.compile(rb"^job [^\s,]{1,400}, (?:life|restart|attempt) [1-9]\d*, on ")
"""The first line of a batch script, a runner or a driver on Ray after its job was restarted."""
_SCRIPT = re.compile(rb"^(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )?(?P<rule>(?:SLU-|CFG-|HST-|RAY-)\d\d): ")
"""The line with which one of them reports why it ends or does not start."""
_TASK_ENDS = re.compile(rb"srun: error: .{1,80}: tasks? [\d,-]{1,200}: ")
"""Slurm's lines about tasks that have ended."""
_STEP_ENDS = re.compile(rb"srun: .{0,40}Terminating (?:StepId|job step)|STEP .{1,60} CANCELLED|srun: Job step aborted")
"""Slurm's lines about tasks that it ends, because another task or the whole job ended."""
_TERMINATED = re.compile(rb": (?:Terminated|Exited with exit code 143)\b")
_EXITED_143 = re.compile(rb": Exited with exit code 143\b")
"""A rank of ours that got SIGTERM; from srun only after it has reported that it ends the step."""
_WATCHED = (_RAISED, _IGNORED, _TROUBLE, _EXITED, _RESTART, _SCRIPT, _TASK_ENDS, _STEP_ENDS, re.compile(b":::MLLOG"))
"""Patterns that are searched in addition to the signs."""
_KNOWN = re.compile(r"(?:\d+: ?)?([A-Z]{2,3}-\d\d): ")


def scan(path: Path) -> Scan:
    """Return the signs in a file of any content; OSError if it cannot be read."""
    reader, rest = _Reader(str(path)), b""
    for chunk in regular_files.chunks(path, _CHUNK_BYTES):
        data = rest + chunk
        end = data.rfind(b"\n") + 1 or max(0, len(data) - AFTER) * (len(data) > _MAX_LINE_BYTES)
        rest = data[end:]
        reader.feed(data[:end])
    reader.feed(rest)
    return reader.finish()


def rule_clue(rule: str, what: str, fix: str | None, *, file: str, line: int = 1) -> Clue:
    """Return the clue of an error of our own that names its rule; its weight is that of the rule's best sign."""
    weight = max((sign.weight for sign in RULES[rule].signs), default=Weight.CAUSE)
    weight = Weight.CAUSE if weight is Weight.HINT else weight  # successful runs print hints too
    return Clue(rule, weight, file, line, shown(with_rule(rule, what).encode(errors="replace")), fix)


def read_message(what: str, fix: str, *, file: str, line: int = 1, otherwise: str = "RUN-10") -> Clue:
    """Return the clue of an error of our own: the rule at the start of its text, else the rule of a sign in it."""
    raw = what.encode(errors="replace")
    text = shown(raw)
    seen = _recognise(raw[:AFTER])
    if (known := _KNOWN.match(text)) and known[1] in RULES:
        follows = known[1] == "RUN-20" and (seen and seen[1] is Weight.ECHO or _FOLLOWING.search(raw))
        return Clue(known[1], Weight.END if follows else Weight.CAUSE, file, line, text, fix)
    rule, weight, _ = seen or (otherwise, Weight.CAUSE, 0)
    return Clue(rule, weight, file, line, text, fix)


def read_text(text: str, *, file: str, line: int = 1) -> Scan:
    """Return the signs in a text that is in a file, at one of its lines."""
    reader = _Reader(file)
    reader.feed(text.encode(errors="replace"))
    scanned = reader.finish()
    return replace(scanned, clues=tuple(replace(clue, line=line) for clue in scanned.clues))


def ranked(clues: Iterable[Clue]) -> list[Clue]:
    """Return the clues of one file, the most important first; an event explains later events."""
    return sorted(clues, key=lambda clue: (-(max(EVENTS) if clue.weight in EVENTS else clue.weight), clue.line))


def shown(raw: bytes) -> str:
    """Return a line in printable form."""
    text = printable(_ESCAPES.sub(b"", raw).decode(errors="replace").strip())
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


@lru_cache(maxsize=4096)
def _recognise(text: bytes) -> tuple[str, Weight, int] | None:
    """Return the rule of the first sign in a line, its weight and position; cached: ranks print the same lines."""
    for sign, pattern in _PATTERNS:
        if match := pattern.search(text):
            return sign.rule, sign.weight, match.start()
    return None


class _Reader:
    """Collect clues from a stream of complete lines."""

    def __init__(self, file: str) -> None:
        self._file, self._line, self._progress = file, 1, 0
        self._first: dict[tuple[str, Weight], tuple[Clue, int]] = {}
        """The clue, and the number of progress records before it."""
        self._failing = False
        """Whether a program has failed since the last record."""
        self._task_ends = self._step_ends = False
        """Whether Slurm has reported the end of a task, and whether it then ends the other tasks of the step."""
        self._task_failed = False
        """Whether Slurm has reported a task that was not terminated by SIGTERM."""
        self._has_records = False
        self._is_ignored = False
        """Whether the traceback that follows is one that Python ignores."""
        self._earlier: list[Clue] = []
        self._seen_boring: set[bytes] = set()
        self._raised, self._trouble, self._end = b"", deque[bytes](maxlen=3), b""

    def feed(self, data: bytes) -> None:
        text = data.replace(b"\0", b"")
        if b"\x1b" in text:
            text = _ESCAPES.sub(b"", text)
        flat = text.replace(b"\r", b"\n")  # the length stays the same, so positions stay valid
        counted = 0
        for start, end in candidate_lines(flat, self._seen_boring, _keywords()):
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
        clues = []
        for clue, before in self._first.values():
            forgiven = self._progress - before > _FORGIVEN_RECORDS
            clues.append(replace(clue, weight=Weight.HINT) if forgiven else clue)
        last = [line for line in self._end.split(b"\n") if line.strip() and b":::MLLOG" not in line][-3:]
        lines = dict.fromkeys(shown(line) for line in (self._raised, *self._trouble, *last) if line.strip())
        return Scan(tuple(ranked(clues)), tuple(lines), self._has_records, tuple(self._earlier))

    def _look(self, line: bytes, flat: bytes, start: int) -> None:
        if _RESTART.match(line):  # the run recovered from earlier problems
            self._earlier += ranked(clue for clue, _ in self._first.values())
            self._first.clear()
            self._failing = self._task_ends = self._step_ends = self._task_failed = False
            self._raised, self._trouble = b"", deque(maxlen=3)
            return
        if b":::MLLOG" in line:
            self._failing, self._has_records = False, True
            self._progress += bool(_PROGRESS.search(line))
            return
        if _IGNORED.match(line):
            self._is_ignored = True
            return
        raised = _RAISED.match(line)
        if raised and self._is_ignored:
            self._is_ignored = False
            return
        if (script := _SCRIPT.match(line)) and (rule := script["rule"].decode()) in RULES:
            self._add(Clue(rule, Weight.CAUSE, self._file, self._line, shown(line)))
        elif known := _recognise(line):
            self._add_known(line, *known, frame=self._frame(line, flat, start) if raised else None)
        elif raised and not _FOLLOWING.fullmatch(raised["name"]):
            frame = self._frame(line, flat, start)
            weight = Weight.CRASH if frame else Weight.END  # without a traceback the program may have caught it
            if frame and (_ABOUT_OTHERS.search(line) or self._has_ended):
                weight = Weight.DEATH
            self._add(Clue("RUN-13", weight, self._file, self._line, _with_frame(shown(line), frame)))
        self._step_ends |= bool(_STEP_ENDS.search(line))
        is_task_end = bool(_TASK_ENDS.search(line))
        self._task_ends |= self._step_ends or is_task_end
        self._task_failed |= is_task_end and not _TERMINATED.search(line)
        if raised:
            self._raised, self._failing = line, True
        elif _TROUBLE.search(line):
            self._trouble.append(line)
            self._failing |= bool(_EXITED.search(line))

    def _add_known(self, line: bytes, rule: str, weight: Weight, place: int, *, frame: Frame | None) -> None:
        if rule == "SLU-08" and self._failing:  # srun also cancels the other tasks of a failed step
            return
        if weight is Weight.CRASH and (self._has_ended or b"srun: error: " in line):
            weight = Weight.DEATH
        if weight is Weight.DEATH and b"srun: error: " in line:
            first_to_exit = _EXITED_143.search(line) and not self._step_ends
            if self._task_ends and _TERMINATED.search(line) and not first_to_exit:  # srun ends the rest of the step
                return
            weight = Weight.CAUSE if first_to_exit or not self._task_ends else weight
        if (rule, weight) == ("RUN-02", Weight.END) and not self._task_failed:
            # The job ended under its ranks. Their errors follow from that, also if a rank printed one earlier.
            weight = Weight.CAUSE
            self._first.pop((rule, weight), None)  # of a rank that Slurm terminated
        shift = max(0, place - _MAX_SHOWN // 2) if len(line) > _MAX_SHOWN else 0
        self._add(Clue(rule, weight, self._file, self._line, _with_frame(shown(line[shift:]), frame)))

    @property
    def _has_ended(self) -> bool:
        """Whether the end of the run was seen: a rank may crash because of it."""
        return self._step_ends or any(weight is Weight.END for _, weight in self._first)

    def _frame(self, line: bytes, flat: bytes, start: int) -> Frame | None:
        """Return the frame that raised the exception on a line; its traceback may begin in the previous chunk."""
        before = flat[max(0, start - LOOK_BACK_BYTES) : start]
        if start < LOOK_BACK_BYTES:
            before = self._end + b"\n" + before
        return innermost(before, line)

    def _add(self, clue: Clue) -> None:
        self._first.setdefault((clue.rule, clue.weight), (clue, self._progress))

    def _read_messages(self, flat: bytes, text: bytes) -> None:
        first_line = self._line - text.count(b"\n")
        for match in _MESSAGE.finditer(flat):
            if _RAISED.match(match["what"]):  # the end of a traceback, already read as an ordinary line
                continue
            line = first_line + text.count(b"\n", 0, match.start())
            clue = read_message(shown(match["what"]), shown(match["fix"]), file=self._file, line=line)
            seen = self._first.get((clue.rule, clue.weight))
            if seen is None or seen[0].fix is None:  # the same line, already read as an ordinary line
                self._first[clue.rule, clue.weight] = clue, self._progress


def _with_frame(text: str, frame: Frame | None) -> str:
    return f"{text} (at {shown(str(frame).encode())})" if frame else text


def _keywords() -> tuple[bytes, ...]:
    """Return the folded keywords of all patterns; a line without any of them is skipped."""
    return keywords_of_signs(tuple(pattern.pattern for pattern in _WATCHED))
