"""An asynchronous, streaming client of the OpenAI API in a thread: it only records what arrives, and when.

Responses are parsed after the load has ended, so that the client does little work while it is timed. Its own delay is
measured: the time from when a request is due until it is sent, and the lateness of its event loop.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TICK_S = 0.01
"""Interval at which the lateness of the event loop is measured."""
IDLE_S = 2.0
"""Longest idle time of a reused connection: servers close idle connections after five seconds, and a request on a
connection that is just being closed would fail."""
PATH = "/v1/completions"


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are from time.perf_counter()."""

    number: int
    prompt: str
    due_s: float
    """When loadgen issued it, or when it got its turn."""
    sent_s: float | None = None
    """When the client started to connect, or reused a connection."""
    http: int | None = None
    failure: str = ""
    """The transport's reason for an incomplete answer."""
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    """Time and bytes of each read."""
    done_s: float = 0.0
    max_tokens: int | None = None
    """The tokens of its answer; None: as in the fields of all requests."""
    waited_s: float = 0.0
    """How long it waited for its turn after loadgen had issued it."""


class Client:
    """Sends requests to one server from a thread with an event loop; a context manager."""

    def __init__(self, url: str, body: Mapping[str, Any], *, timeout_s: float) -> None:
        self._url, self._body, self._timeout_s = url + PATH, body, timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.late_s: list[float] = []
        """Lateness of each tick of the event loop."""

    def __enter__(self) -> "Client":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def send(self, exchange: Exchange, done: Callable[[Exchange], object]) -> None:
        """Send a request from any thread; `done` is called in the client's thread when it has succeeded or failed."""
        with suppress(
            RuntimeError
        ):  # the trial is over, but loadgen's thread, which cannot be stopped, still issues requests
            self._loop.call_soon_threadsafe(self._begin, exchange, done)

    def _begin(self, exchange: Exchange, done: Callable[[Exchange], object]) -> None:
        task = self._loop.create_task(self._exchange(exchange, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())
        self._loop.close()

    async def _live(self) -> None:
        self._stop = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_note_sent)
        trace.on_connection_reuseconn.append(_note_sent)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[trace]) as self._session:
            ticks = self._loop.create_task(self._tick())
            self._ready.set()
            await self._stop.wait()
            for task in (ticks, *self._tasks):
                task.cancel()
            await asyncio.gather(ticks, *self._tasks, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.late_s.append(max(0.0, time.perf_counter() - began_s - TICK_S))

    async def _exchange(self, exchange: Exchange, done: Callable[[Exchange], object]) -> None:
        try:
            await self._stream(exchange)
        except TimeoutError:
            exchange.failure = f"no complete answer within {self._timeout_s:g} s"
        except aiohttp.ClientError as error:
            exchange.failure = f"connection: {type(error).__name__}"
        except OSError as error:
            exchange.failure = f"connection: {error.strerror or type(error).__name__}"
        except Exception as error:  # noqa: BLE001 - loadgen waits for every request, also for failed ones
            exchange.failure = f"connection: {type(error).__name__}: {error}"
        exchange.done_s = time.perf_counter()
        done(exchange)

    async def _stream(self, exchange: Exchange) -> None:
        own = {} if exchange.max_tokens is None else {"max_tokens": exchange.max_tokens}
        body = json.dumps({**self._body, **own, "prompt": exchange.prompt}).encode()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers, trace_request_ctx=exchange) as answer:
            exchange.http = answer.status
            async for part in answer.content.iter_any():
                exchange.parts.append((time.perf_counter(), part))


async def _note_sent(session: Any, context: Any, parameters: Any) -> None:
    exchange = context.trace_request_ctx
    if exchange.sent_s is None:
        exchange.sent_s = time.perf_counter()
