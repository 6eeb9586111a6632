"""Servers that fail: each failure has its finding, nothing hangs, and every server is stopped."""

import json
import re
from pathlib import Path

import psutil
import pytest

from bench.contract import mllog
from bench.contract.plan_kinds import ServingPlan
from bench.mlperf import log as logs
from bench.results import kind as trial_results
from bench.results.serving import ServingResult
from bench.runs import trial as trials
from helpers import ranks, serving, stub_server

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
from jobs.tasks import serve

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the stub has no GPU")


def loaded(tmp: Path, fault: str, *words: str) -> tuple[int, ServingPlan, Path]:
    """Run the task against the stub; return the exit code, the plan and the run folder."""
    plan = serving.with_stub(tmp, fault, *words)
    folder = ranks.write(plan, tmp / "run")
    (folder / "rank_logs").mkdir()
    ((code, output),) = ranks.ended(plan, folder, "jobs.tasks.serve", "plan.json", "--trial", "0")
    print(output)
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp / "model") in (one.info["cmdline"] or [])]
    assert left == [], "the server ends with its trial"
    return code, plan, folder


def loaded_here(tmp: Path, fault: str, *words: str) -> tuple[ServingPlan, Path]:
    """Load a stub that runs elsewhere from this process; return the plan and the run folder."""
    (tmp / "rank_logs").mkdir()
    with stub_server.in_a_thread(fault) as url:
        plan = serving.with_stub(tmp, "none", *serving.elsewhere(url, tmp / "model"), *words)
        with mllog.Writer(tmp / "result_0.txt") as log:
            serve.run(plan, plan.trials[0], log, tmp)
    return plan, tmp


def read(folder: Path) -> ServingResult:
    actual = trial_results.read(folder / "result_0.txt").of_kind
    assert actual is not None
    return actual


def rules(actual: ServingResult) -> list[str]:
    return [finding.rule for finding in actual.findings]


@pytest.mark.starts
def test_a_server_without_a_fault_gives_a_valid_trial(tmp_path: Path) -> None:
    """The stub without a fault: measurements of the client, and loadgen's log."""
    code, plan, folder = loaded(tmp_path, "none")
    judged = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert (code, judged.valid, list(judged.differences)) == (0, True, [])
    (load,) = read(folder).loads
    assert load.status == ("ok",) * 24 and set(load.tokens_out) == {8} and load.validity == "VALID"
    rows = (folder / "rank_logs/trial_0.burst.requests.csv").read_text().splitlines()
    assert len(rows) == 25 and rows[0].startswith("request,arrival_s,sent_s,first_token_s,last_token_s,tokens_in")
    (folder / "rank_logs/trial_0.burst.loadgen").write_text("another\n")
    changed = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert not changed.valid, "our log has the checksum of loadgen's log"


@pytest.mark.starts
def test_failed_requests_are_reported(tmp_path: Path) -> None:
    code, plan, folder = loaded(tmp_path, "errors")
    (finding,) = read(folder).findings
    assert (code, finding.rule) == (0, "SRV-04")
    assert "burst: 6 of 24 requests failed: http 500 (6); oops" in finding.what
    assert not trials.judge(folder / "result_0.txt", plan, plan.trials[0]).valid


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        (
            "short",
            "SRV-05",
            "burst: 24 of 24 requests have answers that do not match the request: short (24); 7 instead of 8 tokens",
        ),
        (
            "liar",
            "SRV-05",
            "requests have answers that do not match the request: miscounted (24); the server reports 8 tokens",
        ),
        (
            "prompt",
            "SRV-05",
            "24 requests have answers that do not match the request: prompt (24); the server reports 17 prompt tokens",
        ),
        ("cut", "SRV-04", "burst: 5 of 24 requests failed: stream (5); the stream ended early, after 2 chunks"),
    ],
)
def test_answers_that_do_not_match_the_request_are_reported(tmp_path: Path, fault: str, rule: str, what: str) -> None:
    plan, folder = loaded_here(tmp_path, fault)
    actual = read(folder)
    (finding,) = actual.findings
    assert finding.rule == rule and what in finding.what
    assert not trials.judge(folder / "result_0.txt", plan, plan.trials[0]).valid
    (load,) = actual.loads
    assert len(load.status) == 24 and load.percentile_s(load.latency_s, 100) is None, "failures are the slowest"


@pytest.mark.long
def test_a_slow_server_is_invalid_by_loadgen_with_its_reason(tmp_path: Path) -> None:
    words = ("task.serving.arrivals=[poisson]", "task.serving.rates=[40]", "task.serving.limits.latency_s=0.1")
    _, folder = loaded_here(tmp_path, "slow", *words)
    actual = read(folder)
    assert rules(actual) == ["SRV-07"] and actual.findings[0].severity == "warning"
    (load,) = actual.loads
    assert load.validity == "INVALID" and "99th percentile of the latency is above its limit" in load.reason
    assert load.goodput == 0 and load.meets_limits is False


@pytest.mark.long
def test_batched_chunks_give_no_token_times(tmp_path: Path) -> None:
    _, folder = loaded_here(tmp_path, "bunched")
    actual = read(folder)
    (load,) = actual.loads
    assert (
        re.match(
            r"the server sent several tokens per chunk|this server always|\d+ % of the chunks", load.no_token_times
        )
        and load.percentile_s(load.latency_s, 50) is not None
    )
    names = {one.name for one in actual.measurements}
    assert "latency_p50" in names and not any(name.startswith(("ttft", "tpot")) for name in names)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("killed", "SRV-03", "the server ended under load (poisson 40/s), by signal 9"),
        ("never", "SRV-02", "the server did not become healthy within 2 s: "),
    ],
)
def test_a_server_that_ends_or_never_starts_fails_the_trial(tmp_path: Path, fault: str, rule: str, what: str) -> None:
    words = {
        "never": ["task.serving.server.startup_timeout_s=2"],
        "killed": ["task.serving.arrivals=[poisson]", "task.serving.rates=[40]"],  # requests keep arriving
    }
    code, _, folder = loaded(tmp_path, fault, *words[fault])
    account = json.loads((folder / "rank_logs/trial_0_rank_0.error").read_text())
    assert (code, account["rule"]) == (1, rule) and what in account["what"]
    assert not list((folder / "rank_logs").glob("*.csv")), "an aborted trial has no rows"


@pytest.mark.long
def test_a_server_elsewhere_has_measurements_but_no_hardware(tmp_path: Path) -> None:
    plan, folder = loaded_here(tmp_path, "none")
    actual = read(folder)
    assert trials.judge(folder / "result_0.txt", plan, plan.trials[0]).valid
    assert re.fullmatch(r"at http://127.0.0.1:\d+; precision and hardware unknown", actual.about)
    assert actual.healthy_s is None and actual.no_memory == "the server runs elsewhere"
    assert "transformers" not in logs.read(folder / "result_0.txt").value("software")
