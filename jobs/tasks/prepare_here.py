"""Prepare the rows or the weights of a config on the machine that submits runs, and print what was written.

`python -m jobs.tasks.prepare_here rows|weights` reads the config from stdin, as JSON; `runstop prepare` starts it.
"""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench.contract import checkpoint, codec
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError, Stopped, stopped_by_signals


def main(argv: list[str] | None = None) -> int:
    works: dict[str, Callable[[Config, int | None], str]] = {"rows": rows, "weights": weights}
    parser = argparse.ArgumentParser(prog="python -m jobs.tasks.prepare_here", description=__doc__)
    parser.add_argument("what", choices=works)
    parser.add_argument("--processes", type=int, metavar="N", help="number of tokenizer processes")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        with stopped_by_signals():
            print(works[args.what](codec.typed(Config, json.load(sys.stdin)), args.processes))
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("stopped; run the same command again to continue", file=sys.stderr)
        return stop.exit_code
    return 0


def rows(config: Config, processes: int | None) -> str:
    """Prepare data.train_rows rows, or all rows of the files if it is null; return lines with folder and contents.

    Raises:
        ConfigError: DATADIR is not set, or as `prepare_rows.prepare`.
    """
    from jobs.data import prepare_rows

    root = prepare_rows.named(config.cluster.paths.data)
    with prepare_rows.locked_folder(root):
        folder, manifest = prepare_rows.of_config(config, processes=processes)
    count = manifest["splits"]["train"]["rows"]
    return "\n".join([*prepare_rows.described(manifest), f"{folder} is complete: data.train_rows is {count}"])


def weights(config: Config, processes: int | None) -> str:
    """Convert the Hugging Face folder MODEL as the engine stores the weights; return a line with the new folder.

    Raises:
        ConfigError: as `conversion.prepare`, or a package is missing.
        BenchError: a file cannot be read or written.
    """
    source, stored = Path(str(expanded(config.cluster.paths.model))), checkpoint.preferred(config)
    try:
        from jobs.weights import conversion

        prepared = conversion.prepare(source, config.model, stored=stored)
        conversion.convert(prepared)
    except ModuleNotFoundError as error:
        fix = "pip install 'runstop[engine,weights]', or run the same command where these packages are installed"
        raise ConfigError(f"the Python package {error.name} is not installed", where=sys.executable, fix=fix) from error
    except OSError as error:
        raise BenchError(
            f"the weights cannot be read or written: {error.strerror or error}",
            where=str(error.filename or source),
            fix="free disk space or correct the permissions, then run the same command again: finished layers are kept",
            rule="CFG-08",
        ) from error
    how = "" if stored is checkpoint.Stored.plain else f", linear layers in {stored.name.upper()}"
    return f"{prepared.folder} is complete: the weights of {config.model.name}{how}"


if __name__ == "__main__":
    sys.exit(main())
