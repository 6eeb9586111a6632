"""Serve the dashboard on localhost until Ctrl-C."""

import errno
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from bench.dashboard.app import app
from bench.errors import ConfigError, Stopped
from bench.runs import names
from bench.runs.folder import short

ADDRESS = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 8790, 20
"""The ports that are tried if the user names none, so that several dashboards run at once."""
_STOP_S = 2
"""How long open requests may take to end."""


def serve(root: Path, *, port: int | None, say: Callable[[str], None] = print) -> None:
    """Answer requests until a signal ends the process; `say` prints the address with its token.

    Raises:
        ConfigError: the folder does not exist, or the port is in use.
    """
    names.require_root(root)
    token = secrets.token_urlsafe(24)
    with _bound(port) as listening:
        at = listening.getsockname()[1]
        say(f"dashboard of {short(root)}: http://{ADDRESS}:{at}/?token={token}")
        say(f"Only this machine can open it; from another: ssh -L {at}:{ADDRESS}:{at} HOST. Ctrl-C ends it.")
        config = uvicorn.Config(
            app(root, token), log_level="warning", access_log=False, server_header=False, lifespan="off",
            proxy_headers=False, ws="none", timeout_graceful_shutdown=_STOP_S, limit_concurrency=64,
        )  # fmt: skip
        _run(uvicorn.Server(config), listening)
    say("the dashboard has ended")


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    """Run the server; the signal that ended it has done its work."""
    assert threading.current_thread() is threading.main_thread(), "signals reach the main thread only"
    try:
        server.run(sockets=[listening])
    except (KeyboardInterrupt, Stopped):
        return


def _bound(port: int | None) -> socket.socket:
    """Return a socket that listens on localhost.

    Raises:
        ConfigError: the port is in use, or this user may not use it.
    """
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 0]
    for candidate in ports:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, candidate))
            listening.listen()
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE and candidate != ports[-1]:
                continue
            what = "another program uses this port" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise ConfigError(
                what,
                where=f"--port {candidate}",
                fix="choose another port, or remove --port: runstop then chooses a free port",
            ) from error
        return listening
    raise AssertionError("the loop over the ports ended without a socket and without an error")
