"""`history` detects a planted regression, and its cache always equals the logs."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.contract.plan_kinds import GenerationPlan
from bench.history import regression, store
from bench.history.regression import Change, judge
from bench.planning.compose import compose
from bench.results.measurement import Measurement
from helpers import answers, answers_log, serving, serving_log
from helpers.clock import Clock, turned
from helpers.planted_runs import plant, prove

H200 = {"num_ranks": 8, "accelerator": "NVIDIA H200", "config_filename": "task/lora_8b.yaml"}
STEADY = (100.0, 100.3, 99.8, 100.1, 99.9)
GAUGE = {"median": 1980, "max": 1980}
SPEED = Measurement(name="throughput", unit="samples/s", value=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    return turned(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["history", *argv])
    output = capsys.readouterr()
    assert stop.value.code == code, output
    return output.out + output.err


@pytest.mark.long
def test_a_planted_regression_fails_the_check(clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five runs with a deviation of 0.19 % and one that is 5 % slower: s √(1 + 1/5) t(4) is 0.59 %."""
    for number, speed in enumerate(STEADY):
        plant(root / f"run{number}", clock, speed, **H200)
        plant(root / f"other{number}", clock, 2 * speed, **H200 | {"num_ranks": 4})
    output = run(capsys, "lora_8b", "--check", "2")
    assert "2 no regression" in output
    plant(root / "run9", clock, 95.0, **H200 | {"commit": "abc"})
    output = run(capsys, "lora_8b", "--check", "2", "--measurement", "throughput", code=1)
    assert "regression\t-5.0 % (-5.6 to -4.5 %), 1 run compared with 5 earlier runs" in output
    assert "1 no regression" in output, "other hardware has its own history"
    assert "commit unknown → abc" in run(capsys, "lora_8b")
    assert "no regression" in run(capsys, "--check", "6")
    lines = [line.split("\t") for line in run(capsys).splitlines() if line.startswith("lora_8b")]
    assert [(line[1], line[3], *line[-3:-1]) for line in lines] == [
        ("8 × NVIDIA H200", "6", "95.000", "100.300"),
        ("4 × NVIDIA H200", "5", "199.80", "200.60"),
    ]


def test_a_server_that_became_slower_fails_the_check(
    clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a fixed request rate the slow run has the same throughput, and three times the latency."""
    plan = serving.planned()
    burst, rate = (load.name for load in plan.loads)
    for number, scale in enumerate((1.0, 1.01, 0.99, 3.0)):
        (root / f"run{number}").mkdir(parents=True)
        latency_s = {burst: [0.1 * scale] * 100, rate: [0.01 * scale] * 100}
        serving_log.write(plan, root / f"run{number}/result_0.txt", latency_s)
        prove(root / f"run{number}")
        clock.now_s += 60
    lines = run(capsys, "serve_tiny", "--check", "2", code=1).splitlines()
    changes = {tuple(line.split("\t")[3:5]) for line in lines if line.startswith("serve_tiny")}
    assert changes == {
        (f"{burst} output_throughput", "regression"),
        (f"{burst} latency_p50", "regression"),
        (f"{rate} output_throughput", "no regression"),
        (f"{rate} latency_p50", "regression"),
    }


def test_a_check_without_a_judgement_fails_and_shows_the_reason(
    clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        plant(root / f"run{number}", clock, 100.0, **H200)
    expected = "earlier runs: 1; an estimate of the run-to-run variation needs 2 or more"
    assert expected in run(capsys, "--check", "2", code=1)
    plant(root / "run2", clock, 100.0, **H200)
    assert "1 no regression" in run(capsys, "--check", "2")
    plant(root / "run3", clock, 100.0, **H200 | {"gpu_telemetry": {"gpus": [{"gpu": 0, "sm_clock_mhz": GAUGE}]}})
    plant(root / "run4", clock, 100.0, **H200)
    assert "the newest run has no measurement" in run(capsys, "--check", "2", "--measurement", "sm_clock", code=1)


def test_a_shorter_step_time_is_not_a_regression(clock: Clock, root: Path) -> None:
    for number, speed in enumerate((*STEADY, 120.0)):
        plant(root / f"run{number}", clock, speed, **H200)
    (only,) = regression.histories(store.trials(root))
    (step,) = only.measurements("step_time")
    assert judge(only, step, tolerance=0.02).change is Change.none
    assert judge(only, SPEED, tolerance=0.02).text.startswith("+20.0 %")


@pytest.mark.long
def test_an_insignificant_change_is_undecided_and_one_earlier_run_is_not_judged(clock: Clock, root: Path) -> None:
    def change(*speeds: float, **how: int) -> Change:
        shutil.rmtree(root, ignore_errors=True)
        for number, speed in enumerate(speeds):
            plant(root / f"run{number}", clock, speed, **H200)
        (only,) = regression.histories(store.trials(root))
        return judge(only, SPEED, tolerance=0.02, **how).change

    assert change(100, 90) is Change.not_judged
    assert change(100, 103, 98, 94) is Change.undecided
    assert change(*STEADY, 97.5) is Change.undecided, "2.5 % slower, and at least 1.9 %"
    assert change(*STEADY, 97.2) is Change.regression, "2.8 % slower, and at least 2.2 %"
    assert change(*STEADY, 98.1) is Change.undecided, "1.9 % slower, and at most 2.5 %"
    assert change(*STEADY, 97.5, 97.9, 97.7, newest=3) is Change.undecided
    assert change(*STEADY, 95.0, 95.2, newest=2) is Change.regression
    assert change(50, 60, *STEADY, 95.0, earlier=5) is Change.regression, "the two oldest do not count"
    assert change(50, 60, *STEADY, 95.0) is Change.undecided


def test_trials_of_one_run_are_one_value(clock: Clock, root: Path) -> None:
    """The newest run's trials came in the other order, which changes nothing of their mean."""
    for number, speed in enumerate(STEADY):
        trials = (speed - 1, speed + 1) if number < 4 else (speed + 1, speed - 1)
        plant(root / f"run{number}", clock, *trials, **H200)
    (only,) = regression.histories(store.trials(root))
    assert judge(only, SPEED, tolerance=0.02).text == "-0.1 % (-0.9 to +0.6 %), 1 run compared with 4 earlier runs"


@pytest.mark.long
def test_a_rebuilt_cache_equals_the_updated_one(clock: Clock, root: Path) -> None:
    plant(root / "a", clock, 100.0, 101.0, **H200)
    store.trials(root)
    plant(root / "studies/tiny-local/new.1", clock, 90.0, **H200)
    plant(root / "b", clock, 102.0, **H200)
    store.trials(root)
    shutil.rmtree(root / "b")
    plant(root / "c", clock, 103.0, **H200)
    grown = store.trials(root)
    assert [trial.folder.name for trial in grown] == ["a", "a", "new.1", "c"]
    assert grown == store.trials(root) == store.trials(root, rebuild=True) == store.trials(root)
    with closing(sqlite3.connect(root / store.STORE)) as database:
        rows = dict(
            database.execute("SELECT folder, max(value) FROM measurements WHERE name = 'throughput' GROUP BY folder")
        )
    assert rows == pytest.approx({"a": 101, "c": 103, "studies/tiny-local/new.1": 90})


def test_a_resumed_run_is_read_again(clock: Clock, root: Path) -> None:
    plant(root / "a", clock, 100.0, **H200)
    assert len(store.trials(root)) == 1
    shutil.rmtree(root / "a")
    plant(root / "a", clock, 100.0, 101.0, **H200)
    assert len(store.trials(root)) == 2


@pytest.mark.parametrize("damage", ["cut", "text", "old", "empty", "column"])
def test_a_damaged_or_old_cache_is_rebuilt(damage: str, clock: Clock, root: Path) -> None:
    plant(root / "a", clock, 100.0, 101.0, **H200)
    whole, path = store.trials(root), root / store.STORE
    if damage in ("old", "column"):
        old = "UPDATE version SET code = 'old'; UPDATE measurements SET value = 1"
        with closing(sqlite3.connect(path)) as database, database:
            database.executescript(old if damage == "old" else "ALTER TABLE trials DROP COLUMN facts")
    else:
        path.write_bytes({"cut": path.read_bytes()[:5000], "text": b"not a database", "empty": b""}[damage])
    assert store.trials(root) == whole
    assert store._read(root), "it is written again"


@pytest.mark.long
def test_concurrent_readers_rebuild_the_cache(clock: Clock, root: Path) -> None:
    for number, speed in enumerate(STEADY):
        plant(root / f"run{number}", clock, speed, **H200)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: store.trials(root, rebuild=True), range(16)))
    assert all(answer == answers[0] for answer in answers)
    assert [path.name for path in root.glob(".*sqlite*")] == [] and len(store._read(root)) == 5


def test_a_copied_run_counts_once_and_a_changed_log_does_not_count(clock: Clock, root: Path) -> None:
    plant(root / "a", clock, 100.0, 101.0, **H200)
    shutil.copytree(root / "a", root / "copy")
    with (root / "copy/result_0.txt").open("a") as log:
        log.write("\n")
    assert [(trial.folder.name, trial.trial) for trial in store.trials(root)] == [("a", 0), ("a", 1)]


def test_a_folder_that_cannot_be_written_has_a_history(
    clock: Clock, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(root / "a", clock, 100.0, **H200)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert len(store.trials(root)) == 1
    assert "cannot be written" in caplog.text and not list(root.glob("*sqlite*")) + list(root.glob(".*sqlite*"))


def test_a_folder_whose_name_is_not_utf8_is_cached(
    clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(root / "a", clock, 100.0, **H200)
    plant(root / os.fsdecode(b"caf\xe9"), clock, 101.0, **H200)
    trials = store.trials(root)
    assert [os.fsencode(trial.folder.name) for trial in trials] == [b"a", b"caf\xe9"]
    assert store._read(root) and store.trials(root) == trials, "it is cached"
    assert "101.00" in run(capsys, "lora_8b")
    assert [path.name for path in root.glob(".*sqlite*")] == []


def test_values_that_sqlite_cannot_store_are_read_from_the_logs_each_time(
    clock: Clock, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(root / "a", clock, 100.0, **H200)
    monkeypatch.setattr(store, "stamp", lambda _: "\ud800")
    assert len(store.trials(root)) == 1
    assert "cannot be written" in caplog.text and not list(root.glob("*sqlite*")) + list(root.glob(".*sqlite*"))


@pytest.mark.long
def test_different_settings_have_separate_histories(
    clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (clip, seed) in enumerate([(0.3, 1), (0.3, 9), (0.5, 1)]):
        words = ["task=lora_tiny", "cluster=local", f"recipe.clip_grad={clip}", f"seed_base={seed}"]
        plant(root / f"run{number}", clock, 100.0, plan=compose(words))
    lines = [line.split("\t") for line in run(capsys).splitlines() if line.startswith("lora_tiny")]
    assert [(line[3], line[-1]) for line in lines] == [("1", "recipe.clip_grad=0.5"), ("2", "recipe.clip_grad=0.3")]


def test_logs_without_a_plan_have_a_history_for_each_request(clock: Clock, root: Path) -> None:
    plan = compose(["task=generate_tiny", "cluster=local"])
    assert isinstance(plan, GenerationPlan)
    requests: list[dict[str, Any]] = [{}, {"bandwidth_gbs": 4000.0}, {"order": "one_by_one"}, {"max_batch": 3}]
    for number, about in enumerate(requests):
        (root / f"run{number}").mkdir(parents=True)
        answers_log.write(plan, root / f"run{number}/result_0.txt", answers_log.rows(plan), run_s=100 + number, **about)
        prove(root / f"run{number}")
    histories = regression.histories(store.trials(root))
    settings = {each.runs[-1].folder.name: regression.distinguishing_settings(each, histories) for each in histories}
    assert len(settings) == 3, "an estimate is not a setting"
    assert (
        "answers_requested.order=one_by_one" in settings["run2"] and "answers_requested.max_batch=3" in settings["run3"]
    )


def test_folder_and_port_of_a_server_are_not_settings_and_its_options_are(clock: Clock, root: Path) -> None:
    plan = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    for number, (requests, words) in enumerate(((9, []), (9, []), (9, ["--max-num-seqs", "8"]), (8, []))):
        (root / f"run{number}").mkdir(parents=True)
        model = f"/runs/{number}/rank_logs/trial_{number}.model"
        argv = [f"/venv{number}/bin/vllm", "serve", model, "--port", str(5000 + number), *words]
        started = {"argv": argv, "model": model, "healthy_s": 9.0 + number}
        latency_s = {"burst": [0.1 + number / 1e3] * requests}
        serving_log.write(plan, root / f"run{number}/result_0.txt", latency_s, started=started)
        prove(root / f"run{number}")
        clock.now_s += 60
    histories = regression.histories(store.trials(root))
    assert sorted(sorted(run.folder.name for run in each.runs) for each in histories) == [
        ["run0", "run1"],
        ["run2"],
        ["run3"],
    ]
    own = next(each for each in histories if len(each.runs) == 2)
    assert own.settings_by_name["server.argv"] == "vllm serve ….model --port …"
    assert (
        regression.distinguishing_settings(own, histories) == "server.argv=vllm serve ….model --port … burst.requests=9"
    )


def test_json_has_every_value(clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(root / "a", clock, 100.0, 101.0, **H200)
    parsed = answers.one(run(capsys, "--json"))
    assert (parsed["task"], parsed["hardware"]) == ("lora_8b", "8 × NVIDIA H200")
    assert parsed["values"]["throughput"] == pytest.approx([100, 101])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lora_70b"], "no valid run of lora_70b"),
        (["--measurement", "speed"], "no run has the measurement speed"),
        (["--folder", "/nowhere"], "this folder does not exist"),
    ],
)
def test_bad_requests_are_refused(
    argv: list[str], message: str, clock: Clock, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(root / "a", clock, 100.0, **H200)
    assert message in run(capsys, *argv, code=2)
