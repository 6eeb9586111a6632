"""Posting a run's progress to a TrainJob's status, in the format of upstream's definition."""

import gzip
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.backends.kubernetes import trainer_status
from bench.contract import mllog, plan_kinds
from bench.planning import compose
from helpers.clock import Clock
from helpers.paths import ROOT

WORDS = ("task=lora_tiny", "cluster=local", "cluster.ranks_per_node=1", "trials=2")
DEFINITION = ROOT.parent / "shared/crds/trainer.kubeflow.org_trainjobs.yaml.gz"
Posts = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[dict[str, str], Posts]]:
    """Yield a pod's environment with the server's address, and the posts that arrive, with their authorization."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate of a server")
    posts: Posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posts.append((self.headers["Authorization"], body["trainerStatus"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    crt, key = tmp_path / "ca.crt", tmp_path / "key"
    name = ["-subj", "/CN=a", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *name]
    subprocess.run([*argv, "-keyout", key, "-out", crt], check=True, capture_output=True)
    (tmp_path / "token").write_text("secret\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{http.server_port}/status"
        yield (
            {
                trainer_status.URL: url,
                trainer_status.CERTIFICATE: str(crt),
                trainer_status.TOKEN: str(tmp_path / "token"),
            },
            posts,
        )
        http.shutdown()
        thread.join()


def run_of(folder: Path, *words: str) -> Path:
    """Create a run folder with a plan."""
    (folder / "run").mkdir()
    (folder / "run/plan.json").write_text(plan_kinds.dumps(compose.compose([*WORDS, *words])))
    return folder / "run"


def train(run: Path, trial: int, *, samples: int, stops: bool) -> None:
    """Write the log of a trial that trains one sample per second."""
    clock = Clock()
    with mllog.Writer(run / f"result_{trial}.txt", clocks=clock.read_ms) as log:
        log.start(mllog.RUN_START)
        clock.now_s += samples
        log.event(mllog.TRAIN_LOSS, 1.5, samples_count=samples)
        if stops:
            log.event(mllog.EVAL_ACCURACY, 0.9375, samples_count=samples)
            log.finish("success")


def test_progress_and_losses_are_posted_once_more_at_the_end(
    tmp_path: Path, server: tuple[dict[str, str], Posts]
) -> None:
    env, posts = server
    run = run_of(tmp_path, "task.training.target_eval_loss=null", "task.training.max_steps=100")
    with trainer_status.posting(run, env):
        train(run, 0, samples=400, stops=True)
        train(run, 1, samples=200, stops=False)
    ((authorization, status),) = posts
    assert authorization == "Bearer secret"
    assert status["progressPercentage"] == 62, "the first trial is over; the second has 200 of its 800 samples"
    assert status["estimatedRemainingSeconds"] == 600
    assert {one["name"]: one["value"] for one in status["metrics"]} == {
        "train_loss": "1.5",
        "trial": "1",
        "samples_count": "200",
    }
    if DEFINITION.exists():
        jsonschema = pytest.importorskip("jsonschema")
        definition = yaml.load(gzip.decompress(DEFINITION.read_bytes()), Loader=yaml.CSafeLoader)
        (version,) = definition["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["trainerStatus"]
        jsonschema.Draft202012Validator({**schema, "additionalProperties": False}).validate(status)


def test_the_remaining_time_to_a_target_is_unknown(tmp_path: Path, server: tuple[dict[str, str], Posts]) -> None:
    env, posts = server
    run = run_of(tmp_path)
    with trainer_status.posting(run, env):
        train(run, 0, samples=400, stops=True)
    ((_, status),) = posts
    assert "estimatedRemainingSeconds" not in status and status["progressPercentage"] == 50
    assert {"name": "eval_loss", "value": "0.9375"} in status["metrics"]


def test_a_failed_post_only_prints_a_line(
    tmp_path: Path, server: tuple[dict[str, str], Posts], capfd: pytest.CaptureFixture[str]
) -> None:
    env, posts = server
    run = run_of(tmp_path)
    (tmp_path / "token").unlink()
    with trainer_status.posting(run, env):
        pass
    assert (
        posts == [] and "cannot post the progress to the TrainJob's status: FileNotFoundError" in capfd.readouterr().out
    )
