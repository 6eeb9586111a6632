"""Logs listed up from MLPerf's rule files, before and after damage: our verdict is that of MLPerf's checker."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer

from bench.mlperf import compliance
from bench.mlperf import log as logs
from bench.mlperf.benchmarks import BENCHMARKS, DISCLOSED
from bench.mlperf.official import official_verdict
from bench.mlperf.result import parse
from bench.mlperf.score import score

CHECKER = Path(mlp_compliance.__file__).parent
RULES = [
    *(("gpt3", "4.1.0"), ("llama31_405b", "5.1.0"), ("llama31_405b", "6.0.0"), ("flux1", "5.1.0")),
    *((name, ruleset) for name in ("flux1", "gpt_oss_20b", "deepseekv3_671b") for ruleset in ("6.0.0", "6.1.0")),
    *((name, "6.1.0") for name in ("dlrmv4", "qwen35_397b_grpo")),
]
"""The rule file of ruleset 5.0.0 for llama31_405b checks less than ours: it accepts any decay steps."""
STARTS_MS = {
    ruleset: round(datetime.fromisoformat(f"{day}T00:00Z").timestamp() * 1000)
    for ruleset, day in {
        "4.1.0": "2024-09-01",
        "5.1.0": "2025-09-01",
        "6.0.0": "2026-02-01",
        "6.1.0": "2026-09-01",
    }.items()
}
"""A time at which a ruleset was in force; some rules depend on it."""
COMMON = {
    "submission_org": "example",
    "submission_platform": "example",
    "submission_status": "onprem",
    "seed": 1,
    **dict.fromkeys(("train_samples", "eval_samples", "gradient_accumulation_steps", "micro_batch_size"), 1),
    **dict.fromkeys([key for key in DISCLOSED if key.endswith("parallelism")], 1),
    **dict.fromkeys([key for key in DISCLOSED if key.startswith("lowest")], "bfloat16"),
    "config_filename": "example.yaml",
}
_LLAMA = {"opt_end_learning_rate": 8e-6, "max_sequence_length": 8192, "opt_name": "adamw"}
_COSINE = {"opt_learning_rate_decay_schedule": "cosine with linear warmup", "opt_gradient_clip_norm": 1.0}


def adamw(beta_2: float, epsilon: float, decay: float = 0.1) -> dict[str, Any]:
    names = ("opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", "opt_adamw_weight_decay")
    return {"opt_name": "adamw", **dict(zip(names, (0.9, beta_2, epsilon, decay), strict=True))}


OWN: dict[str, dict[str, Any]] = {
    "gpt3": {
        "global_batch_size": 1536,
        "opt_base_learning_rate": 2e-5,
        "opt_end_learning_rate": 2e-6,
        "max_sequence_length": 2048,
        "opt_name": "adam",
        "opt_adam_beta_1": 0.9,
        "opt_adam_beta_2": 0.95,
        "opt_adam_epsilon": 1e-8,
        "opt_learning_rate_warmup_steps": 0,
        "opt_learning_rate_decay_steps": 108600,
        **_COSINE,
        "init_checkpoint_step": 4000,
    },
    "llama31_405b": {
        "global_batch_size": 1152,
        "opt_base_learning_rate": 8e-5,
        "opt_learning_rate_warmup_steps": 8000,
        "opt_learning_rate_decay_steps": 1_192_000,
        "eval_samples": 5760,
        "init_checkpoint_step": 0,
        **adamw(0.95, 1e-5),
        **_COSINE,
        **_LLAMA,
    },
    "gpt_oss_20b": {
        "global_batch_size": 16,
        "opt_base_learning_rate": 4e-4,
        "opt_learning_rate_warmup_steps": 128,
        "opt_learning_rate_decay_steps": 1_199_872,
        "eval_samples": 1024,
        "max_steps": 1_200_000,
        **adamw(0.95, 1e-5),
        **_COSINE,
        **_LLAMA,
    },
    "deepseekv3_671b": {
        "global_batch_size": 15360,
        "opt_base_learning_rate": 2.3238e-5,
        "opt_learning_rate_warmup_steps": 4,
        "opt_learning_rate_decay_steps": 11_996,
        "eval_samples": 1024,
        "max_steps": 60,
        "moe_aux_loss_coeff": 0.01,
        **adamw(0.95, 1e-8),
        **_COSINE,
        "max_sequence_length": 4096,
    },
    "flux1": {
        "global_batch_size": 1024,
        "evaluation_frequency": 262_144,
        "opt_base_learning_rate": 2.5e-4,
        **adamw(0.95, 1e-8),
        "opt_learning_rate_warmup_steps": 800,
        "opt_gradient_clip_norm": 1.0,
    },
    "dlrmv4": {
        "global_batch_size": 8192,
        "train_samples": 2_290_835_423,
        "eval_samples": 2_058_204,
        "max_sequence_length": 4096,
        "opt_name": "Adam",
        "opt_base_learning_rate": 1.2e-6,
        "opt_adam_beta_1": 0.95,
        "opt_adam_beta_2": 0.999,
        "opt_adam_epsilon": 1e-8,
        "opt_weight_decay": 0.0,
        "opt_gradient_clip_norm": 1.0,
        "opt_sparse_name": "RowWiseAdagrad",
        "opt_sparse_base_learning_rate": 1.2e-6,
        "opt_learning_rate_warmup_steps": 24_000,
        "opt_learning_rate_warmup_start_lr": 0.0,
        "eval_every_data_pct": 0.001,
    },
    "qwen35_397b_grpo": {
        "global_batch_size": 512,
        "opt_base_learning_rate": 1.4142135624e-6,
        "max_sequence_length": 65_536,
        **adamw(0.999, 1e-8, 0.0),
        "opt_gradient_clip_norm": 0.08838834765,
        "opt_learning_rate_warmup_steps": 0,
        "eval_samples": 251,
        "init_checkpoint_step": 0,
        "max_steps": 40,
        "opt_learning_rate_decay_schedule": "constant",
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 16,
        "generation_training_rollout_temperature": 1.0,
        "generation_training_rollout_top_p": 1.0,
        "generation_validation_rollout_temperature": 0.1,
        "generation_validation_rollout_top_p": 0.95,
    },
}
"""By benchmark: values that its rule file accepts; a later key may depend on an earlier one."""
DESCRIPTION = {
    "submitter": "example",
    "division": "closed",
    "status": "Available on-premise",
    "system_name": "box",
    "number_of_nodes": "1",
    "host_processors_per_node": "2",
    "host_processor_model_name": "Example 8480",
    "accelerators_per_node": "8",
    "accelerator_model_name": "Example",
    "framework": "runstop",
    "hw_notes": "",
    "sw_notes": "",
    "host_processor_core_count": "56",
}
PLACES = {
    "gpt3": (24_576, 49_152),
    "llama31_405b": (46_080, 92_160),
    "gpt_oss_20b": (12_288, 24_576),
    "deepseekv3_671b": (660_480, 675_840),
    "flux1": (262_144, 524_288),
    "dlrmv4": (57_344_000, 59_637_760),
    "qwen35_397b_grpo": (5_120, 5_632),
}
"""Samples at the two evaluations of a log."""
METRICS = {
    "gpt3": (2.8, 2.68),
    "llama31_405b": (5.7, 5.59),
    "gpt_oss_20b": (3.5, 3.33),
    "deepseekv3_671b": (3.7, 3.6),
    "flux1": (0.6, 0.586),
    "dlrmv4": (0.74, 0.75),
    "qwen35_397b_grpo": (0.69, 0.6901),
}
Record = tuple[str, Any, dict[str, Any]]


def records(benchmark: str, evaluations: Sequence[tuple[int, float]] = (), **changes: Any) -> list[Record]:
    """Return the records of a log, by default with the two evaluations of PLACES and METRICS."""
    settings = {**COMMON, **OWN[benchmark], **changes}
    counted = BENCHMARKS[benchmark].counts
    listed: list[Record] = [("cache_clear", True, {}), ("init_start", None, {})]
    listed += [(f"submission_{name}", value, {}) for name, value in (("benchmark", benchmark), ("division", "closed"))]
    listed += [(key, settings[key], {}) for key in [*OWN[benchmark], *(COMMON.keys() - OWN[benchmark].keys())]]
    listed += [("init_stop", None, {}), ("run_start", None, {})]
    for samples, value in evaluations or zip(PLACES[benchmark], METRICS[benchmark], strict=True):
        at: dict[str, Any] = {"samples_count": samples}
        listed += [("block_start", None, at), ("block_stop", None, at), ("eval_start", None, at)]
        listed += [("eval_accuracy", value, at if counted == "samples_count" else {"epoch_num": samples})]
        listed += [("eval_stop", None, at)]
    return [*listed, ("run_stop", None, {"status": "success"})]


def write(path: Path, listed: Sequence[Record], *, start_ms: int = STARTS_MS["6.1.0"], step_ms: int = 60_000) -> Path:
    """Write a log with a record a minute from `start_ms` on, within the 30 minutes of initialisation."""
    lines, now, timed = [], start_ms, False
    for key, value, metadata in listed:
        timed = timed or key == "run_start"
        now += step_ms if timed else 1000
        record = {"namespace": "", "time_ms": now, "event_type": "POINT_IN_TIME", "key": key, "value": value}
        lines.append(f":::MLLOG {json.dumps(record | {'metadata': {'file': 'x.py', 'lineno': 1, **metadata}})}\n")
    path.write_text("".join(lines))
    return path


def rule_file(benchmark: str, ruleset: str) -> dict[str, dict[str, Any]]:
    """Return the rules of a closed run by key, the benchmark's own over the common ones."""
    names = ("common", "closed_common", f"closed_{benchmark}")
    texts = [(CHECKER / f"training_{ruleset}/{name}.yaml").read_text() for name in names]
    return {each["KEY"]["NAME"]: each["KEY"] for text in texts for each in yaml.safe_load(text) if "KEY" in each}


OF_EVENTS = {
    *("cache_clear", "init_start", "init_stop", "run_start", "run_stop", "block_start", "block_stop", "eval_start"),
    *("eval_stop", "epoch_start", "epoch_stop", "eval_accuracy"),
}


def wrong(value: Any) -> list[Any]:
    """Return values near one that a rule fixes."""
    if isinstance(value, str):
        return [f"{value} 2"]
    return [value * 1.001 if value else 0.001, value * 4 if value else -1, -1]


def damaged(benchmark: str, ruleset: str) -> Iterator[tuple[str, list[Record]]]:
    """Yield a name and the records of each log in which one key is lost, doubled or wrong, or an evaluation is."""
    listed = records(benchmark)
    for key, rule in rule_file(benchmark, ruleset).items():
        at = next((place for place, (name, *_) in enumerate(listed) if name == key), None)
        if at is None:
            continue
        if rule["REQ"] in ("EXACTLY_ONE", "AT_LEAST_ONE"):
            yield f"{key} removed", [record for record in listed if record[0] != key]
        if rule["REQ"] == "EXACTLY_ONE":
            other = "another" if isinstance(listed[at][1], str) else (listed[at][1] or 0) + 1
            yield f"{key} doubled", [*listed[: at + 1], (key, other, listed[at][2]), *listed[at + 1 :]]
        if "CHECK" in rule and key not in OF_EVENTS:
            for value in wrong(listed[at][1]):
                yield f"{key} = {value!r}", [*listed[:at], (key, value, {}), *listed[at + 1 :]]
    evaluations = [place for place, (name, *_) in enumerate(listed) if name == "eval_accuracy"]
    for name, values in {
        "missed": [METRICS[benchmark][0]] * 2,
        "above 1": [1.5, METRICS[benchmark][1]],
        "below 0": [METRICS[benchmark][0], -0.1],
    }.items():
        changed = dict(zip(evaluations, values, strict=True))
        yield f"evaluation {name}", [(k, changed.get(n, v), m) for n, (k, v, m) in enumerate(listed)]
    step = OWN[benchmark]["global_batch_size"]
    for name, shifts in {"first": (step, step), "second": (0, 3 * step), "no count": (None, None)}.items():
        moved = dict(zip(evaluations, shifts, strict=True))
        yield (
            f"evaluation {name}",
            [
                (k, v, {} if n in moved and moved[n] is None else {c: s + (moved.get(n) or 0) for c, s in m.items()})
                if k == "eval_accuracy"
                else (k, v, m)
                for n, (k, v, m) in enumerate(listed)
            ],
        )


@pytest.mark.parametrize(("benchmark", "ruleset"), RULES)
def test_a_log_made_from_the_rule_file_is_valid_for_us_and_for_mlperf(
    benchmark: str, ruleset: str, tmp_path: Path
) -> None:
    assert rule_file(benchmark, ruleset).keys() - {name for name, *_ in records(benchmark)} <= {
        *("epoch_start", "epoch_stop"),
    }
    path = write(tmp_path / "result_0.txt", records(benchmark), start_ms=STARTS_MS[ruleset])
    verdict = official_verdict(path, ruleset=ruleset)
    assert (verdict.passed, verdict.messages) == (True, ())
    result = parse(path)
    assert [finding for finding in result.findings if finding.severity == "error"] == [] and result.valid
    assert result.converged and result.eval_final == METRICS[benchmark][1]


IN_GATE = {("dlrmv4", "6.1.0"), ("qwen35_397b_grpo", "6.1.0"), ("deepseekv3_671b", "6.1.0")}
"""Those with the most rules."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("benchmark", "ruleset"), [pytest.param(*each, marks=[] if each in IN_GATE else pytest.mark.slow) for each in RULES]
)
def test_every_damaged_log_that_mlperf_refuses_is_refused(benchmark: str, ruleset: str, tmp_path: Path) -> None:
    """We refuse more only where a size is not a whole number above 0; a key of 6.1.0 alone is a warning of ours."""
    only_we, only_they, count = [], [], 0
    for name, listed in damaged(benchmark, ruleset):
        path, count = write(tmp_path / "bad.txt", listed, start_ms=STARTS_MS[ruleset]), count + 1
        findings = compliance.judge(logs.read(path))
        errors = [finding.what for finding in findings if finding.severity == "error"]
        is_new = name.removesuffix(" removed") in DISCLOSED
        ours = bool(errors) or (is_new and any(finding.rule == "LOG-10" for finding in findings))
        theirs = official_verdict(path, ruleset=ruleset).passed is False
        is_stricter = any("an integer above 0" in what for what in errors)
        only_we += [(name, errors)] if ours and not theirs and not is_stricter else []
        only_they += [name] if theirs and not ours else []
    assert (only_we, only_they) == ([], [])
    assert count > 80


def test_an_open_log_of_flux1_has_its_evaluations_under_the_rule_files_own_key(tmp_path: Path) -> None:
    closed = [(k, "open" if k == "submission_division" else v, m) for k, v, m in records("flux1")]

    def both(value: float | None = None, **at: Any) -> list[Record]:
        """The log, in which each evaluation is repeated under the other key, with this value."""
        other = "averaged_validation_loss"
        twice = [
            [(k, v, m), (other, value or v, at or m)] if k == "eval_accuracy" else [(k, v, m)] for k, v, m in closed
        ]
        return [record for each in twice for record in each]

    for listed, rules in (
        (both(), []),
        (closed, ["LOG-10"]),
        (both(0.6), ["LOG-07"]),
        (both(step=1), ["EVL-03"]),
    ):
        path = write(tmp_path / "result_0.txt", listed)
        errors = [finding.rule for finding in compliance.judge(logs.read(path)) if finding.severity == "error"]
        assert (errors, official_verdict(path, ruleset="6.1.0").passed) == (rules, not rules)


def test_flux1_is_evaluated_every_262144_samples_in_whole_steps(tmp_path: Path) -> None:
    """As the published runs are: those with a batch of 2,304 every 262,656 samples."""
    for places, rules in (
        ((262_656, 525_312), []),
        ((262_656, 523_008), ["EVL-01"]),
        ((2_304, 4_608), ["EVL-01", "EVL-02"]),
    ):
        evaluations = list(zip(places, METRICS["flux1"], strict=True))
        path = write(tmp_path / "result_0.txt", records("flux1", evaluations, global_batch_size=2304))
        problems = compliance.judge(logs.read(path))
        assert [finding.rule for finding in problems if finding.rule.startswith("EVL")] == rules


def references(benchmark: str, ruleset: str) -> list[int]:
    """Return the samples of the reference's runs at the batch size of OWN."""
    points = json.loads((Path(rcp_checker.__file__).parent / f"training_{ruleset}/rcps_{benchmark}.json").read_text())
    (point,) = (point for point in points.values() if point["BS"] == OWN[benchmark]["global_batch_size"])
    samples: list[int] = point.get("Epochs to converge") or point["samples to converge"]
    return samples


def evaluations_until(benchmark: str, samples: int, run: int) -> list[tuple[int, float]]:
    """Return the evaluations of a run that reaches the target at these samples."""
    grid, gbs = BENCHMARKS[benchmark].grid, OWN[benchmark]["global_batch_size"]
    first = grid.first(gbs) if grid else samples - 10 * gbs
    every = grid.every(gbs) if grid and grid.every and not grid.may_skip else samples - first
    before, last = METRICS[benchmark]
    better = -1 if before > last else 1
    places = range(first, samples, every) if every else ()
    return [*((at, before - better * 1.7e-6 * run) for at in places), (samples, last + better * 1.3e-6 * run)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("benchmark", "ruleset", "num_runs"),
    [
        *(("qwen35_397b_grpo", "6.1.0", 3), ("dlrmv4", "6.1.0", 10)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("gpt3", "4.1.0", 3), ("llama31_405b", "6.0.0", 3), ("flux1", "6.1.0", 10)),
                *(("gpt_oss_20b", "6.1.0", 10), ("deepseekv3_671b", "6.1.0", 3)),
            )
        ),
    ],
)
def test_runs_like_the_reference_score_as_mlperfs_summariser_does(
    benchmark: str, ruleset: str, num_runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"example/results/box/{benchmark}"
    folder.mkdir(parents=True)
    (tmp_path / "example/systems").mkdir()
    (tmp_path / "example/systems/box.json").write_text(json.dumps(DESCRIPTION))
    for run, samples in enumerate(references(benchmark, ruleset)[:num_runs]):
        listed = records(benchmark, evaluations_until(benchmark, samples, run), seed=run)
        start_ms = STARTS_MS[ruleset] + 86_400_000 * run
        write(folder / f"result_{run}.txt", listed, start_ms=start_ms, step_ms=60_000 + 100 * run)
    scored = score(folder, ruleset=ruleset)
    assert [finding.what for finding in scored.findings if finding.severity == "error"] == []
    assert scored.valid and scored.num_runs_required == num_runs and scored.disagreements == ()
    for _ in range(2):  # only the second time with the factor that the first time has written
        summary = result_summarizer.summarize_results(str(tmp_path / "example"), "training", ruleset)[0]
    capsys.readouterr()
    (minutes,) = summary[benchmark]
    assert float(minutes) == pytest.approx(scored.official_minutes)


def test_a_ruleset_without_the_benchmark_says_so(tmp_path: Path) -> None:
    for run in range(3):
        write(tmp_path / f"result_{run}.txt", records("llama31_405b", seed=run))
    scored = score(tmp_path, ruleset="6.1.0")
    assert not scored.valid and scored.official_minutes is None
    assert "ruleset 6.1.0 has no rules for llama31_405b" in [finding.what for finding in scored.findings]
