"""The measurements of a training log, with their units; missing records give no measurement."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.mlperf.result import Result, parse
from bench.report.training import speed_rows, verdict_table
from bench.results.measurement import Measurement
from bench.results.training import TrainingResult
from helpers import planned_log

MakeLog = Callable[..., Path]


def by_name(log: Path) -> dict[str, Measurement]:
    measurements = TrainingResult(result=parse(log)).measurements
    assert len({one.name for one in measurements}) == len(measurements)
    return {one.name: one for one in measurements}


def test_a_trial_that_reached_its_target_has_a_time_to_train(written_log: MakeLog) -> None:
    """Three evaluations at 1,536, 1,920 and 2,304 samples, of which the last one reaches 0.925."""
    measurements = by_name(written_log())
    assert measurements["samples_to_target"] == Measurement(name="samples_to_target", unit="samples", value=2304)
    assert measurements["time_to_train"].unit == "min" and measurements["time_to_train"].value >= 0
    assert measurements["evaluation_loss"] == Measurement(name="evaluation_loss", unit="", value=0.92)
    assert (measurements["evaluation_time"].unit, measurements["evaluation_time"].n) == ("s", 3)
    assert not {"run_time", "throughput_per_gpu", "mfu", "peak_memory"} & set(measurements), (
        "none of these was measured"
    )


def test_a_missed_target_has_no_time_to_train(written_log: MakeLog) -> None:
    measurements = by_name(written_log(evals=(0.95, 0.94), status="aborted"))
    assert not {"time_to_train", "run_time", "samples_to_target"} & set(measurements)
    assert measurements["evaluation_loss"].value == 0.94


def test_without_a_target_there_is_a_run_time_and_random_rows_have_no_loss(written_log: MakeLog) -> None:
    silent = {"submission_benchmark": None, "target_accuracy": None}
    assert "run_time" in by_name(written_log(name="a.txt", **silent))
    assert "time_to_train" not in by_name(written_log(name="b.txt", **silent))
    assert "evaluation_loss" not in by_name(written_log(name="c.txt", data_source="random", **silent))


def padded_log(written_log: MakeLog, *, steps: int, listed: int = 2, **changes: object) -> Path:
    """Batches of 2 of 5 rows of 8 tokens: two steps an epoch, each step k of k seconds and with 6 real tokens."""
    silent = {"submission_benchmark": None, "target_accuracy": None, "train_samples": 5, "global_batch_size": 2}
    path = written_log(
        evals=(), **(silent | {"max_sequence_length": 8, "num_ranks": 2, "accelerator": "GPU"} | changes)
    )
    begin, end = path.read_text().splitlines()[:-1], path.read_text().splitlines()[-1]
    record = json.loads(begin[-1].partition("MLLOG ")[2])
    for last in range(listed, steps + 1, listed):
        times = [float(step) for step in range(last - listed + 1, last + 1)]
        stats = {"step_times": times, "real_tokens": 6 * listed, "throughput": 1.0, "train_step_time": 1.0}
        point = {"event_type": "POINT_IN_TIME", "metadata": {"samples_count": 2 * last, "step": last}}
        begin += [f":::MLLOG {json.dumps(record | point | {'key': 'tracked_stats', 'value': stats})}"]
        begin += [f":::MLLOG {json.dumps(record | point | {'key': 'train_loss', 'value': 4.0 / last})}"]
    path.write_text("\n".join([*begin, end]) + "\n")
    return path


def test_the_time_of_steps_and_of_epochs_is_that_of_the_listed_steps(written_log: MakeLog) -> None:
    """Steps of 1 to 7 s, two an epoch: epochs of 1 + 2, 3 + 4 and 5 + 6 s; the seventh step's is not complete."""
    path = padded_log(written_log, steps=7, listed=1)
    result, measurements = parse(path), by_name(path)
    assert (result.steps_time_s, result.epoch_times_s, result.train_loss) == (28, (3, 7, 11), 4 / 7)
    assert (measurements["time_of_steps"].value, measurements["time_of_steps"].n) == (28, 7)
    assert (measurements["epoch_time"].value, measurements["epoch_time"].n) == (7, 3)
    assert measurements["training_loss"].value == 4 / 7


def test_random_rows_have_no_epochs_and_no_training_loss(written_log: MakeLog) -> None:
    result = parse(padded_log(written_log, steps=4, data_source="random"))
    assert (result.steps_time_s, result.epoch_times_s, result.train_loss) == (10, (), None)


def test_padding_is_excluded_from_real_tokens(written_log: MakeLog) -> None:
    """6 of the 16 tokens of a step are real."""
    path = padded_log(written_log, steps=4, accelerator_peak_tflops=989.4, model_tflop_per_sample=10.0)
    result = parse(path)
    assert result.real_token_share == 6 / 16
    assert result.tokens_s_gpu and result.real_tokens_s_gpu == result.tokens_s_gpu * 6 / 16
    assert by_name(path)["real_throughput_per_gpu"].value == result.real_tokens_s_gpu
    rows = {name: (value, remark) for name, value, remark in speed_rows(result)}
    assert rows["without padding"][1] == "37.5 % of all tokens are not padding"
    assert rows["time of 4 steps (s)"] == (
        "10.0",
        "training only: loading, checkpoints and evaluations excluded",
    )
    assert rows["time per epoch (s)"][1].startswith("mean of 2 epochs (3.0, 7.0); training only")
    assert "of the dense BF16 peak of 989 TFLOP/s; attention counted as causal" in rows["model FLOPs"][1]


def test_of_many_epochs_the_first_ten_are_listed(written_log: MakeLog) -> None:
    result = replace(parse(padded_log(written_log, steps=4)), epoch_times_s=tuple(map(float, range(1, 11))))
    ten = "mean of 10 epochs (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0); training only"
    assert remark_of_an_epoch(result).startswith(ten)
    assert "9.0, 10.0, …); training only" in remark_of_an_epoch(replace(result, epoch_times_s=(*range(1, 12),)))
    assert remark_of_an_epoch(replace(result, epoch_times_s=(3.0,))).startswith("training only")


def remark_of_an_epoch(result: Result) -> str:
    return {name: remark for name, _, remark in speed_rows(result)}["time per epoch (s)"]


def test_rows_without_padding_have_no_second_speed(written_log: MakeLog) -> None:
    result = parse(padded_log(written_log, steps=4, max_sequence_length=3))
    assert result.real_token_share == 1 and "without padding" not in {row[0] for row in speed_rows(result)}


def test_the_share_of_evaluations_is_that_of_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of llama31_8b: 13 evaluations of 20 s, 13 x 384 steps of 2 s. A log that times only some of them has no share."""
    planned_log.without_this_machine(monkeypatch)
    plan = planned_log.planned("llama31_8b", "cluster.org=example")
    log = planned_log.write(plan, tmp_path / "result_0.txt", [*(4.0,) * 12, 3.2])
    result = parse(log)
    share = 13 * 20 / (13 * 20 + 13 * 384 * 2)
    assert by_name(log)["evaluation_share"].value == pytest.approx(share, rel=1e-4)
    (row,) = [row for row in verdict_table(result, ()).rows if row[0] == "evaluations"]
    assert f"20.0 s each, {100 * share:.1f} % of run_start → run_stop" in row[2]
    assert replace(result, eval_times_s=result.eval_times_s[1:]).evaluation_share is None
