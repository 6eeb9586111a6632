"""A server that fails in some way: each has its finding, nothing hangs, and no server is left behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import results as trial_results
from bench.contract import mllog
from bench.contract.plan import ServingPlan
from bench.contract.schema import PORTS
from bench.mlperf import log as logs
from bench.results import ServingResult
from bench.results import serving as serving_results
from bench.runs import trial as trials
from helpers import ranks, serving
from helpers.paths import ROOT
from jobs.serving import server

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
pytestmark = [pytest.mark.starts, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the stub has no GPU")]


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


def read(folder: Path) -> ServingResult:
    found = trial_results.read(folder / "result_0.txt").of_kind
    assert found is not None
    return found


def rules(found: ServingResult) -> list[str]:
    return [finding.rule for finding in found.findings]


def test_answers_as_asked_for_prove_the_trial(tmp_path: Path) -> None:
    """The stub without a fault: what is measured of a client, and of loadgen's log."""
    code, plan, folder = loaded(tmp_path, "none")
    judged = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert (code, judged.proven, judged.not_as_planned) == (0, True, [])
    (load,) = read(folder).loads
    assert load.status == ("ok",) * 24 and set(load.tokens_out) == {8} and load.validity == "VALID"
    rows = (folder / "rank_logs/trial_0.burst.requests.csv").read_text().splitlines()
    assert len(rows) == 25 and rows[0].startswith("request,arrival_s,sent_s,first_token_s,last_token_s,tokens_in")
    (folder / "rank_logs/trial_0.burst.loadgen").write_text("another\n")
    changed = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert not changed.proven, "loadgen's log is bound to ours by its checksum"


@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("errors", "SRV-04", "burst: 6 of 24 requests failed: http 500 (6); oops"),
        ("short", "SRV-05", "burst: 24 of 24 requests were not as asked for: short (24); 7 tokens of 8"),
        ("liar", "SRV-05", "burst: 24 of 24 requests were not as asked for: miscounted (24); 8 tokens by the server"),
        ("prompt", "SRV-05", "24 requests were not as asked for: prompt (24); the server counts 17 tokens"),
        ("cut", "SRV-04", "burst: 5 of 24 requests failed: stream (5); the stream ended in the middle, after 2 chunks"),
        ("hangs", "SRV-04", "requests failed: timeout ("),
    ],
)
def test_answers_that_are_not_as_asked_for_are_found_out(tmp_path: Path, fault: str, rule: str, what: str) -> None:
    code, plan, folder = loaded(tmp_path, fault, "task.serving.request_timeout_s=4")
    found = read(folder)
    (finding,) = found.findings
    assert (code, finding.rule) == (0, rule) and what in finding.what
    assert not trials.judge(folder / "result_0.txt", plan, plan.trials[0]).proven
    (load,) = found.loads
    assert len(load.status) == 24 and load.percentile_s(load.latency_s, 100) is None, "failures are the slowest"


def test_a_slow_server_is_invalid_by_loadgen_with_its_reason(tmp_path: Path) -> None:
    words = ("task.serving.arrivals=[poisson]", "task.serving.rates=[40]", "task.serving.limits.latency_s=0.1")
    code, plan, folder = loaded(tmp_path, "slow", *words)
    found = read(folder)
    assert code == 0 and rules(found) == ["SRV-07"] and found.findings[0].severity == "warning"
    (load,) = found.loads
    assert load.validity == "INVALID" and "99th percentile of the latency is above its limit" in load.reason
    assert load.goodput == 0 and load.keeps_limits is False


def test_chunks_that_arrive_together_say_nothing_of_single_tokens(tmp_path: Path) -> None:
    _, _, folder = loaded(tmp_path, "bunched")
    found = read(folder)
    (load,) = found.loads
    assert load.no_token_times.startswith("chunks arrive bunched") and load.percentile_s(load.latency_s, 50) is not None
    names = {one.name for one in serving_results.of_serving(found)}
    assert "latency_p50" in names and not any(name.startswith(("ttft", "tpot")) for name in names)


@pytest.mark.parametrize(
    ("fault", "rule", "what"),
    [
        ("killed", "SRV-03", "the server ended under load (poisson 40/s), by signal 9"),
        ("dies", "SRV-01", "ended before it was healthy, with exit code 1; it last printed: this server does not like"),
        ("never", "SRV-02", "the server was not healthy within 2 s: "),
    ],
)
def test_a_server_that_ends_or_never_comes_up_ends_the_trial(tmp_path: Path, fault: str, rule: str, what: str) -> None:
    words = {
        "never": ["task.serving.server.healthy_within_s=2"],
        "killed": ["task.serving.arrivals=[poisson]", "task.serving.rates=[40]"],  # requests go on arriving
    }
    code, _, folder = loaded(tmp_path, fault, *words.get(fault, []))
    account = json.loads((folder / "rank_logs/trial_0_rank_0.error").read_text())
    assert (code, account["rule"]) == (1, rule) and what in account["what"]
    assert not list((folder / "rank_logs").glob("*.csv")), "a trial that was cut short has no rows to be taken for one"


def test_a_server_that_runs_elsewhere_is_loaded_and_nothing_is_claimed_of_it(tmp_path: Path) -> None:
    """Its requests come one by one here: each when the one before is answered."""
    assert (port := server.free_port()) in PORTS, "or a connection of a client may have it before the server does"
    stub = [sys.executable, "-m", "helpers.stub_server", str(port), "none"]
    one_by_one = ("task.serving.arrivals=[one_by_one]", "task.serving.requests=6")
    words = (*serving.elsewhere(f"http://127.0.0.1:{port}", tmp_path / "model"), *one_by_one)
    with subprocess.Popen(stub, env=os.environ | {"PYTHONPATH": f"{ROOT}/tests"}) as started:
        try:
            code, plan, folder = loaded(tmp_path, "none", *words)
            assert started.poll() is None, "it is not ours to stop"
        finally:
            started.kill()
    found = read(folder)
    assert code == 0 and trials.judge(folder / "result_0.txt", plan, plan.trials[0]).proven
    assert found.about == f"at http://127.0.0.1:{port}; its precision and its hardware are not known"
    (load,) = found.loads
    ends = [at + (took or 0) for at, took in zip(load.arrival_s, load.latency_s, strict=True)]
    assert len(ends) == 6 and all(at >= end for at, end in zip(load.arrival_s[1:], ends, strict=False))
    assert found.healthy_s is None and found.no_memory == "the server runs elsewhere"
    log = logs.read(folder / "result_0.txt")
    record = log.single(mllog.SERVER)
    assert record is not None and not {"precision", "tp", "weights"} & record.metadata.keys()
    assert log.value(mllog.TENSOR_PARALLELISM) is None and "transformers" not in log.value("software")
    code, _, folder = loaded(tmp_path / "gone", "none", *words, "task.serving.server.healthy_within_s=1")
    account = json.loads((folder / "rank_logs/trial_0_rank_0.error").read_text())
    assert (code, account["rule"]) == (1, "SRV-02") and account["fix"].startswith("start it, or correct")


def test_a_port_that_is_taken_is_refused_before_anybody_answers_for_our_server(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, folder = loaded(tmp_path, "none", f"task.serving.server.port={taken.getsockname()[1]}")
    account = json.loads((folder / "rank_logs/trial_0_rank_0.error").read_text())
    assert (code, account["rule"]) == (1, "SRV-01") and "listens at port" in account["what"]
