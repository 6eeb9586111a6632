"""The time of a server by kernels and along a decode step: traces of torch.profiler, and kernels as GPUs have them."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import server_times as times_of
from bench.contract.server_times import KernelClass
from bench.results import server_times as measured

pytest.importorskip("torch")
from jobs.profiles import server_trace, trace
from jobs.profiles.trace import Kernel, Trace

LAYERS, STEPS = 2, 3
COMPUTE, COMMUNICATION = 7, 9
"""Streams."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Record some decode steps of a Llama of transformers on a CPU; return the file, and the profiler's own sums."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, vocab_size=256, **shape)
    llama, cache = transformers.LlamaForCausalLM(config).eval(), transformers.DynamicCache(config=config)
    with torch.no_grad():
        llama(torch.zeros(4, 16, dtype=torch.long), past_key_values=cache)  # the prompts
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(STEPS):
                logits = llama(torch.zeros(4, 1, dtype=torch.long), past_key_values=cache).logits
                logits[:, -1].argmax(-1)
    path = tmp_path_factory.mktemp("trace") / "server.trace.json.gz"
    profiler.export_chrome_trace(str(path))
    return path, {one.key: one.self_cpu_time_total for one in profiler.key_averages()}


@pytest.mark.long
def test_a_trace_of_the_profiler_has_the_decode_steps_and_the_profilers_own_sums(
    recorded: tuple[Path, dict[str, float]],
) -> None:
    path, sums_us = recorded
    chosen = server_trace.read([path])
    assert chosen is not None and chosen[0] == path
    times = server_trace.server_times(chosen[1], num_layers=LAYERS, running=4)
    assert (times.device, times.running, times.num_steps) == ("cpu", 4, STEPS) and times.timeline is not None
    gemms_us = sum(us for name, us in sums_us.items() if name in ("aten::mm", "aten::addmm", "aten::matmul"))
    spent = {row.kernels: row for row in times.rows}
    assert spent[KernelClass.gemm].time_ms == pytest.approx(gemms_us / 1000, rel=0.02)
    calls = (7 * LAYERS + 1) * STEPS  # q, k, v, o, gate, up and down, and the head; each is a matmul and a mm
    assert spent[KernelClass.gemm].launches == 2 * calls
    assert spent[KernelClass.norm].launches == (2 * LAYERS + 1) * STEPS
    assert {KernelClass.attention, KernelClass.element_wise} <= spent.keys() and KernelClass.triton not in spent
    assert sum(row.time_ms for row in times.rows) == pytest.approx(times.time_ms)
    line = times.timeline
    along_ms = line.before_layers_ms + line.attention_ms + line.mlp_ms + line.after_layers_ms
    assert along_ms == pytest.approx(times.time_ms) and min(line.attention_ms, line.mlp_ms) > 0
    raw = times_of.plain(times)
    parsed = times_of.parsed(raw)
    assert parsed is not None and times_of.plain(parsed) == raw and times_of.parsed({"time_ms": 1}) is None


STEP = (
    *("embedding_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)"),
    *(
        *("_rms_norm_fwd_fused", "ampere_bf16_s16816gemm_bf16_128x64_tn", "_rotary_kernel"),
        *("_fwd_kernel_destindex_copy_kv", "_fwd_kernel_flash_decode_stage1", "ampere_bf16_s16816gemm_bf16_64x64_tn"),
        *("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "_rms_norm_fwd_fused"),
        *("ampere_bf16_s16816gemm_bf16_256x64_tn", "_silu_and_mul_kernel", "ampere_bf16_s16816gemm_bf16_64x64_tn"),
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)",
    )
    * LAYERS,
    *("_rms_norm_fwd_fused", "ampere_bf16_s16816gemm_bf16_128x128_tn"),
    *("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, float)",
)
"""The kernels of a decode step as LightLLM launches them, on one GPU of several."""


def kernels(steps: int, *, each_us: float = 10, idle_us: float = 50) -> list[Kernel]:
    """Return steps of kernels one after another, with idle time before each step."""
    built, at_us = [], 0.0
    for _ in range(steps):
        at_us += idle_us
        for name in STEP:
            stream = COMMUNICATION if name.startswith("nccl") else COMPUTE
            built.append(Kernel(name, trace.kind_of(name), stream, at_us, at_us + each_us, None))
            at_us += each_us
    return built


def trace_of(built: list[Kernel]) -> Trace:
    return Trace(
        device="cuda", main_thread=0, kernels=built, ranges={}, operations={}, forward_of={}, attention_stages={}
    )


def test_kernels_of_lightllm_are_summed_as_in_tables_x_and_xi() -> None:
    """By hand: 30 kernels of 10 us each in a step of 2 layers; the idle time of 50 us is at the end of a step."""
    times = server_trace.server_times(trace_of(kernels(4)), num_layers=LAYERS, running=1024)
    values = {one.name: one.value for one in measured.of_server(times)}
    assert times.num_steps == 4 and len(STEP) == 30
    expected_us = {"gemm": 9, "norm": 5, "rope": 2, "triton": 7, "element_wise": 1, "all_reduce": 5, "all_gather": 1}
    for name, count in (expected_us | {"computation": 24, "communication": 6}).items():
        assert values[f"server_time_{name}"] == pytest.approx(10 * count / 1000), name
    assert values["server_time_other"] == pytest.approx(0.05 * 3 / 4), "the last step has no idle time after it"
    assert values["server_step_time"] == pytest.approx(0.3 + 0.05 * 3 / 4)
    assert values["server_time_attention_layers"] == pytest.approx(2 * 7 * 10 / 1000)
    assert values["server_time_mlp_layers"] == pytest.approx(2 * 5 * 10 / 1000)
    assert values["server_time_layers"] == pytest.approx(2 * 12 * 10 / 1000)
    assert values["server_time_before_layers"] == pytest.approx(0.02)
    assert values["server_time_after_layers"] == pytest.approx(0.04 + 0.05 * 3 / 4)
    shares = (values[f"server_share_{name}"] for name in ("computation", "communication", "other"))
    assert sum(shares) == pytest.approx(1)
    assert {name.split()[0] for name in values} <= measured.UNITS.keys()


@pytest.mark.long
@given(st.integers(0, len(STEP) - 1), st.integers(0, len(STEP) - 1), st.integers(2, 4))
def test_only_whole_steps_are_counted(missing: int, more: int, steps: int) -> None:
    """A profile begins and ends anywhere; a step that is cut before its first norm is still whole in its layers."""
    every = kernels(steps + 2)
    cut = every[missing : len(STEP) * (steps + 1) + more]
    times = server_trace.server_times(trace_of(cut), num_layers=LAYERS, running=1)
    before_first_norm, after_last_norm = STEP.index("_rms_norm_fwd_fused"), len(STEP) - 4
    whole = steps + (missing <= before_first_norm) + (more > after_last_norm)
    assert times.num_steps == whole
    assert sum(row.time_ms for row in times.rows) == pytest.approx(times.time_ms)


def test_without_norms_there_are_shares_and_no_steps() -> None:
    built = [one for one in kernels(2) if "norm" not in one.name]
    times = server_trace.server_times(trace_of(built), num_layers=LAYERS, running=1)
    names = {one.name for one in measured.of_server(times)}
    assert times.num_steps is None and times.timeline is None and "server_share_gemm" in names
    assert not any(name.startswith("server_time") for name in names) and "no steps" in measured.note(times)


def test_communication_behind_computation_is_not_counted() -> None:
    gemm = Kernel("ampere_gemm", trace.Kind.gemm, COMPUTE, 0, 100, None)
    reduce = Kernel("ncclDevKernel_AllReduce", trace.Kind.communication, COMMUNICATION, 60, 130, None)
    times = server_trace.server_times(trace_of([reduce, gemm]), num_layers=1, running=1)
    assert {row.kernels: row.time_ms for row in times.rows} == {
        KernelClass.gemm: pytest.approx(0.1),
        KernelClass.all_reduce: pytest.approx(0.03),
        KernelClass.other: pytest.approx(0),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(c10::BFloat16*, long)", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "rope"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>(c10::BFloat16*)", "element_wise"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(long)", "attention"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<false>(int)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("nvjet_tst_128x64_64x8_2x1_v_bz_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)", "gemm"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "other_communication"),
        ("_fwd_kernel_token_att1", "triton"),
        ("void at::native::index_elementwise_kernel<128, 4>(long)", "element_wise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>(int)", "other_computation"),
    ],
)
def test_a_kernel_has_its_class_by_its_name(name: str, expected: str) -> None:
    assert server_trace.class_of(Kernel(name, trace.kind_of(name), COMPUTE, 0, 1, None)).name == expected


def test_the_trace_of_the_first_gpu_is_read(tmp_path: Path) -> None:
    """Servers write a trace for each GPU, and for processes that only pass requests on."""

    def write(name: str, *events: dict[str, Any]) -> Path:
        (tmp_path / name).write_text(json.dumps({"traceEvents": list(events)}))
        return tmp_path / name

    args = {"device": 1, "stream": 7, "correlation": 1}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 5, "tid": 7, "pid": 1, "args": args}
    operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 50, "tid": 1, "pid": 1, "args": {}}
    second = write("a_rank1.json", kernel)
    first = write("b_rank0.json", kernel | {"args": args | {"device": 0}})
    frontend = write("frontend.json", operation)
    chosen = server_trace.read([frontend, second, first])
    assert chosen is not None and chosen[0] == first and chosen[1].device == "cuda"
    idle = write("idle.json", {"ph": "M", "name": "process_name"})
    assert server_trace.read([idle]) is None
    assert (server_trace.read([idle, frontend]) or (None,))[0] == frontend


def test_the_sums_of_steps_are_within_the_profile() -> None:
    """Each step begins where the one before it ended."""
    on_stream = [one for one in kernels(3) if one.stream == COMPUTE]
    steps = server_trace.decode_steps(on_stream, LAYERS)
    assert [one[-1] for one in steps[:-1]] == [one[0] for one in steps[1:]]
    assert all(start < end for step in steps for start, end in pairwise(step))
