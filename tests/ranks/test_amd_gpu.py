"""The GPU sampler with AMD's GPUs: a fake amdsmi with real names and units. torch's own readers are the reference."""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import mllog, telemetry
from bench.contract.node_facts import GpuFacts
from helpers.paths import ROOT
from jobs.node_checks import hardware
from jobs.ranks import amd_gpu
from jobs.ranks.amd_gpu import AmdGpu
from jobs.ranks.telemetry import Sampler

FAKE = ROOT / "tests/helpers/fake_amdsmi"
SERIALS = ["3f5c1e0a77b2d941", "00c0ffee12345678"]
NOT_SUPPORTED = "Error code: 2 | AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"


def torch_uuid(serial: str) -> str:
    """Return the UUID that torch prints: two digits for each of the 16 bytes that spell the serial number."""
    digits = serial.encode().hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    monkeypatch.setattr(telemetry, "EVERY_S", telemetry.EVERY_S)  # which the fake changes

    def load(**script: Any) -> ModuleType:
        monkeypatch.setenv("FAKE_AMDSMI", json.dumps({"serials": SERIALS} | script))
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        monkeypatch.syspath_prepend(FAKE)
        sys.modules.pop("amdsmi", None)
        return importlib.import_module("amdsmi")

    yield load
    sys.modules.pop("amdsmi", None)


def test_a_sample_has_the_units_of_nvidias(fake: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads power, temperature, clock and used memory of the same GPU through the same functions."""
    amdsmi = fake()
    gpu = AmdGpu(amdsmi, 1, 1)
    sample = gpu.sample()
    monkeypatch.setattr(torch.cuda, "_HAS_AMDSMI", True, raising=False)
    monkeypatch.setattr(torch.cuda, "amdsmi", amdsmi, raising=False)
    monkeypatch.setattr(torch.cuda, "_get_amdsmi_handler", lambda device: device)
    assert sample.power_w == torch.cuda._get_amdsmi_power_draw(1) == 600
    assert sample.temperature_c == torch.cuda._get_amdsmi_temperature(1) == 71
    assert sample.sm_clock_mhz == torch.cuda._get_amdsmi_clock_rate(1) == 1840
    assert sample.memory_gib == torch.cuda._get_amdsmi_device_memory_used(1) / 2**30 == 150
    assert (sample.gpu, sample.memory_clock_mhz) == (1, 1300)
    assert gpu.settings() == {"gpu": 1, "power_limit_w": pytest.approx(750), "max_sm_clock_mhz": 2100}
    assert gpu.driver() == "6.12.12" and gpu.refused == {}


def test_limiters_are_those_whose_counters_grew(fake: Callable[..., ModuleType]) -> None:
    """Nothing is known before the second sample; the text N/A is not a counter."""
    gpu = AmdGpu(fake(), 0, 0)
    assert [gpu.sample().throttle for _ in range(3)] == [None, ("package power limit",), ("package power limit",)]
    assert "throttle" not in gpu.refused


def test_what_a_gpu_does_not_report_is_blank_with_the_reason(
    fake: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    amdsmi = fake(refused=["amdsmi_get_gpu_metrics_info"])
    monkeypatch.setattr(amdsmi, "amdsmi_get_power_info", lambda gpu: {"current_socket_power": 0xFFFF})
    monkeypatch.setattr(amdsmi, "amdsmi_get_clock_info", lambda gpu, clock: {"clk": "N/A", "max_clk": "N/A"})
    gpu = AmdGpu(amdsmi, 0, 0)
    sample = gpu.sample()
    assert (sample.power_w, sample.sm_clock_mhz, sample.throttle) == (None, None, None)
    assert sample.energy_j is not None and sample.temperature_c == 70
    na = "amdsmi reports N/A"
    assert gpu.refused == {"power_w": na, "sm_clock_mhz": na, "memory_clock_mhz": na, "throttle": NOT_SUPPORTED}


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_a_serial_number_is_found_in_torchs_uuid(serial: int) -> None:
    assert amd_gpu.serial_in(torch_uuid(f"{serial:016x}")) == serial


def test_gpus_are_found_by_uuid_in_any_order(fake: Callable[..., ModuleType]) -> None:
    amdsmi = fake()
    assert [gpu.index for gpu in amd_gpu.opened(amdsmi, [torch_uuid(SERIALS[1]), torch_uuid(SERIALS[0])])] == [1, 0]
    assert amd_gpu.serial_in("5aed39c6-0001-0002-0003-0123456789ab") is None, "a UUID of NVIDIA"
    twice = fake(serials=[SERIALS[0], SERIALS[0]])
    with pytest.raises(amd_gpu.NotFoundError, match="amdsmi lists 2 GPUs with the UUID"):
        amd_gpu.opened(twice, [torch_uuid(SERIALS[0])])


@pytest.mark.starts
def test_a_process_samples_amd_gpus(fake: Callable[..., ModuleType], tmp_path: Path) -> None:
    """The record has the same names as one of NVIDIA's GPUs; two GPUs draw 600 W each."""
    fake()
    file = tmp_path / "gpus.csv"
    sampler = Sampler(file, [torch_uuid(serial) for serial in SERIALS], is_amd=True)

    def wait_for_lines(count: int) -> None:
        deadline = time.monotonic() + 60
        while not file.exists() or len(file.read_text().splitlines()) <= count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with mllog.Writer(None) as log:
        wait_for_lines(2)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START)
        wait_for_lines(20)
        log.stop(mllog.BLOCK_STOP)
        log.finish(mllog.SUCCESS)
        record = sampler.summary(log)
    assert record["driver"] == "6.12.12" and record["refused"] == {}
    run_ms = dict(log.moments)[mllog.RUN_STOP] - dict(log.moments)[mllog.RUN_START]
    for gpu in record["gpus"]:
        assert gpu["power_w"]["median"] == 600 and gpu["power_limit_w"] == pytest.approx(750)
        assert gpu["energy_by"] == "counter" and gpu["energy_j"] == pytest.approx(0.6 * run_ms, rel=0.2)
        assert gpu["throttle"] == {"package power limit": 1}


@pytest.mark.starts
def test_without_amdsmi_the_reason_is_logged(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "gpus.csv", ["a"], is_amd=True)
    with mllog.Writer(None) as log:
        log.start(mllog.RUN_START)
        log.finish(mllog.SUCCESS)
        assert sampler.summary(log) == {"not_measured": "ModuleNotFoundError: No module named 'amdsmi'"}


@pytest.mark.starts
def test_a_node_with_amd_gpus_has_their_facts(
    fake: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "KFD", tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    if hardware.shutil.which("nvidia-smi"):
        pytest.skip("this machine has nvidia-smi")
    assert hardware.gpus() == (None, "amdsmi is not installed", None)
    fake()
    gpus, refused, links = hardware.gpus()
    known = {"name": "AMD Instinct MI300X", "driver": "6.12.12", "memory_mib": 196_592, "ecc_uncorrected": 0}
    clocks = {"sm_clock_mhz": 1840, "max_sm_clock_mhz": 2100}
    assert gpus is not None and (refused, links) == (None, None)
    assert gpus[1] == GpuFacts(index=1, uuid="0x00C0FFEE12345678", temperature_c=71, **known, **clocks)
    fake(refused=["amdsmi_init"])
    assert hardware.gpus() == (None, NOT_SUPPORTED.partition(": ")[2], None)
