"""The client of a load: its record of responses and of its own delay, with a stub server that injects faults."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from helpers import stub_server
from helpers.ranks import free_port
from jobs.serving.client import Client, Exchange

BODY = {"model": "tiny", "max_tokens": 6, "stream": True}
BEFORE = {"none": 0, "errors": 11, "hangs": 14}
"""Requests before the next one that fails (one in four) or hangs (one in five)."""
PROMPT = "w1 w2 w3"
Serve = Callable[[str], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve in a thread; return the address. The fault applies from the first request."""
    with ExitStack() as stack:
        yield lambda fault: stack.enter_context(stub_server.in_a_thread(fault, before=BEFORE[fault]))


def exchanged(url: str, count: int = 1, *, timeout_s: float = 20.0) -> tuple[list[Exchange], Client]:
    """Return requests that were sent together, in the order of completion."""
    ended = queue.SimpleQueue[Exchange]()
    with Client(url, BODY, timeout_s=timeout_s) as client:
        for number in range(count):
            client.send(Exchange(number, PROMPT, time.perf_counter()), ended.put)
        return [ended.get(timeout=30) for _ in range(count)], client


def test_responses_are_recorded_with_their_times(serve: Serve) -> None:
    actual, client = exchanged(serve("none"), 12)
    assert sorted(exchange.number for exchange in actual) == list(range(12))
    for exchange in actual:
        assert (exchange.http, exchange.failure) == (200, "")
        text = b"".join(part for _, part in exchange.parts).decode()
        assert text.count("data: ") == BODY["max_tokens"] + 2 and text.endswith("data: [DONE]\n\n")
        assert '"prompt_tokens": 3' in text, "the stub got the prompt"
        times = [exchange.due_s, exchange.sent_s, *(at_s for at_s, _ in exchange.parts), exchange.done_s]
        assert None not in times and times == sorted(times) and len(exchange.parts) > 2
    assert client.late_s and all(0 <= late_s < 5 for late_s in client.late_s)


@pytest.mark.parametrize(
    ("fault", "timeout_s", "http", "failure"),
    [("errors", 20.0, 500, ""), ("hangs", 0.3, 200, "no complete answer within 0.3 s")],
)
def test_the_reason_of_a_failed_request(serve: Serve, fault: str, timeout_s: float, http: int, failure: str) -> None:
    ((exchange,), _) = exchanged(serve(fault), timeout_s=timeout_s)
    assert (exchange.http, exchange.failure) == (http, failure) and exchange.done_s > exchange.due_s


def test_a_refused_connection_fails_the_request() -> None:
    ((exchange,), _) = exchanged(f"http://127.0.0.1:{free_port()}")
    assert exchange.http is None and exchange.failure.startswith("connection: ") and not exchange.parts
    assert exchange.sent_s is not None and exchange.due_s <= exchange.sent_s <= exchange.done_s


def test_an_unexpected_error_fails_the_request() -> None:
    ended = queue.SimpleQueue[Exchange]()
    with Client("http://127.0.0.1:1", {"stop": {1}}, timeout_s=20) as client:
        client.send(Exchange(0, PROMPT, time.perf_counter()), ended.put)
        exchange = ended.get(timeout=30)
    assert exchange.failure == "connection: TypeError: Object of type set is not JSON serializable"
    assert (exchange.http, exchange.sent_s) == (None, None) and exchange.done_s >= exchange.due_s


def test_closing_the_client_cancels_requests_and_sends_no_more(serve: Serve) -> None:
    ended = queue.SimpleQueue[Exchange]()
    began_s = time.monotonic()
    with Client(serve("hangs"), BODY, timeout_s=60) as client:
        for number in range(5):  # one of them is not answered in an hour
            client.send(Exchange(number, PROMPT, time.perf_counter()), ended.put)
        assert len([ended.get(timeout=30) for _ in range(4)]) == 4
    client.send(Exchange(9, PROMPT, time.perf_counter()), ended.put)
    assert time.monotonic() - began_s < 30 and ended.empty()
