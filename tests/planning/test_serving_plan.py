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
    "task.serving.rates=[]": "arrivals contains poisson, but task.serving.rates is empty",
    "task.serving.rates=[2,1]": "rates is 2, 1, but rates must be above 0 and in ascending order",
    "task.serving.arrivals=[]": "task.serving.arrivals is empty",
    "task.serving.arrivals=[burst]": "rates is set, but task.serving.arrivals does not contain poisson",
    "task.serving.concurrency=[8]": "concurrency is set, but task.serving.arrivals does not contain concurrent",
    "task.serving.limits.latency_s=null": "poisson arrivals need a latency limit",
    "task.serving.requests=0": "task.serving.requests is 0, but must be a positive number",
    "task.serving.requests=30000": "requests is 30,000, but each load level",
    "task.serving.tokens_in=2000": "a prompt and its answer have 2,008 tokens, but tiny supports only 1,024 tokens",
    "task.serving.max_client_delay=2": "max_client_delay is 2",
    "precision=fp8": "the server transformers has no command-line options for precision=fp8",
    "parallel.tp=2": "parallel.tp is 2, but a server on a CPU supports only parallel.tp=1",
    "task.serving.server.argv=[serve,'{model}','{prot}']": "contains the unknown placeholder {prot}",
    "task.serving.server.options=['{']": "the server contains an unmatched brace: Single '{' encountered",
    "launch.profile=kernels": "launch.profile=kernels needs training steps",
    "task.serving.server.memory_fraction=1.5": "memory_fraction is 1.5",
    "task.serving.server.port=70000": "task.serving.server.port is 70000, which is not a valid port",
    "task.serving.server.url=node7:8000": "url is node7:8000, but must be a URL such as",
    "task.serving.server.url=http://node7:8000": "the model name or the tokenizer of the running server",
}


@pytest.mark.parametrize("override", REFUSED)
def test_invalid_settings_are_refused_with_the_reason(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        serving.planned(override)
    assert REFUSED[override] in refused.value.what and refused.value.fix


@pytest.mark.parametrize(
    ("numbers", "what"),
    [("[]", "concurrency is empty"), ("[8,8]", "in ascending order"), ("[0,1]", "from 1"), ("[9999]", "from 1 to")],
)
def test_numbers_of_concurrent_requests_are_checked(numbers: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        serving.planned(
            "task.serving.arrivals=[concurrent]", "task.serving.rates=[]", f"task.serving.concurrency={numbers}"
        )


def test_each_number_of_concurrent_requests_is_a_load() -> None:
    words = ("task.serving.arrivals=[burst,concurrent]", "task.serving.rates=[]", "task.serving.concurrency=[1,8]")
    plan = serving.planned(*words)
    assert [load.name for load in plan.loads] == ["burst", "concurrency 1", "concurrency 8"]
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_a_missing_model_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="the folder of the model is not set"):
        serving.planned("model.weights=checkpoint", "cluster.paths.model=null")


def test_a_sweep_has_one_load_per_rate_and_the_plan_round_trips_through_json() -> None:
    plan = serving.planned("task.serving.arrivals=[poisson,one_by_one]", "task.serving.rates=[0.5,2]")
    assert [(load.name, load.arrivals.scenario, load.rate) for load in plan.loads] == [
        ("poisson 0.5/s", "Server", 0.5),
        ("poisson 2/s", "Server", 2),
        ("one by one", "SingleStream", None),
    ]
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


@pytest.mark.long
def test_cpu_options_apply_to_their_server_on_cpus_only() -> None:
    cases = (("transformers", True, True), ("transformers", False, False), ("vllm", True, False))
    for server, is_cpu, has_options in cases:
        named = serving.planned(f"server={server}").config.task.serving
        assert named is not None
        words = command(named.server, precision="fp32", is_cpu=is_cpu)
        assert ("--cb-num-blocks" in words) is has_options and words[: len(named.server.argv)] == named.server.argv


@pytest.mark.long
@pytest.mark.parametrize("server", SERVERS)
def test_every_server_has_a_source_and_a_plan_for_a_gpu_node(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "/models/llama")
    plan = compose.compose(["task=serve_7b", f"server={server}", "cluster=dgxh200"])
    assert isinstance(plan, ServingPlan) and plan.base_dir is not None
    named = plan.config.task.serving
    assert named is not None and named.server.name.name == server and len(named.server.source) > 20
    text = (Path(compose.CONF) / "server" / f"{server}.yaml").read_text()
    assert "source:" in text and (server == "transformers" or named.server.image)
    assert (server == "transformers") is ("{tp}" not in named.server.argv)


@pytest.mark.long
def test_a_server_uses_tensor_parallelism_within_one_node() -> None:
    wide = ["task=serve_70b", "cluster=dgxh200"]
    assert compose.compose([*wide, "server=vllm"]).world.tp == 8
    for override, message in (
        ("server=transformers", "the command line of the server transformers has no placeholder"),
        ("cluster.num_nodes=2", "a server runs on one node, but cluster.num_nodes is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose.compose([*wide, override])


@pytest.mark.long
def test_tensor_parallelism_divides_the_heads() -> None:
    """Llama-2-13B has 40 heads. Of 8 KV heads, servers copy each for two GPUs if there are 16."""
    wide = ("cluster=dgxh200", "server=vllm", "model.weights=random")
    for tp in (1, 4, 8):
        assert compose.compose(["task=serve_13b", *wide, f"parallel.tp={tp}"]).world.tp == tp
    with pytest.raises(ConfigError, match="tp 3 does not divide the 40 attention heads") as refused:
        compose.compose(["task=serve_13b", *wide, "parallel.tp=3"])
    assert refused.value.fix == "set parallel.tp to one of 1, 2, 4, 8"
    assert compose.compose(["task=serve_70b", *wide, "parallel.tp=16", "cluster.ranks_per_node=16"]).world.tp == 16
    with pytest.raises(ConfigError, match="tp 4 does not divide the 10 KV heads"):
        compose.compose(["task=serve_13b", *wide, "parallel.tp=4", "model.num_query_groups=10"])


@pytest.mark.long
@pytest.mark.parametrize("server", SERVERS)
def test_a_server_gets_its_own_options_for_tensor_parallelism_and_memory(server: str) -> None:
    block = serving.planned(f"server={server}", "precision=bf16").config.task.serving
    assert block is not None
    words = dict(zip(block.server.argv, block.server.argv[1:], strict=False))
    tensor, memory = OPTIONS[server]
    assert tensor is None or words[tensor] == "{tp}"
    assert memory is None or words[memory] == "{memory_fraction}"


OPTIONS = {
    "transformers": (None, None),
    "vllm": ("--tensor-parallel-size", "--gpu-memory-utilization"),
    "sglang": ("--tp", "--mem-fraction-static"),
    "tgi": ("--num-shard", "--cuda-memory-fraction"),
    "lightllm": ("--tp", "--mem_fraction"),
    "tensorrt_llm": ("--tp_size", "--kv_cache_free_gpu_memory_fraction"),
}
"""The options for tensor parallelism and for the share of the memory, as the documentation of each server has them."""


def test_preflight_reports_a_missing_program_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = preflight.inspect(serving.planned("server=vllm"))
    assert (missing.rule, missing.what) == ("SRV-01", "vllm is not on PATH")
    plan = serving.planned("model.weights=checkpoint", f"cluster.paths.model={tmp_path}")
    assert {finding.what for finding in preflight.inspect(plan)} == {
        "the folder has no config.json",
        "the folder has no tokenizer.json",
    }
    (missing,) = preflight.inspect(serving.planned(*serving.elsewhere("http://node7:8000", tmp_path)))
    assert missing.what == "the folder has no tokenizer.json", "a running server needs nothing else here"


@pytest.mark.long
def test_a_server_without_a_serving_task_is_refused() -> None:
    with pytest.raises(ConfigError):
        compose.compose(["task=lora_tiny", "server=vllm"])
