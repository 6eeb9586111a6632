"""What the GPUs did while a trial ran: sampled by a process of its own, summarised into the log, never in the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.contract import mllog, run_files, telemetry
from bench.contract.schema import Device
from bench.contract.telemetry import Sample
from bench.mlperf.result import parse
from helpers.paths import ROOT
from jobs.ranks import process_group
from jobs.ranks import telemetry as sampling
from jobs.ranks.identity import Rank, node_name
from jobs.ranks.telemetry import NotMeasured, Sampler, Telemetry, summary

FAKE = ROOT / "tests/helpers/fake_nvml"
RUN = [("run_start", 1000), ("block_start", 1000), ("block_stop", 3500), ("run_stop", 4000)]
"""A run of 3 s: a block of 2.5 s, then an evaluation."""
TIMES_MS = (500, 1500, 2500, 3500, 4500)
Fake = Callable[..., None]


def samples(times_ms: tuple[int, ...] = TIMES_MS, **values: tuple[Any, ...]) -> list[Sample]:
    """Return samples of GPU 2 with the values of each column."""
    rows = (dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))
    return [Sample(time_ms=0, monotonic_ms=ms, gpu=2, **row) for ms, row in zip(times_ms, rows, strict=True)]


def of_one(actual: list[Sample]) -> dict[str, Any]:
    (gpu,) = summary(actual, RUN)["gpus"]
    return gpu


def test_energy_is_what_the_counter_gained_between_the_ends_of_run_and_blocks() -> None:
    """1000 J at 1 s, halfway between two samples; 1800 J at 3.5 s; 1900 J at 4 s."""
    gpu = of_one(samples(energy_j=(800.0, 1200.0, None, 1800.0, 2000.0), power_w=(300.0,) * 5))
    assert (gpu["energy_j"], gpu["training_energy_j"], gpu["energy_by"]) == (900, 800, "counter")
    assert gpu["integrated_energy_j"] == 900, "3 s at 300 W"
    assert "integrated_energy_j" not in of_one(samples(energy_j=(800.0, 1200.0, None, 1800.0, 2000.0)))


def test_a_run_without_blocks_has_an_energy_and_none_of_training() -> None:
    (gpu,) = summary(samples(energy_j=(800.0, 1200.0, 1600.0, 1800.0, 2000.0)), [RUN[0], RUN[-1]])["gpus"]
    assert gpu["energy_j"] == 900 and "training_energy_j" not in gpu


def test_without_a_counter_power_is_integrated() -> None:
    """By trapezoids 0, 400, 800, 1100 and 1300 J at the samples: 200 J at 1 s, 1100 at 3.5 s, 1200 at 4 s."""
    gpu = of_one(samples(power_w=(400.0, 400.0, 400.0, 200.0, 200.0)))
    assert (gpu["energy_j"], gpu["training_energy_j"], gpu["energy_by"]) == (1000, 900, "power")


@pytest.mark.parametrize(
    "actual",
    [
        samples((500, 1500, 9000), power_w=(400.0,) * 3),
        samples(power_w=(None, 400.0, 400.0, 400.0, 400.0)),
        samples(energy_j=(900.0, 950.0, 960.0, 10.0, 20.0)),
    ],
    ids=["a gap of 7.5 s", "no power at the start", "a driver that was reloaded"],
)
def test_unknown_energy_is_omitted(actual: list[Sample]) -> None:
    assert not [name for name in of_one(actual) if "energy" in name]


def test_levels_are_those_within_the_run() -> None:
    gpu = of_one(
        samples(
            power_w=(9.0, 500.0, 700.0, 400.0, 9000.0),
            temperature_c=(99.0, None, 60.0, 70.0, 99.0),
            throttle=(("idle",), ("software power cap",), (), ("software power cap", "power brake"), ("idle",)),
        )
    )
    assert gpu["power_w"] == {"median": 500, "max": 700}
    assert gpu["temperature_c"] == {"median": 65, "max": 70}
    assert gpu["throttle"] == {"software power cap": 0.6667, "power brake": 0.3333}
    assert not {"sm_clock_mhz", "memory_gib"} & set(gpu), "they were not measured"


@pytest.mark.parametrize(
    ("times_ms", "moments", "why"),
    [
        ((1500, 2500, 4500), RUN, "not sampled from run_start to run_stop"),
        ((500, 1500, 3500), RUN, "not sampled from run_start to run_stop"),
        ((), RUN, "there are no samples"),
        ((500, 4500), RUN, "there is no sample in the 3.0 s of the run"),
        (TIMES_MS, RUN[:3], "the log has no run_start with a run_stop"),
    ],
)
def test_samples_that_do_not_cover_the_run_are_refused(times_ms: tuple[int, ...], moments: Any, why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        summary(samples(times_ms, power_w=(400.0,) * len(times_ms)), moments)


def test_samples_are_read_back_without_a_truncated_line(tmp_path: Path) -> None:
    nothing = Sample(time_ms=1, monotonic_ms=2, gpu=0)
    full = samples(power_w=(1.5,) * 5, energy_j=(123456789.125,) * 5, throttle=((), ("idle",), None, ("0x800",), ()))
    path = tmp_path / "gpus.csv"
    path.write_text(telemetry.header() + telemetry.lines([nothing, *full, full[1]])[:-2])
    assert list(telemetry.read(path)) == [nothing, *full]
    assert telemetry.reasons(0x4 | 0x800) == ("software power cap", "0x800")


def test_the_newest_samples_come_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    moments = ([Sample(time_ms=1000 * n, monotonic_ms=n, gpu=gpu, power_w=n) for gpu in range(8)] for n in range(500))
    path.write_text(telemetry.header() + "".join(map(telemetry.lines, moments)))
    assert [(s.gpu, s.time_ms, s.power_w) for s in telemetry.newest(path)] == [(n, 499_000, 499) for n in range(8)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Give the sampler an NVML with two GPUs and a script."""

    monkeypatch.setattr(sampling, "END_S", 60)  # the sampler has low priority, and tests keep all CPUs busy

    def script(**more: Any) -> None:
        monkeypatch.setenv("FAKE_NVML", json.dumps({"gpus": {"GPU-a": 3, "MIG-b": 5}} | more))
        monkeypatch.setenv("PYTHONPATH", str(FAKE))

    return script


def sampled(file: Path, num_lines: int = 20, uuids: tuple[str, ...] = ("a", "b")) -> dict[str, Any]:
    """Return the record of a run that lasts until the file has so many lines, or its sampler has ended."""
    sampler = Sampler(file, uuids)
    assert sampler._process is not None
    with mllog.Writer(None) as log:
        wait_for(lambda: sampler._process.poll() is not None or count(file) > 2)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START)
        wait_for(lambda: sampler._process.poll() is not None or count(file) > num_lines)
        log.stop(mllog.BLOCK_STOP)
        log.finish(mllog.SUCCESS)
        return sampler.summary(log)


def count(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(is_so: Callable[[], bool], *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.starts
@pytest.mark.parametrize(("every_s", "num_lines"), [(0.02, 20), (0.0, 2000)])
def test_a_process_samples_until_its_input_ends(fake: Fake, tmp_path: Path, every_s: float, num_lines: int) -> None:
    """GPU b is a MIG slice; both have an energy counter, and neither reports power. With 0 s every sample is late."""
    fake(refused=["nvmlDeviceGetPowerUsage"], every_s=every_s)
    record = sampled(tmp_path / "rank_logs/gpus.csv", num_lines)
    assert record["driver"] == "999.1" and record["refused"] == {"power_w": "Not Supported"}
    assert [gpu["gpu"] for gpu in record["gpus"]] == [3, 5]
    for gpu in record["gpus"]:
        assert (gpu["power_limit_w"], gpu["max_sm_clock_mhz"]) == (700, 1980)
        assert gpu["sm_clock_mhz"] == {"median": 1755, "max": 1755} and "power_w" not in gpu
        assert gpu["memory_clock_mhz"]["median"] == 3201 and gpu["memory_gib"]["max"] == 100
        assert gpu["temperature_c"] == {"median": 60 + gpu["gpu"], "max": 60 + gpu["gpu"]}
        assert gpu["throttle"] == {"software power cap": 1, "software thermal slowdown": 1}
        assert 0 < gpu["training_energy_j"] <= gpu["energy_j"]


@pytest.mark.starts
def test_a_run_that_waits_for_the_first_sample_is_sampled_from_its_start(fake: Fake, tmp_path: Path) -> None:
    fake(every_s=0.02)
    sampler = Sampler(file := tmp_path / "gpus.csv", ["a"])
    sampler.wait_for_first()
    with mllog.Writer(None) as log:
        log.start(mllog.RUN_START)
        already = count(file)
        wait_for(lambda: count(file) > already + 2)
        log.finish(mllog.SUCCESS)
        assert sampler.summary(log)["gpus"][0]["gpu"] == 3


@pytest.mark.starts
def test_a_run_does_not_wait_for_a_driver_that_fails(fake: Fake, tmp_path: Path) -> None:
    fake(no_driver=True)
    sampler = Sampler(tmp_path / "gpus.csv", ["GPU-a"])
    sampler.wait_for_first()
    with pytest.raises(NotMeasured, match="NVML Shared Library Not Found"):
        sampler.end()


@pytest.mark.parametrize(("ended", "waited_s"), [(None, sampling.FIRST_S), (1, 0.0)])
def test_the_first_sample_is_waited_for_until_its_limit_or_the_end_of_the_sampler(
    ended: int | None, waited_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of the test, with a sampler that never samples."""
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        assert now_s < 2 * sampling.FIRST_S

    monkeypatch.setattr(sampling.subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: ended))
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    Sampler(tmp_path / "gpus.csv", ["GPU-a"]).wait_for_first()
    assert now_s == pytest.approx(waited_s, abs=0.1)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ({"no_driver": True}, "NVML Shared Library Not Found"),
        ({"gpus": {}}, "Not Found"),
        ({"ends": {"nvmlDeviceGetPowerUsage": 9}, "how": "crash"}, "the sampler was ended by signal 11"),
        ({"ends": {"nvmlDeviceGetPowerUsage": 9}, "how": "error"}, "RuntimeError: the bindings are broken"),
    ],
)
def test_the_reason_for_missing_samples_is_logged(fake: Fake, tmp_path: Path, script: dict[str, Any], why: str) -> None:
    fake(**script)
    assert why in sampled(tmp_path / "gpus.csv", 500)["not_measured"]


@pytest.mark.starts
def test_a_hanging_driver_does_not_delay_the_run(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "END_S", 0.2)
    fake(ends={"nvmlDeviceGetPowerUsage": 9}, how="hang")
    before = psutil.Process().children()
    assert "the driver hangs" in sampled(tmp_path / "gpus.csv", 8)["not_measured"]
    assert psutil.Process().children() == before


@pytest.mark.starts
def test_nothing_is_measured_without_the_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "pynvml.py").write_text("import a_module_that_does_not_exist")
    assert "No module named" in sampled(tmp_path / "gpus.csv")["not_measured"]


RANK = """
import sys, time
from pathlib import Path
from jobs.ranks.guard import guarded
from jobs.ranks.telemetry import Sampler

with guarded(Path("rank.error")):
    print(Sampler(Path("gpus.csv"), ["a"])._process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.starts
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_rank(fake: Fake, tmp_path: Path, how: signal.Signals) -> None:
    """By any signal, and even if the driver hangs, so that the end of standard input is not seen."""
    fake(ends={"nvmlDeviceGetPowerUsage": 3}, how="hang")
    path = os.pathsep.join((str(ROOT), str(FAKE)))
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with rank:
        assert rank.stdout
        sampler = psutil.Process(int(rank.stdout.readline()))
        wait_for(lambda: count(tmp_path / "gpus.csv") >= 3)
        assert sampler.nice() == 19
        rank.send_signal(how)
        rank.wait(30)
    gone, left = psutil.wait_procs([sampler], timeout=30)
    assert not left, "it outlived its rank"


def plan(*, is_on: bool = True, device: Device = Device.cuda) -> Any:
    launch, cluster = SimpleNamespace(telemetry=is_on), SimpleNamespace(device=device, ranks_per_node=2)
    config = SimpleNamespace(launch=launch, cluster=cluster, huggingface=None)
    return SimpleNamespace(config=config, world=SimpleNamespace(ranks_per_node=2))


@pytest.mark.starts
def test_rank_0_logs_every_node_and_attaches_existing_files(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node's sampler was killed; ranks without a sampler have no record."""
    fake()
    monkeypatch.setattr(sampling, "uuids", lambda num_gpus: ["a", "b"][:num_gpus])
    dead = ("dgx02", "trial_7.gpus_dgx02.csv", {"not_measured": "the sampler got SIGKILL"})
    monkeypatch.setattr(process_group, "gathered", lambda who, mine: [mine, None, dead, None])
    with mllog.Writer(tmp_path / "result_7.txt") as log:
        observed = Telemetry(plan(), Rank(0, 0, 4, "", 0), tmp_path, 7)
        file = tmp_path / run_files.telemetry(7, node_name())
        wait_for(lambda: count(file) > 2)
        log.start(mllog.RUN_START)
        log.start(mllog.BLOCK_START, samples_count=0)
        wait_for(lambda: count(file) > 10)
        log.stop(mllog.BLOCK_STOP, samples_count=8)
        log.finish(mllog.SUCCESS)
        observed.log(log)
    actual = parse(tmp_path / "result_7.txt").telemetry
    assert actual is not None and actual.missing == ("dgx02: the sampler got SIGKILL",)
    assert [gpu.gpu for gpu in actual.gpus] == [3, 5] and actual.energy_j is None, (
        "half of the GPUs are not the whole run"
    )
    text = (tmp_path / "result_7.txt").read_text()
    assert text.count('"attached_file"') == 1 and f'"value": "rank_logs/{file.name}"' in text


@pytest.mark.parametrize("other", [{"is_on": False}, {"device": Device.cpu}])
def test_no_sampler_on_cpus_or_when_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(process_group, "gathered", None)
    with mllog.Writer(tmp_path / "log") as log:
        Telemetry(plan(**other), Rank(0, 0, 2, "", 0), tmp_path, 0).log(log)
    assert [path.name for path in tmp_path.iterdir()] == ["log"] and not (tmp_path / "log").read_text()


@pytest.mark.parametrize(("watts", "difference"), [(300.0, ""), (305.0, ""), (307.0, "+2.3 %"), (290.0, "-3.3 %")])
def test_two_energies_that_disagree_are_a_warning(tmp_path: Path, watts: float, difference: str) -> None:
    """The counter has 900 J in the run of 3 s; the integral of power may differ by 2 %."""
    record = summary(samples(energy_j=(850.0, 1150.0, 1450.0, 1750.0, 2050.0), power_w=(watts,) * 5), RUN)
    with mllog.Writer(tmp_path / "result_0.txt") as log:
        log.event(mllog.GPU_TELEMETRY, record, node="dgx-0")
    warnings = [f.what for f in parse(tmp_path / "result_0.txt").findings if f.rule == "LOG-27"]
    assert len(warnings) == bool(difference) and all(f"GPU 2 of dgx-0: {3 * watts:,.0f} J" in what for what in warnings)
    assert all(difference in what for what in warnings)
