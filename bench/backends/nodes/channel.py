"""A connection between two nodes: JSON objects, one a line, both ways. Silence, or its end, means that a node is gone.

Each side proves that it knows the run's token, which never crosses the network, before the other one obeys it.
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
"""A node that has said nothing for so long is gone; a killed process is noticed at once, by its closed connection."""
LONGEST_LINE = 2**21
TOKEN = "RUNSTOP_TOKEN"
"""The environment variable with what all nodes of a run know, and nobody else."""


class LostError(Exception):
    """The other side is gone."""


class Channel:
    """One side of a connection. Any thread may send; one receives."""

    def __init__(self, incoming: int, outgoing: int, *, is_noisy: bool = False) -> None:
        """`is_noisy`: a login shell may say something before the other side does."""
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
            LostError: the other side is gone, or takes nothing any more.
        """
        left = memoryview(json.dumps({"kind": kind} | content).encode() + b"\n")
        with self._sending:
            if self._is_closed:
                raise LostError("the connection is closed")
            while left:
                try:
                    left = left[os.write(self._outgoing, left) :]
                except BlockingIOError:
                    if not select.select([], [self._outgoing], [], SILENT_S)[1]:
                        raise LostError(f"takes nothing for {SILENT_S:.0f} s") from None
                except OSError as error:
                    raise LostError(error.strerror) from None

    def received(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the messages that have come, after at most so long; beats are left out.

        Raises:
            LostError: the other side is gone, and everything that it had sent before has been returned.
        """
        if not self._is_lost and select.select([self.incoming], [], [], wait_s)[0]:
            self._read()
        messages = [message for message in self._messages if message["kind"] != "beat"]
        self._messages.clear()
        if not messages and self._is_lost:
            raise LostError("the connection has ended")
        if not messages and time.monotonic() - self._heard_s > SILENT_S:
            raise LostError(f"silent for {SILENT_S:.0f} s")
        return messages

    def next(self, within_s: float, *kinds: str) -> dict[str, Any]:
        """Return the next message, which must be of one of these kinds.

        Raises:
            LostError: it does not come, or is of another kind.
        """
        until_s = time.monotonic() + within_s
        while (left_s := until_s - time.monotonic()) > 0:
            if messages := self.received(min(left_s, 0.2)):
                if messages[0]["kind"] not in kinds:
                    raise LostError(f"says {messages[0]['kind']!r:.40}, and not {' or '.join(kinds)}")
                self._messages.extendleft(reversed(messages[1:]))
                return messages[0]
        raise LostError(f"does not answer within {within_s:.0f} s")

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Close the descriptors, which are this channel's own; nothing is sent to who gets their numbers next."""
        with self._sending:
            if not self._is_closed:
                self._is_lost = self._is_closed = True
                for descriptor in {self.incoming, self._outgoing}:
                    os.close(descriptor)

    def _read(self) -> None:
        """Take in what is there now."""
        try:
            while True:
                data = os.read(self.incoming, 2**18)
                if not data:
                    self._is_lost = True
                    return
                self._heard_s = time.monotonic()
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(self._unread) > LONGEST_LINE:
                    raise ValueError("a line without end")
        except BlockingIOError:
            return
        except (OSError, ValueError):  # what no runner sends
            self._is_lost = True

    def _take(self, line: bytes) -> None:
        try:
            self._messages.append(_message(line))
            self._is_noisy = False
        except ValueError:
            if not self._is_noisy:
                raise


def _message(line: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("no message")
    return message


def of_socket(connection: socket.socket) -> Channel:
    """Return a channel that owns the socket's descriptor."""
    connection.setblocking(False)
    descriptor = connection.detach()
    return Channel(descriptor, descriptor)


def beat(channels: list[Channel]) -> None:
    """Tell the other sides from a thread that this process lives, whatever it does, until all of them are closed."""

    def beating() -> None:
        while not all(channel.is_closed for channel in channels):
            for channel in list(channels):
                with suppress(LostError):
                    channel.send("beat")
            time.sleep(BEAT_S)

    threading.Thread(target=beating, name="beats", daemon=True).start()


def token() -> str:
    """Return the run's token, and take it out of the environment, which ranks inherit.

    Raises:
        ConfigError: there is none.
    """
    found = os.environ.pop(TOKEN, "")
    if not found:
        fix = f"set it to the same long random text on every node: {TOKEN}=$(openssl rand -hex 32)"
        raise ConfigError("the nodes of this run have no token by which they know each other", where=TOKEN, fix=fix)
    return found


def challenge() -> str:
    """Return what the other side must answer."""
    return secrets.token_hex(16)


def proof(token: str, challenge: str, who: str) -> str:
    """Return the answer to a challenge, which only those can give who know the token."""
    return hmac.new(token.encode(), f"{challenge} {who}".encode(), "sha256").hexdigest()


def is_proven(given: object, token: str, challenge: str, who: str) -> bool:
    """Return whether an answer to a challenge is the right one."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, challenge, who).encode())
