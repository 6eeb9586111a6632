"""The logs that our emitter writes for both benchmarks, before and after damage, by our checks and by MLPerf's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.compliance_checker import mlp_compliance

from bench.mlperf import compliance
from bench.mlperf import log as logs
from bench.mlperf.benchmarks import DISCLOSED
from bench.mlperf.official import official_verdict
from bench.mlperf.result import parse
from helpers import planned_log

CHECKER = Path(mlp_compliance.__file__).parent
RULESETS = ("5.1.0", "6.0.0", "6.1.0")
LOSSES = {"llama31_8b": (5.6, 4.4, 3.9, 3.5, 3.29), "lora70b": (0.95, 0.94, 0.93, 0.92)}
BENCHMARK = {"llama31_8b": "llama31_8b", "lora70b": "llama2_70b_lora"}

WRONG: dict[str, Any] = {
    "submission_benchmark": "bert",
    "submission_division": "ajar",
    "submission_org": "",
    "submission_platform": "",
    "train_samples": "",
    "eval_samples": 173,
    "max_sequence_length": 4096,
    "opt_name": "sgd",
    "opt_learning_rate_decay_steps": 1_200_000,
    "opt_learning_rate_decay_schedule": "cosine",
    "opt_adamw_beta_1": 0.95,
    "opt_adamw_beta_2": 0.999,
    "opt_adamw_epsilon": 1e-8,
    "opt_adamw_weight_decay": 0.01,
    "opt_gradient_clip_norm": 0.3,
    "gradient_accumulation_steps": 0,
    "max_steps": 2000,
    "eval_accuracy": 3.31,
    **dict.fromkeys(("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn"), "fp7"),
    "lowest_numerical_precision_in_comm": "int2",
    **{f"{axis}_parallelism": 1.5 for axis in ("tensor", "pipeline", "context", "expert")},
    "micro_batch_size": 1.5,
    "config_filename": "",
}
"""By key: a value that fails the CHECK of the rule files of llama31_8b."""
SEALED = "LOG-18"
"""The finding about every changed file, which says nothing about its keys."""
OF_EVENTS = {
    "cache_clear", "init_start", "init_stop", "run_start", "run_stop", "block_start", "block_stop", "eval_start",
    "eval_stop", "epoch_start", "epoch_stop",
}  # fmt: skip
"""Keys whose CHECKs are about order and metadata."""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_log.without_this_machine(monkeypatch)


def rule_files(ruleset: str, benchmark: str = "llama31_8b") -> dict[str, dict[str, Any]]:
    """Return the rules of a closed run, by key."""
    names = ("common", "closed_common", f"closed_{benchmark}")
    files = [CHECKER / f"training_{ruleset}/{name}.yaml" for name in names]
    return {
        rule["KEY"]["NAME"]: rule["KEY"] for file in files for rule in yaml.safe_load(file.read_text()) if "KEY" in rule
    }


def logged(path: Path) -> dict[str, Any]:
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    return {record["key"]: record["value"] for record in records}


@pytest.mark.long
@pytest.mark.parametrize("task", LOSSES)
def test_a_log_has_every_key_of_the_closed_division(task: str, tmp_path: Path) -> None:
    path = planned_log.write(planned_log.planned(task), tmp_path / "result_0.txt", LOSSES[task])
    keys = logged(path).keys()
    for ruleset in RULESETS:
        needed = {key for key, rule in rule_files(ruleset, BENCHMARK[task]).items() if "OR(" not in rule["REQ"]}
        assert needed - keys == set()
        verdict = official_verdict(path, ruleset=ruleset)
        assert (verdict.passed, verdict.messages) == (True, ())
    assert [finding for finding in compliance.judge(logs.read(path)) if finding.severity == "error"] == []
    assert parse(path).valid and set(DISCLOSED) <= keys


@pytest.mark.parametrize(
    ("task", "changes", "expected"),
    [
        ("llama31_8b", (), {"lowest_numerical_precision_in_linear": "fp8", "micro_batch_size": 2}),
        ("llama31_8b", ("precision=bf16",), {"lowest_numerical_precision_in_linear": "bfloat16"}),
        (
            "llama31_8b",
            ("parallel.tp=2", "parallel.cp=2", "recipe.micro_batch_size=1"),
            {"tensor_parallelism": 2, "context_parallelism": 2, "micro_batch_size": 1, "expert_parallelism": 1},
        ),
        ("llama31_8b", ("parallel.pp=2", "parallel.tp=1"), {"pipeline_parallelism": 2, "tensor_parallelism": 1}),
        (
            "lora70b",
            ("precision=bf16", "parallel.tp=4"),
            {"lowest_numerical_precision_in_linear": "bfloat16", "tensor_parallelism": 4},
        ),
    ],
)
def test_what_a_log_discloses_is_what_the_plan_runs(
    task: str, changes: tuple[str, ...], expected: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned_log.planned(task, *changes)
    log = logged(planned_log.write(plan, tmp_path / "result_0.txt", LOSSES[task]))
    assert {key: log[key] for key in expected} == expected
    assert log["config_filename"] == f"task/{task}.yaml"
    assert log["lowest_numerical_precision_in_attn"] == log["lowest_numerical_precision_in_comm"] == "bfloat16"
    sizes = [log[f"{axis}_parallelism"] for axis in ("tensor", "pipeline", "context")]
    assert log["num_ranks"] % (sizes[0] * sizes[1] * sizes[2]) == 0


def damaged(lines: list[str], key: str, how: str) -> list[str]:
    """Return the lines of a log with every record of a key lost, doubled with another value, or wrong."""
    places = [at for at, line in enumerate(lines) if f'"key": "{key}"' in line]
    if how == "removed":
        return [line for at, line in enumerate(lines) if at not in places]
    if how == "doubled":
        first = places[0]
        value = json.dumps("another" if '"value": null' not in lines[first] else 1)
        return [
            *lines[: first + 1],
            re.sub(r'"value": ("[^"]*"|[^,]+)', f'"value": {value}', lines[first]),
            *lines[first + 1 :],
        ]
    changed = [*lines]
    for at in places:
        changed[at] = re.sub(r'"value": ("[^"]*"|[^,]+)', f'"value": {json.dumps(WRONG[key])}', lines[at])
    return changed


def damages(ruleset: str) -> list[tuple[str, str]]:
    """Return each key of the rule files with each damage that breaks one of its rules."""
    listed = []
    for key, rule in rule_files(ruleset).items():
        is_once, is_needed = rule["REQ"] == "EXACTLY_ONE", rule["REQ"] in ("EXACTLY_ONE", "AT_LEAST_ONE")
        listed += [(key, "removed")] if is_needed else []
        listed += [(key, "doubled")] if is_once else []
        listed += [(key, "wrong")] if key in WRONG and {"CHECK", "ATLEAST_ONE_CHECK"} & rule.keys() else []
    return listed


@pytest.mark.parametrize("ruleset", RULESETS)
def test_every_check_of_the_rule_files_has_a_wrong_value(ruleset: str) -> None:
    checked = {key for key, rule in rule_files(ruleset).items() if {"CHECK", "ATLEAST_ONE_CHECK"} & rule.keys()}
    assert checked <= WRONG.keys() | OF_EVENTS


@pytest.mark.long
@pytest.mark.parametrize(
    "ruleset", [pytest.param(name, marks=[] if name == "6.1.0" else pytest.mark.slow) for name in RULESETS]
)
def test_each_key_that_is_missing_double_or_wrong_is_refused_by_us_and_by_mlperf(ruleset: str, tmp_path: Path) -> None:
    """A key that only the newest ruleset needs is a warning of ours, because older rulesets do not need it."""
    path = planned_log.write(planned_log.planned("llama31_8b"), tmp_path / "good.txt", LOSSES["llama31_8b"])
    lines, accepted = path.read_text().splitlines(keepends=True), []
    for key, how in damages(ruleset):
        bad = tmp_path / "bad.txt"
        bad.write_text("".join(damaged(lines, key, how)))
        ours = [f.severity for f in compliance.judge(logs.read(bad)) if f.rule != SEALED]
        is_new = key in DISCLOSED and how == "removed"
        refused = "warning" in ours if is_new else "error" in ours
        accepted += [] if refused else [(key, how, "ours")]
        accepted += [(key, how, "MLPerf's")] if official_verdict(bad, ruleset=ruleset).passed else []
    assert accepted == []
    assert len(damages(ruleset)) > 60


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "metadata"),
    [
        ("run_stop", "status"),
        *((key, "samples_count") for key in ("block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy")),
    ],
)
def test_a_record_without_its_metadata_is_refused_by_us_and_by_mlperf(key: str, metadata: str, tmp_path: Path) -> None:
    path = planned_log.write(planned_log.planned("llama31_8b"), tmp_path / "good.txt", LOSSES["llama31_8b"])
    text = re.sub(rf'("key": "{key}".*)"{metadata}"', r'\1"other"', path.read_text())
    path.write_text(text.replace('"epoch_num"', '"epoch"'))
    assert official_verdict(path, ruleset="6.1.0").passed is False
    assert any(finding.severity == "error" for finding in compliance.judge(logs.read(path)))
