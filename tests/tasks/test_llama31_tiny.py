"""The recipe of llama31_8b trains a tiny Llama to a target on rows of Megatron-LM's files; MLPerf passes its log."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench.contract import mllog, plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.mlperf import reader
from bench.mlperf.official import official_verdict
from bench.mlperf.result import parse
from bench.planning import compose
from helpers import ranks
from helpers.megatron_tokens import write
from jobs.data import tiny_reports

NUM_REPORTS = 4000


def planned(folder: Path, *overrides: str) -> TrainingPlan:
    paths = [f"cluster.paths.{name}={folder}" for name in ("data", "model", "logs")]
    words = ("task=llama31_tiny", "cluster=local", "cluster.device=cpu", "cluster.ranks_per_node=1")
    return plan_kinds.required(compose.compose([*words, *paths, *overrides]), TrainingPlan)


def reports(num_rows: int, seed: int) -> list[np.ndarray]:
    """Return generated reports as documents of tokens."""
    tokens, counts = tiny_reports.rows(num_rows, seq_length=96, seed=seed, with_summaries=False)
    return [row[is_real] for row, is_real in zip(tokens, counts, strict=True)]


@pytest.mark.long
def test_the_recipe_is_that_of_llama31_8b() -> None:
    tiny, full = planned(Path("/unused")), compose.compose(["task=llama31_8b", "cluster=dgxh200"])
    own = {"global_batch_size", "micro_batch_size", "lr", "lr_warmup_steps", "eval_every_samples", "recompute"}
    for name in type(tiny.recipe).__slots__:
        assert name in own or getattr(tiny.recipe, name) == getattr(full.config.training_recipe, name), name
    assert tiny.max_steps == 1_200_000 and tiny.config.training.starts_from.name == "random"
    assert (tiny.submission.benchmark, tiny.submission.division) == ("llama31_8b", "open")
    assert "not a submission" in tiny.submission.org


@pytest.mark.trains
def test_a_tiny_llama_reaches_the_target_on_rows_of_megatrons_files(tmp_path: Path) -> None:
    sizes = ("data.seq_length=96", f"data.train_rows={NUM_REPORTS}", "data.eval_rows=32")
    sooner = ("task.training.target_eval_loss=0.99", "recipe.eval_every_samples=512")
    plan = planned(tmp_path, "data=c4_mlperf", *sizes, *sooner)
    write(tmp_path, str(plan.data.files), reports(NUM_REPORTS, seed=1))
    write(tmp_path, str(plan.data.eval_files), reports(100, seed=2))
    folder = ranks.write(plan, tmp_path / "run")
    ((code, printed),) = ranks.ended(plan, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    assert code == 0, printed
    result = parse(folder / "result_0.txt")
    assert result.valid and result.converged, result.findings
    assert result.eval_final is not None and result.eval_final <= 0.99
    for ruleset in ("5.1.0", "6.0.0", "6.1.0"):
        assert official_verdict(folder / "result_0.txt", ruleset=ruleset).passed
    records = reader.read(folder / "result_0.txt")[0]
    rates = [record.metadata["lr"] for record in records if record.key == mllog.TRAIN_LOSS]
    steps = [record.metadata["step"] for record in records if record.key == mllog.TRAIN_LOSS]
    assert rates == pytest.approx([plan_kinds.learning_rate(plan, step) for step in steps])
    assert re.search(r'"key": "opt_learning_rate_decay_steps", "value": 1199984', (folder / "result_0.txt").read_text())
