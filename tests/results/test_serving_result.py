"""Results of serving logs: percentiles as in numpy, failures count as slowest, limits and the knee."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cli
from bench.contract.plan_kinds import ServingPlan
from bench.results import kind as trial_results
from bench.results.serving import ServingResult
from bench.runs import trial as trials
from helpers import serving, serving_log

ONE_BY_ONE = "task.serving.server.batches_tokens=false"
LATENCIES = [float(s) for s in np.random.default_rng(1).lognormal(0, 0.5, 200)]


@pytest.fixture(scope="module")
def burst() -> ServingPlan:
    return serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]", ONE_BY_ONE)


def read(path: Path) -> ServingResult:
    result = trial_results.read(path).of_kind
    assert result is not None
    return result


def bench(*words: object) -> int:
    """Return the exit code of a command line."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in words])
    return int(str(end.value.code))


def values(result: ServingResult) -> dict[str, float]:
    return {one.name: one.value for one in result.measurements}


def test_percentiles_and_rates_are_those_of_numpy(burst: ServingPlan, tmp_path: Path) -> None:
    result = values(read(serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES})))
    for share in (50, 60, 90, 99, 100):
        expected = np.percentile(LATENCIES, share, method="inverted_cdf")
        assert result[f"latency_p{share}"] == pytest.approx(expected)
        if share in (50, 99):
            assert result[f"ttft_p{share}"] == pytest.approx(expected / 4)
            assert result[f"tpot_p{share}"] == pytest.approx(0.75 * expected / 7)
    assert result["output_throughput"] == pytest.approx(200 * 8 / max(LATENCIES)), "the burst ends with its last token"
    assert result["goodput"] == pytest.approx(sum(s <= 30 for s in LATENCIES) / max(LATENCIES))
    assert result["time_to_healthy"] == 9.5 and "server_memory" not in result and "knee" not in result


@pytest.mark.parametrize(("num_late", "meets"), [(2, True), (3, False)])
def test_a_load_meets_its_limits_if_99_percent_of_its_requests_do(
    burst: ServingPlan, tmp_path: Path, num_late: int, meets: bool
) -> None:
    (load,) = read(
        serving_log.write(burst, tmp_path / "result_0.txt", {"burst": [1.0] * (200 - num_late) + [31.0] * num_late})
    ).loads
    assert load.meets_limits is meets


def test_percentiles_between_two_requests_are_those_of_numpy(tmp_path: Path) -> None:
    """Of 203 requests the 99th percentile is the 201st latency: 200.97 is rounded up."""
    plan = serving.planned(
        "task.serving.arrivals=[burst]", "task.serving.rates=[]", "task.serving.requests=203", ONE_BY_ONE
    )
    latencies = [float(s) for s in np.random.default_rng(2).lognormal(0, 0.5, 203)]
    result = values(read(serving_log.write(plan, tmp_path / "result_0.txt", {"burst": latencies})))
    for share in (50, 90, 99):
        assert result[f"latency_p{share}"] == pytest.approx(np.percentile(latencies, share, method="inverted_cdf"))


def test_a_failed_request_counts_as_the_slowest_and_makes_the_trial_invalid(burst: ServingPlan, tmp_path: Path) -> None:
    """Three of 200 failed: the 99th percentile is one of them, and has no number; the 98th has."""
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": [*LATENCIES[:197], None, None, None]})
    result = read(log)
    assert {"latency_p99", "latency_p100"} & values(result).keys() == set()
    with_inf = [*LATENCIES[:197], np.inf, np.inf, np.inf]
    assert values(result)["latency_p90"] == pytest.approx(np.percentile(with_inf, 90, method="inverted_cdf"))
    judged = trials.judge(log, burst, burst.trials[0])
    assert not judged.valid and judged.result.valid and list(judged.differences) == []
    assert result.problems == ["SRV-04: burst: 3 of 200 requests failed: timeout (3)"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"client": {"sent_p99_s": 5.0}}, "SRV-06: burst: the delay of the client itself is"),
        ({"ttft_s": [1.0]}, "burst was not measured"),
        (
            {"status": ["ok"] * 199 + ["short"]},
            "SRV-05: burst: 1 of 200 requests have answers that do not match the request: short (1)",
        ),
        ({"arrival_s": [None] * 200}, "burst was not measured"),
    ],
)
def test_problems_make_a_trial_invalid(
    burst: ServingPlan, tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES}, **changed)
    (actual,) = read(log).problems
    assert actual.startswith(problem) and not trials.judge(log, burst, burst.trials[0]).valid


def test_a_mean_client_overhead_is_a_share_of_the_mean_latency(burst: ServingPlan, tmp_path: Path) -> None:
    """Nine in ten requests take 0.1 s and the others 2.1 s: 0.06 s are a fifth of the mean, not more than half."""
    client = {"sent_p50_s": 0.001, "loadgen_mean_s": 0.06}
    (load,) = read(
        serving_log.write(burst, tmp_path / "result_0.txt", {"burst": [0.1] * 180 + [2.1] * 20}, client=client)
    ).loads
    assert load.client_share == pytest.approx(0.2)


def test_a_load_that_loadgen_reports_invalid_is_measured_and_shown_with_the_reason(
    burst: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loadgen = {
        "result_validity": "INVALID",
        "early_stopping_result": " * Processed 200 queries.\n * Would need 259 more.",
    }
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES}, loadgen=loadgen)
    assert trials.judge(log, burst, burst.trials[0]).valid
    assert bench("parse", log) == 0
    shown = capsys.readouterr().out
    assert "burst: INVALID by loadgen: Processed 200 queries.; Would need 259 more." in shown and "SRV-07" in shown


def test_chunks_that_arrive_together_give_no_token_times(
    burst: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES}, together=0.4)
    assert not [name for name in values(read(log)) if name.startswith(("ttft", "tpot"))]
    bench("parse", log)
    assert "no TTFT and TPOT: 40 % of the chunks arrived together with the previous one" in capsys.readouterr().out


def test_the_knee_is_the_highest_rate_that_meets_the_limits(tmp_path: Path) -> None:
    plan = serving.planned("task.serving.arrivals=[poisson]", "task.serving.rates=[1,2,4]", ONE_BY_ONE)
    loads = {"poisson 1/s": [1.0] * 200, "poisson 2/s": [29.0] * 198 + [31.0] * 2, "poisson 4/s": [31.0] * 200}
    result = read(serving_log.write(plan, tmp_path / "result_0.txt", loads))
    assert result.knee == 2 == values(result)["knee"]
    assert "poisson 2/s latency_p50" in values(result), "with several loads the names have prefixes"
    slow = read(serving_log.write(plan, tmp_path / "result_1.txt", loads | {"poisson 4/s": [1.0] * 200}))
    assert slow.knee is None and slow.no_knee.startswith("the limits are met at every rate"), (
        "no rate misses the limits"
    )
    loads |= {"poisson 1/s": [31.0] * 200}
    uneven = read(serving_log.write(plan, tmp_path / "result_2.txt", loads))
    assert uneven.knee is None and uneven.no_knee.startswith("the limits are not met even at the lowest rate"), (
        "a lower rate missed the limits"
    )


def test_a_load_without_a_record_is_missing(burst: ServingPlan, tmp_path: Path) -> None:
    log = serving_log.write(burst, tmp_path / "result_0.txt", {}, without=["burst"])
    assert read(log).problems == ["burst was not measured"] and not trials.judge(log, burst, burst.trials[0]).valid


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"details": []', '"details": null'),
        ('"latency_s": 30.0', f'"latency_s": 1{"0" * 400}'),
        ('"max_client_delay": 0.5', f'"max_client_delay": 1{"0" * 400}'),
        ('"sent_p50_s": 0.001', f'"sent_p50_s": 1{"0" * 400}'),
    ],
)
def test_a_load_with_a_damaged_record_is_missing(burst: ServingPlan, tmp_path: Path, old: str, new: str) -> None:
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES})
    assert old in log.read_text()
    log.write_text(log.read_text().replace(old, new))
    assert read(log).problems == ["burst was not measured"]


VLLM = {
    "model_id": "tiny",
    "completed": 40,
    "failed": 2,
    "request_rate": "inf",
    "output_throughput": 320.5,
    "request_throughput": 40.0,
    "median_ttft_ms": 20.0,
    "p99_ttft_ms": 40.0,
    "median_tpot_ms": 3.0,
    "p99_tpot_ms": 5.0,
}


def guidellm(successful: int) -> dict[str, Any]:
    """The parts of a GuideLLM 0.8.1 file that are read."""
    ok = {"mean": 19.9, "percentiles": {"p50": 50.0, "p99": 100.0}}
    return {
        "metadata": {"version": 2},
        "benchmarks": [
            {
                "config": {"strategy": {"type_": "constant", "rate": 20.0}},
                "metrics": {
                    "request_totals": {"successful": successful, "errored": 50 - successful, "total": 50},
                    "requests_per_second": {"successful": ok},
                    "request_latency": {"successful": ok},
                    "time_to_first_token_ms": {"successful": ok},
                    "inter_token_latency_ms": {"successful": ok},
                },
            }
        ],
    }


AIPERF = {
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 47.0},
    "error_request_count": {"unit": "requests", "avg": 3.0},
    "request_latency": {"unit": "ms", "avg": 100.0, "p50": 90.0, "p99": 200.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 400.0},
}


def test_results_of_other_tools_are_shown_with_ours(
    burst: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES})]
    for name, raw in (("vllm", VLLM), ("guidellm", guidellm(48)), ("aiperf", AIPERF)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(raw))
    assert bench("parse", *files) == 0
    rows = {row[0]: row for line in capsys.readouterr().out.splitlines() if len(row := line.split("\t")) == 12}
    assert rows["transformers"][1:4] == ["burst", "200", "0"]
    assert rows["vllm bench serve: tiny"][1:] == [
        *("burst", "42", "2", "320.5", "40", "-", "-", "0.02", "0.04", "0.003", "0.005")
    ]
    assert rows["GuideLLM"][1:4] == ["constant 20.0/s", "50", "2"] and rows["GuideLLM"][6:9] == ["50", "100", "0.05"]
    assert rows["AIPerf 0.13.0"][1:8] == ["load", "50", "3", "400", "-", "0.09", "0.2"]


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"failed": 2}, ["42", "2"]),
        ({"num_prompts": 100}, ["100", "60"]),
        ({"num_prompts": 100, "failed": 3}, ["43", "3"]),
        ({}, ["40", "-"]),
    ],
)
def test_vllm_requests_without_an_answer_have_failed(
    counts: dict[str, int], shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "vllm.json").write_text(json.dumps({**VLLM, "failed": None, **counts}))
    assert bench("parse", file) == 0
    (row,) = (line.split("\t") for line in capsys.readouterr().out.splitlines() if line.startswith("vllm bench"))
    assert row[2:4] == shown


def test_a_compressed_log_is_shown_with_other_tools(
    burst: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = serving_log.write(burst, tmp_path / "result_0.txt", {"burst": LATENCIES})
    (packed := tmp_path / "result_0.txt.gz").write_bytes(gzip.compress(log.read_bytes()))
    (other := tmp_path / "vllm.json").write_text(json.dumps(VLLM))
    tables = []
    for name in (log, packed):
        assert bench("parse", name, other) == 0
        tables.append(capsys.readouterr().out.partition("loads of all files")[2])
    assert tables[0] == tables[1] and "transformers\tburst\t200" in tables[1]


def test_a_file_whose_requests_all_failed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "guidellm.json"
    file.write_text(json.dumps(guidellm(0)))
    assert bench("parse", file) == 1
    assert "the load level 'constant 20.0/s' has no results: 50 of 50 requests failed" in capsys.readouterr().err
    file.write_text(
        json.dumps({"log": ':::MLLOG {"time_ms": 1, "event_type": "", "key": "", "value": 1, "metadata": {}}'})
    )
    assert bench("parse", file) == 1
    assert "not a result of AIPerf, GuideLLM or vllm bench serve" in capsys.readouterr().err


@pytest.mark.long
def test_a_report_has_a_page_a_table_and_its_figures(burst: ServingPlan, tmp_path: Path) -> None:
    for name, factor in (("first", 1.0), ("second", 2.0)):
        (tmp_path / name).mkdir()
        times = {"burst": [factor * s for s in LATENCIES]}
        serving_log.write(burst, tmp_path / name / "result_0.txt", times, server=f"{name}_server")
    out = tmp_path / "report"
    assert bench("report", tmp_path / "first", tmp_path / "second", "-o", out) == 0
    assert {path.name for path in out.iterdir()} >= {"report.html", "requests.csv", "latency_cdf.png"}
    assert len((out / "requests.csv").read_text().splitlines()) == 1 + 2 * 200
    page = (out / "report.html").read_text()
    assert "first_server" in page and "Random weights" not in page.split("<h1>")[0]


def test_answers_of_other_lengths_than_in_the_plan_are_named_and_actual_tokens_counted(tmp_path: Path) -> None:
    stated = [f"task.serving.lengths.{name}={{mean:30,sigma:1,min:4,max:300}}" for name in ("prompt", "answer")]
    plan = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]", *stated)
    assert plan.lengths is not None
    planned = plan.lengths.trials[0].tokens_out
    log = serving_log.write(plan, tmp_path / "result_0.txt", {"burst": LATENCIES}, tokens_out=planned)
    assert values(read(log))["output_throughput"] == pytest.approx(sum(planned) / max(LATENCIES))
    assert list(trials.judge(log, plan, plan.trials[0]).differences) == []
    (tmp_path / "other").mkdir()
    other = serving_log.write(plan, tmp_path / "other/result_0.txt", {"burst": LATENCIES}, tokens_out=planned[::-1])
    wrong = list(trials.judge(other, plan, plan.trials[0]).differences)
    assert wrong == ["burst: answers have other lengths than in the plan"]
