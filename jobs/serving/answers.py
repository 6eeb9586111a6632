"""What came back of a request: its tokens and their times, and whether it is what was asked for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from jobs.serving.client import Exchange

OK, SHORT, LONG, PROMPT, MISCOUNTED, STREAM = "ok", "short", "long", "prompt", "miscounted", "stream"
"""What a request came to, beside `http 500`, `timeout` and `connection`: as asked for; fewer or more tokens; the prompt
had another number of tokens; more or far fewer tokens arrived than the server counts; an error in the stream."""
TOGETHER = 0.1
"""A chunk came together with the one before if its gap is below this share of the mean gap of its answer."""
FEW = 0.5
"""A server may count tokens of which no text is to be seen, but not as many as this share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request, judged. Times are in seconds from its arrival; None for what it has not."""

    number: int
    due_s: float
    status: str
    detail: str = ""
    first_s: float | None = None
    last_s: float | None = None
    tokens_in: int | None = None
    """As the server counts them; None where it does not say."""
    tokens_out: int | None = None
    num_chunks: int = 0
    num_together: int = 0
    """Chunks that arrived together with the one before."""

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or (self.tokens_out or 0) < 2:
            return None
        return (self.last_s - self.first_s) / ((self.tokens_out or 0) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every request of a load asks for."""

    tokens_in: int
    tokens_out: int
    tokenizer: Tokenizer


def judged(exchange: Exchange, asked: Asked) -> Answer:
    """Return what a request came to."""
    if exchange.failure:
        kind = "timeout" if "within" in exchange.failure else "connection"
        return _failed(exchange, kind, exchange.failure)
    if exchange.http != 200:
        said = b"".join(part for _, part in exchange.parts)[:200].decode(errors="replace")
        return _failed(exchange, f"http {exchange.http}", said)
    events = list(_events(exchange.parts))
    wrong = next((event["error"] for _, event in events if "error" in event), None)
    if wrong is not None:
        return _failed(exchange, STREAM, str(wrong)[:200])
    chunks = [(at_s, choice.get("text") or "") for at_s, event in events for choice in _choices(event)]
    if not chunks or not _has_ended(exchange.parts, events):
        return _failed(exchange, STREAM, f"the stream ended in the middle, after {len(chunks)} chunks")
    return _counted(exchange, asked, chunks, _usage(events))


def _counted(exchange: Exchange, asked: Asked, chunks: list[tuple[float, str]], usage: dict[str, Any]) -> Answer:
    """Return an answer that arrived whole, with what the server and we count of it."""
    times = [at_s - exchange.due_s for at_s, _ in chunks]
    tokens_in, said = usage.get("prompt_tokens"), usage.get("completion_tokens")
    tokens_out = said if isinstance(said, int) else len(chunks)
    text = "".join(text for _, text in chunks)
    status, detail = OK, ""
    if tokens_out != asked.tokens_out:
        status = SHORT if tokens_out < asked.tokens_out else LONG
        detail = f"{tokens_out} tokens of {asked.tokens_out}"
    elif isinstance(tokens_in, int) and tokens_in != asked.tokens_in:
        status, detail = PROMPT, f"the server counts {tokens_in} tokens in the prompt of {asked.tokens_in}"
    elif len(chunks) > tokens_out or max(len(chunks), _num_tokens(asked.tokenizer, text)) < FEW * tokens_out:
        status, detail = MISCOUNTED, f"{tokens_out} tokens by the server, in {len(chunks)} chunks: {text[:80]!r}"
    return Answer(
        number=exchange.number,
        due_s=exchange.due_s,
        status=status,
        detail=detail,
        first_s=times[0],
        last_s=times[-1],
        tokens_in=tokens_in if isinstance(tokens_in, int) else None,
        tokens_out=tokens_out,
        num_chunks=len(chunks),
        num_together=_num_together(times),
    )


def _failed(exchange: Exchange, status: str, detail: str) -> Answer:
    return Answer(number=exchange.number, due_s=exchange.due_s, status=status, detail=detail)


def _events(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the JSON of each server-sent event, with the time at which its last byte was there."""
    rest = b""
    for at_s, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield at_s, _object(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {"error": f"not JSON: {data[:80]!r}"}
    return found if isinstance(found, dict) else {"error": f"not an object: {data[:80]!r}"}


def _choices(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what holds a token; a last chunk that only says why the answer ended holds none."""
    for choice in event.get("choices") or []:
        if choice.get("text") or choice.get("finish_reason") is None:
            yield choice


def _has_ended(parts: list[tuple[float, bytes]], events: list[tuple[float, dict[str, Any]]]) -> bool:
    """Return whether the server said that the answer is over, in either of the ways that servers have."""
    is_done = b"[DONE]" in b"".join(part for _, part in parts[-2:])
    return is_done or any(choice.get("finish_reason") for _, event in events for choice in event.get("choices") or [])


def _usage(events: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Return what the server counts; empty where it does not say."""
    return next((event["usage"] for _, event in reversed(events) if event.get("usage")), {})


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _num_together(times: list[float]) -> int:
    if len(times) < 2:
        return 0
    mean_s = (times[-1] - times[0]) / (len(times) - 1)
    return sum(later - earlier < TOGETHER * mean_s or later == earlier for earlier, later in pairwise(times))
