"""Step times against hand arithmetic and measurements, and how they depend on rates, sizes and splits."""

import copy
import dataclasses
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import layers
from bench.contract.plan import Cost, Recomputed, World
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config, Device, Precision
from bench.planning import compose
from bench.planning.estimates import memory, step_time, transports
from bench.planning.estimates.memory import EVERYTHING, NOTHING
from bench.planning.estimates.network import rate_at
from bench.planning.estimates.parameters import rank_parameters
from bench.planning.parallelism import num_microbatches, split

RESULTS = Path(__file__).parents[2] / "docs/results"
LORA_7B_ROWS_350 = ("task=lora_7b", "data=rows_350", "precision=fp8", "cluster=dgxh200", "cluster.ranks_per_node=1")
LORA_7B_ROWS_350 += ("model.weights=random",)
LAYER_TFLOP = 2 * 8192 * 8192 * (10240 + 8192 + 3 * 28672) / 1e12
HEAD_TFLOP = 2 * 8192 * 8192 * 32000 / 1e12
ATTENTION_TFLOP = 2 * 8192 * 8192 * 8192 / 1e12
GEMM_TFLOPS, FORWARD_TFLOPS, BACKWARD_TFLOPS = 1404, 503, 417
ADAPTERS_S = 6 * 8192 * 44_564_480 / 705e12
"""Rank 16, in BF16 at the rate of a layer of 14 TFLOP."""


def composed(*overrides: str) -> Config:
    return compose.compose(["task=lora70b", *overrides]).config


FP8, BF16 = (composed("cluster=dgxh200", f"precision={name}") for name in ("fp8", "bf16"))
TWO_NODES = composed("cluster=dgx2", "precision=fp8")


def world(config: Config, *, tp: int = 1, pp: int = 1, cp: int = 1, sp: bool = False, vpp: int = 1) -> World:
    return replace(split(config, tp=tp, pp=pp, cp=cp, sp=sp), vpp=vpp)


def estimated(config: Config, recomputed: Recomputed = NOTHING, **axes: int) -> Cost:
    cost = step_time.estimate(config, world(config, **axes), recomputed)
    assert cost is not None
    return cost


def test_70b_in_fp8_on_a_whole_gpu_by_hand() -> None:
    """Eight replicas, one row each: 80 layers forward and backward at the measured rates, and the head in BF16."""
    step = estimated(FP8)
    assert step.gemm_s == pytest.approx(
        80 * 2 * LAYER_TFLOP / GEMM_TFLOPS + 2 * HEAD_TFLOP / 687.6 + ADAPTERS_S, rel=1e-4
    )
    assert step.attention_s == pytest.approx(80 * ATTENTION_TFLOP * (1 / FORWARD_TFLOPS + 2.5 / BACKWARD_TFLOPS))
    forward = 21 * 8192 + 5 * 8192 + 4 * 10240 + 3.9 * 57344
    backward = 27 * 8192 + 6 * 8192 + 9 * 10240 + 3.9 * 57344
    layers_and_loss = 8192 * (80 * (forward + backward) + 6 * 32000) / 3600e9
    update = (34 * 44_564_480 / 8 + 4 * 44_564_480) / 4210e9
    assert step.elementwise_s == pytest.approx(layers_and_loss + update)
    assert (step.recompute_s, step.bubble_s, step.host_s) == (0, 0, 0)
    assert step.step_s == pytest.approx(sum(v for k, v in dataclasses.asdict(step).items() if k != "step_s"))


def test_the_estimate_is_near_a_step_with_its_head_in_fp8() -> None:
    """One H200, eight rows of 4096 at once: the median of eight steps was 1,207.3 ms."""
    sizes = ("recipe.micro_batch_size=8", "recipe.global_batch_size=8")
    config = unplanned("task=lora_8b", "precision=fp8", *sizes)
    step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
    assert step
    assert step.step_s == pytest.approx(1.2073, rel=0.05)


def test_a_frozen_head_of_a_large_vocabulary_in_fp8_by_hand() -> None:
    """Its two GEMMs at the rate of FP8; the loss reads logits twice and writes their gradient in one byte."""
    config = composed("cluster=dgxh200", "model=llama31_8b", "precision=fp8")
    in_bf16 = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=99_968))
    gemm_s = 2 * 2 * 8192 * 4096 / 1e12
    gemms = [128_256 * gemm_s / GEMM_TFLOPS, 99_968 * gemm_s / 677.8]
    got = [estimated(one) for one in (config, in_bf16)]
    assert got[0].gemm_s - got[1].gemm_s == pytest.approx(gemms[0] - gemms[1], rel=2e-3)
    loss_s = 8192 * (5 * 128_256 - 6 * 99_968) / 3600e9
    assert got[0].elementwise_s - got[1].elementwise_s == pytest.approx(loss_s, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "precision", "measured_s", "error"),
    [
        ("llama2_70b", "fp8", 2.518, 0.02),
        ("llama31_8b", "fp8", 0.386, 0.055),
        ("llama31_8b", "bf16 model.bias=true", 0.590, 0.06),
        ("llama2_7b", "fp8", 0.353, 0.045),
    ],
)
def test_the_estimate_is_near_a_measured_step(
    monkeypatch: pytest.MonkeyPatch, model: str, precision: str, measured_s: float, error: float
) -> None:
    """One row of 8192 tokens on one H200: docs/results/2026-11-21-fp8.md, for BF16 2026-11-21-fp8-two-gpus.md.

    Every head was in BF16. The rates come from the first report. FP8 was measured before the adapters had kernels of
    their own, which made the 70B step 0.6 to 1.1 % faster. BF16 was measured with megatron-core's layer, which a bias
    now asks for.
    """
    monkeypatch.setattr(layers, "FP8_HEAD_VOCABULARY", 10**9)
    config = composed("cluster=dgxh200", f"model={model}", *f"precision={precision}".split())
    assert estimated(config).step_s == pytest.approx(measured_s, rel=error)


@pytest.mark.parametrize(
    ("task", "micro_batch_size", "global_batch_size", "measured_ms"),
    [
        ("pretrain_7b precision=bf16", 1, 4, 1228.7),
        ("pretrain_7b precision=fp8", 1, 4, 870.7),
        ("pretrain_8b precision=bf16", 1, 4, 2868.6),
        ("pretrain_8b precision=fp8", 1, 4, 2021.7),
        ("pretrain_gpt3_126m precision=bf16", 32, 128, 548.5),
        ("pretrain_gpt3_5b precision=bf16", 4, 16, 1756.3),
        ("lora_7b precision=fp8", 4, 8, 1161.6),
        ("lora_8b precision=bf16", 4, 8, 1911.2),
        ("lora_8b precision=fp8", 4, 8, 1297.6),
        ("qlora_70b", 1, 2, 4311.2),
    ],
)
def test_the_estimate_is_near_the_measured_steps_of_document_tasks(
    monkeypatch: pytest.MonkeyPatch, task: str, micro_batch_size: int, global_batch_size: int, measured_ms: float
) -> None:
    """One H200, medians of docs/results/2026-11-22-training.md; some of the rates come from these steps.

    They were measured with every head in BF16.
    """
    monkeypatch.setattr(layers, "FP8_HEAD_VOCABULARY", 10**9)
    sizes = (f"recipe.micro_batch_size={micro_batch_size}", f"recipe.global_batch_size={global_batch_size}")
    config = unplanned(*f"task={task}".split(), *sizes)
    step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
    assert step
    assert 1e3 * step.step_s == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(
    ("global_batch_size", "axes", "measured_s", "gemm_s", "communication_s"),
    [
        (2, {}, 2.601, 1.630, None),
        (2, {"cp": 2}, 2.951, 1.613, 0.226),
        (2, {"tp": 2, "sp": True}, 3.027, 1.594, 0.360),
        (2, {"tp": 2}, 3.108, 1.585, 0.364),
        (4, {"pp": 2}, 6.742, 3.270, None),
        (4, {"pp": 2, "vpp": 2}, 6.136, 3.394, None),
    ],
)
def test_the_estimate_is_near_two_measured_gpus(
    global_batch_size: int, axes: dict, measured_s: float, gemm_s: float, communication_s: float | None
) -> None:
    """Llama-2-70B in FP8, docs/results/2026-11-21-fp8-two-gpus.md.

    The measured times are corrected for these GPUs, which are slower than those of the rates, and for the slower
    adapters of that day. Communication, which is the time of NCCL's kernels with their waiting, is within a quarter.
    """
    slower = 2.601 / 2.518 * 2.5805 / 2.5647
    recipe = f"recipe.global_batch_size={global_batch_size}"
    config = composed(
        "cluster=local", "cluster.device=cuda", "gpu@cluster.gpu=h200", "cluster.ranks_per_node=2", recipe
    )
    step = estimated(config, **axes)
    assert step.step_s == pytest.approx(measured_s / slower, rel=0.03)
    assert step.gemm_s == pytest.approx(gemm_s / slower, rel=0.06)
    if communication_s:
        assert step.communication_s == pytest.approx(communication_s, rel=0.25)


@pytest.mark.parametrize(
    ("axes", "measured_s", "error"),
    [({"tp": 2}, 2.784, 0.03), ({"tp": 4}, 2.997, 0.06), ({"tp": 8}, 3.429, 0.10), ({"cp": 4}, 2.953, 0.04)],
)
def test_the_estimate_is_near_one_measured_rank_of_eight(axes: dict, measured_s: float, error: float) -> None:
    """Without communication, on a GPU as slow as those of 2026-11-21: docs/results/2026-11-22-fp8.md."""
    slower = 2.601 / 2.518 * 2.652 / 2.5647
    step = estimated(FP8, **axes)
    assert step.gemm_s + step.attention_s + step.elementwise_s == pytest.approx(measured_s / slower, rel=error)
    assert step.host_s == 0


def test_a_step_is_not_faster_than_its_host() -> None:
    """Host's time of a layer with several ranks of a host, in ms: docs/results/2026-11-26-four-gpus.md."""
    short = replace(FP8, data=replace(FP8.data, seq_length=128))
    of_layer_ms = {
        name: 1000 * estimated(short, **sizes).step_s / count / 80
        for name, count, sizes in (
            ("dp", 1, {}),
            ("tp", 2, {"tp": 2, "sp": True}),
            ("cp", 2, {"cp": 2}),
        )
    }
    assert of_layer_ms == pytest.approx({"dp": 5.95, "tp": 8.63, "cp": 7.42}, rel=0.02)
    eight = {"cp 8": estimated(FP8, cp=8), "tp 8": estimated(FP8, tp=8, sp=True)}
    assert all(step.host_s > 0 for step in eight.values())
    assert {name: step.step_s for name, step in eight.items()} == pytest.approx({"cp 8": 4.90, "tp 8": 5.26}, rel=0.1)


def test_the_host_of_one_rank_launches_faster() -> None:
    alone = replace(FP8, cluster=replace(FP8.cluster, ranks_per_node=1), data=replace(FP8.data, seq_length=128))
    alone = replace(alone, recipe=replace(alone.training_recipe, global_batch_size=1))
    assert estimated(alone).step_s == pytest.approx((80 * 70 + 28) * 47e-6)
    assert estimated(replace(alone, precision=Precision.bf16)).step_s == pytest.approx((80 * 64 + 28) * 47e-6)
    cores = replace(alone, precision=Precision.bf16, model=replace(alone.model, bias=True))
    assert estimated(cores).host_s == 0  # the kernels of megatron-core's layer were not counted


@pytest.mark.parametrize(
    ("name", "micro_batches", "counts"),
    [
        ("lora_7b_fp8", 2, (step_time.FROZEN_FP8, step_time.FROZEN_FORWARD, step_time.FROZEN_ENDS)),
        ("pretrain_7b_bf16", 4, (step_time.TRAINED_BF16, step_time.TRAINED_FORWARD, step_time.TRAINED_ENDS)),
    ],
)
def test_the_launches_of_a_layer_are_those_of_a_profile(name: str, micro_batches: int, counts: tuple[int, ...]) -> None:
    profile = json.loads((RESULTS / "2026-11-22-studies" / f"modules_{name}.json").read_text())
    of_layers, passes = Counter(), 32 * micro_batches
    rows = [row for row in profile["times"]["rows"] if row["phase"] in ("forward", "backward")]
    for row in rows:
        if row["part"] != "embedding":
            of_layers[row["phase"]] += round(row["launches"] / passes)
    layer, forward, ends = counts
    assert (of_layers.total(), of_layers["forward"]) == (layer, forward)
    assert sum(row["launches"] for row in rows) == pytest.approx(layer * passes + ends * micro_batches, rel=0.01)


@pytest.mark.long
def test_a_step_that_waits_for_its_host_takes_what_was_measured() -> None:
    """Also if the forward pass is launched twice: docs/results/2026-11-26-tune.md."""
    rows = json.loads((RESULTS / "2026-11-26-tune" / "lora.json").read_text())
    compared = 0
    for row in rows:
        plan = compose.compose([*LORA_7B_ROWS_350, *row["overrides"]])
        assert isinstance(plan, TrainingPlan) and plan.cost is not None
        if plan.cost.host_s:
            measured_s = np.median([step for block in row["blocks_ms"] for step in block]) / 1000
            assert plan.cost.step_s == pytest.approx(measured_s, rel=0.13), row["name"]
            compared += 1
    assert compared == 8


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_full_recompute_costs_a_forward_pass_more(config: Config) -> None:
    none, full = estimated(config, tp=2, sp=True), estimated(config, EVERYTHING, tp=2, sp=True)
    assert replace(full, recompute_s=0, step_s=none.step_s) == none
    assert full.step_s - none.step_s == pytest.approx(full.recompute_s)
    assert 0.3 * none.step_s < full.recompute_s < 0.5 * none.step_s


def test_recomputing_a_linear_costs_its_gemm_and_the_kernels_after_it() -> None:
    once = [estimated(FP8, Recomputed(full=False, qkv_layers=q, fc1_layers=f)).recompute_s for q, f in ((1, 0), (0, 1))]
    qkv, fc1 = (2 * 8192 * 8192 * width / 1e12 / GEMM_TFLOPS for width in (10240, 57344))
    assert once == pytest.approx([qkv + 8192 * 4 * 10240 / 3600e9, fc1 + 8192 * 3.9 * 57344 / 3600e9])
    both = estimated(FP8, Recomputed(full=False, qkv_layers=5, fc1_layers=3)).recompute_s
    assert both == pytest.approx(5 * once[0] + 3 * once[1])


def test_a_pipeline_has_one_bubble_per_step() -> None:
    flat, two, interleaved = (estimated(FP8, pp=pp, vpp=vpp) for pp, vpp in ((1, 1), (2, 1), (2, 2)))
    half = replace(FP8, model=replace(FP8.model, num_layers=40))
    forty_layers_s = flat.step_s - estimated(half).step_s
    assert two.bubble_s == pytest.approx((1 + step_time.WAIT_SHARE) * forty_layers_s, rel=1e-3)  # one micro-batch
    assert interleaved.bubble_s == pytest.approx(two.bubble_s / 2)
    assert interleaved.communication_s > two.communication_s > flat.communication_s


def test_communication_by_hand() -> None:
    """Per micro-batch and layer: tp 2 sends [tokens, h] eight times; cp 2 gathers k and v twice and sums gradients."""

    def communication_s(config: Config, **axes: int) -> float:
        step = estimated(config, **axes)
        return step.communication_s - step_time.WAIT_SHARE * (step.gemm_s + step.attention_s + step.elementwise_s)

    hidden, gbs_64, gbs_128 = 8192 * 8192, 313e9, (313 * 345) ** 0.5 * 1e9  # 64 MiB in FP8, 128 MiB in BF16
    in_fp8, in_bf16 = hidden / 2 / gbs_64, 2 * hidden / 2 / gbs_128
    more = 0.01  # the adapters' gradients are sent too, and the head does not wait
    assert communication_s(FP8, tp=2, sp=True) == pytest.approx(2 * 80 * 4 * (in_fp8 + in_bf16), rel=more)
    assert communication_s(FP8, tp=2) == pytest.approx(2 * 80 * 8 * in_bf16, rel=more)
    assert communication_s(BF16, tp=2, sp=True) == pytest.approx(2 * 80 * 8 * in_bf16, rel=more)
    keys_and_values = 8192 * 2 * 2 * 1024  # 32 MiB
    gbs_32 = (152 * 313) ** 0.5 * 1e9
    assert communication_s(FP8, cp=2) == pytest.approx(2 * 80 * 3 * keys_and_values / 2 / gbs_32, abs=0.003)


def test_merging_attention_chunks_by_hand() -> None:
    """cp 2: three of four queries have keys in an earlier chunk; k and v are concatenated, gradients summed."""
    more_s = estimated(FP8, cp=2).elementwise_s - estimated(FP8).elementwise_s
    of_hidden, of_kv = 4 + 30 * 0.75 + 4 + 6 * 0.75, 4 + 8 + 11 + 32
    transposed = (
        80 * 2 * 8192 * (10240 + 8192 + 3 * 28672)
    )  # reads and writes all weights; half of it overlaps with GEMMs
    merged = 80 * 8192 * (of_hidden * 8192 + of_kv * 2 * 1024)
    assert more_s == pytest.approx(merged / 3600e9 + transposed / 4210e9, rel=0.01)


def test_ranks_of_a_node_share_their_network_cards() -> None:
    """tp 4 x cp 4 on two nodes: each group of cp has two ranks in a node, and so two cards."""

    def between_nodes_s(network_gbs: float, **axes: int) -> float:
        config = copy.deepcopy(TWO_NODES)
        config.cluster.network_gbs = network_gbs
        config.parallel.overlap = False
        return estimated(config, **axes).communication_s

    adapters = rank_parameters(TWO_NODES.model, TWO_NODES.task.training.lora, tp=4, pp=1, pp_rank=0)[1]
    gathered = 8 * 80 * 3 * 8192 * 2 * 2 * 1024 / 4 * 3 / 4 + 1.5 * 4 * adapters * 3 / 4  # k and v, and gradients
    split_ = {"tp": 4, "cp": 4, "sp": True}
    assert between_nodes_s(10, **split_) - between_nodes_s(20, **split_) == pytest.approx(
        gathered / 20e9 - gathered / 40e9
    )
    sent = 8 * 2 * 2 * 8192 * 8192 / 8
    split_ = {"tp": 8, "pp": 2, "sp": True}
    assert between_nodes_s(10, **split_) - between_nodes_s(20, **split_) == pytest.approx(sent / 10e9 - sent / 20e9)


axes = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([2, 4]),
        "pp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "sp": st.booleans(),
    }
)
recomputes = st.sampled_from([NOTHING, EVERYTHING, Recomputed(full=False, qkv_layers=7, fc1_layers=3)])


@given(
    axes=axes, recomputed=recomputes, config=st.sampled_from([TWO_NODES, replace(TWO_NODES, precision=Precision.bf16)])
)
def test_a_machine_twice_as_fast_takes_half_the_time(
    axes: dict[str, int], recomputed: Recomputed, config: Config
) -> None:
    fast = copy.deepcopy(config)
    assert fast.cluster.gpu and fast.cluster.gpu.rates and fast.cluster.network_gbs
    fast.cluster.network_gbs *= 2
    rates = fast.cluster.gpu.rates
    for name in ("bf16_tflops", "fp8_tflops", "busbw_gbs"):
        setattr(rates, name, [2 * rate for rate in getattr(rates, name)])
    for field in dataclasses.fields(rates):
        if isinstance(getattr(rates, field.name), float) and field.name != "launch_us":
            setattr(rates, field.name, 2 * getattr(rates, field.name))
    rates.launch_us /= 2
    slow_s = dataclasses.asdict(estimated(config, recomputed, **axes))
    rdma = transports.load(transports.RDMA)
    with (
        mock.patch.object(transports, "load", return_value=replace(rdma, latency_us=rdma.latency_us / 2)),
        mock.patch.object(step_time, "SHARED_LAUNCH_US", step_time.SHARED_LAUNCH_US / 2),
    ):
        fast_s = dataclasses.asdict(estimated(fast, recomputed, **axes))
    twice_s = {name: 2 * seconds for name, seconds in fast_s.items()}
    assert slow_s == pytest.approx(twice_s, abs=1.5e-9), "both are rounded to nine places"


NCCL = st.sampled_from(
    [
        {},
        {"NCCL_NET": "IB"},
        {"NCCL_NET": "Socket"},
        {"NCCL_IB_DISABLE": "1"},
        {"NCCL_P2P_DISABLE": "1"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_NET": "Socket"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
    ]
)
layouts = st.fixed_dictionaries({name: st.sampled_from([1, 2, 4]) for name in ("tp", "cp")} | {"pp": st.just(1)})


def with_network(config: Config, network_gbs: float, nccl: dict[str, str]) -> Config:
    return replace(config, cluster=replace(config.cluster, network_gbs=network_gbs, environment=nccl))


@given(axes=layouts, nccl=NCCL, slow=st.floats(0.001, 400), faster=st.floats(1, 1000))
def test_a_slower_network_never_gives_a_shorter_step(
    axes: dict[str, int], nccl: dict[str, str], slow: float, faster: float
) -> None:
    slow_s, fast_s = (estimated(with_network(TWO_NODES, gbs, nccl), **axes) for gbs in (slow, slow * faster))
    assert fast_s.step_s <= slow_s.step_s and fast_s.communication_s > 0


@given(axes=layouts, network_gbs=st.floats(0.001, 400))
def test_each_transport_is_at_most_as_fast_as_the_one_before(axes: dict[str, int], network_gbs: float) -> None:
    """RDMA before TCP sockets between nodes; NVLink before host memory before sockets within a node."""

    def steps_s(*in_order: dict[str, str]) -> list[float]:
        return [estimated(with_network(TWO_NODES, network_gbs, nccl), **axes).step_s for nccl in in_order]

    no_p2p, no_shm = {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    sockets = {"NCCL_NET": "Socket"}
    for in_order in (({}, sockets), (no_p2p, no_p2p | sockets), (sockets, no_p2p | sockets, no_shm | sockets)):
        seconds = steps_s(*in_order)
        assert seconds == sorted(seconds)


REPLICAS = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1")


@pytest.mark.long
def test_gradients_over_sockets_by_hand() -> None:
    """16 replicas of 7B exchange gradients once: TCP frames of a slow link, and the limit of one GPU on a fast one."""
    config = composed("task=pretrain_7b", "cluster=dgx2", *REPLICAS, "parallel.overlap=false")
    parameters = rank_parameters(config.model, None, tp=1, pp=1, pp_rank=0)[0]
    sent = 15 / 16 * (4 + 2) * parameters  # FP32 gradients, BF16 weights
    latency_s = 2 * 45.8e-6  # one step of each of two rings crosses the network
    for network_gbs, of_one_gpu in ((0.125, 0.125 * 1448 / 1538), (50, 6.0)):
        step = estimated(with_network(config, network_gbs, {"NCCL_NET": "Socket"}))
        assert step.communication_s == pytest.approx(sent / (8 * of_one_gpu * 1e9) + latency_s, rel=1e-6)


def test_without_peer_to_peer_data_passes_through_host_memory() -> None:
    """7B on one node: the measured 55 GB/s of a GPU to host memory, and PCIe's latency in each of seven steps."""
    plain = (*REPLICAS, "parallel.overlap=false", "+cluster.environment.NCCL_P2P_DISABLE=1")
    config = composed("task=pretrain_7b", "cluster=dgx1", *plain)
    parameters = rank_parameters(config.model, None, tp=1, pp=1, pp_rank=0)[0]
    expected = 7 / 8 * (4 + 2) * parameters / 55e9 + 2 * 7 * 5.7e-6
    assert estimated(config).communication_s == pytest.approx(expected, rel=1e-6)
    assert config.cluster.gpu and config.cluster.gpu.rates
    config.cluster.gpu.rates.host_gbs = None
    assert step_time.estimate(config, world(config), NOTHING) is None, "the rate to host memory was not measured"


@pytest.mark.parametrize("network_gbs", [0.125, 1, 50, 400])
def test_replicas_show_only_what_a_backward_and_a_forward_pass_do_not_hide(network_gbs: float) -> None:
    """7B on two nodes. Nothing hides the embedding's gradients; what is hidden slows the layers down."""
    config = with_network(composed("task=pretrain_7b", "cluster=dgx2", *REPLICAS), network_gbs, {})
    count = num_microbatches(config, world(config))
    plain, overlapped, captured = (
        step_time.estimate(
            replace(config, parallel=replace(config.parallel, overlap=overlap)),
            world(config),
            NOTHING,
            is_captured=graph,
        )
        for overlap, graph in ((False, False), (True, False), (True, True))
    )
    assert plain and overlapped and captured
    parameters = rank_parameters(config.model, None, tp=1, pp=1, pp_rank=0)[0]
    reduce_s, gather_s = (plain.communication_s * share for share in (4 / 6, 2 / 6))
    embedding_s = reduce_s * config.model.vocab_size * config.model.hidden_size / parameters
    layers_s = (plain.gemm_s + plain.attention_s + plain.elementwise_s) / count
    hidden_s = plain.communication_s - overlapped.communication_s
    could_hide_s = min(reduce_s - embedding_s, layers_s) + min(gather_s, layers_s)
    assert 0 < hidden_s <= could_hide_s * (1 - step_time.SLOWED) + 1e-6
    if reduce_s < layers_s / 2 and gather_s < layers_s / 4:
        assert hidden_s == pytest.approx(could_hide_s * (1 - step_time.SLOWED), rel=1e-4)
    assert overlapped.communication_s <= captured.communication_s <= plain.communication_s


@given(axes=axes, recomputed=recomputes)
def test_more_micro_batches_take_longer_with_the_same_bubble(axes: dict[str, int], recomputed: Recomputed) -> None:
    few, many = (replace(TWO_NODES, recipe=replace(TWO_NODES.recipe, global_batch_size=n)) for n in (16, 32))
    few_s, many_s = (estimated(config, recomputed, **axes) for config in (few, many))
    assert many_s.bubble_s == pytest.approx(few_s.bubble_s)
    assert many_s.attention_s == pytest.approx(2 * few_s.attention_s)
    assert few_s.step_s < many_s.step_s <= 2 * few_s.step_s


@given(tp=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]))
def test_sequence_parallel_is_slower_only_by_its_launches(tp: int, cp: int) -> None:
    for config in (FP8, BF16):
        with_sp, without = (estimated(config, tp=2 * tp, cp=cp, sp=sp) for sp in (True, False))
        assert with_sp.step_s - with_sp.host_s <= without.step_s - without.host_s


def test_rates_interpolate_measurements_and_extrapolate_below() -> None:
    sizes, rates = [1.0, 4.0, 16.0], [10.0, 20.0, 30.0]
    assert [rate_at(size, sizes, rates) for size in (*sizes, 2.0, 99.0)] == pytest.approx([10, 20, 30, 200**0.5, 30])
    assert rate_at(0.25, sizes, rates) == pytest.approx(5.0)
    assert rate_at(7.0, [1.0], [10.0]) == 10.0
    samples = [rate_at(2**exponent, sizes, rates) for exponent in range(-6, 8)]
    assert all(low <= high for low, high in pairwise(samples))


def test_unmeasured_rates_give_no_estimate() -> None:
    def without(change: str) -> Config:
        config = copy.deepcopy(TWO_NODES)
        assert config.cluster.gpu
        match change:
            case "rates":
                config.cluster.gpu.rates = None
            case "gpu":
                config.cluster.gpu = None
            case "cuda":
                config.cluster.device = Device.cpu
            case "network":
                config.cluster.network_gbs = None
            case "fp32":
                config.precision = Precision.fp32
        return config

    for change in ("rates", "gpu", "cuda", "network", "fp32"):
        config = without(change)
        assert step_time.estimate(config, world(config, tp=2), NOTHING) is None, change
    assert step_time.estimate(without("nothing"), world(TWO_NODES, tp=2), NOTHING) is not None


@pytest.mark.parametrize(
    ("precision", "tflops", "gradient_tflops", "per_token", "refreshed"),
    [
        # norms 12 and again 8, residual 6, backward 16; RoPE 4 and 4; SwiGLU 3 and 6, on gate and up
        ("bf16", 678.0, 678.0, (18 + 24) * 4096 + (4 + 4) * 12288 + (3 + 6) * 22016, 0),
        # norms 10, residual 6, quantize 3, again 6, backward 17, transpose 8; of attention 3, 3 and 2
        ("fp8", 1404, 1110, (16 + 34 + 3 + 5) * 4096 + (4 + 5) * 12288 + (3.9 + 8) * 22016, 5),
    ],
)
def test_a_trained_model_by_hand(
    precision: str, tflops: float, gradient_tflops: float, per_token: float, refreshed: int
) -> None:
    """Llama-2-7B on a GPU, 16 micro-batches of four rows of 4096: three GEMMs of each weight, of which the last one
    adds to FP32 gradients; the head's and the embedding's gradients take 24 bytes. Once a step 38 bytes for each
    weight, and in FP8 5 more for the layers' linears."""
    config = unplanned("task=pretrain_7b", f"precision={precision}", "recipe.global_batch_size=64")
    config = replace(config, recipe=replace(config.recipe, micro_batch_size=4))
    tokens, linears, head = 4 * 4096, 4 * 4096**2 + 3 * 4096 * 11008, 32000 * 4096
    step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
    assert step
    head_s = 3 * 2 * head * tokens / 1e12 / 686.1  # BF16 at 4.3 TFLOP, between 690 at 3.5 and 677 at 7
    layers_s = 32 * 2 * linears * tokens / 1e12 * (2 / tflops + 1 / gradient_tflops)  # BF16 at 6.6 TFLOP
    assert step.gemm_s == pytest.approx(16 * (layers_s + head_s), rel=1e-3)
    kernels = 16 * (32 * per_token + 6 * 32000) * tokens
    updates = 16 * 24 * head + 38 * 6_738_415_616 + refreshed * 32 * linears
    assert step.elementwise_s == pytest.approx(kernels / 3600e9 + updates / 4210e9, rel=1e-6)
    assert step.communication_s == 0


def unplanned(*overrides: str) -> Config:
    return compose.unplanned([*overrides, "cluster=dgxh200", "cluster.ranks_per_node=1"])


def test_offloaded_moments_are_copied_once_per_step() -> None:
    """6.7 billion weights with 8 bytes of moments, in BF16 4, at 55 GB/s each way."""
    times_s = {}
    for moments in ("fp32", "bf16"):
        for offload in ("true", "false"):
            config = unplanned("task=pretrain_7b", f"recipe.moments={moments}", f"recipe.offload_moments={offload}")
            step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
            assert step
            times_s[moments, offload] = step.step_s
    for moments, size in (("fp32", 8), ("bf16", 4)):
        more_s = times_s[moments, "true"] - times_s[moments, "false"]
        assert more_s == pytest.approx(size * 6_738_415_616 / 55e9)


def test_offloading_waits_if_copies_take_longer_than_layers() -> None:
    """Of a 7B layer 4096 tokens store 481 MB in BF16, which takes 8.8 ms at 55 GB/s; forward it takes 2.7 ms."""
    config = unplanned("task=pretrain_7b", "precision=bf16", "recipe.micro_batch_size=1", "recipe.global_batch_size=2")

    def elementwise_s(num_offloaded: int) -> float:
        step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), memory.offloaded(num_offloaded))
        assert step
        return step.elementwise_s

    layer_s = 4096 * (2 * (2 * 4096 + 3 * 4096 + 4096 + 2 * 11008) + 2 * 4 + 4 * 32) / 55e9
    assert elementwise_s(8) == elementwise_s(0), "70 ms of copies hide behind 86 ms"
    waits_s = [elementwise_s(n) - elementwise_s(0) for n in (30, 31, 32)]
    steps_s = [more - less for less, more in zip(waits_s, waits_s[1:], strict=False)]
    assert steps_s == pytest.approx([2 * 2 * layer_s] * 2), "two micro-batches, each there and back"
    assert waits_s[-1] < 2 * 2 * 32 * layer_s - 2 * 0.2, "the rest hides behind the layers"


@pytest.mark.long
def test_a_4_bit_base_is_dequantised_in_both_passes() -> None:
    """0.516 bytes are read and 2 written of each of the layers' weights, twice in each of the 32 micro-batches."""
    four, sixteen = (unplanned(f"task={name}_70b") for name in ("qlora", "lora"))
    seconds = []
    for config in (four, sixteen):
        sized = replace(config, recipe=replace(config.recipe, micro_batch_size=1))
        step = step_time.estimate(sized, split(sized, tp=1, pp=1, cp=1, sp=False), NOTHING)
        assert step
        seconds.append(step.elementwise_s)
    weights = 80 * 8192 * (10240 + 8192 + 3 * 28672)
    assert seconds[0] - seconds[1] == pytest.approx(32 * 2 * (4.127 / 8 + 2) * weights / 3600e9, rel=1e-4)


def test_with_few_tokens_a_weight_gradient_is_bound_by_its_accumulation() -> None:
    """128 tokens of Llama-2-7B in FP8: each weight's FP32 gradient is read and written, 8 bytes at 4210 GB/s."""
    config = unplanned("task=pretrain_7b", "precision=fp8", "data.seq_length=128", "recipe.global_batch_size=1")
    layer, head = 4 * 4096**2 + 3 * 4096 * 11008, 32000 * 4096
    step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
    assert step
    head_s = 6 * head * 128e-12 / rate_at(2 * head * 128e-12, [0.93, 1.66], [594, 686])
    assert step.gemm_s == pytest.approx(32 * layer * (4 * 128e-12 / 1404 + 8 / 4210e9) + head_s, rel=1e-6)


def test_missing_rates_use_the_closest_measured_ones() -> None:
    """A plan of an earlier version has none of these; 4096 tokens of attention, FP8 gradients, element-wise kernels."""
    config = unplanned("task=pretrain_7b", "precision=fp8", "recipe.micro_batch_size=1", "recipe.global_batch_size=4")
    assert config.cluster.gpu and config.cluster.gpu.rates
    optional = ("fp8_weight_gradient_tflops", "attention_forward_4096_tflops", "attention_backward_4096_tflops")
    for name in (*optional, "elementwise_gbs"):
        setattr(config.cluster.gpu.rates, name, None)
    step = step_time.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), NOTHING)
    assert step
    layers, head = 32 * (4 * 4096**2 + 3 * 4096 * 11008), 32000 * 4096
    tflop = 32 * 2 * 16384 * 4096 * 4096 / 1e12
    assert step.attention_s == pytest.approx(tflop * (1 / 503 + 2.5 / 417))
    head_s = 6 * 16384e-12 * head / rate_at(2 * head * 4096e-12, [0.93, 1.66], [594, 686])
    assert step.gemm_s == pytest.approx(6 * 16384e-12 * layers / 1404 + head_s, rel=1e-4)
    per_token = (16 + 34 + 3 + 5) * 4096 + (4 + 5) * 12288 + (3.9 + 8) * 22016
    updates = 4 * 24 * head + 38 * 6_738_415_616 + 5 * layers
    transposed = 4 * 0.5 * 2 * layers
    kernels = 16384 * (32 * per_token + 6 * 32000)
    assert step.elementwise_s == pytest.approx((kernels + updates + transposed) / 4210e9, rel=1e-6)
