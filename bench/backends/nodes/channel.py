"""A connection between two nodes that carries JSON messages, one per line, in both directions.

A node is lost if the connection is closed or nothing arrives for SILENT_S. Each side authenticates by a challenge and
an HMAC with the run's token, so the token itself is never sent.
"""

import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from bench.errors import ConfigError

BEAT_S = 1.0
SILENT_S = 15.0
"""A node that has sent nothing for this long is lost. A killed process is detected at once by its closed connection."""
LONGEST_LINE = 2**21
TOKEN = "RUNSTOP_TOKEN"
"""The environment variable with the secret that the nodes of a run share."""


class LostError(Exception):
    """The connection to the other side is lost."""


class Channel:
    """One side of a connection. Any thread may send; only one thread receives."""

    def __init__(self, incoming: int, outgoing: int, *, is_noisy: bool = False) -> None:
        """`is_noisy`: lines before the first message are skipped; a login shell may print some."""
        self.incoming, self._outgoing = incoming, outgoing
        self._sending = threading.Lock()
        self._unread, self._messages = b"", deque[dict[str, Any]]()
        self._heard_s = time.monotonic()
        self._is_lost, self._is_noisy, self._is_closed = False, is_noisy, False
        for descriptor in {incoming, outgoing}:
            os.set_blocking(descriptor, False)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message.

        Raises:
            LostError: the connection is lost, or the other side does not read.
        """
        left = memoryview(json.dumps({"kind": kind} | content).encode() + b"\n")
        with self._sending:
            if self._is_closed:
                raise LostError("this process has already closed the connection")
            while left:
                try:
                    left = left[os.write(self._outgoing, left) :]
                except BlockingIOError:
                    if not select.select([], [self._outgoing], [], SILENT_S)[1]:
                        raise LostError(
                            f"the other node has not read the messages of this node for {SILENT_S:.0f} s"
                        ) from None
                except OSError as error:
                    raise LostError(error.strerror) from None

    def received(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the messages that have arrived, after waiting at most `wait_s`; heartbeats are left out.

        Raises:
            LostError: the connection is lost, and all messages sent before have been returned.
        """
        if not self._is_lost and select.select([self.incoming], [], [], wait_s)[0]:
            self._read()
        messages = [message for message in self._messages if message["kind"] != "beat"]
        self._messages.clear()
        if not messages and self._is_lost:
            raise LostError("the connection was closed")
        if not messages and time.monotonic() - self._heard_s > SILENT_S:
            raise LostError(f"no heartbeat has arrived for {SILENT_S:.0f} s")
        return messages

    def next(self, within_s: float, *kinds: str) -> dict[str, Any]:
        """Return the next message, which must be of one of these kinds.

        Raises:
            LostError: no message arrives, or it is of another kind.
        """
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            if messages := self.received(min(left_s, 0.2)):
                if messages[0]["kind"] not in kinds:
                    raise LostError(
                        f"this node expects the message {' or '.join(kinds)}, but received {messages[0]['kind']!r:.40}"
                    )
                self._messages.extendleft(reversed(messages[1:]))
                return messages[0]
        raise LostError(f"no answer has arrived within {within_s:.0f} s")

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Close both descriptors. Later calls of `send` fail, because the numbers may be reused."""
        with self._sending:
            if not self._is_closed:
                self._is_lost = self._is_closed = True
                for descriptor in {self.incoming, self._outgoing}:
                    os.close(descriptor)

    def _read(self) -> None:
        """Read all available data without blocking."""
        try:
            while True:
                data = os.read(self.incoming, 2**18)
                if not data:
                    self._is_lost = True
                    return
                self._heard_s = time.monotonic()
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._parse(line)
                if len(self._unread) > LONGEST_LINE:
                    raise ValueError("the line is too long for a message")
        except BlockingIOError:
            return
        except (OSError, ValueError):  # ValueError: not a message from runstop
            self._is_lost = True

    def _parse(self, line: bytes) -> None:
        try:
            self._messages.append(_message(line))
            self._is_noisy = False
        except ValueError:
            if not self._is_noisy:
                raise


def _message(line: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("the received line is not a message from runstop")
    return message


def from_socket(connection: socket.socket) -> Channel:
    """Return a channel that takes over the socket's descriptor."""
    connection.setblocking(False)
    descriptor = connection.detach()
    return Channel(descriptor, descriptor)


def beat(channels: list[Channel]) -> None:
    """Send heartbeats on all channels from a thread, until all of them are closed."""

    def beating() -> None:
        while not all(channel.is_closed for channel in channels):
            for channel in list(channels):
                with suppress(LostError):
                    channel.send("beat")
            time.sleep(BEAT_S)

    threading.Thread(target=beating, name="heartbeat", daemon=True).start()


def token() -> str:
    """Return the run's token and remove it from the environment, which ranks inherit.

    Raises:
        ConfigError: it is not set.
    """
    value = os.environ.pop(TOKEN, "")
    if not value:
        fix = f"run `openssl rand -hex 32` once, and set {TOKEN} on every node to this one output"
        raise ConfigError("the token that authenticates the nodes of this run is not set", where=TOKEN, fix=fix)
    return value


def challenge() -> str:
    """Return a random challenge for the other side."""
    return secrets.token_hex(16)


def proof(token: str, challenge: str, who: str) -> str:
    """Return the answer to a challenge: an HMAC with the token over the challenge and the sender's role `who`."""
    return hmac.new(token.encode(), f"{challenge} {who}".encode(), "sha256").hexdigest()


def is_valid_proof(given: object, token: str, challenge: str, who: str) -> bool:
    """Return whether an answer to a challenge is correct."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, challenge, who).encode())
