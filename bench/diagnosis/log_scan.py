"""Find the signs of rules in a log of any size, encoding and content, and the lines that say most where there are none.

Logs are read in chunks. A line is looked at only if it holds one of a few words that some sign needs; most lines never
meet a regular expression.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path

from bench.diagnosis import tracebacks
from bench.diagnosis.suspects import AFTER, suspects
from bench.diagnosis.tracebacks import LABEL, Frame
from bench.diagnosis.words import of_signs
from bench.errors import with_rule
from bench.mlperf.reader import printable
from bench.rules import RULES
from bench.rules.signs import EVENTS, SIGNS, Weight


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
        before = flat[max(0, start - tracebacks.LOOK_BACK_BYTES) : start]
        if start < tracebacks.LOOK_BACK_BYTES:
            before = self._end + b"\n" + before
        return tracebacks.innermost(before, line)

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
