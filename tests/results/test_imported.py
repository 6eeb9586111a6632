"""Results of other load generators: every number of their files in our units, and each refusal."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import LogError
from bench.results import imported
from bench.results.imported import Summary

TIMES = {f"{name}_{share}": None for name in ("latency", "ttft", "tpot") for share in ("p50", "p99")}
VLLM = {
    "model_id": "org/model",
    "completed": 90,
    "failed": 10,
    "request_rate": 4.5,
    "output_throughput": 321,
    "request_throughput": 1.5,
    "median_e2el_ms": 2500.0,
    "p99_e2el_ms": 4000,
    "median_ttft_ms": 125.0,
    "p99_ttft_ms": 250.0,
    "median_tpot_ms": 12.5,
    "p99_tpot_ms": 50.0,
}
OF_VLLM = Summary(
    source="vllm bench serve: org/model",
    load="4.5/s",
    requests=100,
    failed=10,
    output_throughput=321.0,
    request_throughput=1.5,
    latency_p50=2.5,
    latency_p99=4.0,
    ttft_p50=0.125,
    ttft_p99=0.25,
    tpot_p50=0.0125,
    tpot_p99=0.05,
)
ONLY_COUNTED = {"completed": 90, "request_throughput": None}
OF_COUNTED = Summary(
    source="vllm bench serve: model not named",
    load="None/s",
    requests=90,
    failed=None,
    output_throughput=None,
    request_throughput=None,
    **TIMES,
)
GUIDELLM = {
    "metadata": {},
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "poisson", "rate": 8}},
            "metrics": {
                "request_totals": {"total": 50, "successful": 48},
                "output_tokens_per_second": {"successful": {"mean": 640.0}, "total": {"mean": 1.0}},
                "requests_per_second": {"successful": {"mean": 7.5}},
                "request_latency": {"successful": {"percentiles": {"p50": 2.5, "p99": 4.0}}},
                "time_to_first_token_ms": {"successful": {"percentiles": {"p50": 125.0, "p99": 250.0}}},
                "inter_token_latency_ms": {"successful": {"percentiles": {"p50": 12.5, "p99": 50.0}}},
            },
        },
        {
            "config": {"strategy": {"type_": "synchronous"}},
            "metrics": {"request_totals": {"total": 1, "successful": 1}},
        },
        {"config": None, "metrics": {"request_totals": {"total": 2, "successful": 1}}},
    ],
}
OF_GUIDELLM = [
    Summary(
        source="GuideLLM",
        load="poisson 8/s",
        requests=50,
        failed=2,
        output_throughput=640.0,
        request_throughput=7.5,
        latency_p50=2.5,
        latency_p99=4.0,
        ttft_p50=0.125,
        ttft_p99=0.25,
        tpot_p50=0.0125,
        tpot_p99=0.05,
    ),
    *(
        Summary(
            source="GuideLLM",
            load=load,
            requests=requests,
            failed=requests - 1,
            output_throughput=None,
            request_throughput=None,
            **TIMES,
        )
        for load, requests in (("synchronous", 1), ("load", 2))
    ),
]
AIPERF = {
    "aiperf_version": "0.13.0",
    "request_count": {"avg": 47.0},
    "error_request_count": {"avg": 3.0},
    "request_latency": {"unit": "s", "p50": 2.5, "p99": 4.0},
    "time_to_first_token": {"unit": "us", "p50": 125_000.0, "p99": 250_000.0},
    "inter_token_latency": {"unit": "ns", "p50": 12_500_000.0, "p99": 50_000_000.0},
    "output_token_throughput": {"avg": 640.0},
    "request_throughput": {"avg": 7.5},
}
OF_AIPERF = Summary(
    source="AIPerf 0.13.0",
    load="load",
    requests=50,
    failed=3,
    output_throughput=640.0,
    request_throughput=7.5,
    latency_p50=2.5,
    latency_p99=4.0,
    ttft_p50=0.125,
    ttft_p99=0.25,
    tpot_p50=0.0125,
    tpot_p99=0.05,
)
MILLISECONDS = {
    "request_count": {"avg": 47.0},
    "request_latency": {"p50": 2500.0, "p99": True},
    "time_to_first_token": {"unit": "sec", "p50": 0.5, "p99": "slow"},
    "inter_token_latency": {"unit": "ms", "p50": 12.5},
}
OF_MILLISECONDS = Summary(
    source="AIPerf",
    load="load",
    requests=47,
    failed=0,
    output_throughput=None,
    request_throughput=None,
    **TIMES | {"latency_p50": 2.5, "ttft_p50": 0.5, "tpot_p50": 0.0125},
)


def close(one: Summary) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return {name: pytest.approx(value) if isinstance(value, float) else value for name, value in values.items()}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (VLLM, [OF_VLLM]),
        (ONLY_COUNTED | {"num_prompts": 80}, [OF_COUNTED]),
        (GUIDELLM, OF_GUIDELLM),
        (AIPERF, [OF_AIPERF]),
        (MILLISECONDS, [OF_MILLISECONDS]),
    ],
)
def test_every_number_of_a_file_is_read_in_seconds(raw: object, expected: list[Summary], tmp_path: Path) -> None:
    (file := tmp_path / "result.json").write_text(json.dumps(raw))
    assert imported.is_json(file)
    assert [close(one) for one in imported.read(file)] == [close(one) for one in expected]


@pytest.mark.parametrize(
    ("counts", "requests", "failed"),
    [
        ({"num_prompts": 90}, 90, 0),
        ({"num_prompts": 91}, 91, 1),
        ({"failed": 0, "num_prompts": 99}, 90, 0),
        ({"failed": -1}, 90, 0),
        ({"completed": 1, "failed": 1}, 2, 1),
    ],
)
def test_requests_of_vllm_are_those_that_it_completed_and_that_failed(
    counts: dict[str, int], requests: int, failed: int, tmp_path: Path
) -> None:
    (file := tmp_path / "result.json").write_text(json.dumps(ONLY_COUNTED | counts))
    (one,) = imported.read(file)
    assert (one.requests, one.failed) == (requests, failed)


@pytest.mark.parametrize("rate", ["inf", float("inf")])
def test_an_infinite_rate_of_vllm_is_a_burst(rate: object, tmp_path: Path) -> None:
    (file := tmp_path / "result.json").write_text(json.dumps(VLLM | {"request_rate": rate}))
    assert [one.load for one in imported.read(file)] == ["burst"]


FIX = "give the JSON file that AIPerf (profile_export_aiperf.json), GuideLLM or vllm bench serve wrote"
OTHER = "the file is not a result of AIPerf, GuideLLM or vllm bench serve"
REPEAT = "find out from the server's responses why the requests failed, then run this load level again"


@pytest.mark.parametrize(
    ("raw", "what", "fix"),
    [
        ([VLLM], OTHER, FIX),
        ({"benchmarks": []}, OTHER, FIX),
        ({"metadata": {}, "benchmarks": {}}, OTHER, FIX),
        ({"completed": 3}, OTHER, FIX),
        ({"request_throughput": 3}, OTHER, FIX),
        (
            {"metadata": {}, "benchmarks": []},
            "the file has no results for any load level (a request rate, or a number of concurrent requests)",
            FIX,
        ),
        (VLLM | {"completed": 0}, "the load level '4.5/s' has no results: 10 of 10 requests failed", REPEAT),
        (
            {"error_request_count": {"avg": 2}},
            "the load level 'load' has no results: 2 of 2 requests failed",
            REPEAT,
        ),
        (ONLY_COUNTED | {"completed": 0}, "the load level 'None/s' has no results: 0 of 0 requests failed", REPEAT),
    ],
)
def test_a_file_without_results_is_refused(raw: object, what: str, fix: str, tmp_path: Path) -> None:
    (file := tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(LogError) as error:
        imported.read(file)
    assert str(error.value) == f"{what}\n  where: {file}\n  fix:   {fix}"


def test_text_that_is_not_json_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate(("{", "[" * 100_000, "\xff")):
        (file := tmp_path / f"{number}.json").write_text(text)
        with pytest.raises(LogError, match="the file cannot be read: "):
            imported.read(file)
    with pytest.raises(LogError, match="the file cannot be read: "):
        imported.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n  {}", True),
        ("[]", False),
        ("", False),
        (':::MLLOG {"key": 1}', False),
        ('{"a": 1}\n:::MLLOG {"time_ms": 1, "event_type": "", "key": "k", "value": 1, "metadata": {}}\n', False),
    ],
)
def test_only_json_without_records_is_a_result_of_another_tool(text: str, expected: bool, tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text(text)
    assert imported.is_json(file) is expected
    assert imported.is_json(tmp_path / "missing") is False
