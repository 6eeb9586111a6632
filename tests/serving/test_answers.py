"""Judging responses from their bytes: statuses, counts, times and bounds."""

import json
from typing import Any

import pytest

from helpers import serving
from jobs.serving.answers import Answer, RequestSpec, judged
from jobs.serving.client import Exchange

DUE_S = 16.0
DONE = b"data: [DONE]\n\n"
Parts = list[tuple[float, bytes]]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RequestSpec:
    from jobs.serving import prompts

    own = prompts.tokenizer(serving.tokenizer(tmp_path_factory.mktemp("answers") / "model"))
    return RequestSpec(tokens_in=16, tokens_out=4, tokenizer=own)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str | None, *, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish_reason}])


def usage(tokens_in: object, tokens_out: object) -> bytes:
    return event(choices=[], usage={"prompt_tokens": tokens_in, "completion_tokens": tokens_out})


def at(*parts: tuple[float, bytes], http: int | None = 200, failure: str = "") -> Exchange:
    """Return a request with parts at these seconds after it was due; it was sent late."""
    arrived = [(DUE_S + s, data) for s, data in parts]
    return Exchange(3, "", DUE_S, sent_s=DUE_S + 0.25, http=http, failure=failure, parts=arrived)


def words(*times: float) -> Parts:
    return [(at_s, token(f" w{number}")) for number, at_s in enumerate(times)]


def status_of(exchange: Exchange, spec: RequestSpec) -> tuple[str, str]:
    answer = judged(exchange, spec)
    return answer.status, answer.detail


def test_a_valid_answer_has_its_counts_and_token_times(spec: RequestSpec) -> None:
    """A last chunk with only a finish_reason is not a token; an empty text without one is a token."""
    last = (3.0, token("", finish_reason="length") + usage(16, 4) + DONE)
    one = (0.5, b": a remark\n\n" + token(" w1"))
    answer = judged(at(one, (1.0, token("")), (1.5, token(None)), (2.0, token(" w2")), last), spec)
    expected = Answer(
        number=3, due_s=DUE_S, status="ok", first_s=0.5, last_s=2.0, tokens_in=16, tokens_out=4, num_chunks=4
    )
    assert answer == expected and answer.tpot_s == 1.5 / 3


def test_an_event_counts_when_its_last_byte_arrives(spec: RequestSpec) -> None:
    """One event is split; the end is marked by a finish_reason, without [DONE]."""
    raw = token(" w2 w3 w4", finish_reason="stop")
    answer = judged(at((1.0, token(" w1")), (2.0, raw[:9]), (4.0, raw[9:] + usage(16, 4))), spec)
    assert (answer.status, answer.first_s, answer.last_s, answer.num_chunks) == ("ok", 1.0, 4.0, 2)


def test_chunks_are_counted_if_the_server_reports_no_usage(spec: RequestSpec) -> None:
    answer = judged(at(*words(1, 2, 3, 4), (5, DONE)), spec)
    assert (answer.status, answer.tokens_in, answer.tokens_out) == ("ok", None, 4)
    assert status_of(at(*words(1, 2, 3), (5, DONE)), spec) == ("short", "3 instead of 4 tokens")
    assert judged(at(*words(1, 2, 3, 4), (5, usage("16", 4) + DONE)), spec).tokens_in is None
    first = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1})
    running = judged(at((0.5, first), *words(1, 2, 3, 4), (5, usage(16, 4) + token(" ", finish_reason="x"))), spec)
    assert (running.tokens_in, running.tokens_out) == (16, 4), "the last count is that of the whole answer"


@pytest.mark.parametrize(
    ("parts", "counts", "status", "detail"),
    [
        (words(1, 2, 3), (16, 3), "short", "3 instead of 4 tokens"),
        (words(1, 2, 3, 4), (16, 5), "long", "5 instead of 4 tokens"),
        (words(1, 2, 3, 4), (17, 4), "prompt", "the server reports 17 prompt tokens instead of 16"),
        (words(1, 2, 3, 4), (15, 4), "prompt", "the server reports 15 prompt tokens instead of 16"),
        (
            words(1, 2, 3, 4, 5),
            (16, 4),
            "miscounted",
            "the server reports 4 tokens, but sent 5 chunks: ' w0 w1 w2 w3 w4'",
        ),
        (words(1), (16, 4), "miscounted", "the server reports 4 tokens, but sent 1 chunks: ' w0'"),
        (words(1, 2), (16, 4), "ok", ""),
        ([(1, token("w1 w2"))], (16, 4), "ok", ""),
        (
            [(1, token("w" * 90))],
            (16, 4),
            "miscounted",
            f"the server reports 4 tokens, but sent 1 chunks: '{'w' * 80}'",
        ),
    ],
)
def test_a_mismatch_is_reported_with_both_counts(
    spec: RequestSpec, parts: Parts, counts: tuple[int, int], status: str, detail: str
) -> None:
    """Half of the tokens must be visible, as chunks or as words of the text."""
    assert status_of(at(*parts, (9, usage(*counts) + DONE)), spec) == (status, detail)


@pytest.mark.parametrize(
    ("exchange", "status", "detail"),
    [
        (at(failure="no complete answer within 0.3 s"), "timeout", "no complete answer within 0.3 s"),
        (at(failure="connection: refused"), "connection", "connection: refused"),
        (at((1, b"a" * 150), (2, b"b" * 150), http=503), "http 503", "a" * 150 + "b" * 50),
        (at((1, b"\xff!"), http=500), "http 500", "\ufffd!"),
        (at(*words(1), (2, event(error="e" * 300) + DONE)), "stream", "e" * 200),
        (at((1, b"data:" + b"{" * 100 + b"\n")), "stream", f"not JSON: b'{'{' * 80}'"),
        (at((1, b'data: ["' + b"x" * 100 + b'"]\n')), "stream", "not an object: b'[\"" + "x" * 78 + "'"),
        (at(*words(1, 2)), "stream", "the stream ended early, after 2 chunks"),
        (at((1, usage(16, 4) + DONE)), "stream", "the stream ended early, after 0 chunks"),
    ],
)
def test_a_failed_request_has_a_reason_and_no_times(
    spec: RequestSpec, exchange: Exchange, status: str, detail: str
) -> None:
    assert judged(exchange, spec) == Answer(number=3, due_s=DUE_S, status=status, detail=detail)


def test_the_end_of_a_stream_may_be_split(spec: RequestSpec) -> None:
    assert status_of(at(*words(1, 2, 3, 4), (5, b"data: [DO"), (6, b"NE]\n\n")), spec) == ("ok", "")
    early = [(0.5, DONE), *words(1, 2, 3, 4)]
    assert status_of(at(*early), spec) == ("stream", "the stream ended early, after 4 chunks")


@pytest.mark.parametrize(
    ("times", "together"),
    [
        ((1.0,), 0),
        ((0.0, 1.0), 0),
        ((2.0, 2.0), 1),
        ((2.0, 2.0, 2.0, 2.0), 3),
        ((4.0, 5.0, 24.0), 0),  # a tenth of the mean gap of 10 s
        ((0.0, 0.875, 20.0), 1),
        ((0.0, 8.0, 8.0, 8.25), 2),
    ],
)
def test_chunks_are_batched_below_a_tenth_of_the_mean_gap(
    spec: RequestSpec, times: tuple[float, ...], together: int
) -> None:
    assert judged(at(*words(*times), (30, DONE)), spec).num_together == together


@pytest.mark.parametrize(
    ("first_s", "last_s", "tokens_out", "tpot_s"),
    [(1.0, 3.0, 2, 2.0), (1.0, 3.0, 5, 0.5), (1.0, 3.0, 1, None), (1.0, 3.0, None, None), (None, 3.0, 2, None),
     (1.0, None, 2, None), (0.0, 3.0, 2, 3.0)],
)  # fmt: skip
def test_time_per_output_token_excludes_the_first_token(
    first_s: float | None, last_s: float | None, tokens_out: int | None, tpot_s: float | None
) -> None:
    answer = Answer(number=0, due_s=0, status="ok", first_s=first_s, last_s=last_s, tokens_out=tokens_out)
    assert answer.tpot_s == tpot_s
