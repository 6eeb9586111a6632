"""The numbers of one load, by hand: percentiles, rates, limits and why there are no token times."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from bench.contract.serving import Arrivals, LatencyLimits, Load
from bench.results.serving import LoadResult

LOAD = Load(name="burst", arrivals=Arrivals.burst, requests=4)
FOUR = LoadResult(
    load=LOAD,
    arrival_s=(1.0, 2.0, 4.0, 8.0),
    latency_s=(2.0, 4.0, 1.0, 3.0),
    ttft_s=(0.5, 0.25, 0.75, 1.0),
    tpot_s=(0.01, 0.02, 0.03, 0.04),
    tokens_out=(10, 20, 30, 40),
    status=("ok",) * 4,
    details=(),
    together=None,
    chunks_per_token=None,
    client_s={},
    validity="VALID",
    reason="",
    limits=LatencyLimits(latency_s=None, ttft_s=None, tpot_s=None),
    max_client_delay=0.1,
    line=1,
)
ONE_FAILED = replace(
    FOUR, status=("ok", "ok", "ok", "error"), latency_s=(2.0, 4.0, 1.0, None), tokens_out=(10, 20, 30, None)
)


def limits(latency_s: float | None = None, ttft_s: float | None = None, tpot_s: float | None = None) -> dict[str, Any]:
    return {"limits": LatencyLimits(latency_s=latency_s, ttft_s=ttft_s, tpot_s=tpot_s)}


def test_rates_are_those_from_the_first_arrival_to_the_last_token() -> None:
    """The last token is at 11 s, ten seconds after the first arrival; of the failed request none is."""
    assert (FOUR.duration_s, FOUR.output_throughput, FOUR.request_throughput, FOUR.num_failed) == (10.0, 10.0, 0.4, 0)
    assert FOUR.goodput is None and FOUR.meets_limits is None
    assert (ONE_FAILED.duration_s, ONE_FAILED.num_failed) == (5.0, 1)
    assert (ONE_FAILED.output_throughput, ONE_FAILED.request_throughput) == (12.0, 0.6)
    none = replace(FOUR, status=("error",) * 4, latency_s=(None,) * 4, tokens_out=(None,) * 4)
    assert (none.duration_s, none.output_throughput, none.request_throughput, none.num_failed) == (None, None, None, 4)


def test_percentiles_are_nearest_ranks_over_all_requests() -> None:
    shares = (0, 25, 26, 50, 51, 75, 76, 100)
    assert [FOUR.percentile_s(FOUR.latency_s, share) for share in shares] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [ONE_FAILED.percentile_s(ONE_FAILED.latency_s, share) for share in shares] == [1, 1, 2, 2, 4, 4, None, None]
    short = replace(FOUR, status=("ok", "short", "ok", "ok"))
    assert [short.percentile_s(short.latency_s, share) for share in shares] == [1, 1, 2, 2, 3, 3, None, None]


@pytest.mark.parametrize(
    ("changes", "meets", "goodput"),
    [
        (limits(latency_s=4.0), True, 0.4),
        (limits(latency_s=3.9), False, 0.3),
        (limits(ttft_s=1.0), True, 0.4),
        (limits(ttft_s=0.5), False, 0.2),
        (limits(tpot_s=0.04, latency_s=1.0), False, 0.1),
        (limits(tpot_s=0.02, ttft_s=0.25), False, 0.1),
        (limits(tpot_s=0.04) | {"together": 0.11}, None, None),
        (limits(latency_s=4.0) | {"together": 0.11}, True, 0.4),
        (limits(latency_s=4.0) | {"status": ("ok", "ok", "ok", "short")}, False, 0.3),
    ],
)
def test_requests_that_meet_every_limit_count(
    changes: dict[str, Any], meets: bool | None, goodput: float | None
) -> None:
    load = replace(FOUR, **changes)
    assert (load.meets_limits, load.goodput) == (meets, goodput)


@pytest.mark.parametrize(("num_late", "meets"), [(0, True), (1, True), (2, False)])
def test_99_percent_of_the_requests_meet_the_limits(num_late: int, meets: bool) -> None:
    late = tuple(itertools.chain((5.0,) * num_late, (1.0,) * (100 - num_late)))
    fields = ("arrival_s", "ttft_s", "tpot_s", "tokens_out")
    first = {name: 100 * getattr(FOUR, name)[:1] for name in fields}
    load = replace(FOUR, **first, status=("ok",) * 100, latency_s=late, **limits(latency_s=4.0))
    assert load.meets_limits is meets
    assert load.goodput == (100 - num_late) / (5.0 if num_late else 1.0), "all arrive at the same time"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"load": replace(LOAD, batched_tokens=True)}, "this server always sends several tokens per chunk"),
        ({"client_s": {"p99": 0.1}}, ""),
        ({"client_s": {"p99": 0.11}}, "the client overhead is 11 % of the TTFT"),
        ({"client_s": {"p50": 0.05}}, ""),
        ({"client_s": {"p50": 0.06, "p99": 0.01}}, "the client overhead is 12 % of the TTFT"),
        ({"client_s": {"mean": 0.0625}}, ""),
        ({"client_s": {"mean": 0.125}}, "the client overhead is 20 % of the TTFT"),
        ({"chunks_per_token": 0.9}, ""),
        ({"chunks_per_token": 0.89}, "the server sent several tokens per chunk: 0.89 chunks per token"),
        ({"together": 0.1}, ""),
        ({"together": 0.101}, "10 % of the chunks arrived together with the previous one"),
    ],
)
def test_token_times_are_left_out_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    load = replace(FOUR, **changes)
    assert load.no_token_times == reason


def test_the_share_of_the_client_is_the_largest_of_its_statistics() -> None:
    """Of latencies with a mean of 2.5 s, a median of 2 s and a p99 of 4 s."""
    assert FOUR.client_share is None
    assert replace(FOUR, client_s={"mean": 0.5, "p99": 0.4}).client_share == 0.2
    assert replace(FOUR, client_s={"mean": 0.25, "p99": 1.0}).client_share == 0.25
    assert replace(ONE_FAILED, client_s={"mean": 0.7, "p99": 1.0}).client_share == pytest.approx(0.3)
