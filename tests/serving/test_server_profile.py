"""The profile of a server: by its endpoints, and of processes that record themselves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.errors import ConfigError, SubmitError
from bench.report import kinds
from bench.report.kinds import ShownTrial
from bench.report.serving import REPORT
from bench.results import kind
from bench.results.serving import ServingResult
from helpers import ranks, serving

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
pytest.importorskip("torch")
from bench.contract import mllog
from jobs.profiles import trace
from jobs.serving.recorder import sitecustomize as recorder
from jobs.tasks import serve

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the stub has no GPU")
PROFILED = (
    "launch.profile=modules",
    "task.serving.server.profile.has_endpoints=true",
    "+task.serving.server.profile.environment.STUB_PROFILE='{profile}'",
)
RECORDED = "launch.profile=modules"
"""The config of transformers gives it no endpoints."""


def run(plan: ServingPlan, folder: Path) -> ServingResult:
    """Run a trial in this process, with the server as its child."""
    (folder / "rank_logs").mkdir()
    with mllog.Writer(folder / "result_0.txt") as log:
        serve.run(plan, plan.trials[0], log, folder)
    result = kind.read(folder / "result_0.txt").of_kind
    assert isinstance(result, ServingResult)
    return result


@pytest.mark.starts
def test_a_server_with_endpoints_is_profiled_before_the_timed_load(tmp_path: Path) -> None:
    result = run(serving.with_stub(tmp_path, "none", *PROFILED), tmp_path)
    assert result.valid and len(result.loads[0].status) == 24, result.problems
    values = {one.name: one.value for one in result.measurements}
    assert values["server_step_time"] == pytest.approx(1.4 + 2 * 0.1 / 3), "14 kernels, and the wait for the next step"
    assert values["server_time_gemm"] == pytest.approx(0.5) and values["server_time_rope"] == pytest.approx(0.2)
    assert values["server_time_attention_layers"] == pytest.approx(0.8)
    assert result.times is not None and result.times.running == 24 and result.times.device == "cuda"
    assert len(trace.read(tmp_path / "rank_logs/trial_0.trace.json.gz").kernels) == 42
    (longest, *_) = json.loads((tmp_path / "rank_logs/trial_0.modules.json").read_text())["kernels"]
    assert (longest["class"], longest["launches"]) == ("norm", 15)
    lines = (tmp_path / "result_0.txt").read_text().splitlines()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    assert keys.index(mllog.SERVER_TIMES) < keys.index(mllog.RUN_START), "it is not in the timed part"
    profile = REPORT.tables(ShownTrial("0", kind.read(tmp_path / "result_0.txt")))[-1]
    rows = {row[0]: row[1:] for row in profile.rows}
    assert rows["GEMMs"] == ("0.500", "34.1", "5") and rows["MLP of all layers"] == ("0.400", "27.3", "")
    assert rows["copies, and no kernel"][0] == "0.067" and "3 decode steps, with 24 requests" in profile.caption
    page = kinds.load([tmp_path]).write(tmp_path / "page", title=None).read_text()
    assert "GPU time of the server" in page and "all-reduce" not in page, "it had no communication"


@pytest.mark.starts
def test_a_server_that_does_not_record_itself_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub does not import torch."""
    from jobs.serving import profile

    monkeypatch.setattr(profile, "STARTED_S", 0.5)
    with pytest.raises(SubmitError, match="no process of the server has started torch.profiler") as refused:
        run(serving.with_stub(tmp_path, "none", RECORDED), tmp_path)
    assert "server.out" in refused.value.fix
    monkeypatch.setattr(profile, "TRACE_S", 1.0)
    for folder in ("rank_logs", "model"):
        (tmp_path / folder).rename(tmp_path / f"{folder}_before")
    (tmp_path / "result_0.txt").unlink()
    with pytest.raises(SubmitError, match="the server wrote no trace within 1 s"):
        run(serving.with_stub(tmp_path, "no trace", *PROFILED), tmp_path)


@pytest.mark.long
def test_a_server_that_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    for words in (["server=tgi", "precision=bf16"], serving.elsewhere("http://node7:8000", tmp_path)):
        with pytest.raises(ConfigError, match="runstop (cannot profile|can profile only)"):
            serving.planned(*words, "launch.profile=modules")


WORK = """
import threading, time, torch
def work():
    while True:
        torch.ones(8, 8) @ torch.ones(8, 8)
        time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
time.sleep(120)
"""


@pytest.mark.starts
def test_all_threads_of_a_process_are_recorded_and_the_sites_own_start_is_kept(tmp_path: Path) -> None:
    site, traces = tmp_path / "site", tmp_path / "traces"
    site.mkdir(), traces.mkdir()
    (site / "sitecustomize.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    path = f"{Path(recorder.__file__).parent}:{site}"
    environment = os.environ | {"PYTHONPATH": path, recorder.FOLDER: str(traces), recorder.DEVICE: "cpu"}
    with subprocess.Popen([sys.executable, "-c", WORK], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            (traces / recorder.START).touch()
            _await(traces / recorder.STARTED.format(process.pid))
            time.sleep(0.2)
            (traces / recorder.STOP).touch()
            _await(written := traces / recorder.TRACE.format(process.pid))
        finally:
            process.kill()
    assert "aten::mm" in {one.name for one in trace.read(written).kernels}, "of the thread with most operations"
    assert (site / "ran").exists()


def _await(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, path
        time.sleep(0.02)
