"""A log proves a valid trial, or a finding says where it does not."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract.mllog import Writer
from bench.mlperf.result import parse
from helpers.paths import CORPUS

MakeLog = Callable[..., Path]


def found(path: Path) -> dict[str, str]:
    """Return rule -> severity, having checked that errors and validity agree."""
    result = parse(path)
    assert result.valid == all(finding.severity == "warning" for finding in result.findings)
    return {finding.rule: finding.severity for finding in result.findings}


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
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["global_batch_size"] == 8


@pytest.mark.parametrize(
    ("pattern", "replacement", "rules"),
    [
        (r".*run_start.*\n", "", {"LOG-01", "LOG-13"}),
        (r".*run_stop.*\n", "", {"LOG-02"}),
        (r"(?s)(.*)", r"\1\1", {"LOG-03", "LOG-11"}),
        (r'("time_ms": )\d+(.*"run_stop")', r"\g<1>5\2", {"LOG-04"}),
        (r"(.*init_start.*\n)((?:.*\n)*)", r"\2\1", {"LOG-04"}),
        ("success", "aborted", {"LOG-05"}),
        (r".*eval_accuracy.*\n", "", {"LOG-06"}),
        (r'(eval_accuracy", "value": )0.92,', r"\g<1>0.926,", {"LOG-07"}),
        (r'(eval_accuracy", "value": )0.92,', r"\1NaN,", {"LOG-07", "LOG-08"}),
        (r'(train_loss", "value": )1.03,', r"\1null,", {"LOG-08"}),
        (r'(lora_rank", "value": 16)', r'\1"', {"LOG-09", "LOG-10"}),
        (r".*init_start.*\n", "", {"LOG-10"}),
        (r"(.*lora_alpha.*)32(.*\n)", r"\g<1>32\2\g<1>64\2", {"LOG-11"}),
        (r"(.*)llama2_70b_lora(.*\n)", r"\1llama2_70b_lora\2\1bert\2", {"LOG-11"}),
        (r'(target_accuracy", "value": )0.925', r"\g<1>2.5", {"LOG-12"}),
        (r'(.*"value": 0.92,.*\n)((?:.*\n)*)', r"\2\1", {"LOG-13"}),
        (r'("time_ms": )\d+(.*"value": 0.92,)', r"\g<1>9999999999999\2", {"LOG-13"}),
    ],
)
def test_damage_makes_a_log_invalid_and_is_named(
    written_log: MakeLog, pattern: str, replacement: str, rules: set[str]
) -> None:
    path = damage(written_log(), pattern, replacement)
    assert found(path).keys() == rules
    assert not parse(path).valid


@pytest.mark.parametrize(
    ("pattern", "replacement"), [("(?m)^", "0: "), ("\n", "\r\n"), ("}}\n", "}}\x1b[0m"), ("}\n", "} ")]
)
def test_what_srun_and_terminals_add_changes_nothing(written_log: MakeLog, pattern: str, replacement: str) -> None:
    assert found(damage(written_log(), pattern, replacement)) == {}


def test_every_cut_of_a_log_is_invalid_and_has_no_minutes(written_log: MakeLog, tmp_path: Path) -> None:
    data = written_log().read_bytes().rstrip()
    for end in range(0, len(data), 97):
        (tmp_path / "cut").write_bytes(data[:end])
        result = parse(tmp_path / "cut")
        assert not result.valid
        assert result.minutes is None


def test_a_repeated_key_with_one_value_is_a_warning(written_log: MakeLog) -> None:
    assert found(damage(written_log(), r"(.*lora_alpha.*\n)", r"\1\1")) == {"LOG-11": "warning"}


@pytest.mark.parametrize("benchmark", [None, "of our own"])
def test_without_a_target_a_finished_run_is_valid_but_not_converged(
    written_log: MakeLog, benchmark: str | None
) -> None:
    result = parse(written_log(submission_benchmark=benchmark, target_accuracy=None, lora_rank=None))
    assert (result.valid, result.converged, result.target, result.samples_to_target) == (True, False, None, None)
    assert result.eval_final == 0.92


def test_a_task_of_our_own_brings_its_target(written_log: MakeLog) -> None:
    assert not parse(written_log(submission_benchmark=None, target_accuracy=0.9)).valid


@pytest.mark.parametrize(("benchmark", "target"), [("llama2_70b_lora", 0.925), ("llama31_8b", 3.3)])
def test_the_official_target_holds_where_none_is_logged(written_log: MakeLog, benchmark: str, target: float) -> None:
    assert parse(written_log(submission_benchmark=benchmark, target_accuracy=None)).target == target


def test_an_open_log_needs_fewer_keys(written_log: MakeLog) -> None:
    path = written_log(lora_alpha=None)
    assert found(path) == {"LOG-10": "error"}
    assert found(damage(path, '"closed"', '"open"')) == {}


def test_values_of_any_kind_are_survived(tmp_path: Path) -> None:
    values: list[object] = [None, True, "x", [], {"throughput": []}, 10**400, -1]
    for number, value in enumerate(values):
        with Writer(tmp_path / str(number)) as log:
            for key in ("submission_benchmark", "submission_division", "target_accuracy", "seed", "global_batch_size"):
                log.event(key, value)
            log.start("run_start", value)
            for key in ("eval_accuracy", "train_loss", "tracked_stats"):
                log.event(key, value, samples_count=value)
            log.finish("success")
        json.dumps(parse(tmp_path / str(number)).to_json(), allow_nan=False)


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


def test_a_clock_that_stands_still_or_runs_backwards_times_nothing(tmp_path: Path) -> None:
    """A number that the log does not prove is None, and every document is strict JSON."""
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
    json.dumps(result.to_json(), allow_nan=False)
