"""Test that a log is a valid trial, or that a finding shows why not."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import answers as printed
from bench.contract.mllog import Writer
from bench.mlperf.reader import is_number
from bench.mlperf.result import parse
from bench.mlperf.speed import Spread, spread
from bench.report.training import speed_rows
from bench.results import kind
from helpers import answers
from helpers.paths import CORPUS
from helpers.types import MakeLog


def severities(path: Path) -> dict[str, str]:
    """Return rule -> severity, and check that a result is valid exactly if it has no error."""
    result = parse(path)
    assert result.valid == all(finding.severity == "warning" for finding in result.findings)
    return {finding.rule: finding.severity for finding in result.findings}


def as_answer(log: Path) -> dict[str, Any]:
    return answers.one(printed.line(printed.verdict(log, kind.read(log))))


def damage(path: Path, pattern: str, replacement: str) -> Path:
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count
    path.write_text(text)
    return path


def test_a_good_log_is_valid_and_its_numbers_are_read(written_log: MakeLog) -> None:
    result = parse(written_log())
    assert (result.valid, result.converged, result.findings) == (True, True, ())
    assert (result.benchmark, result.division, result.status, result.seed) == (
        "llama2_70b_lora",
        "closed",
        "success",
        7,
    )
    assert (result.target, result.eval_final, result.samples_to_target) == (0.925, 0.92, 2304)
    assert (
        [e.samples for e in result.evaluations] == [samples for samples, _ in result.train_losses] == [1536, 1920, 2304]
    )
    assert result.minutes is not None
    assert 0 <= result.minutes < 1
    assert result.hyperparameters["lora_rank"] == 16
    assert as_answer(Path(result.file))["global_batch_size"] == 8


@pytest.mark.parametrize(
    ("pattern", "replacement", "rules"),
    [
        (r".*run_start.*\n", "", {"LOG-01", "LOG-13"}),
        (r".*run_stop.*\n", "", {"LOG-02"}),
        (r"(?s)(.*)", r"\1\1", {"LOG-03", "LOG-11"}),
        (r'("time_ms": )\d+(.*"run_stop")', r"\g<1>5\2", {"LOG-04", "LOG-19"}),
        (r"(.*init_start.*\n)((?:.*\n)*)", r"\2\1", {"LOG-04"}),
        ("success", "aborted", {"LOG-05"}),
        (r".*eval_accuracy.*\n", "", {"LOG-06"}),
        (r'(eval_accuracy", "value": )0.92,', r"\g<1>0.926,", {"LOG-07"}),
        (r'(eval_accuracy", "value": )0.92,', r"\1NaN,", {"LOG-07", "LOG-08"}),
        (r'(train_loss", "value": )1.03,', r"\1null,", {"LOG-08"}),
        (r'(lora_rank", "value": 16)', r'\1"', {"LOG-09", "LOG-10"}),
        (r".*init_start.*\n", "", {"LOG-10"}),
        (r'(.*lora_alpha", "value": )32(.*\n)', r"\g<1>32\2\g<1>64\2", {"LOG-11"}),
        (r"(.*)llama2_70b_lora(.*\n)", r"\1llama2_70b_lora\2\1bert\2", {"LOG-11"}),
        (r'(target_accuracy", "value": )0.925', r"\g<1>2.5", {"LOG-12"}),
        (r'(.*"value": 0.92,.*\n)((?:.*\n)*)', r"\2\1", {"LOG-13"}),
        (r'("time_ms": )\d+(.*"value": 0.92,)', r"\g<1>9999999999999\2", {"LOG-13", "LOG-19"}),
    ],
)
def test_damage_makes_a_log_invalid_and_is_reported(
    written_log: MakeLog, pattern: str, replacement: str, rules: set[str]
) -> None:
    path = damage(written_log(), pattern, replacement)
    assert severities(path).keys() == rules
    assert not parse(path).valid


@pytest.mark.parametrize(
    ("pattern", "replacement"), [("(?m)^", "0: "), ("\n", "\r\n"), ("}}\n", "}}\x1b[0m"), ("}\n", "} ")]
)
def test_prefixes_of_srun_and_terminals_are_ignored(written_log: MakeLog, pattern: str, replacement: str) -> None:
    assert severities(damage(written_log(), pattern, replacement)) == {}


@pytest.mark.long
def test_every_cut_of_a_log_is_invalid_and_has_no_minutes(written_log: MakeLog, tmp_path: Path) -> None:
    data = written_log().read_bytes().rstrip()
    for end in range(0, len(data), 97):
        (tmp_path / "cut").write_bytes(data[:end])
        result = parse(tmp_path / "cut")
        assert not result.valid
        assert result.minutes is None


def test_a_repeated_key_with_one_value_is_a_warning(written_log: MakeLog) -> None:
    assert severities(damage(written_log(), r"(.*lora_alpha.*\n)", r"\1\1")) == {"LOG-11": "warning"}


def test_without_a_target_a_finished_run_is_valid_but_not_converged(written_log: MakeLog) -> None:
    result = parse(written_log(submission_benchmark=None, target_accuracy=None, lora_rank=None))
    assert (result.valid, result.converged, result.target, result.samples_to_target) == (True, False, None, None)
    assert result.eval_final == 0.92


def test_a_task_of_our_own_brings_its_target(written_log: MakeLog) -> None:
    assert not parse(written_log(submission_benchmark=None, target_accuracy=0.9)).valid


@pytest.mark.parametrize(("benchmark", "target"), [("llama2_70b_lora", 0.925), ("llama31_8b", 3.3)])
def test_the_official_target_holds_where_none_is_logged(written_log: MakeLog, benchmark: str, target: float) -> None:
    assert parse(written_log(submission_benchmark=benchmark, target_accuracy=None)).target == target


def test_an_open_log_needs_fewer_keys(written_log: MakeLog) -> None:
    path = written_log(lora_alpha=None)
    assert severities(path) == {"LOG-10": "error"}
    assert severities(damage(path, '"closed"', '"open"')) == {}


@pytest.mark.long
def test_values_of_any_type_can_be_read(tmp_path: Path) -> None:
    values: list[object] = [None, True, "x", [], {"throughput": []}, 10**400, -1]
    for number, value in enumerate(values):
        with Writer(tmp_path / str(number)) as log:
            for key in ("submission_benchmark", "submission_division", "target_accuracy", "seed", "global_batch_size"):
                log.event(key, value)
            log.start("run_start", value)
            for key in ("eval_accuracy", "train_loss", "tracked_stats"):
                log.event(key, value, samples_count=value)
            log.finish("success")
        as_answer(tmp_path / str(number))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not here")
def test_published_logs_are_read_as_an_independent_reader_read_them() -> None:
    truth = json.loads((CORPUS / "truth.json").read_text())
    assert len(truth) == 74
    for record in truth:
        result = parse(CORPUS / record["file"])
        for name in ("minutes", "status", "eval_final", "run_stop_ms", "global_batch_size"):
            assert getattr(result, name) == record.get(name), (record["file"], name)
        assert result.run_start_ms == record.get("run_start_ms", result.run_start_ms)
        assert result.benchmark == record["submission_benchmark"]
        if record["official_compliance_ok"] is not None:
            assert result.valid == record["official_compliance_ok"], record["file"]


def test_clock_that_stops_or_runs_backwards_gives_no_times(tmp_path: Path) -> None:
    """A number that is not in the log is None, and every document is strict JSON."""
    clock = {"init_start": 9, "init_stop": 8, "eval_start": 7, "eval_stop": 6}
    settings = {"global_batch_size": 8, "accelerator": "cuda", "num_ranks": -8, "max_sequence_length": -1}
    lines = [':::SYSJSON {"number_of_nodes": NaN}']
    keys = (
        *settings,
        "init_start",
        "init_stop",
        "run_start",
        "block_start",
        "train_loss",
        "train_loss",
        "tracked_stats",
    )
    for number, key in enumerate((*keys, "block_stop", "eval_start", "eval_stop")):
        value = {"train_step_time": -1, "throughput": 0} if key == "tracked_stats" else settings.get(key)
        event = {"time_ms": clock.get(key, 5), "event_type": "", "key": key, "value": value}
        lines.append(f":::MLLOG {json.dumps(event | {'metadata': {'samples_count': number}})}")
    (tmp_path / "log").write_text("\n".join(lines))
    result = parse(tmp_path / "log")
    assert (result.init_s, result.eval_time_s, result.step_time_ms, result.throughput_samples_s) == (None,) * 4
    assert (result.num_gpus, result.tokens_s_gpu, result.system) == (None, None, {})
    as_answer(tmp_path / "log")


def timed_log(path: Path, events: Sequence[tuple[int, str, int | None]], *, batch_size: int = 8) -> Path:
    """Write records of (seconds since run_start, key, samples_count), by a clock of our own."""
    settings = [(0, "submission_benchmark", None), (0, "global_batch_size", None), (0, "run_start", None)]
    values = {"submission_benchmark": "llama2_70b_lora", "global_batch_size": batch_size, "eval_accuracy": 0.9}
    lines = []
    for seconds, key, samples in (*settings, *events):
        record = {"time_ms": 1_000_000 + 1000 * seconds, "event_type": "", "key": key, "value": values.get(key, 1.0)}
        record["metadata"] = {} if samples is None else {"samples_count": samples}
        lines.append(f":::MLLOG {json.dumps(record)}\n")
    path.write_text("".join(lines))
    return path


@pytest.mark.parametrize(
    ("evaluation", "steps_ms"),
    [
        ([(4, "block_stop", 32), (4, "eval_start", 32), (24, "eval_accuracy", 32)], [1000, 1000, 1000]),
        ([(4, "eval_start", 32), (24, "eval_accuracy", 32), (24, "block_stop", 32)], [1000, 1000, 1000]),
        ([(4, "block_stop", None), (4, "eval_start", None), (24, "eval_accuracy", 32)], [1000, 1000, 1000]),
        ([(4, "eval_start", None), (24, "eval_accuracy", 32)], [1000, 1000, 1000]),
        ([(24, "block_stop", 32), (24, "eval_accuracy", 32)], [1000, 1000]),
        ([(24, "eval_accuracy", 32)], [1000, 1000]),
    ],
    ids=["usual", "block stops late", "start not counted", "no block", "no start", "result only"],
)
def test_an_evaluation_is_never_part_of_a_step(
    tmp_path: Path, evaluation: list[tuple[int, str, int | None]], steps_ms: list[float]
) -> None:
    """Steps of one second from 0 to 4 and from 26 to 28, and an evaluation from 4 to 24.

    Published logs without eval_start stop their blocks behind the evaluation: steps that nothing ends are not timed.
    """
    before = [(0, "block_start", 0), (2, "train_loss", 16)]
    after = [(26, "block_start", 32), (28, "train_loss", 48)]
    result = parse(timed_log(tmp_path / "log", [*before, *evaluation, *after]))
    assert [time_ms for _, time_ms in result.step_times_ms] == steps_ms
    assert result.throughput_samples_s == 8


def test_evaluation_without_a_result_ends_when_training_continues(tmp_path: Path) -> None:
    """The second evaluation has no eval_start, so no record ends the step before it."""
    first = [(0, "block_start", 0), (1, "block_stop", 8), (1, "eval_start", 8)]
    second = [(5, "block_start", 8), (9, "block_stop", 16), (9, "eval_accuracy", 16)]
    result = parse(timed_log(tmp_path / "log", [*first, *second]))
    assert result.step_times_ms == ((8, 1000),)


@pytest.mark.parametrize(
    ("platform", "nodes", "per_node", "model", "num_gpus", "conflict"),
    [
        ("1xDGX H100", 1, 8, "NVIDIA H100", 8, ""),
        ("8xDGX H100", 1, 8, "NVIDIA H100", None, "counted 1 nodes, but the name of the platform is 8xDGX H100"),
        ("1xXE7745x4H200-NVL", 1, 8, "Dell H200 NVL", None, "counted 8 GPUs per node, but the name of the platform"),
        ("1xSR680aV3-8xH200_SXM", 1, 4, "NVIDIA H200", None, "counted 4 GPUs per node"),
        ("GX2560M7_H100_SXM_80GBx4", 1, 4, "NVIDIA H100", 4, ""),
        ("GX2560M7_H100_SXM_80GBx4", 1, 8, "NVIDIA H100", None, "counted 8 GPUs per node"),
        ("1xXE9680Lx8H200-SXM-141GB", 1, 8, "NVIDIA H200", 8, ""),
        ("18xKinabalux18x4GB200", 18, 4, "NVIDIA GB200", 72, ""),
        ("1xSUBMISSION_PLATFORM_PLACEHOLDER", 1, 1, "No devices were found", None, "found no devices on its node"),
        ("1xSYS-821GE-TNHR", 1, 8, "NVIDIA H200", 8, ""),
    ],
)  # fmt: skip
def test_conflicting_gpu_counts_are_not_used(
    written_log: MakeLog, platform: str, nodes: int, per_node: int, model: str, num_gpus: int | None, conflict: str
) -> None:
    """Names are those of published logs."""
    path = written_log(submission_platform=platform)
    recorded = {"number_of_nodes": str(nodes), "accelerators_per_node": str(per_node), "accelerator_model_name": model}
    path.write_text(f":::SYSJSON {json.dumps(recorded)}\n{path.read_text()}")
    result = parse(path)
    assert (result.num_gpus, result.tokens_s_gpu is None) == (num_gpus, num_gpus is None)
    assert conflict in result.gpu_count_conflict and bool(conflict) == bool(result.gpu_count_conflict)
    row = next(row for row in speed_rows(result) if row[0] == "training throughput")
    assert result.gpu_count_conflict in row[2]


def test_num_ranks_is_used_if_the_run_script_has_a_conflict(written_log: MakeLog) -> None:
    path = written_log(submission_platform="8xDGX", accelerator="NVIDIA H100", num_ranks=64)
    path.write_text(':::SYSJSON {"number_of_nodes": "1", "accelerators_per_node": "8"}\n' + path.read_text())
    assert parse(path).num_gpus == 64


def test_numbers_that_fit_into_64_bits_are_numbers() -> None:
    values = (2**63 - 1, 1 - 2**63, 2**63, -(2**63), 1e18, 1e19, True, float("nan"))
    assert [is_number(value) for value in values] == [True, True, False, False, True, False, False, False]


@pytest.mark.parametrize(("before_bytes", "num_gpus"), [(2**20 - 200, 64), (2**20 - 20, None)])
def test_the_system_is_looked_for_in_the_first_mebibyte(
    written_log: MakeLog, before_bytes: int, num_gpus: int | None
) -> None:
    """Run scripts print it ahead of a trial: a log of gigabytes is not searched for it."""
    path = written_log(submission_platform="8xDGX")
    recorded = ':::SYSJSON {"number_of_nodes": "8", "accelerators_per_node": "8", "accelerator_model_name": "H100"}\n'
    path.write_text("-" * (before_bytes - 1) + "\n" + recorded + path.read_text())
    assert parse(path).num_gpus == num_gpus


def test_spread_of_values() -> None:
    """Of 0 to 10, tenths are whole numbers; one value is all of them."""
    assert spread([*range(10), 21]) == Spread(median=5, p10=1, p90=9, mean=6, count=11)
    assert spread([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0, mean=3.0, count=1)
    assert spread([]) is None


@pytest.mark.parametrize(("evals", "converged"), [((0.95, 0.92), True), ((0.92, 0.95), False), ((0.95, 0.94), False)])
def test_last_evaluation_decides_whether_a_run_converged(
    written_log: MakeLog, evals: tuple[float, ...], converged: bool
) -> None:
    result = parse(written_log(evals=evals))
    assert (result.converged, result.valid) == (converged, converged)
