"""What the processes of a job have printed, as files: the logs of a run whose folder is not seen from here.

The first pod of a run on Kubernetes prints each line of the run's files behind the name of the file.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import backends
from bench.errors import BenchError
from bench.runs import run as runs

_NAMED = re.compile(r"([\w.-]+\.(?:txt|out|err)): (.*)", re.DOTALL)


@contextmanager
def files(folder: Path) -> Iterator[list[Path]]:
    """Yield what a run's job has printed, where its backend keeps that and can be asked; else nothing."""
    texts: dict[str, list[str]] = defaultdict(list)
    with suppress(BenchError):
        run = runs.find(folder)
        backend = backends.get(run.backend)
        if run.jobs and isinstance(backend, backends.Printed):
            for process, text in backend.printed(run.id).items():
                for line in text.splitlines(keepends=True):
                    named = _NAMED.match(line)
                    texts[named[1] if named else f"{process}.out"].append(named[2] if named else line)
    with tempfile.TemporaryDirectory(prefix="runstop-printed-") as scratch:
        found = [Path(scratch, name) for name in sorted(texts)]
        for path in found:
            path.write_text("".join(texts[path.name]))
        yield found
