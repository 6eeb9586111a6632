"""GPUs that are found on the planning machine: what the plan becomes, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.planning import gpu_detection
from bench.planning.compose import compose, for_run, read
from helpers.nvml import H200, L40S, nvml

UNKNOWN = ("NVIDIA Some New GPU", 100.0, (12, 1))


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _machine(monkeypatch: pytest.MonkeyPatch, *gpus: tuple[str, float, tuple[int, int]]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(*gpus))


@pytest.mark.long
def test_a_machine_with_gpus_needs_no_other_word(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, *[H200] * 8)
    plan, config_yaml = for_run(["task=lora_tiny"])
    cluster = plan.config.cluster
    assert (cluster.device, cluster.ranks_per_node) == (Device.cuda, 8)
    assert cluster.gpu is not None and cluster.gpu.name == "NVIDIA H200 SXM 141GB"
    assert cluster.detected_gpus == "8 x NVIDIA H200, 139.8 GiB, NVLink (NVML, driver 570.86.15)"
    monkeypatch.setitem(sys.modules, "pynvml", nvml())  # read on a machine without GPUs
    assert read(config_yaml).cluster == cluster


def test_the_base_task_runs_on_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, H200)
    plan = compose(["task=lora_tiny"])
    assert plan.base is not None and plan.base.config.cluster == plan.config.cluster


@pytest.mark.long
def test_the_users_words_win(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, *[H200] * 8)
    few = compose(["task=lora_tiny", "cluster.ranks_per_node=2", "gpu@cluster.gpu=h100"]).config.cluster
    assert few.ranks_per_node == 2 and few.gpu is not None and "H100" in few.gpu.name
    on_cpu = compose(["task=lora_tiny", "cluster.device=cpu"]).config.cluster
    assert (on_cpu.device, on_cpu.ranks_per_node, on_cpu.gpu, on_cpu.detected_gpus) == (Device.cpu, 2, None, None)


@pytest.mark.long
def test_a_gpu_without_a_file_has_its_memory_and_no_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, UNKNOWN)
    plan: Any = compose(["task=lora_7b", "model.weights=random", "precision=fp8"])
    gpu = plan.config.cluster.gpu
    assert (gpu.name, gpu.memory_gib, gpu.peak_bf16_tflops) == ("NVIDIA Some New GPU", 99.4, None)
    assert plan.memory.capacity_gib is not None and plan.cost is None and plan.peak_tflops is None


def test_a_found_gpu_without_fp8_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, ("NVIDIA Old GPU", 24.0, (8, 6)))
    with pytest.raises(ConfigError, match="does not support FP8"):
        compose(["task=lora_7b", "model.weights=random", "precision=fp8"])


@pytest.mark.long
def test_the_users_file_of_a_gpu_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, L40S)
    assert compose(["task=lora_tiny"]).config.cluster.gpu.name == "NVIDIA L40S 48GB"  # type: ignore[union-attr]
    own = tmp_path / "config/runstop/gpu/nvidia_l40s.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: my own L40S\nmemory_gib: 44.4\npeak_bf16_tflops: 362\nsource: mine\nrates: null\n")
    assert compose(["task=lora_tiny"]).config.cluster.gpu.name == "my own L40S"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("value", "count"),
    [("0", 1), ("3,1", 2), ("GPU-222", 1), ("0,9,1", 1), ("", 0), ("-1", 0), ("0,0", 1), ("GPU-000,GPU-111", 2)],
)
def test_visible_devices_are_honoured(value: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, *[H200] * 4)
    detected = gpu_detection.detect({"CUDA_VISIBLE_DEVICES": value})
    assert (len(detected.gpus) if detected else 0) == count


def test_different_gpus_are_refused_until_one_kind_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, H200, L40S)
    with pytest.raises(
        ConfigError, match="different kinds of GPU, but a run needs GPUs of a single kind: NVIDIA H200, NVIDIA L40S"
    ):
        gpu_detection.detect({})
    detected = gpu_detection.detect({"CUDA_VISIBLE_DEVICES": "1"})
    assert detected is not None and detected.gpus[0].name == "NVIDIA L40S"


def test_gpus_that_cannot_be_queried_are_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = nvml(H200, fails="Driver/library version mismatch")
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert gpu_detection.detect({}) is None  # no driver is loaded: a laptop
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(gpu_detection, "DRIVER_FILES", (str(driver),))
    with pytest.raises(ConfigError, match="Driver/library version mismatch") as refused:
        compose(["task=lora_tiny"])
    assert "cluster.device=cpu" in str(refused.value.fix)


def test_every_shipped_file_of_a_name_exists_and_describes_that_gpu() -> None:
    from bench.planning.conf_folder import CONF

    for name, file in gpu_detection.NAMES.items():
        text = (CONF / f"gpu/{file}.yaml").read_text()
        series = name.split()[1 if "GeForce" not in name else 3]
        assert series.split("-")[0] in text, (name, file)


@pytest.mark.starts
def test_launch_uses_the_gpus_that_plan_shows(tmp_path: Path) -> None:
    helpers = Path(__file__).parents[1]
    (tmp_path / "pynvml.py").write_text(
        f"import sys\nsys.path.append({str(helpers)!r})\nfrom helpers.nvml import H200, nvml\n"
        "sys.modules[__name__] = nvml(H200)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "XDG_CONFIG_HOME": str(tmp_path / "config")}
    command = [sys.executable, "-m", "bench", "launch", "task=lora_tiny", "launch.dry_run=true"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "1 node with 1 x NVIDIA H200 SXM 141GB" in " ".join(ended.stdout.split()), ended.stderr
    assert "1 x NVIDIA H200, 139.8 GiB (NVML, driver 570.86.15)" in " ".join(ended.stdout.split())
