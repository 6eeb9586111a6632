"""The power of runs, by hand: energies, the written files, and each way in which readings do not cover a run."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.contract import run_files, telemetry
from bench.contract.telemetry import Reading, Sample
from bench.errors import ConfigError
from bench.mlperf.package import power as powers
from bench.mlperf.package.entry import Entry, Run
from bench.mlperf.package.power import PowerRequest, Scope
from bench.mlperf.result import parse

START, SECONDS = 1_790_000_000_000, 100
"""The start of the run in milliseconds, and its seconds."""


def written_run(folder: Path, *, seconds: float = SECONDS) -> Run:
    folder.mkdir(exist_ok=True)
    records = [
        {"time_ms": START, "event_type": "INTERVAL_START", "key": "run_start", "value": None, "metadata": {}},
        {
            "time_ms": round(START + 1000 * seconds),
            "event_type": "INTERVAL_END",
            "key": "run_stop",
            "value": None,
            "metadata": {"status": "success"},
        },
    ]
    (log := folder / "result_0.txt").write_text("".join(f":::MLLOG {json.dumps(one)}\n" for one in records))
    result = parse(log)
    return Run(folder, (replace(result, system={"number_of_nodes": "1"}, findings=()),), None)


def record(folder: Path, node: str, moments_s: Sequence[float], *, power_w: float = 1000.0) -> None:
    """Write readings of a node at these seconds after run_start."""
    (folder / run_files.RANK_LOGS).mkdir(exist_ok=True)
    lines = [telemetry.reading_header()]
    for moment_s in moments_s:
        at = round(START + 1000 * moment_s)
        lines.append(telemetry.reading_line(Reading(time_ms=at, monotonic_ms=at, power_w=power_w)))
    (folder / run_files.node_power(0, node)).write_text("".join(lines))


def measured(run: Run, request: PowerRequest | None = None) -> tuple[float | None, list[str]]:
    """Return the energy of the only run, and the findings."""
    entry = Entry("box", "bert", (run,))
    ((_, (power,)),), findings = powers.measure([entry], request or PowerRequest())
    shown = [f"{one.severity} {one.titled}".replace(f"{run.folder}/", "") for one in findings]
    return power.energy_j(request or PowerRequest()), shown


EVERY_SECOND = [float(second) for second in range(-2, SECONDS + 3)]


@pytest.mark.parametrize(
    ("seconds", "moments_s", "expected"),
    [
        (SECONDS, EVERY_SECOND, []),
        (SECONDS, [float(second) for second in range(SECONDS + 1)], []),
        (SECONDS, [1.5 * number for number in range(68)], []),
        (
            SECONDS,
            [second for second in EVERY_SECOND if second >= 1],
            ["the readings of node n0 begin 1.0 s after run_start"],
        ),
        (
            SECONDS,
            [second for second in EVERY_SECOND if second < 97],
            ["the readings of node n0 end 4.0 s before run_stop"],
        ),
        (
            SECONDS,
            [second for second in EVERY_SECOND if second not in (10, 20, 21, 50)],
            [
                "the readings of node n0 have 3 gaps of more than 1.5 s; the longest is 3.0 s, 19.0 s after run_start",
            ],
        ),
        (SECONDS, [], ["node n0 has no reading"]),
        (59, [float(second) for second in range(60)], []),
        (
            58.9,
            [float(second) for second in range(60)],
            ["it took 58.9 s, but the rules require 60 power samples for each run"],
        ),
        (
            30,
            [1.5 * number for number in range(21)],
            [
                "node n0 has 21 readings in 30.0 s",
                "it took 30.0 s, but the rules require 60 power samples for each run",
            ],
        ),
    ],
)
def test_readings_that_do_not_cover_a_run_are_listed(
    seconds: float, moments_s: list[float], expected: list[str], tmp_path: Path
) -> None:
    run = written_run(tmp_path / "run", seconds=seconds)
    record(run.folder, "n0", moments_s)
    energy_j, findings = measured(run)
    assert findings == [f"error PCK-07: result_0.txt: {what}" for what in expected]
    assert energy_j == (pytest.approx(1000 * seconds) if moments_s else None)


def test_every_node_of_the_run_has_readings(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    lacking = "error PCK-07: result_0.txt: the power of a node was recorded on 0 of 1 nodes"
    assert measured(run) == (0.0, [lacking])
    record(run.folder, "n0", EVERY_SECOND)
    two = replace(run, results=(replace(run.results[0], system={"number_of_nodes": "2"}),))
    switches = "error PCK-09: bert on box: the runs use 2 nodes, but --switch-watts is missing"
    lacking = "error PCK-07: result_0.txt: the power of a node was recorded on 1 of 2 nodes"
    assert measured(two) == (pytest.approx(1e5), [switches, lacking])
    record(run.folder, "n1", EVERY_SECOND, power_w=500.0)
    assert measured(two)[1] == [switches]
    request = PowerRequest(efficiency=0.9, switches_w=(100.0, 50.0))
    assert measured(two, request) == (pytest.approx(0.9 * 150_000 + 15_000), [])
    unknown = replace(run, results=(replace(run.results[0], system={}),))
    for file in (run.folder / run_files.RANK_LOGS).iterdir():
        file.unlink()
    assert measured(unknown, PowerRequest(scope=Scope.gpus))[1] == [
        "error PCK-06: bert on box: the package contains only GPU power, but MLPerf requires the power of whole nodes",
        "error PCK-07: result_0.txt: the power of the GPUs of a node was recorded on 0 of an unknown number of nodes",
    ]


def test_the_energy_weighs_each_reading_with_the_time_before_it(tmp_path: Path) -> None:
    """From one second before the run to one after it: 1 s of 100 W, 100 s of 200 W and 1 s of 300 W, as a mean."""
    run = written_run(tmp_path / "run")
    (meter := tmp_path / "meter.csv").write_text(
        "node,power_w,time_ms\n"
        + "".join(
            f"n,{watts},{START + 1000 * second}\n" for second, watts in ((101, 300), (-1, 50), (0, 100), (100, 200))
        )
    )
    energy_j, _ = measured(run, PowerRequest(meters=(meter,)))
    assert energy_j == pytest.approx(200 * 100)
    meter.write_text(f"node,power_w,time_ms\nn,10,{START - 1000}\nn,100,{START + 1000}\nn,200,{START + 101_000}\n")
    energy_j, _ = measured(run, PowerRequest(meters=(meter,)))
    assert energy_j == pytest.approx((2 * 100 + 100 * 200) / 102 * 100)


def test_gpus_are_summed_at_each_moment_that_has_all_of_them(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    (run.folder / run_files.RANK_LOGS).mkdir()
    lines = [telemetry.header()]
    for number, second in enumerate(EVERY_SECOND):
        at = [round(START + 1000 * second) + gpu for gpu in range(2)]
        watts = [300.0, None if number == 50 else 100.0]
        samples = [Sample(time_ms=at[gpu], monotonic_ms=at[gpu], gpu=gpu, power_w=watts[gpu]) for gpu in range(2)]
        lines.append(telemetry.lines(samples[:1] if number == 70 else samples))
    (run.folder / run_files.telemetry(0, "n0")).write_text("".join(lines))
    energy_j, findings = measured(run, PowerRequest(scope=Scope.gpus))
    assert energy_j == pytest.approx(400 * 100)
    assert findings[1:] == [
        "error PCK-07: result_0.txt: the readings of node n0 have 2 gaps of more than 1.5 s; the longest is 2.0 s, "
        "67.0 s after run_start"
    ]


def test_the_files_of_a_submission_have_each_reading_between_its_start_and_stop(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run", seconds=1)
    record(run.folder, "n0", [-0.5, 0.5, 1.5])
    request = PowerRequest(efficiency=0.5, switches_w=(300.0,), current="DC")
    entries, _ = powers.measure([Entry("box", "bert", (run,))], request)
    assert powers.write(tmp_path / "out", entries, request) == {}
    folder = tmp_path / "out/results/box/bert/power/result_0"
    assert sorted(path.name for path in folder.iterdir()) == ["node_0.txt", "sw_0.txt"]

    def lines(name: str) -> list[tuple[object, ...]]:
        records = [json.loads(line.removeprefix(":::MLLOG ")) for line in (folder / name).read_text().splitlines()]
        assert {one["namespace"] for one in records} == {""}
        return [
            (one["time_ms"] - START, one["event_type"], one["key"], one["value"], one["metadata"]) for one in records
        ]

    host = {"host": "node_0"}
    assert lines("node_0.txt") == [
        (-500, "INTERVAL_START", "power_measurement_start", None, host),
        (-500, "POINT_IN_TIME", "conversion_eff", 0.5, host | {"measurement_type": "DC"}),
        *((at, "POINT_IN_TIME", "power_reading", 1000.0, host) for at in (-500, 500, 1500)),
        (1500, "INTERVAL_END", "power_measurement_stop", None, host),
    ]
    assert lines("sw_0.txt") == [
        (0, "INTERVAL_START", "power_measurement_start", None, {"host": "sw_0"}),
        (0, "POINT_IN_TIME", "interconnect_power_est", 300.0, {"host": "sw_0"}),
        (1000, "INTERVAL_END", "power_measurement_stop", None, {"host": "sw_0"}),
    ]


def test_the_energy_of_an_entry_is_the_mean_of_the_runs_that_count(tmp_path: Path) -> None:
    """Of ten runs of bert, the fastest and the slowest are dropped; a failed run counts as the slowest."""
    run = written_run(tmp_path / "run")
    record(run.folder, "n0", EVERY_SECOND)

    def energy_j(invalid: int, *, num_runs: int = 10) -> float | None:
        results = tuple(
            replace(
                run.results[0],
                valid=True,
                minutes=float(number),
                run_stop_ms=START + 1000 * (60 + number),
                run_start_ms=START,
                findings=(),
            )
            for number in range(num_runs)
        )
        results = tuple(replace(one, minutes=None) if number < invalid else one for number, one in enumerate(results))
        entry = Entry("box", "bert", (replace(run, results=results),))
        measured_entries, _ = powers.measure([entry], PowerRequest())
        return powers.write(tmp_path / f"out{invalid}{num_runs}", measured_entries, PowerRequest()).get(
            "results/box/bert"
        )

    assert energy_j(0) == pytest.approx(1000 * (60 + 4.5))
    assert energy_j(1) == pytest.approx(1000 * (60 + sum(range(2, 10)) / 8))
    assert energy_j(2) is None


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            PowerRequest(efficiency=0.0),
            "the efficiency of the power supplies is 0, but must be above 0 and at most 1\n  where: --psu-efficiency\n"
            "  fix:   set --psu-efficiency to the output power divided by the input power, such as 0.94",
        ),
        (
            PowerRequest(efficiency=1.01),
            "the efficiency of the power supplies is 1.01, but must be above 0 and at most 1\n"
            "  where: --psu-efficiency\n  fix:   set --psu-efficiency to the output power divided by the "
            "input power, such as 0.94",
        ),
        (
            PowerRequest(switches_w=(1.0, 0.0)),
            "the power of a switch is 0 W, but must be above 0 and finite\n  where: --switch-watts\n  fix:   write the "
            "power of each switch in watts, such as --switch-watts 350 350",
        ),
        (
            PowerRequest(switches_w=(float("inf"),)),
            "the power of a switch is inf W, but must be above 0 and finite\n  where: --switch-watts\n"
            "  fix:   write the power of each switch in watts, such as --switch-watts 350 350",
        ),
        (
            PowerRequest(meters=(Path("m"),), scope=Scope.gpus),
            "--meter gives the power of nodes, but --power is gpus\n  where: --meter\n  fix:   set --power node, or "
            "remove --meter",
        ),
    ],
)
def test_options_out_of_range_are_refused(request_: PowerRequest, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        powers.require_valid(request_)
    assert str(error.value) == expected


def test_options_at_their_limits_are_accepted() -> None:
    powers.require_valid(PowerRequest(efficiency=1.0, switches_w=(0.1,), meters=(Path("m"),)))
    powers.require_valid(PowerRequest(efficiency=0.01, scope=Scope.gpus))
