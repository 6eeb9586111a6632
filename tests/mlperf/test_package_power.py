"""Power in a package: recorded by the sampler, checked for gaps, laid out and scored as MLPerf's tools do."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlperf_logging.result_summarizer import result_summarizer

from bench import cli
from bench.contract import plan_kinds, run_files, telemetry
from bench.contract.telemetry import Reading, Sample
from bench.errors import ConfigError
from bench.mlperf import package
from bench.mlperf.package.power import PowerRequest, Scope
from bench.mlperf.result import Result, parse
from bench.mlperf.system_fields import NEEDED
from helpers import answers, planned_log

pytestmark = pytest.mark.long

NUM_EVALUATIONS = (14, 14, 14, 14, 14, 14, 14, 15, 15, 15)
NODE_W, GPU_W = 9000.0, 900.0
"""The node's power rises by a watt a reading; its eight GPUs use 7200 W."""
FIRST_S, LAST_S = -3.4, 2.6
"""The sampler starts before run_start and ends after run_stop."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten short logs of llama31_8b, with telemetry as the sampler writes it: a line per GPU and second, and one of the
    node."""
    with pytest.MonkeyPatch.context() as patch:
        planned_log.without_this_machine(patch)
        plan = planned_log.planned("llama31_8b", "trials=10", "cluster.org=example")
        folder = tmp_path_factory.mktemp("logs")
        (folder / "plan.json").write_text(plan_kinds.dumps(plan))
        for trial, number in enumerate(NUM_EVALUATIONS):
            losses = [3.31 + 0.2 * (number - done) + trial * 1.7e-6 for done in range(1, number)]
            last = 3.29 + trial * 1.3e-6
            planned_log.write(plan, folder / f"result_{trial}.txt", [*losses, last], trial=trial, step_s=0.02)
    (folder / run_files.RANK_LOGS).mkdir()
    for trial in range(10):
        record(folder, trial, parse(folder / f"result_{trial}.txt"))
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(recorded, tmp_path / "run")


def record(folder: Path, trial: int, result: Result, *, skip: Callable[[float], bool] = lambda _: False) -> None:
    """Write the telemetry of a trial; `skip` leaves out moments, in seconds since run_start."""
    gpus, node = telemetry.header(), telemetry.reading_header()
    for number, moment_s in enumerate(moments(result)):
        if skip(moment_s):
            continue
        time_ms = int((result.run_start_ms or 0) + 1000 * moment_s)
        at = {"time_ms": time_ms, "monotonic_ms": time_ms}
        gpus += telemetry.lines([Sample(**at, gpu=gpu, power_w=GPU_W) for gpu in range(8)])
        node += telemetry.reading_line(Reading(**at, power_w=NODE_W + number))
    (folder / run_files.telemetry(trial, "dgx-0")).write_text(gpus)
    (folder / run_files.node_power(trial, "dgx-0")).write_text(node)


def moments(result: Result) -> Iterator[float]:
    end_s = ((result.run_stop_ms or 0) - (result.run_start_ms or 0)) / 1000 + LAST_S
    return (FIRST_S + number for number in range(int(end_s - FIRST_S) + 1))


def request(run: Path, power: PowerRequest | None, **changes: object) -> package.Request:
    described = run.parent / "box.json"
    described.write_text(json.dumps(DESCRIBED))
    options = {"folder": run.parent / "package", "org": "example", "system": "box", "ruleset": "6.1.0"} | changes
    return package.Request(runs=(run,), descriptions=(described,), power=power, **options)  # type: ignore[arg-type]


DESCRIBED = dict.fromkeys(NEEDED[5:], "known") | {"accelerators_per_node": "8", "host_processors_per_node": "2"}


def test_recorded_power_of_nodes_passes_the_checkers_and_scores_as_mlperf_does(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = package.pack(request(run, PowerRequest(efficiency=0.94, switches_w=(250.0,))))
    assert packed.passed and packed.findings == ()
    submission = run.parent / "package/example"
    results = submission / "results/box/llama31_8b"
    files = sorted(str(path.relative_to(results)) for path in (results / "power").rglob("*.txt"))
    assert files == sorted(f"power/result_{k}/{name}_0.txt" for k in range(10) for name in ("node", "sw"))
    summary = result_summarizer.summarize_results(str(submission), "training", "6.1.0")
    capsys.readouterr()
    (energy,) = summary[2]["llama31_8b:Energy"]
    factor = packed.checked.scaling["results/box/llama31_8b/scaling.json"]
    assert packed.energy_j["results/box/llama31_8b"] * factor == pytest.approx(float(energy), rel=1e-9)


def test_the_energy_of_a_constant_power_is_power_times_time(run: Path) -> None:
    packed = package.pack(request(run, PowerRequest(scope=Scope.gpus), force=True))
    minutes = sorted(parse(run / f"result_{k}.txt").minutes or 0 for k in range(10))[1:-1]
    expected = 8 * GPU_W * 60 * sum(minutes) / len(minutes)
    assert packed.energy_j["results/box/llama31_8b"] == pytest.approx(expected, rel=1e-9)
    assert not packed.passed and [f.rule for f in packed.findings if f.severity == "error"] == ["PCK-06"]
    assert b"Not for submission" in (run.parent / "package/TODO.md").read_bytes()


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (lambda s: 100 < s < 104, r"have 1 gaps of more than 1.5 s; the longest is 5.0 s, 99.6 s after run_start"),
        (lambda s: int(s) % 2 == 0, r"gaps of more than 1.5 s; the longest is [23]"),
        (lambda s: s < 5, r"the readings of node dgx-0 begin 5\.\d s after run_start"),
        (lambda s: s > 300, r"the readings of node dgx-0 end \d+\.\d s before run_stop"),
        (lambda s: True, "the power of a node was recorded on 1 of 1|node dgx-0 has no reading"),
    ],
    ids=["a gap", "every second one is missing", "late", "early", "nothing"],
)
def test_missing_samples_refuse_the_package(run: Path, skip: Callable[[float], bool], message: str) -> None:
    record(run, 4, parse(run / "result_4.txt"), skip=skip)
    with pytest.raises(ConfigError, match=rf"PCK-07: .*result_4.txt: .*{message}(?s:.*)fix: .*--meter"):
        package.pack(request(run, PowerRequest()))
    assert not (run.parent / "package").exists()


def test_readings_of_a_meter_replace_recorded_ones(run: Path) -> None:
    for file in (run / run_files.RANK_LOGS).glob("*.node_*"):
        file.unlink()
    with pytest.raises(ConfigError, match="PCK-07: .*the power of a node was recorded on 0 of 1 nodes"):
        package.pack(request(run, PowerRequest()))
    unreadable = run / run_files.node_power(0, "dgx-0")
    unreadable.symlink_to("elsewhere")
    with pytest.raises(
        ConfigError,
        match=r"the recorded power cannot be read: .*symbolic link, which is not allowed here\n  where: .*dgx-0.csv",
    ):
        package.pack(request(run, PowerRequest()))
    unreadable.unlink()
    meter = run.parent / "pdu.csv"
    lines = ["node,time_ms,power_w", "rack7,1000,0"]
    results = [parse(run / f"result_{k}.txt") for k in range(10)]
    for result in {r.run_start_ms: r for r in sorted(results, key=lambda r: r.run_stop_ms or 0)}.values():
        lines += [f"rack7,{int((result.run_start_ms or 0) + 1000 * s)},5000" for s in moments(result)]
    meter.write_text("\n".join(lines) + "\n")
    packed = package.pack(request(run, PowerRequest(meters=(meter,))))
    assert packed.passed and packed.energy_j


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_ms,power_w\n1,2\n", "has no column node"),
        ("time_ms,node,power_w\n1,a,high\n", r"line 2 is not a reading: '1,a,high'\n  where: .*pdu.csv:2"),
        ("time_ms,node,power_w\n1,a,nan\n", "line 2 is not a reading"),
        ("time_ms,node,power_w\n1,,5\n", "line 2 is not a reading"),
    ],
)
def test_a_meter_file_that_has_no_readings_is_refused(run: Path, text: str, message: str) -> None:
    meter = run.parent / "pdu.csv"
    meter.write_text(text)
    with pytest.raises(ConfigError, match=message):
        package.pack(request(run, PowerRequest(meters=(meter,))))


def test_nodes_without_switches_and_wrong_units_are_found(run: Path) -> None:
    plan = planned_log.planned("llama31_8b", "trials=10", "cluster.org=example", "cluster.num_nodes=2")
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    with pytest.raises(ConfigError, match=r"PCK-09: .*2 nodes(?s:.*)PCK-07: .*recorded on 1 of 2 nodes"):
        package.pack(request(run, PowerRequest()))


def test_options_of_power_are_checked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["pack", str(run), "-o", str(run.parent / "package"), "--org", "example"]
    for more, message in (
        (["--switch-watts", "100", "--dc"], "--switch-watts and --dc need the option --power"),
        (["--power", "--psu-efficiency", "1.5"], "the efficiency of the power supplies is 1.5"),
        (["--power", "--switch-watts", "-3"], "the power of a switch is -3 W"),
        (["--power", "gpus", "--meter", "x.csv"], "--meter gives the power of nodes"),
    ):
        with pytest.raises(SystemExit, match="^2$"):
            cli.main([*out, *more])
        assert message in capsys.readouterr().err


def test_json_has_the_energy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = run.parent / "box.json"
    described.write_text(json.dumps(DESCRIBED))
    out = ["pack", str(run), "-o", str(run.parent / "package"), "--org", "example", "--system", "box"]
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([*out, "--describe", str(described), "--power", "--json"])
    packed = answers.one(capsys.readouterr().out)
    assert packed["energy_j"]["results/box/llama31_8b"] > 8 * GPU_W * 300


@pytest.mark.parametrize(("energy_j", "message"), [(9e8, "PCK-08: .*the nodes used 3,[0-9,]+ J, less than their GPUs")])
def test_nodes_use_more_energy_than_their_gpus(run: Path, energy_j: float, message: str) -> None:
    log = run / "result_3.txt"
    of_gpu = {"gpu": 0, "energy_j": energy_j, "integrated_energy_j": 0.9 * energy_j}
    record = {"time_ms": 1, "event_type": "POINT_IN_TIME", "key": "gpu_telemetry", "value": {"gpus": [of_gpu]}}
    line = f":::MLLOG {json.dumps(record | {'namespace': '', 'metadata': {'node': 'dgx-0'}})}\n"
    log.write_text(line + log.read_text())
    with pytest.raises(ConfigError, match=message):
        package.pack(request(run, PowerRequest()))
    with pytest.raises(ConfigError, match=r"LOG-27: .*result_3.txt: the energy of 1 of 1 GPUs .*\(-10.0 %\)"):
        package.pack(request(run, PowerRequest(scope=Scope.gpus)))
