"""Test the compliance checks: stricter than the official checker, and a valid log passes the official checker."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.contract.mllog import Writer
from bench.mlperf import compliance
from bench.mlperf import log as logs
from bench.mlperf.benchmarks import BENCHMARKS, LLAMA2_70B_LORA, LLAMA31_8B
from bench.mlperf.official import official_verdict
from bench.mlperf.result import parse
from bench.rules.finding import Finding
from helpers import clock
from helpers.examples import in_proportion
from helpers.paths import CORPUS
from helpers.types import MakeLog

RULESETS = {round_: f"{round_[1:]}.0" for round_ in ("v3.1", "v4.0", "v4.1", "v5.0", "v5.1", "v6.0")}


def findings(path: Path) -> list[Finding]:
    return list(compliance.judge(logs.read(path)))


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        ({"lora_alpha": 16}, "REC-01", "lora_alpha is 16, but the rules require 32"),
        ({"lora_dropout": 0}, "REC-01", "lora_dropout is 0, but the rules require 0.1"),
        ({"opt_gradient_clip_norm": 1.0}, "REC-01", "opt_gradient_clip_norm is 1.0"),
        ({"opt_adamw_weight_decay": "0.0001"}, "REC-01", "opt_adamw_weight_decay is '0.0001'"),
        ({"global_batch_size": 0}, "REC-01", "must be an integer above 0"),
        ({"train_samples": 3900}, "REC-02", "train_samples is 3900, but the rules require 3901"),
        ({"eval_samples": 172}, "REC-02", "the rules require 173"),
        ({"submission_org": ""}, "REC-03", "submission_org is ''"),
        ({"submission_division": "ajar"}, "REC-01", "must be closed or open"),
        ({"micro_batch_size": 1.5}, "REC-01", "micro_batch_size is 1.5, but must be an integer above 0"),
        ({"lowest_numerical_precision_in_attn": "fp7"}, "REC-01", "is 'fp7', but must be one of fp64, "),
        ({"config_filename": ""}, "REC-03", "config_filename is ''"),
        ({"seed": None}, "LOG-15", "no seed"),
        ({"seed": 1.5}, "LOG-15", "must be an integer"),
        ({"cache_clear": None}, "LOG-10", "no cache_clear"),
        ({"global_batch_size": 128}, "EVL-02", "the target was reached at 2,304 samples, but the rules"),
    ],
)
def test_deviation_is_reported(written_log: MakeLog, changes: dict[str, object], rule: str, message: str) -> None:
    path = written_log(**changes)
    errors = [finding for finding in findings(path) if finding.severity == "error"]
    assert [finding.rule for finding in errors] == [rule]
    assert message in errors[0].what
    assert not parse(path).valid


@pytest.mark.parametrize(
    ("benchmark", "target", "is_easier"),
    [("bert", 0.71, True), ("bert", 0.73, False), ("llama2_70b_lora", 0.93, True), ("llama2_70b_lora", 0.92, False)],
)
def test_a_target_that_is_easier_than_the_official_one_is_reported(
    written_log: MakeLog, benchmark: str, target: float, is_easier: bool
) -> None:
    """A lower accuracy is easier, and a higher loss."""
    path = written_log(submission_benchmark=benchmark, target_accuracy=target)
    assert ("LOG-12" in {finding.rule for finding in findings(path)}) is is_easier


LLAMA31_8B_SETTINGS: dict[str, object] = {
    "submission_benchmark": "llama31_8b",
    "target_accuracy": 3.3,
    "global_batch_size": 8,
    "train_samples": 1_574_207_408,
    "eval_samples": 1024,
    "max_sequence_length": 8192,
    "max_steps": 1_200_000,
    "opt_name": "adamw",
    "opt_base_learning_rate": 8e-4,
    "opt_end_learning_rate": 8e-5,
    "opt_learning_rate_warmup_steps": 128,
    "opt_learning_rate_decay_steps": 1_199_872,
    "opt_learning_rate_decay_schedule": "cosine with linear warmup",
    "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.95,
    "opt_adamw_epsilon": 1e-5,
    "opt_adamw_weight_decay": 0.1,
    "opt_gradient_clip_norm": 1.0,
    "lora_rank": None,
    "lora_alpha": None,
}


def llama31_8b_log(written_log: MakeLog, **changes: object) -> Path:
    """Return a log with the evaluations that the rules of llama31_8b require."""
    path = written_log(evals=(4.1, 3.5, 3.29), **(LLAMA31_8B_SETTINGS | changes))
    text = path.read_text()
    for number, samples in enumerate((1536, 1920, 2304), 1):
        text = text.replace(f'"samples_count": {samples}', f'"samples_count": {12288 * number}')
    path.write_text(text)
    return path


def test_llama31_8b_is_fully_checked(written_log: MakeLog) -> None:
    path = llama31_8b_log(written_log)
    assert findings(path) == []
    assert official_verdict(path, ruleset="5.1.0").passed
    assert parse(path).samples_to_target == 36864


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opt_end_learning_rate": 8e-6}, "the rules require 0.1 x opt_base_learning_rate"),
        ({"opt_learning_rate_decay_steps": 1_200_000}, "1200000 minus the warm-up steps"),
        ({"opt_adamw_beta_2": 0.999}, "opt_adamw_beta_2 is 0.999, but the rules require 0.95"),
        ({"opt_learning_rate_decay_schedule": "cosine"}, "require cosine with linear warmup"),
        ({"max_steps": 1000}, "max_steps is 1000"),
    ],
)
def test_deviation_of_llama31_8b_is_reported(written_log: MakeLog, changes: dict[str, object], message: str) -> None:
    (finding,) = findings(llama31_8b_log(written_log, **changes))
    assert (finding.rule, finding.severity) == ("REC-01", "error") and message in finding.what


def places(path: Path, samples: Sequence[int]) -> Path:
    """Move the evaluations of a log of `llama31_8b_log` to these sample counts."""
    text = path.read_text()
    for number, count in enumerate(samples, 1):
        text = text.replace(f'"samples_count": {12288 * number},', f'"samples_count": {count},')
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("samples", "gbs", "done_and_due"),
    [
        (
            (196_992, 218_880, 240_768),
            64,
            "evaluation 3 of the run, but the rules have 19 until this number of samples",
        ),
        ((49_152, 57_344, 65_536), 32, "evaluation 3 of the run, but the rules have 5 until this number of samples"),
        ((6144, 12288, 18432), 16, "evaluation 3 of the run, but the rules have 1 until this number of samples"),
    ],
)
def test_other_number_of_evaluations_is_only_a_warning(
    written_log: MakeLog, samples: tuple[int, ...], gbs: int, done_and_due: str
) -> None:
    """Intervals of 21,888, 8,192 and 6,144 samples at these batch sizes have official scores in round v5.1."""
    path = places(llama31_8b_log(written_log, global_batch_size=gbs), samples)
    assert official_verdict(path, ruleset="5.1.0").passed and parse(path).valid
    by_rule = {finding.rule: finding for finding in findings(path)}
    assert {rule: finding.severity for rule, finding in by_rule.items()} == {"EVL-01": "warning", "EVL-02": "warning"}
    assert by_rule["EVL-02"].what.endswith(done_and_due)


@pytest.mark.parametrize(
    ("late_by", "rules"), [(0, set()), (8, {"EVL-01"}), (40, {"EVL-01"}), (48, {"EVL-01", "EVL-02"})]
)
def test_one_step_late_per_interval_is_on_schedule(written_log: MakeLog, late_by: int, rules: set[str]) -> None:
    """At batch size 8 the first evaluation is due after four intervals, the second after five: 1,920 samples."""
    path = written_log(evals=(0.95, 0.92))
    path.write_text(path.read_text().replace('"samples_count": 1920', f'"samples_count": {1920 + late_by}'))
    assert {finding.rule for finding in findings(path)} == rules


def test_the_first_evaluation_that_is_off_schedule_is_named(written_log: MakeLog) -> None:
    path = written_log(evals=(0.95, 0.94, 0.93, 0.92))
    path.write_text(path.read_text().replace('"samples_count": 2688', '"samples_count": 2696'))
    assert [finding.what for finding in findings(path)] == [
        "evaluation 4 is at 2,696 samples, but is due at 2,688; the rules require 1,536, then every 384 (GBS 8)"
    ]


@pytest.mark.parametrize(
    ("value", "required"),
    [("0.926", "the target is ≤ 0.925"), ("0", "a loss must be above 0"), ("-1.0", "a loss must be above 0")],
)
def test_a_value_that_no_loss_has_is_not_compared_with_the_target(
    written_log: MakeLog, value: str, required: str
) -> None:
    path = written_log()
    path.write_text(re.sub(r'(eval_accuracy", "value": )0.92,', rf"\g<1>{value},", path.read_text()))
    (error,) = [finding for finding in findings(path) if finding.rule == "LOG-07"]
    assert error.what.startswith(f"the last evaluation is {value}, but {required}")


def test_batch_size_that_no_evaluation_fits_is_an_error(written_log: MakeLog) -> None:
    """Batches of 8 logged as 9: 1,536 samples are no whole number of steps."""
    (error,) = [f for f in findings(written_log(global_batch_size=9)) if f.severity == "error"]
    assert error.rule == "REC-01" and error.what.startswith("an evaluation is after 1,5")


def test_a_target_reached_before_the_first_evaluation_of_the_rules_is_an_error(written_log: MakeLog) -> None:
    path = places(llama31_8b_log(written_log), (1536, 3072, 6144))
    assert [f.severity for f in findings(path) if f.rule == "EVL-02"] == ["error"] and not parse(path).valid


@pytest.mark.parametrize(("division", "limit_min"), [("closed", 30), ("open", 240)])
def test_init_has_a_time_limit(written_log: MakeLog, division: str, limit_min: int) -> None:
    path = written_log(submission_division=division)
    for took_ms, rules in ((60_000 * limit_min - 1, []), (60_000 * limit_min, ["LOG-14"])):
        clock.move(path, "init_start", clock.time_ms(path, "init_stop") - took_ms - clock.time_ms(path, "init_start"))
        assert [finding.rule for finding in findings(path)] == rules


def test_a_benchmark_known_by_its_target_only_needs_no_seed(written_log: MakeLog) -> None:
    """Published logs of dlrm_dcnv2 have official scores without one."""
    path = written_log(submission_benchmark="dlrm_dcnv2", target_accuracy=0.80275, evals=(0.79, 0.803), seed=None)
    assert [(f.rule, f.severity) for f in findings(path)] == [("LOG-15", "warning")] and parse(path).valid


def test_keys_of_the_newest_ruleset_only_are_a_warning(written_log: MakeLog) -> None:
    path = written_log(tensor_parallelism=None)
    (finding,) = findings(path)
    assert (finding.rule, finding.severity) == ("LOG-10", "warning")
    assert finding.what == "the log has no tensor_parallelism, which ruleset 6.1.0 requires"
    assert [official_verdict(path, ruleset=name).passed for name in ("6.0.0", "6.1.0")] == [True, False]


def test_the_official_checker_must_read_the_warm_up_first(written_log: MakeLog) -> None:
    path = llama31_8b_log(written_log)
    text = path.read_text()
    first, second = re.findall(r'"key": "opt_learning_rate_(?:warmup|decay)_steps", "value": \d+', text)
    path.write_text(text.replace(second, "both").replace(first, second).replace("both", first))  # times stay in order
    (finding,) = findings(path)
    assert finding.rule == "LOG-04" and not official_verdict(path, ruleset="5.1.0").passed


def test_open_division_has_no_fixed_values(written_log: MakeLog) -> None:
    path = written_log(submission_division="open", lora_alpha=8, train_samples=5, seed=None, global_batch_size=128)
    assert findings(path) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "rule", "severity"),
    [
        (r'("init_start".*?"time_ms": )\d+', None, "LOG-14", "error"),
        (r'"samples_count": 2304, ', '"epoch_num": 1, ', "EVL-03", "error"),
        (r'(block_stop".*)"samples_count": \d+, ', r"\1", "LOG-10", "error"),
        (r"run_stop", "run_stop ", "LOG-02", "error"),
        (r'"samples_count": 1536', '"samples_count": 1528', "EVL-01", "warning"),
        (r'(.*"seed".*\n)', r"\1", "LOG-15", "warning"),
        (r"llama2_70b_lora", "llama2_70b_lorra", "LOG-23", "error"),
        (r'"status": "success"', '"status": "aborted", "status": "success"', "LOG-09", "error"),
        (r'"key": "eval_accuracy", "value": 0', '"value": 0.9, "key": "eval_accuracy", "value": 0', "LOG-09", "error"),
        (r'"namespace": ""(.*"status")', r'"status": ""\1: "aborted", "status"', "LOG-09", "error"),
        (r'"namespace": ""(.*run_start)', r'"namespace": ":::MLLOG {}"\1', "LOG-09", "error"),
        (r'("run_start".*"file": )', r'\1":::MLLOG x", "other": ', "LOG-09", "error"),
    ],
)
def test_damage_is_reported(
    written_log: MakeLog, pattern: str, replacement: str | None, rule: str, severity: str
) -> None:
    path = written_log()
    text = path.read_text()
    if rule == "LOG-14":
        text = re.sub(r'(\d{13})(?=, "event_type": "INTERVAL_START", "key": "init_start")', "1000000000000", text)
    elif rule == "LOG-15":
        text = re.sub(r'(.*"seed".*\n)', lambda line: line[1] + line[1].replace('"value": 7', '"value": 8'), text)
    else:
        assert replacement is not None
        text = re.sub(pattern, replacement, text)
    path.write_text(text)
    assert (rule, severity) in {(finding.rule, finding.severity) for finding in findings(path)}


def test_benchmark_that_is_not_judged_here_has_no_other_error(written_log: MakeLog) -> None:
    """The evaluations of maskrcnn are objects; its rules are MLPerf's alone."""
    path = written_log(submission_benchmark="maskrcnn", target_accuracy=None)
    path.write_text(re.sub(r'("eval_accuracy", "value": )[\d.]+', r'\1{"BBOX": 0.378, "SEGM": 0.34}', path.read_text()))
    (error,) = [f for f in findings(path) if f.severity == "error"]
    assert (error.rule, error.what) == ("LOG-23", "runstop has no rules for the benchmark 'maskrcnn'")


@pytest.mark.parametrize(("clip_at", "converged"), [(5000, True), (6000, False)])
def test_metrics_count_together_at_one_checkpoint(written_log: MakeLog, clip_at: int, converged: bool) -> None:
    """stable_diffusion of v3.1 counts steps, and evaluates its checkpoints after the run in any order."""
    path = written_log(submission_benchmark="stable_diffusion", target_accuracy=None, evals=(95.0, 82.0, 0.2))
    text = path.read_text()
    for value, metric, step in ((95.0, "FID", 6000), (82.0, "FID", 5000), (0.2, "CLIP", clip_at)):
        record = rf'("eval_accuracy", "value": {value}, "metadata": {{.*?)"samples_count": \d+'
        text = re.sub(record, rf'\1"metric": "{metric}", "step_num": {step}', text)
    path.write_text(text)
    result = parse(path)
    assert result.converged == converged
    assert {f.rule for f in result.findings if f.severity == "error"} == (set() if converged else {"LOG-07"})


def test_names_and_colons_in_texts_are_no_damage(written_log: MakeLog) -> None:
    path = written_log(submission_org="a: b", note='{"key": 1, "key": 2}', other={"a": {"key": 1}, "b": {"key": ":"}})
    assert findings(path) == []


def test_an_appended_log_shows_its_trials(written_log: MakeLog) -> None:
    path = written_log()
    once = path.read_text()
    torn = once.replace('"value": 7', '"value": 8').splitlines(keepends=True)[:-1]
    path.write_text("".join([*torn, "srun: error: task 0: Killed\n", once]))
    result = parse(path)
    assert not result.valid and not result.converged and result.evaluations == ()
    assert (result.minutes, result.status, result.eval_final, result.samples_to_target) == (None, None, None, None)
    first, second = result.trials
    assert (first.seed, first.minutes, first.status, first.first_line) == (8, None, None, 1)
    assert (second.seed, second.status, second.last_line) == (7, "success", len(once.splitlines()) * 2)
    assert second.first_line > first.last_line and second.minutes is not None
    assert f"the log has 2 records run_start (lines {torn_line(path)}" in next(
        f.what for f in result.findings if f.rule == "LOG-03"
    )


def torn_line(path: Path) -> str:
    return ", ".join(str(n) for n, line in enumerate(path.read_text().splitlines(), 1) if '"run_start"' in line)


def test_each_goal_has_its_direction() -> None:
    assert BENCHMARKS["bert"].goals[0].is_reached_by(0.72) and not BENCHMARKS["bert"].goals[0].is_reached_by(0.71)
    assert LLAMA2_70B_LORA.goals[0].is_reached_by(0.925) and not LLAMA2_70B_LORA.goals[0].is_reached_by(0.926)
    assert not LLAMA2_70B_LORA.goals[0].is_reached_by(0)


@pytest.mark.parametrize(
    ("metrics", "converged"),
    [
        ([("FID", 91, 512), ("CLIP", 0.16, 512)], False),
        ([("FID", 89, 512), ("CLIP", 0.16, 1024)], False),
        ([("FID", 89, 512), ("CLIP", 0.16, 512), ("FID", 95, 1024)], True),
    ],
)
def test_two_goals_are_reached_by_one_checkpoint(
    tmp_path: Path, metrics: list[tuple[str, float, int]], converged: bool
) -> None:
    with Writer(tmp_path / "log") as writer:
        writer.event("submission_benchmark", "stable_diffusion")
        writer.start("run_start")
        writer.finish("success")
        for metric, value, samples in metrics:
            writer.event("eval_accuracy", value, metric=metric, samples_count=samples)
    result = parse(tmp_path / "log")
    assert (result.converged, result.samples_to_target) == (converged, 512 if converged else None)
    assert [evaluation.metric for evaluation in result.evaluations] == [metric for metric, _, _ in metrics]


@pytest.mark.parametrize(
    ("benchmark", "gbs", "first", "every"),
    [
        *((LLAMA2_70B_LORA, *row) for row in [(8, 1536, 384), (9, 1548, 387), (16, 1920, 384), (64, 4224, 384)]),
        *((LLAMA2_70B_LORA, *row) for row in [(32, 2688, 384), (72, 5184, 432), (128, 7296, 384)]),
        *((LLAMA31_8B, *row) for row in [(16, 12288, 12288), (96, 12288, 12288), (36, 12312, 12312)]),
    ],
)
def test_schedules_are_the_rules(benchmark: object, gbs: int, first: int, every: int) -> None:
    schedule = benchmark.schedule  # type: ignore[attr-defined]
    assert (schedule.first(gbs), schedule.interval(gbs)) == (first, every)


@pytest.fixture(params=["llama2_70b_lora", "llama31_8b"])
def good_lines(request: pytest.FixtureRequest, written_log: MakeLog) -> list[str]:
    path = written_log() if request.param == "llama2_70b_lora" else llama31_8b_log(written_log)
    return path.read_text().splitlines(keepends=True)


@pytest.mark.long
@settings(max_examples=in_proportion(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_valid_log_passes_the_official_checker(good_lines: list[str], tmp_path: Path, data: st.DataObject) -> None:
    """With damaged lines our checks may be stricter than the official checker, never more lenient."""
    lines, path = [*good_lines], tmp_path / "damaged"
    for _ in range(data.draw(st.integers(0, 3))):
        at, other = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        change = data.draw(st.sampled_from(["lose", "double", "swap", "value", "count", "key"]))
        if change == "lose":
            lines[at] = "\n"
        elif change == "double":
            lines.insert(other, lines[at])
        elif change == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif change == "count":
            lines[at] = lines[at].replace('"samples_count"', '"step"')
        elif change == "key":
            lines[at] = re.sub(r'"key": "([^"]*)"', r'"key": "\1 "', lines[at])
        else:
            value = data.draw(st.sampled_from(["0.5", "16", "null", '"x"', "true", "-1", '""']))
            lines[at] = re.sub(r'"value": ("[^"]*"|[^,]+)', f'"value": {value}', lines[at])
    path.write_text("".join(lines))
    result = parse(path)
    if result.valid and result.benchmark in BENCHMARKS:
        discloses = not any(finding.rule == "LOG-10" for finding in result.findings)
        verdict = official_verdict(path, ruleset="6.1.0" if discloses else "6.0.0")
        assert verdict.passed is not False, verdict.messages


@pytest.mark.long
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not here")
def test_our_verdict_and_the_official_one_agree_on_published_logs() -> None:
    different = {}
    for record in json.loads((CORPUS / "truth.json").read_text()):
        if record.get("excerpt"):
            continue
        path = CORPUS / record["file"]
        result, verdict = parse(path), official_verdict(path, ruleset=RULESETS[record["file"].split("/")[0]])
        if result.valid != verdict.passed:
            different[record["file"]] = (result.findings, verdict.messages)
    assert different == {}
