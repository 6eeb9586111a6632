"""`runstop study dissect_serving_tiny` with its real server, up to its table, page and profile."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ranks
from helpers.paths import ROOT

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
ARGV = [sys.executable, "-m", "bench", "study", "dissect_serving_tiny", "cluster=local"]
IS_THERE = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "openai"))


@pytest.mark.trains
@pytest.mark.slow
@pytest.mark.skipif(ranks.DEVICE != "cpu" or not IS_THERE, reason="pip install 'transformers[serving]', on a CPU")
def test_the_study_ends_with_latencies_and_the_parts_of_a_decode_step(tmp_path: Path) -> None:
    environment = os.environ | {"LOGDIR": str(tmp_path)}
    for words in (["--runs", "1"], ["--runs", "1", "--table", "--out", str(tmp_path / "page")]):
        done = subprocess.run([*ARGV, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with (tmp_path / "page/table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["origin"] == "measured" or row["origin"] == ""]
    values = {(row["model"], row["measurement"]): float(row["value"]) for row in rows}
    for model in ("2 layers", "4 layers"):
        step_ms = values[model, "server_step_time"]
        assert 0 < values[model, "server_time_attention_layers"] + values[model, "server_time_mlp_layers"] < step_ms
        assert 0 < values[model, "latency_p60"] <= values[model, "latency_p100"]
        assert 0 < values[model, "server_share_gemm"] < 1
    assert (tmp_path / "page/cdf_1.png").read_bytes().startswith(b"\x89PNG")
    assert "Latency (burst)" in (tmp_path / "page/index.html").read_text()
