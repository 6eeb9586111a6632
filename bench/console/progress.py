"""Show how far a long piece of work is: on a terminal one line that changes, in a pipe a line from time to time."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PIPE_S, TERMINAL_S = 60.0, 1.0
"""Seconds between two lines in a pipe, and between two updates on a terminal."""


@contextmanager
def shown(line: Callable[[], str], *, say: Callable[[str], None], every_s: float = PIPE_S) -> Iterator[None]:
    """Show a line, which is called for each update, until the block ends; `say` prints it in a pipe."""
    from rich.console import Console

    console, is_over = Console(stderr=True), threading.Event()
    with console.status("") if sys.stderr.isatty() else _nothing() as status:

        def report_progress() -> None:
            while not is_over.wait(TERMINAL_S if status else every_s):
                if status:
                    status.update(line())
                else:
                    say(line())

        reporter = threading.Thread(target=report_progress, daemon=True)
        reporter.start()
        try:
            yield
        finally:
            is_over.set()
            reporter.join()


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
