"""The measurements of a trial are what its log says, each with its unit, and none that it does not."""

from collections.abc import Callable
from pathlib import Path

from bench.mlperf.result import parse
from bench.results import Measurement, of_training

MakeLog = Callable[..., Path]


def by_name(log: Path) -> dict[str, Measurement]:
    found = of_training(parse(log))
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def test_a_trial_that_reached_its_target_has_a_time_to_train(written_log: MakeLog) -> None:
    """Three evaluations at 1,536, 1,920 and 2,304 samples, of which the last one reaches 0.925."""
    found = by_name(written_log())
    assert found["samples_to_target"] == Measurement(name="samples_to_target", unit="samples", value=2304)
    assert found["time_to_train"].unit == "min" and found["time_to_train"].value >= 0
    assert found["evaluation_loss"] == Measurement(name="evaluation_loss", unit="", value=0.92)
    assert (found["evaluation_time"].unit, found["evaluation_time"].n) == ("s", 3)
    assert not {"run_time", "throughput_per_gpu", "mfu", "peak_memory"} & set(found), "none of these was measured"


def test_a_missed_target_has_no_time_to_train(written_log: MakeLog) -> None:
    found = by_name(written_log(evals=(0.95, 0.94), status="aborted"))
    assert not {"time_to_train", "run_time", "samples_to_target"} & set(found)
    assert found["evaluation_loss"].value == 0.94


def test_without_a_target_there_is_a_run_time_and_random_rows_have_no_loss(written_log: MakeLog) -> None:
    silent = {"submission_benchmark": None, "target_accuracy": None}
    assert "run_time" in by_name(written_log(name="a.txt", **silent))
    assert "time_to_train" not in by_name(written_log(name="b.txt", **silent))
    assert "evaluation_loss" not in by_name(written_log(name="c.txt", data_source="random", **silent))
