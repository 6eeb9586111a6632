"""Rates from the times of a sweep: times that were made from known rates give these rates back."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.console import calibration as console
from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Rates
from bench.launch import calibrate
from bench.planning import calibration, compose, gpu_detection
from bench.planning.estimates import step_time
from helpers import golden
from helpers.golden import significant
from helpers.nvml import H200, nvml

TRUE = Rates(
    source="made up",
    layer_tflop=[0.5, 20.0],
    bf16_tflops=[600.0, 600.0],
    fp8_tflops=[1300.0, 1300.0],
    attention_forward_tflops=500.0,
    attention_backward_tflops=400.0,
    attention_forward_4096_tflops=450.0,
    attention_backward_4096_tflops=350.0,
    narrow_heads_forward=0.7,
    narrow_heads_backward=0.6,
    fp8_weight_gradient_tflops=1000.0,
    copy_gbs=4000.0,
    elementwise_gbs=3000.0,
    busbw_mib=[],
    busbw_gbs=[],
    launch_us=40.0,
    host_gbs=50.0,
)


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(H200))


def _times(plan: TrainingPlan) -> dict[str, float]:
    """Return the times that a GPU with the true rates would have."""
    config = plan.config
    assert config.cluster.gpu is not None

    def cost(rates: Rates) -> Any:
        gpu = dataclasses.replace(config.cluster.gpu, rates=rates)  # type: ignore[type-var]
        cluster = dataclasses.replace(config.cluster, gpu=gpu)
        return step_time.estimate(dataclasses.replace(config, cluster=cluster), plan.world, plan.recompute)

    no_backward = dataclasses.replace(TRUE, attention_backward_tflops=1e15, attention_backward_4096_tflops=1e15)
    forward_s = cost(no_backward).attention_s
    whole = cost(TRUE)
    return {
        "gemm_s": whole.gemm_s,
        "attention_forward_s": forward_s,
        "attention_backward_s": whole.attention_s - forward_s,
        "elementwise_s": whole.elementwise_s,
        "step_s": whole.gemm_s + whole.attention_s + whole.elementwise_s,
    }


@pytest.mark.long
def test_the_rates_come_back_from_the_times_that_they_give() -> None:
    plans, skipped = calibrate._plans()
    assert not skipped
    points = {name: _times(plan) for name, plan in plans.items()}
    for count in calibration.LAUNCH_LAYERS:
        plan = plans[f"launch {count}"]
        kernels = step_time.layer_launches(plan.config, plan.world) * count
        points[f"launch {count}"]["step_s"] = 0.1 + kernels * TRUE.launch_us / 1e6
    detected = calibration.rates(plans, {"points": points, "copy_gbs": 4000.0, "host_gbs": 50.0}, source="made up")
    for name, expected in dataclasses.asdict(TRUE).items():
        if name in ("source", "layer_tflop", "busbw_mib", "busbw_gbs"):
            continue
        actual = getattr(detected, name)
        for one in actual if isinstance(actual, list) else [actual]:
            value = expected[0] if isinstance(expected, list) else expected
            assert one == pytest.approx(value, rel=0.02), name


def test_no_point_has_the_size_of_a_shipped_model() -> None:
    models = [yaml.safe_load(path.read_text()) for path in (compose.CONF / "model").glob("*.yaml")]
    shipped = {model.get("hidden_size") for model in models}
    assert not shipped & {point.hidden_size for point in calibration.POINTS if not point.name.startswith("launch")}


MADE_UP_S = ("gemm_s", "attention_forward_s", "attention_backward_s", "elementwise_s")


def _made_up(place: int, plan: TrainingPlan) -> dict[str, float]:
    """Return times that no GPU has: each is different, so that rates show which of them they come from."""
    times = {name: (1 + 0.01 * place) * 0.001 * number**2 for number, name in enumerate(MADE_UP_S, start=1)}
    return times | {"step_s": 0.04 + 0.002 * place + 0.00003 * plan.config.model.num_layers}


@pytest.mark.long
@pytest.mark.parametrize(
    "gpu", [H200, ("NVIDIA L4", 22.5, (8, 9)), ("NVIDIA A10", 22.0, (8, 6))], ids=lambda gpu: gpu[0]
)
def test_points_and_rates_are_the_golden_ones(gpu: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs have room for all models, for some of them, and no FP8."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(gpu))
    plans, skipped = calibrate._plans()
    measured = {
        "points": {name: _made_up(place, plan) for place, (name, plan) in enumerate(plans.items())},
        "copy_gbs": 12345.67,
        "host_gbs": 43.21,
        "busbw_gbs": {"16": 123.45, "64": 234.56},
    }
    lines = [f"do not fit: {', '.join(skipped)}"]
    for name, plan in plans.items():
        work = significant(dict(calibration.unit_work(plan)))
        lines.append(f"{name}: {calibration.layer_tflop(plan):.7g} TFLOP in a layer, {json.dumps(work)}")
    rates = dataclasses.asdict(calibration.rates(plans, measured, source="made up"))
    lines += [f"{key}: {value}" for key, value in rates.items()]
    file = Path(__file__).with_name("calibrations") / f"{gpu[0].replace(' ', '_')}.txt"
    golden.require("\n".join([*lines, ""]), file, variable="WRITE_CALIBRATIONS")


@pytest.mark.long
def test_a_written_file_is_used_by_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, _ = calibrate._plans()
    measured = {
        "torch": "2.11.0",
        "cuda": "13.0",
        "points": {name: _times(plan) for name, plan in plans.items()},
        "copy_gbs": 4000.0,
        "host_gbs": 50.0,
    }
    monkeypatch.setattr(calibrate, "_measured", lambda _: measured)
    done = calibrate.calibrate(say=lambda _: None)
    assert done.file.name == "nvidia_h200.yaml"
    plan: Any = compose.compose(["task=lora_8b", "precision=fp8", "model.weights=random", "cluster=local"])
    assert plan.config.cluster.gpu.rates.source.startswith("runstop calibrate")
    assert plan.cost.step_s > 0


@pytest.mark.long
@pytest.mark.parametrize("link_error", [None, "ncclSystemError: no path"])
def test_the_measured_one_of_several_gpus_is_named(link_error: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is measured, and named; without rates of links, only plans for one GPU have an estimate."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(H200, H200))
    plans, _ = calibrate._plans()
    assert {plan.world.num_ranks for plan in plans.values()} == {1}
    links = {"link_error": link_error} if link_error else {"busbw_gbs": {"16": 200.0, "64": 300.0}}
    points = {name: _times(plan) for name, plan in plans.items()}
    measured = {"torch": "2", "cuda": "13", "points": points, "copy_gbs": 4000.0, "host_gbs": 50.0} | links
    monkeypatch.setattr(calibrate, "_measured", lambda _: measured)
    printed: list[str] = []
    done = calibrate.calibrate(say=printed.append)
    first, rates = gpu_detection.detect({}).gpus[0].uuid, done.gpu.rates  # type: ignore[union-attr]
    assert rates is not None and first in printed[1] and f"kernels of {first}" in rates.source
    assert rates.busbw_mib == ([] if link_error else [16.0, 64.0])
    shown = str(console.tables(done.gpu, skipped=[], link_error=done.link_error)[1].rows)
    assert ("not measured: ncclSystemError: no path" if link_error else "64 MiB") in shown
    words = ["task=lora_8b", "precision=fp8", "model.weights=random", "cluster=local"]
    estimated = [compose.compose([*words, f"cluster.ranks_per_node={count}"]).cost for count in (1, 2)]  # type: ignore[attr-defined]
    assert [cost is not None for cost in estimated] == [True, link_error is None]


@pytest.mark.starts
@pytest.mark.slow
def test_all_reduces_between_processes_are_measured() -> None:
    from jobs.engines.megatron.calibrate import REDUCED_MIB, link_rates

    rates = link_rates(2, "cpu")["busbw_gbs"]
    assert list(rates) == [REDUCED_MIB[0]] and rates[REDUCED_MIB[0]] > 0
    assert "not a device" in link_rates(2, "not a device")["link_error"]


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.errors import ConfigError

    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    with pytest.raises(ConfigError, match="no GPU to calibrate"):
        calibrate.calibrate()


def test_kernels_are_sorted_by_their_names() -> None:
    from jobs.engines.megatron.calibrate import seconds_by_kind

    seconds = seconds_by_kind(
        [
            ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", 1.0),
            ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n", 2.0),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", 3.0),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_30", 4.0),
            ("_norm_quantize", 5.0),
            ("_down", 6.0),
            ("_transpose", 7.0),
            ("Memcpy HtoD (Pinned -> Device)", 8.0),
        ]
    )
    assert seconds == {"gemm": 3.0, "attention_forward": 3.0, "attention_backward": 4.0, "elementwise": 11.0}


@pytest.mark.long
def test_plans_of_the_sweep_are_read_by_a_job() -> None:
    plans, _ = calibrate._plans()
    for plan in plans.values():
        assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


@pytest.mark.long
def test_models_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(("NVIDIA L4", 22.5, (8, 9))))
    plans, skipped = calibrate._plans()
    assert "bf16 7680" in skipped and "elementwise bf16" in plans
    measured = {"points": {name: _times(plan) for name, plan in plans.items()}, "copy_gbs": 250.0, "host_gbs": 12.0}
    rates = calibration.rates(plans, measured, source="made up")
    assert len(rates.layer_tflop) == len(rates.bf16_tflops) == len(rates.fp8_tflops)
