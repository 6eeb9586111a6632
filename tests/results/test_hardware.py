"""GPU telemetry in a log: measurements, table rows, and facts in which machines differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.contract import mllog
from bench.mlperf.result import parse
from bench.report import sets, throughput
from bench.report.training import speed_rows
from bench.results.measurement import differing_clocks, hardware_facts
from bench.results.training import TrainingResult
from helpers.written_log import ONCE

MakeLog = Callable[..., Path]
GPU: dict[str, Any] = {
    "gpu": 0,
    "power_w": {"median": 650.0, "max": 701.0},
    "sm_clock_mhz": {"median": 1755, "max": 1980},
    "memory_clock_mhz": {"median": 3201, "max": 3201},
    "temperature_c": {"median": 61, "max": 66},
    "memory_gib": {"median": 120.0, "max": 121.0},
    "throttle": {"software power cap": 0.75},
    "power_limit_w": 700.0,
    "max_sm_clock_mhz": 1980,
    "energy_j": 30_000.0,
    "training_energy_j": 24_000.0,
}
COOLER = GPU | {
    "gpu": 1,
    "power_w": {"median": 640.0, "max": 690.0},
    "temperature_c": {"median": 55, "max": 58},
    "throttle": {},
    "energy_j": 28_000.0,
    "training_energy_j": 22_080.0,
}


@pytest.fixture
def gpu_log(tmp_path: Path) -> MakeLog:
    """Write a run of two blocks of 384 and 768 samples, in batches of 8 rows of 100 tokens, with these records."""

    def write(*records: tuple[str, object], name: str = "result_0.txt", seed: int = 1) -> Path:
        untargeted = {"submission_benchmark": None, "target_accuracy": None, "max_sequence_length": 100}
        sizes = {"num_ranks": 2, "accelerator": "NVIDIA H200", "seed": seed}
        with mllog.Writer(tmp_path / name) as log:
            log.start(mllog.INIT_START)
            for key, value in (ONCE | untargeted | sizes).items():
                if value is not None:
                    log.event(key, value)
            log.stop(mllog.INIT_STOP)
            log.start(mllog.RUN_START)
            for start, end in ((0, 384), (768, 1536)):
                log.start(mllog.BLOCK_START, samples_count=start)
                log.stop(mllog.BLOCK_STOP, samples_count=end)
            log.finish(mllog.SUCCESS)
            for node, value in records:
                log.event(mllog.GPU_TELEMETRY, value, node=node)
        return tmp_path / name

    return write


def measured(log: Path) -> dict[str, tuple[float, str, int]]:
    return {m.name: (m.value, m.unit, m.n) for m in TrainingResult(result=parse(log)).measurements}


def test_measurements_are_over_gpus_and_energy_is_of_all_of_them(gpu_log: MakeLog) -> None:
    """58,000 J in total; 46,080 J of training in 144 steps of 8 rows of 100 tokens: 320 J per step, 0.4 J per token."""
    measurements = measured(gpu_log(("dgx01", {"gpus": [GPU]}), ("dgx02", {"gpus": [COOLER]})))
    assert measurements["gpu_power"] == (645, "W", 2) and measurements["peak_gpu_power"] == (701, "W", 2)
    assert measurements["sm_clock"] == (1755, "MHz", 2) and measurements["memory_clock"] == (3201, "MHz", 2)
    assert measurements["gpu_temperature"] == (58, "°C", 2) and measurements["peak_gpu_temperature"] == (66, "°C", 2)
    assert measurements["peak_gpu_memory_used"] == (121, "GiB", 2)
    assert measurements["throttle_software_power_cap"] == (0.375, "", 2)
    assert measurements["energy"] == (58_000, "J", 2)
    assert measurements["energy_per_step"] == (320, "J", 2)
    assert measurements["energy_per_token"] == (pytest.approx(0.4), "J", 2)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"not_measured": "the sampler got signal 9"}, "dgx02: the sampler got signal 9"),
        ({"gpus": [{**COOLER, "energy_j": None, "training_energy_j": None}]}, ""),
    ],
)
def test_energy_is_that_of_all_gpus_or_none(gpu_log: MakeLog, other: object, why: str) -> None:
    log = gpu_log(("dgx01", {"gpus": [GPU], "refused": {"energy_j": "Not Supported"}}), ("dgx02", other))
    assert "sm_clock" in measured(log) and not [name for name in measured(log) if "energy" in name]
    rows = {name: remark for name, _, remark in speed_rows(parse(log))}
    assert rows["not measured on the GPUs"] == "; ".join(filter(None, [why, "no energy: Not Supported"]))


def test_a_quantity_that_one_gpu_does_not_report_is_not_measured(gpu_log: MakeLog) -> None:
    measurements = measured(gpu_log(("dgx01", {"gpus": [GPU, {"gpu": 1, "power_w": {"median": 1.0, "max": 2.0}}]})))
    assert "gpu_power" in measurements and not {"sm_clock", "gpu_temperature", "peak_sm_clock"} & set(measurements)


def test_quantities_that_the_driver_refuses_are_listed(gpu_log: MakeLog) -> None:
    refused = {"throttle": "Not Supported", "max_sm_clock_mhz": "Unknown Error"}
    rows = {name: remark for name, _, remark in speed_rows(parse(gpu_log(("n1", {"gpus": [GPU], "refused": refused}))))}
    assert rows["not measured on the GPUs"] == "no throttle: Not Supported; no max sm clock: Unknown Error"
    assert rows["energy of the run (J)"] == "1 GPU, run_start to run_stop"


@pytest.mark.parametrize("value", [7, None, [], {"gpus": 7}, {"gpus": [7, {}, {"gpu": "0"}]}, {"gpus": {"gpu": 0}}])
def test_a_malformed_record_has_no_measurements(gpu_log: MakeLog, value: object) -> None:
    assert not {"gpu_power", "energy", "sm_clock"} & set(measured(gpu_log(("dgx01", value))))


def test_a_log_without_telemetry_has_no_gpu_rows(gpu_log: MakeLog) -> None:
    result = parse(gpu_log())
    assert result.telemetry is None and hardware_facts(result) == {}
    assert not [row for row in speed_rows(result) if "GPU" in row[0] or "clock" in row[0]]


def test_clocks_that_differ_by_more_than_the_tolerance_are_reported(gpu_log: MakeLog) -> None:
    """A clock within 2 % counts as equal, and power is not compared."""
    close = GPU | {"sm_clock_mhz": {"median": 1780, "max": 1980}, "power_w": {"median": 400.0, "max": 500.0}}
    slow = GPU | {"sm_clock_mhz": {"median": 1404, "max": 1410}, "power_limit_w": 500.0}
    logs = [gpu_log(("n", {"gpus": [gpu]}), name=f"{number}.txt") for number, gpu in enumerate((GPU, close, slow))]
    one, same, other, silent = (
        [{m.name: m for m in TrainingResult(result=parse(log)).measurements}] for log in (*logs, gpu_log())
    )
    assert list(differing_clocks(one, same)) == list(differing_clocks(one, silent)) == []
    assert list(differing_clocks(one, other)) == [("median SM clock (MHz)", "1755", "1404")]
    assert [hardware_facts(parse(log)) for log in logs[1:]] == [
        {"GPU power limit (W)": "700"},
        {"GPU power limit (W)": "500"},
    ]


def test_a_report_shows_the_gpu_telemetry_of_all_trials(gpu_log: MakeLog) -> None:
    """Two trials on the same two GPUs: energy is a mean over trials, energy per step a mean over all steps."""
    first = gpu_log(("n", {"gpus": [GPU, COOLER]}), seed=1)
    second = [gpu | {"energy_j": 1000.0, "training_energy_j": 0.0} for gpu in (GPU, COOLER)]
    gpu_log(("n", {"gpus": second}), name="result_1.txt", seed=2)
    (trials,) = sets.load([first.parent])
    rows = {name: (value, remark) for name, value, remark in throughput.compared(trials).rows}
    assert rows["power of a GPU (W)"] == ("645", "median; maximum 701; GPUs 640 to 650; limit 700")
    assert rows["SM clock (MHz)"] == ("1,755", "median; maximum 1,980")
    assert rows["clock throttling"] == ("software power cap 38 %", "share of time")
    assert rows["energy of the run (J)"] == ("30,000", "2 GPUs, run_start to run_stop")
    assert rows["energy of a step (J)"][0] == "160.0"
