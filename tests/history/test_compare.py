"""`compare` with two sets of runs of planted speeds: pairing, verdict, and further differences."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.cli import main
from bench.contract import node_facts
from bench.contract.node_facts import GpuFacts, RankFacts, Results, Software
from bench.contract.plan_kinds import GenerationPlan, KernelsPlan
from bench.planning.compose import compose
from bench.runs import manifest
from bench.studies import STUDY, folder, library
from bench.studies.spec import Arm, ColumnSpec, Study, Window
from helpers import answers, answers_log, kernels_log, serving, serving_log, study_runs
from helpers.clock import Clock, turned
from helpers.planted_runs import plant
from jobs.node_checks import hardware

H200 = {"num_ranks": 8, "accelerator": "NVIDIA H200", "max_sequence_length": 4096}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    monkeypatch.chdir(tmp_path)
    return turned(monkeypatch)


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *argv])
    output = capsys.readouterr()
    assert stop.value.code == code, output
    return output.out + output.err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    return answers.one(run(capsys, *argv, "--json", code=code))


@pytest.mark.long
def test_alternating_runs_are_paired_in_order_of_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine slows down by 10 % over time, and fp8 stays 5 % faster: without pairing, the drift hides that."""
    for block, speed in enumerate((100.0, 97.0, 94.0, 91.0)):
        pair = [("bf16", speed), ("fp8", speed * (1.05 + 0.001 * (block % 2)))]
        for name, samples_s in pair if block % 2 else reversed(pair):
            plant(Path(f"{name}-{block}"), clock, samples_s, **H200)
    parsed = as_json(capsys, "fp8-*", "bf16-*")
    assert (parsed["pairing"], parsed["text"]) == ("paired in order of time", "fp8-* is 4.96–5.14 % faster than bf16-*")
    assert parsed["first"] == pytest.approx([105 * 512, 0.97 * 105.1 * 512, 0.94 * 105 * 512, 0.91 * 105.1 * 512])
    assert (parsed["measurement"], parsed["unit"], parsed["is_better"]) == ("throughput_per_gpu", "tokens/s/GPU", True)
    assert parsed["differences"] == {}
    printed = run(capsys, "fp8-*", "bf16-*")
    assert "pairs: paired in order of time" in printed and "when: " in printed
    unpaired = as_json(capsys, "fp8-*", "bf16-*", "--pairing", "none", code=1)
    assert unpaired["verdict"] == "undecided" and unpaired["num_more"] > 4
    assert "\nruns: " in run(capsys, "fp8-*", "bf16-*", "--pairing", "none", code=1)


def study_folder(*arms: str, window: Window | None = None) -> Path:
    """Write the folder of a study without runs."""
    column = ColumnSpec(measurement="step_time", title="step", unit="ms", higher_is_better=False)
    arms_of = {name: Arm() for name in arms}
    study = Study(title="t", question="q", source="ours", columns=(column,), arms=arms_of, window=window)
    path = Path("studies/tiny-local")
    path.mkdir(parents=True)
    stored = folder.StoredStudy(name="tiny", cluster="local", overrides=(), study=study, publications={})
    library.dump_yaml(path / STUDY, msgspec.to_builtins(stored))
    return path


def test_arms_of_a_study_are_paired_by_block(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_folder("new", "new_other", "old")
    for block, speed in ((1, 100.0), (2, 90.0), (3, 80.0)):
        plant(study / f"new.{block}", clock, speed * (0.995 + block / 1e4), **H200)
        if block != 2:
            plant(study / f"new_other.{block}", clock, 1.0, **H200)
            plant(study / f"old.{block}", clock, speed, **H200)
    parsed = as_json(capsys, f"{study}/new", f"{study}/old")
    assert (parsed["pairing"], len(parsed["first"])) == ("paired by block", 2), "the pair of block 2 is not complete"
    assert parsed["ratio"] == pytest.approx(0.9952, abs=1e-6)
    assert "give one arm of the study as studies/tiny-local/ARM; arms with runs: new, new_other, old" in run(
        capsys, str(study), "x", code=2
    )
    assert "an arm with runs: new, new_other, old" in run(capsys, f"{study}/New arm", f"{study}/old", code=2)


def test_arms_of_a_study_have_the_numbers_of_its_tables(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the steps of its window, not over the whole run; a run without all of them is left out."""
    study = study_folder("new", "old", window=Window(skip_steps=1, steps=2))
    for block, second in ((1, 2.0), (2, 2.002)):
        study_runs.valid_run(study / f"old.{block}", [9.0, second, second])
        study_runs.valid_run(study / f"new.{block}", [5.0, 1.01 * second, 1.01 * second])
    study_runs.valid_run(study / "new.3", [5.0, 1.0])
    parsed = as_json(capsys, f"{study}/new", f"{study}/old", "--measurement", "step_time")
    assert parsed["first"] == pytest.approx([2020, 2022.02]) and parsed["second"] == pytest.approx([2000, 2002])
    assert "not counted: new.3: the log has the times of only 1 of the 2 steps from step 2 to 3" in parsed["notes"]


def test_one_run_of_several_trials_is_compared_by_its_trials_with_a_warning(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(Path("old"), clock, 100.0, 100.4, 99.8, **H200 | {"commit": "aaa"})
    plant(Path("new"), clock, 90.0, 90.3, 90.1, **H200 | {"commit": "bbb"})
    output = run(capsys, "new", "old", "--margin", "1")
    assert "verdict: new is 9.4–10.5 % slower than old" in output
    assert "the 3 values of old are from trials of one run" in output
    assert "commit\tbbb\taaa" in output


@pytest.mark.long
def test_runs_of_several_trials_count_once_each(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for name, speed in (("a1", 100.0), ("a2", 101.0), ("b1", 90.0), ("b2", 91.0)):
        plant(Path(name), clock, speed - 1, speed, speed + 1, **H200)
    parsed = as_json(capsys, "a*", "b*")
    assert parsed["first"] == pytest.approx([512 * 100, 512 * 101], rel=1e-4)
    assert parsed["pairing"] == "not paired", "the runs did not alternate"


@pytest.mark.long
def test_settings_of_plans_are_compared_without_those_of_the_site(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task=lora_tiny", "cluster=local"]
    plant(Path("old"), clock, 100.0, 100.1, plan=compose([*words, "trials=2"]))
    plant(Path("new"), clock, 100.0, 100.1, plan=compose([*words, "recipe.clip_grad=0.5", "walltime=7"]))
    assert as_json(capsys, "new", "old")["differences"] == {"recipe.clip_grad": ["0.5", "0.3"]}


def test_different_clocks_are_noted(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPUs of one run had a lower power limit and lower clocks."""
    for name, clock_mhz, limit_w in (("old", 1980, 700), ("new", 1500, 400)):
        gpu = {"gpu": 0, "sm_clock_mhz": {"median": clock_mhz, "max": 1980}, "power_limit_w": limit_w}
        plant(Path(name), clock, 100.0, 100.1, **H200 | {"gpu_telemetry": {"gpus": [gpu]}})
    parsed = as_json(capsys, "new", "old")
    clocks = {"GPU power limit (W)": ["400", "700"], "median SM clock (MHz)": ["1500", "1980"]}
    assert parsed["differences"] == clocks
    assert (
        "the median SM clock (MHz) was 1500 and 1980; speeds at different clocks are not comparable" in parsed["notes"]
    )


def write_node_facts(folder: Path, driver: str, digest: str, *nodes: str) -> None:
    """Write the facts of nodes, and the image of the job."""
    unknown = {field.name: None for field in dataclasses.fields(GpuFacts)}
    gpu = GpuFacts(**unknown | {"name": "NVIDIA H200", "driver": driver, "max_sm_clock_mhz": 1980})
    here = hardware.machine(results=Results("/results", 1, None), paths=())
    machine = dataclasses.replace(here, gpus=(gpu,))
    software = Software(None, True, "Rocky 9.4", "3.12.3", "python3", {"nvidia-nccl-cu12": "2.27.5"})
    (folder / "facts").mkdir()
    for rank, node in enumerate(nodes):
        known = RankFacts(rank, 0, len(nodes), node, node, None, 0, software, None, 8, 0, (), (), machine)
        (folder / f"facts/rank_{rank}.json").write_text(node_facts.dumps(known))
    (folder / "job.json").write_text(json.dumps({"image": {"name": "runstop.sqsh", "sha256": digest}}))
    manifest.write(folder)


@pytest.mark.long
def test_different_drivers_images_and_nodes_are_listed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for name, *parsed in (("old", "570.86", "aaa", "dgx-1", "dgx-2"), ("new", "580.12", "bbb", "dgx-2", "dgx-3")):
        write_node_facts(plant(Path(name), clock, 100.0, 100.1, **H200), *parsed)
    assert as_json(capsys, "new", "old")["differences"] == {
        "nodes": ["dgx-2, dgx-3", "dgx-1, dgx-2"],
        "driver": ["580.12", "570.86"],
        "image sha256": ["bbb", "aaa"],
    }


def test_changed_logs_are_left_out_with_a_note(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        plant(Path(name), clock, 100.0, 101.0, 100.1, **H200)
    with Path("a/result_1.txt").open("a") as log:
        log.write("\n")
    parsed = as_json(capsys, "a", "b", "--margin", "5")
    assert len(parsed["first"]) == 2
    assert "not counted: a/result_1.txt: the log has changed since its trial ended" in parsed["notes"]


@pytest.mark.long
def test_invalid_logs_without_a_ledger_are_left_out(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Their run_stop has the status success, but `parse` reports that they are invalid."""
    burst = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    kernels = compose(["task=kernels_tiny", "cluster=local"])
    answers = compose(["task=generate_tiny", "cluster=local"])
    assert isinstance(kernels, KernelsPlan) and isinstance(answers, GenerationPlan)
    for name in ("good", "bad", "kernels", "answers"):
        Path(name).mkdir()
    for number in range(2):
        log = f"result_{number}.txt"
        serving_log.write(burst, Path("good", log), {"burst": [0.1] * (9 + number)})
        serving_log.write(burst, Path("bad", log), {"burst": [0.1] * 6 + [None] * (3 + number)})
        kernels_log.write(kernels, Path("kernels", log), without=[kernels.points[number].name])
        answers_log.write(answers, Path("answers", log), answers_log.rows(answers)[1:], run_s=100.0 + number)
    for name, why in (
        ("bad", "SRV-04: burst: 4 of 10 requests failed"),
        ("kernels", f"{kernels.points[1].name} was not measured"),
        ("answers", "answer 0 is missing"),
    ):
        output = run(capsys, name, "good", code=2)
        assert f"no valid trial: {name}/result_0.txt: the trial is not valid: " in output and why in output


def test_one_run_each_is_never_compared(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        plant(Path(name), clock, 100.0, **H200)
    assert "verdict: not compared: n = 1 run of a and of b" in run(capsys, "a", "b", code=1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a"], "compare needs exactly two arguments, but the command has 1"),
        (["a", "missing"], "no run or file has this name: missing"),
        (["**a*", "b"], "the path component **a* has ** and other characters"),
        (["a", "a"], "this run is in the first and in the second set"),
        (
            ["a", "b", "--measurement", "speed"],
            "at least one of the two sets of runs does not have the measurement speed",
        ),
        (["a", "b", "--pairing", "order"], "the runs cannot be paired: a has 2 runs, but b has 1 runs"),
        (["a", "empty"], "no valid trial"),
    ],
)
def test_bad_requests_are_refused(
    argv: list[str], message: str, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(Path("a/1"), clock, 100.0, **H200)
    plant(Path("a/2"), clock, 100.0, **H200)
    plant(Path("b"), clock, 100.0, **H200)
    plant(Path("empty"), clock)
    assert message in run(capsys, *argv, code=2)
