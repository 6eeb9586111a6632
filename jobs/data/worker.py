"""A process that tokenises blocks and checksums files: `python -m jobs.data.worker`, started by `jobs.data.workers`.

It reads one JSON object a line: first its settings, then what to do; each gets one line of an answer. It ends with its
input, and at once when the process that started it is gone.
"""

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contract.data import DataSource, PromptType
from bench.errors import BenchError
from jobs.data import token_blocks
from jobs.data import tokenizer as tokenizers
from jobs.data.blocks import Block
from jobs.data.files import described

POLL_S = 0.5


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    settings = json.loads(sys.stdin.readline())
    source, kind = DataSource[settings["source"]], settings["prompt_type"] and PromptType[settings["prompt_type"]]
    by = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            by = by or tokenizers.load(Path(settings["tokenizer"]))
            if "file" in job:
                done: dict[str, Any] = described(Path(job["file"]))
            else:
                block, folder = Block(**job["block"]), Path(settings["folder"])
                done = asdict(token_blocks.make(block, job["number"], folder, source=source, kind=kind, by=by))
            answer = {"done": done}
        except BenchError as error:
            answer = {"error": {"what": error.what, "where": error.where, "fix": error.fix, "rule": error.rule}}
        except OSError as error:
            answer = {"os_error": [error.errno, error.strerror, error.filename and str(error.filename)]}
        print(json.dumps(answer), flush=True)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


if __name__ == "__main__":
    main()
