"""The memory of a server: against the weights and the cache of transformers, and the document's cluster."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract.plan_kinds import ServingPlan
from bench.contract.serving import ServingMemory
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning import serving as planning
from bench.planning.estimates import serving_memory
from helpers import serving
from helpers.cached_configs import cached

ON = ("cluster=dgx1", "container=none", "server=vllm")
GIB = 2**30
config_of = cached(lambda words: compose.unplanned(list(words)))


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "/models/llama")


def memory(*words: str) -> ServingMemory:
    plan = compose.compose([*ON, *words])
    assert isinstance(plan, ServingPlan) and plan.memory is not None
    return plan.memory


@pytest.mark.long
def test_weights_and_kv_cache_are_those_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from helpers.llama_config import llama_config

    plan = serving.planned()
    model, needed = plan.config.model, plan.memory
    assert needed is not None and needed.capacity_gib is None and needed.fits is None
    theirs = transformers.LlamaForCausalLM(llama_config(model)).eval()
    assert needed.weights_gib * GIB == sum(weight.nbytes for weight in theirs.parameters())
    cache = transformers.DynamicCache(config=theirs.config)
    with torch.no_grad():
        theirs(torch.zeros(1, 40, dtype=torch.long), past_key_values=cache)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert needed.request_gib * GIB == stored, "40 tokens in FP32: 32 of the prompt and 8 of the answer"


@pytest.mark.long
def test_a_70b_model_fits_on_eight_rtx_4090_and_not_on_one() -> None:
    """The document ran it on eight. By hand: 137,953,296,384 bytes of weights, 2 x 80 x 8 x 128 values a token."""
    rtx = ("task=serve_70b", "gpu@cluster.gpu=rtx4090")
    needed = memory(*rtx)
    assert needed.weights_gib == pytest.approx(137_953_296_384 / 8 / GIB, rel=2e-4), "norms are on every GPU"
    assert needed.request_gib == 576 * 2 * 80 * 128 * 2 / GIB
    room_gib = 0.9 * 23.65 - needed.weights_gib - needed.workspace_gib
    assert needed.fitting == int(room_gib / needed.request_gib) and 0 < needed.fitting < needed.concurrent == 1000
    with pytest.raises(ConfigError, match=r"needs 131\.3 GiB per GPU \(.*\), but it may use only 21\.3 GiB") as no:
        memory(*rtx, "parallel.tp=1")
    assert "raise parallel.tp" in no.value.fix
    with pytest.raises(ConfigError, match="it may use only 17"):
        memory(*rtx, "task.serving.server.memory_fraction=0.75")


@pytest.mark.long
def test_concurrent_requests_follow_from_the_loads() -> None:
    seven = "task=serve_7b"
    assert memory(seven, "task.serving.arrivals=[one_by_one]").concurrent == 1
    poisson = ("task.serving.arrivals=[poisson]", "task.serving.limits.latency_s=20")
    assert memory(seven, *poisson, "task.serving.rates=[1,4]").concurrent == 80, "4/s for at most 20 s each"
    assert memory(seven, *poisson, "task.serving.rates=[400]").concurrent == 1000, "no more than there are"


@given(tp=st.sampled_from([1, 2, 4, 8]), requests=st.integers(1, 2000), tokens=st.integers(1, 3000))
def test_what_fits_is_within_the_memory_of_the_server(tp: int, requests: int, tokens: int) -> None:
    config = config_of((*ON, "task=serve_7b"))
    block = replace(config.task.serving, requests=requests, tokens_in=tokens)
    config = replace(config, parallel=replace(config.parallel, tp=tp))
    needed = serving_memory.estimate(config, block, planning.loads(block))
    assert needed.fitting is not None and 0 <= needed.fitting <= requests and needed.capacity_gib
    usable_gib = needed.fraction * needed.capacity_gib
    if needed.fitting:
        assert needed.total_gib <= usable_gib
    if needed.fitting < requests:
        assert needed.total_gib + needed.request_gib > usable_gib * (1 - 1e-9)


def test_more_gpus_than_kv_heads_have_copies() -> None:
    llama = config_of((*ON, "task=serve_70b")).model
    by_tp = [serving_memory.token_bytes(llama, tp=tp, element_bytes=2) for tp in (1, 4, 8, 16)]
    assert by_tp == [8 * by_tp[2], 2 * by_tp[2], by_tp[2], by_tp[2]]
