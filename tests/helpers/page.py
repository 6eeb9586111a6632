"""A page of ours, as a browser reads it."""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.figure import Figure
from plotly.offline import get_plotlyjs

from bench import report

NO_PICTURE = b"a figure that was not painted"


@contextmanager
def unpainted() -> Iterator[None]:
    """Put figures together as ever, and neither lay them out nor paint them, for tests that look at texts and tables.

    It takes most of the time of a report. test_figures.py and the other tests of pictures paint them.
    """

    def save(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(NO_PICTURE)

    with mock.patch.object(Figure, "savefig", save), mock.patch.object(Figure, "get_layout_engine", lambda _: None):
        yield


class Page(HTMLParser):
    """What a browser would show, what it would load, and what it would run."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.policy: str | None = None
        self.text = ""
        self.runs: list[str] = []
        """Texts of the scripts."""
        self.charts: dict[str, Any] = {}
        self._parts: list[str] | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._parts = None
        if tag == "script":
            self._parts = []
            self._id = dict(attrs).get("id") if "type" in dict(attrs) else ""
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"]
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            script = "".join(self._parts or ())
            if self._id == "charts":
                self.charts = json.loads(script)
            elif self._id == "library":  # page.js unpacks it into a script element
                self.runs.append(gzip.decompress(base64.b64decode(script)).decode())
            else:
                self.runs.append(script)
            self._parts = None

    def handle_data(self, data: str) -> None:
        if self._parts is not None:
            self._parts.append(data)
        elif self.tags[-1:] != ["style"]:
            self.text += data

    @property
    def runs_only_ours(self) -> bool:
        """Whether the scripts are the plotting library and our own, and its policy allows these two and no address."""
        ours = [get_plotlyjs(), (Path(report.__file__).parent / "page.js").read_text()]
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in self.runs]
        allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
        start = "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        return self.runs == ours and self.policy == f"{start}script-src {allowed}"
