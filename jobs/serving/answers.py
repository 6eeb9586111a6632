"""Judge the response to a request: its tokens and their times, and whether it is as requested."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from jobs.serving.client import Exchange

OK, TOO_SHORT, TOO_LONG, PROMPT, MISCOUNTED, STREAM = "ok", "short", "long", "prompt", "miscounted", "stream"
"""The status of a request, in addition to `http 500`, `timeout` and `connection`. short, long: fewer or more tokens
than requested. prompt: the prompt had another number of tokens. miscounted: the text does not match the token count
that the server reports. stream: an error in the stream."""
TOGETHER = 0.1
"""A chunk counts as batched with the one before if its gap is below this share of the mean gap of its answer."""
FEW = 0.5
"""A server may count tokens without visible text, but at least this share must be visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The judged response of one request. Times are in seconds since the request was due; None if unknown."""

    number: int
    due_s: float
    status: str
    detail: str = ""
    first_s: float | None = None
    last_s: float | None = None
    tokens_in: int | None = None
    """As the server reports it; None if it does not."""
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
class RequestSpec:
    """The token counts that every request of a load must have, and the tokenizer."""

    tokens_in: int
    tokens_out: int
    tokenizer: Tokenizer


def judged(exchange: Exchange, spec: RequestSpec) -> Answer:
    """Return the judged response of a request."""
    if exchange.failure:
        kind = "timeout" if "within" in exchange.failure else "connection"
        return _failed(exchange, kind, exchange.failure)
    if exchange.http != 200:
        body = b"".join(part for _, part in exchange.parts)[:200].decode(errors="replace")
        return _failed(exchange, f"http {exchange.http}", body)
    events = list(_events(exchange.parts))
    wrong = next((event["error"] for _, event in events if "error" in event), None)
    if wrong is not None:
        return _failed(exchange, STREAM, str(wrong)[:200])
    chunks = [(at_s, choice.get("text") or "") for at_s, event in events for choice in _choices(event)]
    if not chunks or not _has_ended(exchange.parts, events):
        return _failed(exchange, STREAM, f"the stream ended early, after {len(chunks)} chunks")
    return _counted(exchange, spec, chunks, _usage(events))


def _counted(exchange: Exchange, spec: RequestSpec, chunks: list[tuple[float, str]], usage: dict[str, Any]) -> Answer:
    """Return a complete answer, with the token counts of the server and of this client."""
    times = [at_s - exchange.due_s for at_s, _ in chunks]
    tokens_in, reported = usage.get("prompt_tokens"), usage.get("completion_tokens")
    tokens_out = reported if isinstance(reported, int) else len(chunks)
    text = "".join(text for _, text in chunks)
    status, detail = OK, ""
    if tokens_out != spec.tokens_out:
        status = TOO_SHORT if tokens_out < spec.tokens_out else TOO_LONG
        detail = f"{tokens_out} instead of {spec.tokens_out} tokens"
    elif isinstance(tokens_in, int) and tokens_in != spec.tokens_in:
        status, detail = PROMPT, f"the server reports {tokens_in} prompt tokens instead of {spec.tokens_in}"
    elif len(chunks) > tokens_out or max(len(chunks), _num_tokens(spec.tokenizer, text)) < FEW * tokens_out:
        status, detail = (
            MISCOUNTED,
            f"the server reports {tokens_out} tokens, but sent {len(chunks)} chunks: {text[:80]!r}",
        )
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
    """Yield the JSON of each server-sent event, with the arrival time of its last byte."""
    rest = b""
    for at_s, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield at_s, _object(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        return {"error": f"not JSON: {data[:80]!r}"}
    return event if isinstance(event, dict) else {"error": f"not an object: {data[:80]!r}"}


def _choices(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choices with a token; a last chunk with only a finish_reason has none."""
    for choice in event.get("choices") or []:
        if choice.get("text") or choice.get("finish_reason") is None:
            yield choice


def _has_ended(parts: list[tuple[float, bytes]], events: list[tuple[float, dict[str, Any]]]) -> bool:
    """Return whether the server marked the end of the answer, by [DONE] or by a finish_reason."""
    is_done = b"[DONE]" in b"".join(part for _, part in parts[-2:])
    return is_done or any(choice.get("finish_reason") for _, event in events for choice in event.get("choices") or [])


def _usage(events: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """Return the usage that the server reports; empty if it reports none."""
    return next((event["usage"] for _, event in reversed(events) if event.get("usage")), {})


def _num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _num_together(times: list[float]) -> int:
    if len(times) < 2:
        return 0
    mean_s = (times[-1] - times[0]) / (len(times) - 1)
    return sum(later - earlier < TOGETHER * mean_s or later == earlier for earlier, later in pairwise(times))
