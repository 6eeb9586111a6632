"""What is refused of a serving task, and the commands of servers that run on GPUs only."""

from pathlib import Path

import pytest

from bench import preflight
from bench.contract import plan_kinds
from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import command
from bench.errors import ConfigError
from bench.planning import compose
from helpers import serving

SERVERS = ("transformers", "vllm", "sglang", "tgi", "lightllm", "tensorrt_llm")
REFUSED = {
    "task.serving.rates=[]": "a Poisson load without a rate",
    "task.serving.rates=[2,1]": "rates 2, 1 do not rise",
    "task.serving.arrivals=[]": "no arrivals",
    "task.serving.arrivals=[burst]": "rates without a Poisson load",
    "task.serving.limits.latency_s=null": "without a limit of the latency",
    "task.serving.requests=0": "0 is not above 0",
    "task.serving.requests=30000": "30,000 requests of one load",
    "task.serving.tokens_in=2000": "2,008 tokens of a request and its answer, and tiny takes 1,024",
    "task.serving.max_client_delay=2": "would hide the server",
    "precision=fp8": "transformers is not started in fp8",
    "parallel.tp=2": "tp 2 on a CPU",
    "task.serving.server.argv=[serve,'{model}','{prot}']": "{prot} stands for nothing",
    "task.serving.server.options=['{']": "a brace in the command line: Single '{' encountered",
    "task.serving.server.port=70000": "70000 is not a valid port",
    "task.serving.server.url=node7:8000": "node7:8000 is not the address of a server",
    "task.serving.server.url=http://node7:8000": "where its tokenizer is",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_done_is_refused_with_its_reason(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        serving.planned(word)
    assert REFUSED[word] in refused.value.what and refused.value.fix


def test_a_model_that_nobody_has_named_is_refused() -> None:
    with pytest.raises(ConfigError, match="no folder of the model is named"):
        serving.planned("model.weights=checkpoint", "cluster.paths.model=null")


def test_a_sweep_is_a_load_for_each_rate_and_the_plan_survives_its_json() -> None:
    plan = serving.planned("task.serving.arrivals=[poisson,one_by_one]", "task.serving.rates=[0.5,2]")
    assert [(load.name, load.arrivals.scenario, load.rate) for load in plan.loads] == [
        ("poisson 0.5/s", "Server", 0.5),
        ("poisson 2/s", "Server", 2),
        ("one by one", "SingleStream", None),
    ]
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_what_one_server_needs_on_cpus_is_not_given_to_another_or_to_a_gpu() -> None:
    asked = (("transformers", True, True), ("transformers", False, False), ("vllm", True, False))
    for server, is_cpu, is_told in asked:
        named = serving.planned(f"server={server}").config.task.serving
        assert named is not None
        words = command(named.server, precision="fp32", is_cpu=is_cpu)
        assert ("--cb-num-blocks" in words) is is_told and words[: len(named.server.argv)] == named.server.argv


@pytest.mark.parametrize("server", SERVERS)
def test_every_server_has_a_source_and_is_started_for_a_node_of_gpus(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", "/models/llama")
    plan = compose.compose(["task=serve_7b", f"server={server}", "cluster=dgxh200"])
    assert isinstance(plan, ServingPlan) and plan.base_dir is not None
    named = plan.config.task.serving
    assert named is not None and named.server.name.name == server and len(named.server.source) > 20
    text = (Path(compose.CONF) / "server" / f"{server}.yaml").read_text()
    assert "source:" in text and (server == "transformers" or named.server.image)
    assert (server == "transformers") is ("{tp}" not in named.server.argv)


def test_a_server_is_split_over_the_gpus_of_one_node() -> None:
    wide = ["task=serve_70b", "cluster=dgxh200"]
    assert compose.compose([*wide, "server=vllm"]).world.tp == 8
    for word, why in (
        ("server=transformers", "transformers is not started with a tensor parallelism"),
        ("cluster.num_nodes=2", "2 nodes, and a server is started on one"),
    ):
        with pytest.raises(ConfigError, match=why):
            compose.compose([*wide, word])


def test_a_program_and_a_model_that_are_missing_are_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = preflight.inspect(serving.planned("server=vllm"))
    assert (missing.rule, missing.what) == ("SRV-01", "vllm is not on PATH")
    plan = serving.planned("model.weights=checkpoint", f"cluster.paths.model={tmp_path}")
    assert {finding.what for finding in preflight.inspect(plan)} == {
        "there is no config.json",
        "there is no tokenizer.json",
    }
    (missing,) = preflight.inspect(serving.planned(*serving.elsewhere("http://node7:8000", tmp_path)))
    assert missing.what == "there is no tokenizer.json", "all that is needed here of a server elsewhere"


def test_a_server_for_a_task_that_loads_none_is_refused() -> None:
    with pytest.raises(ConfigError):
        compose.compose(["task=lora_tiny", "server=vllm"])
