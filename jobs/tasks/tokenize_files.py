"""Tokenise the files of a config on the machine that submits runs, and print how many rows there are.

`python -m jobs.tasks.tokenize_files [--processes N]` reads the config from stdin, as JSON; `runstop prepare` starts it.
"""

import argparse
import json
import logging
import signal
import sys

from bench.contract import codec
from bench.contract.schema import Config
from bench.errors import BenchError, Stopped, stopped_by_signals
from jobs.data import prepare_rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.tasks.tokenize_files", description=__doc__)
    parser.add_argument("--processes", type=int, metavar="N", help="number of tokenizer processes")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        with stopped_by_signals():
            print(prepared(codec.typed(Config, json.load(sys.stdin)), args.processes))
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped; run the same command again to continue", file=sys.stderr)
        return stop.exit_code
    return 0


def prepared(config: Config, processes: int | None) -> str:
    """Prepare data.train_rows rows, or all rows of the files if it is null; return lines with folder and contents.

    Raises:
        ConfigError: DATADIR is not set, or as `prepare_rows.prepare`.
    """
    root = prepare_rows.named(config.cluster.paths.data)
    with prepare_rows.locked_folder(root):
        folder, manifest = prepare_rows.of_config(config, processes=processes)
    rows = manifest["splits"]["train"]["rows"]
    return "\n".join([*prepare_rows.described(manifest), f"{folder} is complete: data.train_rows is {rows}"])


if __name__ == "__main__":
    sys.exit(main())
