"""The serving task on rank 0, in this process, and its log."""

import contextlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog
from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Device
from bench.contract.serving import Serving
from bench.errors import ConfigError, SubmitError
from bench.mlperf import log as logs
from bench.runs import trial as trials
from helpers import ranks, serving, stub_server
from helpers.paths import ROOT

pytest.importorskip("mlperf_loadgen", reason="pip install 'runstop[serve]'")
pytest.importorskip("torch")
from jobs.node_checks import hardware
from jobs.ranks import program
from jobs.ranks.identity import Rank
from jobs.serving import loadgen, model_folder, prompts, server
from jobs.serving.answers import Answer
from jobs.tasks import describe, serve

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="the stub has no GPU")
MODEL_FOLDER = Path("rank_logs/trial_0.model")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock the facts of this machine and its checkout."""
    monkeypatch.setattr(describe, "commit", lambda root, image: f"the commit of {root}")
    monkeypatch.setattr(hardware, "cpu_model", lambda: "Xeon 8480C")
    monkeypatch.setattr(hardware, "operating_system", lambda: "Ubuntu 24.04")


class Child:
    """A server in a thread of this process; the port is the last argument of its command."""

    created: "list[Child]" = []

    def __init__(self, argv: list[str], environment: dict[str, str], output: Path) -> None:
        self.output, self.model = output, Path(argv[-2])
        self.files = sorted(path.name for path in self.model.iterdir())
        self._running = contextlib.ExitStack()
        self._running.enter_context(stub_server.in_a_thread("none", port=int(argv[-1])))
        self.created.append(self)
        self.is_running = True

    def exit_code(self) -> int | None:
        return None

    def stop(self) -> None:
        self._running.close()
        self.is_running = False


def block(plan: ServingPlan) -> Serving:
    assert plan.config.task.serving is not None
    return plan.config.task.serving


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def of_key(path: Path, key: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return the values and their metadata."""
    return [(x["value"], _about(x)) for x in records(path) if x["key"] == key]


def _about(record: dict[str, Any]) -> dict[str, Any]:
    where = ("file", "lineno", "monotonic_ms")
    return {key: value for key, value in record["metadata"].items() if key not in where}


@contextmanager
def logging(folder: Path) -> Iterator[tuple[mllog.Writer, Path]]:
    folder.mkdir(parents=True, exist_ok=True)
    with mllog.Writer(folder / "result_0.txt") as log:
        yield log, folder / "result_0.txt"


@pytest.mark.long
def test_a_trial_starts_its_server_runs_two_loads_and_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"requests": 6, "warm_up": 3, "tokens_in": 16, "rates": "[400]", "max_client_delay": 1}
    plan = serving.planned(
        "task.serving.server.argv=[stub,'{model}','{port}']",
        *("task.serving.server.precisions={fp32:[]}", "task.serving.server.cpu_options=[]"),
        *("task.serving.server.batches_tokens=false", "cluster.ranks_per_node=1"),
        *(f"task.serving.{name}={value}" for name, value in words.items()),
    )
    monkeypatch.setattr(server, "Child", Child)
    Child.created.clear()
    allowed = list[int]()
    monkeypatch.setattr(server, "allow_connections", allowed.append)
    (tmp_path / "rank_logs").mkdir()
    set_aside, others = tmp_path / "attempts/0.1" / MODEL_FOLDER.name, tmp_path / "attempts/1.1/trial_1.model"
    for folder in (set_aside, others):
        folder.mkdir(parents=True)
    with logging(tmp_path) as (log, path):
        serve.run(plan, plan.trials[0], log, tmp_path)
    (child,) = Child.created
    assert child.files[-1] == "tokenizer_config.json" and "model.safetensors.index.json" in child.files
    assert (child.model, child.output) == (tmp_path / MODEL_FOLDER, tmp_path / "rank_logs/trial_0.server.out")
    assert not child.is_running and not child.model.exists() and allowed == [6]
    assert not set_aside.exists() and others.exists(), "folders of other trials are kept"
    assert capsys.readouterr().out == "burst: 6 requests\npoisson 400/s: 6 requests\n"

    keys = [record["key"] for record in records(path)]
    clock = ["init_start", mllog.LOADS_REQUESTED, mllog.SERVER, "init_stop", "run_start", *[mllog.LOAD_MEASURED] * 2]
    clock += ["run_stop", mllog.SERVER_MEMORY, *[mllog.ATTACHED_FILE] * 4]
    assert [key for key in keys if key in clock] == clock and keys[0] == "init_start"
    ((name, about),) = of_key(path, mllog.SERVER)
    assert name == "transformers" and 0 <= about.pop("healthy_s") < 60
    server_settings = {"argv": ["stub", str(child.model), about["argv"][2]], "model": "tiny", "weights": "random"}
    assert about == server_settings | {"precision": "fp32", "tp": 1}
    assert of_key(path, mllog.SERVER_MEMORY) == [({"not_measured": "the server runs on CPUs"}, {})]
    attached = [f"rank_logs/trial_0.{one}.{x}" for one in ("burst", "poisson_400") for x in ("requests.csv", "loadgen")]
    assert [value for value, _ in of_key(path, mllog.ATTACHED_FILE)] == attached
    judged = trials.judge(path, plan, plan.trials[0])
    assert list(judged.differences) == [] and judged.of_kind is not None
    assert [one.status for one in judged.of_kind.loads] == [("ok",) * 6] * 2

    model_folder._write_tokenizer(created := tmp_path, size=plan.config.model.vocab_size, longest=1)
    sampled = prompts.random_prompts(prompts.tokenizer(created), lengths=[16] * 15, seed=plan.trials[0].seed)
    sent = [body["prompt"] for body in stub_server.bodies]
    for first, last in ((0, 3), (3, 9), (9, 15)):  # the warm-up, and each load
        assert sorted(sent[first:last]) == sorted(sampled[first:last])


@pytest.mark.long
def test_a_server_elsewhere_has_no_hardware_in_the_log(tmp_path: Path) -> None:
    with stub_server.in_a_thread("prompt") as url:
        place = ("task.serving.arrivals=[one_by_one]", *serving.elsewhere(url, tmp_path / "model"))
        plan = serving.with_stub(tmp_path, "none", *place, "task.serving.requests=2", "task.serving.tokens_out=2")
        (tmp_path / "rank_logs").mkdir()
        with logging(tmp_path) as (log, path):
            serve.run(plan, plan.trials[0], log, tmp_path)
    assert of_key(path, mllog.SERVER) == [("transformers", {"url": url, "model": "tiny"})]
    known = {
        key: value for record in records(path) if (key := record["key"]) and (value := record["value"]) is not None
    }
    assert not known.keys() & {mllog.TENSOR_PARALLELISM, "num_ranks", "accelerator"}
    assert known["server_memory_gib"] == {"not_measured": "the server runs elsewhere"}
    ((_, about),) = of_key(path, mllog.LOAD_MEASURED)
    assert about["status"] == ["prompt"] * 2 and about["details"] == [
        "the server reports 17 prompt tokens instead of 16"
    ]
    assert about["arrival_s"][0] == 0 and about["arrival_s"][1] >= about["latency_s"][0] > about["ttft_s"][0] > 0


def test_the_log_describes_the_trial_and_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "gpu_name", lambda: "an H200")
    plan = serving.planned("task.serving.limits={ttft_s:2,tpot_s:null,latency_s:30}")
    config = plan.config
    on_gpus = replace(plan, config=replace(config, cluster=replace(config.cluster, device=Device.cuda)))
    with logging(tmp_path) as (log, path):
        serve.describe_serving(on_gpus, plan.trials[0], block(plan), log)
    actual = {record["key"]: record["value"] for record in records(path)}
    software = {name: version(name) for name in ("mlcommons-loadgen", "aiohttp", "tokenizers", "transformers")}
    assert list(actual.items())[:-1] == [
        (mllog.SUBMISSION_ORG, "runstop"),
        (mllog.SUBMISSION_PLATFORM, config.cluster.platform),
        (mllog.SEED, plan.trials[0].seed),
        (mllog.CONFIG_FILENAME, "task/serve_tiny.yaml"),
        (mllog.TENSOR_PARALLELISM, 1),
        ("num_ranks", 1),
        ("accelerator", "an H200"),
        ("host_processor_model_name", "Xeon 8480C"),
        ("operating_system", "Ubuntu 24.04"),
        ("commit", f"the commit of {ROOT}"),
        ("software", software),
    ]
    limits = {"ttft_s": 2.0, "tpot_s": None, "latency_s": 30.0}
    assert of_key(path, mllog.LOADS_REQUESTED) == [
        (["burst", "poisson 8/s"], {"limits": limits, "max_client_delay": 0.5}),
    ]
    assert serve.system(plan)["accelerator"] == "cpu"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_version(name: str) -> str:
        if name == "aiohttp":
            raise PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(serve, "version", fake_version)
    names = ("mlcommons-loadgen", "tokenizers", "vllm")
    assert serve.versions(("vllm",)) == {name: f"{name} 1" for name in names}


@pytest.mark.parametrize(("name", "shown"), [(b"NVIDIA H200", "NVIDIA H200"), ("NVIDIA H200", "NVIDIA H200")])
def test_a_gpu_has_nvmls_name_or_a_reason(monkeypatch: pytest.MonkeyPatch, name: str | bytes, shown: str) -> None:
    begun = list[str]()
    names = {"handle 5": name}
    fake = SimpleNamespace(
        nvmlInit=lambda: begun.append("init"),
        nvmlDeviceGetHandleByIndex=lambda index: f"handle {index}",
        nvmlDeviceGetName=names.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert serve.gpu_name() == shown and begun == ["init"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert serve.gpu_name() == "unknown GPU: 'handle 6'"


def test_a_model_of_the_site_is_logged_with_its_folder(tmp_path: Path) -> None:
    plan = serving.with_stub(tmp_path, "none")
    actual = server.RunningServer("http://127.0.0.1:1", "/site/llama", ["serve", "x"], 1.23456, None)
    with logging(tmp_path) as (log, path):
        serve.log_server(plan, block(plan), actual, log)
    about = {"argv": ["serve", "x"], "healthy_s": 1.235, "model": "/site/llama", "weights": "given"}
    assert of_key(path, mllog.SERVER) == [("transformers", about | {"precision": "fp32", "tp": 1})]


def test_a_load_is_logged_request_by_request(tmp_path: Path) -> None:
    """Two requests succeeded, one with two tokens per chunk; the others failed. Details are sorted, at most five."""
    plan = serving.planned()
    ok = Answer(
        number=0, due_s=7.0, status="ok", first_s=0.25, last_s=1.0000004, tokens_in=32, tokens_out=8, num_chunks=8
    )
    slow = replace(ok, due_s=7.5, first_s=0.5, last_s=2.25, num_chunks=4, num_together=2)
    failed = [Answer(number=2 + n, due_s=8.0, status="timeout", detail=f"no {6 - n}") for n in range(6)]
    client = {"sent_p50_s": 0.12345678}
    printed = {"result_validity": "VALID"}
    files = (tmp_path / "rows", tmp_path / "detail")
    actual = loadgen.LoadResult(
        load=plan.loads[1], answers=[ok, slow, *failed], client=client, loadgen=printed, files=files
    )
    with logging(tmp_path) as (log, path):
        serve.write(actual, log)
        serve.write(replace(actual, answers=failed[:1]), log)
    (name, about), (_, nothing) = of_key(path, mllog.LOAD_MEASURED)
    none = [None] * 6
    expected: dict[str, Any] = {"arrivals": "poisson", "requests": 200, "rate": 8.0, "batched_tokens": True}
    expected |= {"arrival_s": [0.0, 0.5, *[1.0] * 6], "latency_s": [1.0, 2.25, *none], "ttft_s": [0.25, 0.5, *none]}
    expected |= {"tpot_s": [0.107143, 0.25, *none], "tokens_in": [32, 32, *none], "tokens_out": [8, 8, *none]}
    expected |= {"status": ["ok", "ok", *["timeout"] * 6], "details": [f"no {n}" for n in range(1, 6)]}
    expected |= {
        "together": 2 / 10,
        "chunks_per_token": 12 / 16,
        "client": {"sent_p50_s": 0.123457},
        "loadgen": printed,
    }
    assert (name, about) == ("poisson 8/s", expected)
    assert (nothing["together"], nothing["chunks_per_token"], nothing["details"]) == (None, None, ["no 6"])
    assert logs.read(path).garbled == []


def test_a_tokenizer_path_may_contain_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE", str(tmp_path))
    own = block(serving.planned("task.serving.server.tokenizer=$SITE/words"))
    assert serve._tokenizer_folder(own, tmp_path / "model") == tmp_path / "words"
    assert serve._tokenizer_folder(block(serving.planned()), tmp_path / "model") == tmp_path / "model"


def test_a_load_needs_loadgen_and_a_plan_of_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = serving.planned()
    task = replace(plan.config.task, serving=None)
    with logging(tmp_path) as (log, _):
        with pytest.raises(ConfigError, match="the plan has no block task.serving"):
            serve.run(replace(plan, config=replace(plan.config, task=task)), plan.trials[0], log, tmp_path)
        for module in ("jobs.serving.loadgen", "mlperf_loadgen"):
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delattr("jobs.serving.loadgen")
        with pytest.raises(SubmitError, match=r"a serving benchmark needs jobs\.serving") as refused:
            serve.run(plan, plan.trials[0], log, tmp_path)
    assert (refused.value.rule, refused.value.where) == ("RUN-08", "jobs.serving")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_serves_and_its_end_closes_the_log_and_removes_the_model(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, events = serving.planned(), list[Any]()
    (tmp_path / MODEL_FOLDER).mkdir(parents=True)
    log = SimpleNamespace(abort=lambda: events.append("aborted"))
    guard = SimpleNamespace(finish=None)

    @contextmanager
    def begun(module: str, about: str, required: Any) -> Iterator[program.Begun[ServingPlan]]:
        assert (module, required) == ("jobs.tasks.serve", ServingPlan) and "on rank 0" in about
        who = Rank(rank, 0, 2, "127.0.0.1", 0)
        yield program.Begun(plan, plan.trials[0], who, log, tmp_path, guard)  # type: ignore[arg-type]

    monkeypatch.setattr(program, "begun", begun)
    monkeypatch.setattr(serve, "run", lambda *given: events.append(given))
    serve.main()
    assert events == ([(plan, plan.trials[0], log, tmp_path)] if rank == 0 else [])
    assert (guard.finish is None) == (rank == 1)
    if rank == 0:
        guard.finish()
        assert (
            events[1:] == ["aborted"] and not (tmp_path / MODEL_FOLDER).exists() and (tmp_path / "rank_logs").exists()
        )
