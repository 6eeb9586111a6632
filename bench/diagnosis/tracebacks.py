"""Find the place in somebody's code that raised an exception, among the lines of many ranks."""

import re
from dataclasses import dataclass

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
