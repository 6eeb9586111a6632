"""The verb `dashboard`: runs and their history in a browser on this machine."""

import argparse
from functools import partial
from pathlib import Path

from bench.cli import arguments
from bench.errors import ConfigError


def _add_dashboard(verbs: arguments.Verbs) -> None:
    parser = arguments.add(
        verbs,
        _dashboard,
        help="show the runs of a folder in a browser on this machine, with live curves; it only reads",
        example="runs --port 8790",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="folder that holds the run folders (default: LOGDIR, else runs)",
    )
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port on localhost (default: the first free one from 8790)"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: use 1 to 65535, or 0 for any free port")
    return int(text)


def _dashboard(args: argparse.Namespace) -> int:
    try:
        from bench.dashboard import server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        what, fix = f"the package {error.name} is not installed", "pip install 'runstop[dashboard]'"
        raise ConfigError(what, where="runstop dashboard", fix=fix) from error
    from bench.runs import names

    server.serve(args.folder or names.root(), port=args.port, say=partial(print, flush=True))
    return 0


VERBS = (_add_dashboard,)
