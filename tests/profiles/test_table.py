"""The table of a hand-written step of 100 us: which kernel counts at each moment, and its phase and part.

Kernels of the compute stream (7) with begin and end in microseconds:

      20 fill | 25–45 QKV | 45–60 attention | 66–70 no range | 70–90 QKV backward | 100–104 norm | 112–120 AdamW

On other streams: a copy to the device (stream 8) at 50–66 and one to the host (9) at 84–92, a transpose (30) at 85–95,
NCCL at 93–105 (stream 20) and 100–110 (21).
"""

from typing import Any

import pytest

from bench.contract import modules
from bench.contract.modules import Part, Phase
from bench.errors import ConfigError
from jobs.profiles import recording, table, trace
from jobs.profiles.trace import Kind

MAIN, AUTOGRAD, GLOO = 11, 12, 13
Event = dict[str, Any]


def span(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> Event:
    times = {"ts": float(start), "dur": float(end - start)}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "args": args} | times


def named(what: Phase | Part | str, start: float, end: float, thread: int = MAIN) -> Event:
    label = what if what == "step" else f"{type(what).__name__.lower()}: {what.name}"
    return span("user_annotation", label, start, end, thread)


def launch(correlation: int, at: float, thread: int = MAIN, *, by: str = "cuda_runtime") -> Event:
    return span(by, "launch", at, at + 0.5, thread, correlation=correlation)


def kernel(
    correlation: int, start: float, end: float, *, stream: int = 7, name: str, category: str = "kernel"
) -> Event:
    return span(category, name, start, end, 0, stream=stream, correlation=correlation)


def link(*, forward: tuple[int, float], backward: tuple[int, float]) -> list[Event]:
    ends = (("s", *forward), ("f", *backward))
    return [{"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "tid": tid, "ts": float(at)} for ph, tid, at in ends]


def step_of_a_gpu() -> list[Event]:
    return [
        *(named("step", 0, 10), launch(1, 5), kernel(1, 10, 20, name="fill")),
        *(named("step", 12, 100), named(Phase.forward, 12, 40)),
        *(named(Part.qkv, 14, 18), span("cpu_op", "aten::addmm", 14.5, 17)),
        *(launch(2, 15), kernel(2, 25, 45, name="nvjet_tst_192x192")),
        named(Part.attention, 20, 24),
        *(launch(3, 21), kernel(3, 45, 60, name="cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16")),
        named(Part.input, 25, 27),
        launch(4, 26),
        kernel(4, 50, 66, stream=8, name="Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy"),
        *(launch(5, 30, by="cuda_driver"), kernel(5, 66, 70, name="_unknown")),
        named(Phase.backward, 40, 80),
        span("cpu_op", "AddmmBackward0", 45, 55, AUTOGRAD),
        *link(forward=(MAIN, 14.5), backward=(AUTOGRAD, 45)),
        *(launch(6, 50, AUTOGRAD), kernel(6, 70, 90, name="nvjet_tss_128x256")),
        *(named(Part.fc2, 56, 60, AUTOGRAD), named(Part.weights, 56.5, 58, AUTOGRAD)),
        *(launch(7, 57, AUTOGRAD), kernel(7, 85, 95, stream=30, name="_transpose")),
        *(launch(8, 62, AUTOGRAD), kernel(8, 93, 105, stream=20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")),
        *(launch(11, 62.5, AUTOGRAD), kernel(11, 100, 110, stream=21, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")),
        launch(12, 63, AUTOGRAD),
        kernel(12, 84, 92, stream=9, name="Memcpy DtoH (Device -> Pinned)", category="gpu_memcpy"),
        *(named(Part.norm, 64, 68, AUTOGRAD), launch(9, 65, AUTOGRAD), kernel(9, 100, 104, name="_norm_backward")),
        *(named(Phase.optimizer, 80, 100), named(Part.adamw, 82, 90)),
        *(launch(10, 85), kernel(10, 112, 120, name="_update")),
    ]


def rows(events: list[Event]) -> dict[tuple[Phase, Part], modules.TimeRow]:
    times, _ = table.module_times(trace.trace(events), is_eager=False)
    assert sum(row.time_ms for row in times.rows) == pytest.approx(times.step_ms, rel=1e-12)
    return {(row.phase, row.part): row for row in times.rows}


def test_every_moment_of_a_step_is_counted_once() -> None:
    by_place = rows(step_of_a_gpu())
    assert {place: round(1000 * row.time_ms, 9) for place, row in by_place.items()} == {
        (Phase.forward, Part.gap): 5,  # 20–25, before QKV
        (Phase.forward, Part.qkv): 20,
        (Phase.forward, Part.attention): 15,
        (Phase.forward, Part.copies): 6,  # 60–66; 50–60 is hidden behind attention
        (Phase.forward, Part.unnamed): 4,
        (Phase.backward, Part.qkv): 20,  # autograd's own, by the operation of the forward pass
        (Phase.backward, Part.weights): 3,  # 90–93; before that hidden, and from 93 on communication counts
        (Phase.backward, Part.communication): 13,  # 93–100 and 104–110
        (Phase.backward, Part.copies): 0,  # the transpose goes first
        (Phase.backward, Part.norm): 4,
        (Phase.optimizer, Part.gap): 2,  # 110–112, before AdamW
        (Phase.optimizer, Part.adamw): 8,
    }
    gemm_us = {place: round(1000 * row.gemm_ms, 9) for place, row in by_place.items() if row.gemm_ms}
    assert gemm_us == {(Phase.forward, Part.qkv): 20, (Phase.backward, Part.qkv): 20}, "attention is not a GEMM"
    busy_us = {
        place: round(1000 * row.busy_ms, 9) for place, row in by_place.items() if row.busy_ms > row.time_ms + 1e-9
    }
    assert busy_us == {
        (Phase.forward, Part.copies): 16,
        (Phase.backward, Part.weights): 10,
        (Phase.backward, Part.communication): 17,  # 93–110, though two kernels run at 100–105
        (Phase.backward, Part.copies): 8,
    }
    launches = {Part.gap: 0, Part.communication: 2}
    assert all(row.launches == launches.get(part, 1) for (_, part), row in by_place.items())


def test_a_kernel_that_autograds_thread_launches_in_a_recomputation_is_recomputation() -> None:
    """The transpose at 85–95 is launched at 57; what the same thread launches later belongs to the backward phase."""
    by_place = rows([*step_of_a_gpu(), named(Phase.recomputation, 55.5, 60.5, AUTOGRAD)])
    assert round(1000 * by_place[Phase.recomputation, Part.weights].time_ms, 9) == 3
    assert (Phase.backward, Part.weights) not in by_place and (Phase.backward, Part.norm) in by_place


def test_steps_are_averaged_without_the_first() -> None:
    """The host runs ahead: it has launched all three steps before the first kernel ends."""
    events = []
    for number, end in enumerate((500, 520, 550)):
        at = 10 * number
        events += [named("step", at, at + 9), named(Phase.forward, at, at + 9), named(Part.qkv, at + 1, at + 5)]
        start = end - 10 * (number + 1)
        events += [launch(number, at + 2), kernel(number, start, end, name="gemm")]
    times, kernels = table.module_times(trace.trace(events), is_eager=False)
    assert (times.num_steps, times.device, times.step_ms) == (2, "cuda", pytest.approx(0.025))
    assert [(row.part, row.time_ms, row.launches) for row in times.rows] == [(Part.qkv, pytest.approx(0.025), 1)]
    assert kernels == [{"phase": "forward", "part": "qkv", "kernel": "gemm", "time_ms": 0.025, "launches": 1}]


@pytest.mark.parametrize("launches", [[], [launch(9, 65, 4711)]], ids=["missing", "of an unknown thread"])
def test_operation_replaces_a_missing_launch(launches: list[Event]) -> None:
    """For example, a kernel that is launched through an interface that the profiler does not record."""
    events = [event for event in step_of_a_gpu() if event != launch(9, 65, AUTOGRAD)] + launches
    assert (Phase.backward, Part.norm) not in rows(events)
    events.append(span("cpu_op", "NormBackward", 65, 67, AUTOGRAD, **{"External id": 77}))
    next(event for event in events if event["name"] == "_norm_backward")["args"]["External id"] = 77
    assert round(1000 * rows(events)[Phase.backward, Part.norm].time_ms, 9) == 4


def test_profile_of_one_step_is_refused() -> None:
    events = [event for event in step_of_a_gpu() if (event["name"], event["ts"]) != ("step", 0.0)]
    with pytest.raises(ValueError, match="the profile has 1 steps"):
        rows(events)


def test_cpu_profile_uses_the_self_time_of_operations() -> None:
    """aten::linear of 10 us contains aten::addmm of 6 us; gloo is busy for 8 us, 3 of them during an operation."""
    events = [
        *(named("step", 0, 9), span("cpu_op", "aten::zero_", 2, 8)),
        *(named("step", 10, 50), named(Phase.forward, 10, 30), named(Part.fc1, 12, 24)),
        *(span("cpu_op", "aten::linear", 13, 23), span("cpu_op", "aten::addmm", 15, 21)),
        named(Phase.backward, 30, 50),
        span("user_annotation", "gloo:all_reduce", 32, 40, GLOO),
        *(span("cpu_op", "aten::add_", 31, 35), named(Part.norm, 30.5, 36)),
        span("cpu_op", "aten::mul", 44, 48),
    ]
    by_place = rows(events)
    assert {place: round(1000 * row.time_ms, 9) for place, row in by_place.items()} == {
        (Phase.forward, Part.gap): 5,  # 8–13
        (Phase.forward, Part.fc1): 10,
        (Phase.backward, Part.gap): 12,  # 23–31 and 40–44
        (Phase.backward, Part.norm): 4,
        (Phase.backward, Part.communication): 5,  # 35–40
        (Phase.backward, Part.unnamed): 4,
    }
    linear = by_place[Phase.forward, Part.fc1]
    assert (round(1000 * linear.gemm_ms, 9), linear.launches) == (6, 2)
    assert round(1000 * by_place[Phase.backward, Part.communication].busy_ms, 9) == 8


def attention_module(*between: Event) -> list[Event]:
    """A step of 60 us whose attention module has QKV at 12–20, the output projection at 50–58, and this in between."""
    return [
        *(named("step", 0, 9), span("cpu_op", "aten::zero_", 2, 9)),
        *(named("step", 10, 80), named(Phase.forward, 10, 60), named(Part.attention, 11, 59)),
        *(named(Part.qkv, 12, 20), span("cpu_op", "aten::matmul", 12, 20), span("cpu_op", "aten::mm", 13, 19)),
        *between,
        *(named(Part.output, 50, 58), span("cpu_op", "aten::linear", 50, 58)),
        *(named(Phase.backward, 60, 80), span("cpu_op", "BmmBackward0", 60, 80)),
        *link(forward=(MAIN, 43), backward=(MAIN, 60)),
    ]


def test_unfused_attention_is_divided_by_its_products_and_softmax() -> None:
    """The backward operation belongs to the product at 42–50, and the mask to the product before the softmax."""
    product, second = span("cpu_op", "aten::matmul", 30, 34), span("cpu_op", "aten::matmul", 42, 50)
    between = [
        *(span("cpu_op", "aten::mul", 20, 30), product, span("cpu_op", "aten::add", 34, 36)),
        *(span("cpu_op", "aten::softmax", 36, 40), span("cpu_op", "aten::_softmax", 37, 39)),
        *(span("cpu_op", "aten::to", 40, 42), second, span("cpu_op", "aten::bmm", 43, 49)),
    ]
    times_us = {place: round(1000 * row.time_ms, 9) for place, row in rows(attention_module(*between)).items()}
    assert times_us == {
        (Phase.forward, Part.gap): 3,
        (Phase.forward, Part.qkv): 8,
        (Phase.forward, Part.rope): 10,
        (Phase.forward, Part.scores): 6,
        (Phase.forward, Part.softmax): 6,
        (Phase.forward, Part.values): 8,
        (Phase.forward, Part.output): 8,
        (Phase.backward, Part.gap): 2,
        (Phase.backward, Part.values): 20,
    }


def test_fused_attention_has_rope_before_it_and_other_code_is_not_divided() -> None:
    fused = [span("cpu_op", "aten::mul", 20, 40), span("cpu_op", "aten::scaled_dot_product_attention", 40, 50)]
    times_us = {place: round(1000 * row.time_ms, 9) for place, row in rows(attention_module(*fused)).items()}
    assert times_us[Phase.forward, Part.rope] == 20 and times_us[Phase.forward, Part.attention] == 10
    other = [span("cpu_op", "aten::mul", 20, 40), span("cpu_op", "aten::matmul", 40, 50)]
    assert (Phase.forward, Part.rope) not in rows(attention_module(*other))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Kind.gemm, ("nvjet_tst_192x192_64x4", "void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "_down_backward")),
        (Kind.gemm, ("sm90_xmma_gemm_e4m3bf16_e4m3f32", "ampere_sgemm_128x64_tn", "aten::_scaled_mm", "gemvx::kernel")),
        (Kind.communication, ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",)),
        (Kind.communication, ("gloo:all_gather", "c10d::allreduce_")),
        (Kind.compute, ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "_norm_quantize", "aten::mul", "_swiglu_backward")),
        (Kind.compute, ("cudnn_generated_fort_native_sdpa_sm90_knob_3r_flash_bprop_wgmma_f16", "aten::add_")),
    ],
)
def test_kind_of_kernels_by_name(kind: Kind, names: tuple[str, ...]) -> None:
    assert {trace.kind_of(name) for name in names} == {kind}


def test_gpu_profile_without_kernels_is_refused() -> None:
    """The table would show times of the host as times of the GPU."""
    of_host = trace.trace([named("step", 0, 10), span("cpu_op", "aten::mm", 1, 5)])
    recording.require_kernels(of_host, on_gpu=False)
    recording.require_kernels(trace.trace(step_of_a_gpu()), on_gpu=True)
    with pytest.raises(ConfigError, match=r"recorded no kernel of this GPU[\s\S]*launch.profile=modules[\s\S]*fix:"):
        recording.require_kernels(of_host, on_gpu=True)
