"""The GPU sampler in this process, with a fake driver and clock, and failures of its process."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.contract import mllog, telemetry
from bench.contract.schema import Device
from bench.contract.telemetry import Sample
from helpers.paths import ROOT
from jobs.ranks import gpu_sampler, identity, node_meter, process_group
from jobs.ranks import telemetry as sampling
from jobs.ranks.gpu_sampler import Gpu
from jobs.ranks.identity import Rank
from jobs.ranks.telemetry import NotMeasured, Sampler, Telemetry

FAKE = ROOT / "tests/helpers/fake_nvml"
PARENT = 4711


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An NVML with a GPU and a part of one, which never says their power, and whose clocks are made up."""
    script = {"gpus": {"GPU-a": 3, "MIG-b": 5}, "refused": ["nvmlDeviceGetPowerUsage"]}
    monkeypatch.setenv("FAKE_NVML", json.dumps(script))
    monkeypatch.setattr(telemetry, "EVERY_S", telemetry.EVERY_S)  # which the made-up NVML changes
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", importlib.import_module("pynvml"))
    module = sys.modules["pynvml"]
    monkeypatch.setattr(module, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 500 * handle)
    monkeypatch.setattr(mllog, "clocks_ms", lambda: (1000, 20))
    monkeypatch.setattr(telemetry, "EVERY_S", 0.5)
    return module


def test_what_a_driver_says_of_a_gpu_is_kept_in_our_units(nvml: ModuleType) -> None:
    gpu = Gpu(nvml, 3, 3)
    sample = {"time_ms": 1000, "monotonic_ms": 20, "gpu": 3, "sm_clock_mhz": 1755, "memory_clock_mhz": 3201}
    sample |= {"temperature_c": 63, "memory_gib": 100.0, "energy_j": 1.5}
    throttle = ("software power cap", "software thermal slowdown")
    assert gpu.sample() == Sample(**sample, throttle=throttle, pcie_lanes=16, ecc_errors=0)
    assert gpu.settings() == {"gpu": 3, "power_limit_w": 700.0, "max_sm_clock_mhz": 1980}
    assert gpu.refused == {"power_w": "Not Supported"}


def test_refused_queries_are_blank_with_the_first_reason(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two names of the query for throttle reasons the newer one is used."""
    reasons = iter(["first", "second"])

    def refuse(*arguments: Any) -> int:
        raise nvml.NVMLError(next(reasons))

    monkeypatch.setattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", refuse, raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda handle: refuse())
    gpu = Gpu(nvml, 3, 3)
    sample = gpu.sample()
    assert (sample.throttle, sample.memory_gib, sample.power_w) == (None, None, None)
    assert gpu.refused == {"throttle": "first", "memory_gib": "second", "power_w": "Not Supported"}
    reasons = iter(["third", "fourth"])
    gpu.sample()
    assert gpu.refused["throttle"] == "first"


def test_it_samples_every_gpu_until_standard_input_ends(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one more sample after the end, and then a summary. It has the lowest CPU priority."""
    done: list[Any] = []
    ends = iter([[], [sys.stdin]])
    now = iter([10.0, 10.1, 11.4])
    monkeypatch.setattr(sys, "argv", ["gpu_sampler", str(tmp_path / "gpus.csv"), str(PARENT), "a", "b"])
    monkeypatch.setattr(gpu_sampler, "end_with", lambda parent: done.append(("ends with", parent)))
    monkeypatch.setattr(os, "nice", lambda by: done.append(("nice", by)))
    monkeypatch.setattr(os, "getppid", lambda: PARENT)
    monkeypatch.setattr(nvml, "nvmlInit", lambda: done.append("init"))
    monkeypatch.setattr(gpu_sampler, "time", SimpleNamespace(monotonic=lambda: next(now)))

    def select(readers: list[Any], writers: list[Any], errors: list[Any], timeout_s: float) -> Any:
        num_lines = len((tmp_path / "gpus.csv").read_text().splitlines())
        assert (readers, writers, errors) == ([sys.stdin], [], [])
        done.append((num_lines, round(timeout_s, 6)))
        return next(ends), [], []

    monkeypatch.setattr(gpu_sampler, "select", SimpleNamespace(select=select))
    gpu_sampler.main()
    assert done == [("ends with", PARENT), ("nice", 19), "init", (3, 0.4), (5, 0.0)], "missed samples are skipped"
    actual = list(telemetry.read(tmp_path / "gpus.csv"))
    assert [sample.gpu for sample in actual] == [3, 5] * 3 and actual[1].energy_j == 2.5
    gpus = [{"gpu": gpu, "power_limit_w": 700.0, "max_sm_clock_mhz": 1980} for gpu in (3, 5)]
    expected = {"driver": "999.1", "gpus": gpus, "refused": {"power_w": "Not Supported"}}
    assert json.loads(capsys.readouterr().out) == expected


def test_the_power_meter_of_the_node_is_read_at_the_same_moments(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ACPI meter next to another sensor; a moment without a value is left out, and two meters are none."""
    hwmon = tmp_path / "hwmon"
    for number, (name, file) in enumerate((("coretemp", "temp1_input"), ("power_meter", "power1_average"))):
        folder = hwmon / f"hwmon{number}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / file).write_text("8123500000\n")
    monkeypatch.setattr(node_meter, "HWMON", hwmon)
    value = hwmon / "hwmon1/power1_average"
    file = tmp_path / "trial_0.gpus_dgx-0.csv"

    def moments(parent: int) -> Iterator[None]:
        for text in ("8123500000\n", "", "9000000000\n"):
            value.write_text(text)
            yield

    monkeypatch.setattr(sys, "argv", ["gpu_sampler", str(file), str(PARENT), "a"])
    monkeypatch.setattr(gpu_sampler, "end_with", lambda parent: None)
    monkeypatch.setattr(os, "nice", lambda by: None)
    monkeypatch.setattr(gpu_sampler, "moments", moments)
    gpu_sampler.main()
    assert json.loads(capsys.readouterr().out)["meter"] == str(value)
    node = tmp_path / "trial_0.node_dgx-0.csv"
    assert node == telemetry.node_file(file)
    assert node.read_text() == "time_ms,monotonic_ms,power_w\n1000,20,8123.5\n1000,20,9000\n"
    (hwmon / "hwmon0/name").write_text("power_meter\n")
    (hwmon / "hwmon0/device").mkdir()
    (hwmon / "hwmon0/device/power1_average").write_text("1000000\n")
    assert node_meter.find() is None


def test_it_stops_when_its_rank_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start or later; on Linux the kernel kills it at once."""
    monkeypatch.setattr(os, "getppid", lambda: PARENT)
    requests: list[Any] = []
    library = SimpleNamespace(prctl=lambda *arguments: requests.append(arguments))
    monkeypatch.setattr(gpu_sampler.ctypes, "CDLL", lambda name: requests.append(name) or library)
    gpu_sampler.end_with(PARENT)
    assert requests == [None, (1, 9)]
    with pytest.raises(SystemExit, match="the rank has ended"):
        gpu_sampler.end_with(PARENT + 1)
    assert list(gpu_sampler.moments(PARENT + 1)) == [None]
    monkeypatch.setattr(gpu_sampler.ctypes, "CDLL", lambda name: SimpleNamespace())
    gpu_sampler.end_with(PARENT)
    assert gpu_sampler._text("580.1") == gpu_sampler._text(b"580.1") == "580.1"


class Ended:
    """A fake sampler process that has ended, or that hangs."""

    def __init__(self, printed: str = "", errors: str = "", returncode: int = 0, *, hangs: int = 0) -> None:
        self.printed, self.errors, self.returncode, self.hangs = printed, errors, returncode, hangs
        self.did: list[Any] = []

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.did.append(timeout)
        self.hangs -= 1
        if self.hangs >= 0:
            raise subprocess.TimeoutExpired("sampler", timeout)
        return self.printed, self.errors

    def kill(self) -> None:
        self.did.append("killed")


ACCOUNT = {"driver": "999.1", "gpus": [{"gpu": 2, "power_limit_w": 700.0}], "refused": {}}


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (Ended(hangs=1), "the sampler did not end within 20 s: the driver hangs, or the CPUs are busy"),
        (Ended(returncode=-11), r"the sampler was ended by signal 11 \(Segmentation fault\)"),
        (Ended(errors="Traceback\nNVMLError: Not Found\n\n", returncode=1), "NVMLError: Not Found"),
        (Ended(errors=" \n", returncode=3), "exit code 3"),
        (Ended("half of it"), "the sampler ended without its summary of the GPUs"),
        (Ended(""), "the sampler ended without its summary of the GPUs"),
        (Ended("7"), "the sampler ended without its summary of the GPUs"),
    ],
)
def test_the_reason_of_a_failed_sampler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, process: Ended, why: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: process)
    with pytest.raises(NotMeasured, match=f"^{why}$"):
        Sampler(tmp_path / "gpus.csv", ["a"]).end()
    assert process.did == ([20.0, "killed", 1] if "did not end" in why else [20.0])


def test_a_sampler_is_started_with_its_parent_and_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its last line is the summary. A sampler that hangs in the driver does not delay the run."""
    started: list[Any] = []
    process = Ended(f"a library's words\n{json.dumps(ACCOUNT)}\n")
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: started.append((command, how)) or process)
    monkeypatch.setenv("PYTHONPATH", "/site")
    file = tmp_path / "rank_logs/gpus.csv"
    sampler = Sampler(file, ["a", "b"])
    ((command, how),) = started
    expected = [sys.executable, "-m", "jobs.ranks.gpu_sampler", str(file), str(os.getpid()), "a", "b"]
    assert command == expected and file.parent.is_dir()
    assert how["env"]["PYTHONPATH"] == f"{ROOT}{os.pathsep}/site" and how["text"]
    assert how["stdin"] is how["stdout"] is how["stderr"] is subprocess.PIPE
    assert sampler.end() == ACCOUNT and process.did == [20.0]
    process.hangs = 2
    with pytest.raises(NotMeasured, match="the driver hangs"):
        sampler.end()


def test_a_record_has_samples_and_settings_of_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moments = SimpleNamespace(moments=[("run_start", 1000), ("run_stop", 3000)])
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: Ended(json.dumps(ACCOUNT)))
    sampler = Sampler(tmp_path / "gpus.csv", ["a"])
    log: Any = moments
    assert sampler.summary(log) == {"not_measured": "the samples could not be read: No such file or directory"}
    taken = [Sample(time_ms=0, monotonic_ms=ms, gpu=2, power_w=float(ms)) for ms in (500, 1500, 2500, 3500)]
    sampler.file.write_text(telemetry.header() + telemetry.lines(taken))
    record = sampler.summary(log)
    assert (record["driver"], record["refused"], record["samples"], record["longest_gap_s"]) == ("999.1", {}, 2, 1.0)
    (gpu,) = record["gpus"]
    assert (gpu["gpu"], gpu["power_limit_w"], gpu["power_w"]) == (2, 700.0, {"median": 2000.0, "max": 2500.0})
    log.moments.clear()
    assert sampler.summary(log) == {"not_measured": "the log has no run_start with a run_stop"}


def test_a_sampler_that_could_not_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(command: list[str], **how: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(NotMeasured, match="^the sampler could not be started: Cannot allocate memory$"):
        Sampler(tmp_path / "gpus.csv", ["a"]).end()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_rank_0_logs_a_record_of_each_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local_rank: int) -> None:
    """Only local rank 0 samples; a node whose file is missing has a record with the reason."""
    launch, cluster = SimpleNamespace(telemetry=True), SimpleNamespace(device=Device.cuda, ranks_per_node=3)
    config = SimpleNamespace(launch=launch, cluster=cluster, huggingface=None)
    plan: Any = SimpleNamespace(config=config, world=SimpleNamespace(ranks_per_node=3))
    planned: list[Any] = []

    class FakeSampler:
        def __init__(self, file: Path, uuids: list[str], *, is_amd: bool) -> None:
            planned.append((file, uuids))
            assert not is_amd, "torch here is not built for AMD's GPUs"
            self.file = file

        def summary(self, log: mllog.Writer) -> dict[str, Any]:
            return {"samples": 7}

    properties = {0: SimpleNamespace(uuid="a"), 1: SimpleNamespace(uuid="b"), 2: SimpleNamespace()}
    monkeypatch.setattr("torch.cuda.get_device_properties", properties.get)
    monkeypatch.setattr(sampling, "Sampler", FakeSampler)
    monkeypatch.setattr(identity.socket, "gethostname", lambda: "dgx-0")
    dead = ("dgx-1", "trial_7.gpus_dgx-1.csv", {"not_measured": "it was killed"})
    given: list[Any] = []
    monkeypatch.setattr(process_group, "gathered", lambda who, mine: given.append(mine) or [mine, None, dead])
    for name in ("SLURMD_NODENAME", identity.NODE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / "rank_logs/trial_7.gpus_dgx-0.csv").write_text("samples")
    logged: list[Any] = []
    log: Any = SimpleNamespace(
        event=lambda key, value, **metadata: logged.append((key, value, metadata)),
        attach=lambda path: logged.append((path.name, path.read_text())),
    )
    Telemetry(plan, Rank(0, local_rank, 3, "", 0), tmp_path, 7).log(log)
    file = tmp_path / "rank_logs/trial_7.gpus_dgx-0.csv"
    mine = ("dgx-0", file.name, {"samples": 7})
    own = [("gpu_telemetry", {"samples": 7}, {"node": "dgx-0"}), (file.name, "samples")]
    assert planned == ([(file, ["a", "b", ""])] if local_rank == 0 else [])
    assert given == ([mine] if local_rank == 0 else [None])
    assert logged == [*(own if local_rank == 0 else []), ("gpu_telemetry", dead[2], {"node": "dgx-1"})]
