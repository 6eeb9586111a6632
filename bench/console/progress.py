"""Show progress while an image is imported, which takes minutes.

On a terminal it is one line that changes; in a pipe it is a new line every minute.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIPE_S, TERMINAL_S = 60.0, 1.0
"""Between two lines in a pipe, and two pictures on a terminal."""


@contextmanager
def shown(part: Path, *, say: Callable[[str], None], every_s: float = PIPE_S) -> Iterator[None]:
    """Show how long the block has taken and how much of the image is written, until the block ends."""
    from rich.console import Console

    console, began_s, is_over = Console(stderr=True), time.monotonic(), threading.Event()
    with console.status("") if sys.stderr.isatty() else _nothing() as status:

        def tell() -> None:
            while not is_over.wait(TERMINAL_S if status else every_s):
                line = state(part, time.monotonic() - began_s)
                if status:
                    status.update(line)
                else:
                    say(line)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            is_over.set()
            teller.join()


def state(part: Path, elapsed_s: float) -> str:
    """Return the time so far and the written size of the image; Enroot writes none of it before all is unpacked."""
    written = 0
    with suppress(FileNotFoundError):
        written = part.stat().st_size
    size = f"{written / 2**30:.2f} GiB of the image written" if written else "nothing of the image written yet"
    return f"importing for {int(elapsed_s) // 60}:{int(elapsed_s) % 60:02}, {size}"


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
