"""A worker process that tokenises blocks and checksums files: `python -m jobs.data.worker PARENT` (see `workers.py`).

It reads one JSON object per line: first its settings, then jobs; each job gets one line as its result. It ends at the
end of its input, or when the process with the id PARENT has ended.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from bench.contract import codec
from bench.contract.data import Data
from bench.errors import BenchError
from jobs.data import tokenization
from jobs.data.records import Block
from jobs.data.writing import described

POLL_S = 0.5


def main() -> None:
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        for answer in answers(sys.stdin):
            print(answer, flush=True)
    except BrokenPipeError:
        os._exit(1)


def answers(lines: Iterable[str]) -> Iterator[str]:
    """Yield the result of each job; the first line has the settings."""
    remaining = iter(lines)
    settings, encoder = json.loads(next(remaining)), cache(_encoder)
    for line in remaining:
        try:
            answer: dict[str, Any] = {"done": _result(json.loads(line), settings, encoder)}
        except BenchError as error:
            answer = {"error": {"what": error.what, "where": error.where, "fix": error.fix, "rule": error.rule}}
        except OSError as error:
            answer = {"os_error": [error.errno, error.strerror, error.filename and str(error.filename)]}
        yield json.dumps(answer)


def _encoder(data: str, tokenizer: str) -> tokenization.Encoder:
    return tokenization.encoder_of(codec.typed(Data, json.loads(data)), Path(tokenizer))


def _result(job: dict[str, Any], settings: dict[str, Any], encoder: Any) -> dict[str, Any]:
    """Do a job: describe a file, or tokenise a block."""
    if "file" in job:
        return described(Path(job["file"]))
    data, block, folder = settings["data"], Block(**job["block"]), Path(settings["folder"])
    encoding = encoder(json.dumps(data), settings["tokenizer"])
    return asdict(
        tokenization.tokenize_block(block, job["number"], folder, data=codec.typed(Data, data), encoder=encoding)
    )


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
