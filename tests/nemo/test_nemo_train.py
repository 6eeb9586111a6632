"""NeMo's own loop compared with engine=megatron: equal losses from the same base checkpoint and rows."""

import os
import subprocess
from pathlib import Path

import pytest

from bench.backends.local import free_port
from bench.contract import mllog, run_files
from bench.contract.plan import Plan
from bench.mlperf import reader
from bench.mlperf.result import parse
from helpers import ranks
from helpers.paths import ROOT

PYTHON = Path(os.environ.get("NEMO_PYTHON") or Path.home() / ".cache/runstop/nemo/bin/python")
pytestmark = [
    pytest.mark.trains,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment of NeMo: see docs/nemo.md, and set NEMO_PYTHON"),
]
WHOLE_MODEL = ("task.training.trains=all", "task.training.lora=null", "task.training.target_eval_loss=null")
SHORT_RUN = ("task.benchmark=null", "recipe.log_every_steps=1", "recipe.eval_every_samples=80", "recipe.eval_skip=0")
GPT = ("model=gpt3_126m", "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=256")
TINY_GPT = (*GPT, "model.num_attention_heads=4", "model.num_query_groups=4", "model.vocab_size=128")


def trained(planned: Plan, folder: Path) -> Path:
    """Run the plan's trial with its interpreter, and return its log."""
    ranks.write(planned, folder)
    argv, size = planned.commands[-1].argv, planned.world.num_ranks
    shared = os.environ | planned.environment | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(argv, cwd=folder, env=env, **pipes) for env in places]  # type: ignore[call-overload]
    for code, output in ranks.finish(started):
        assert code == 0, output
    return folder / planned.trials[0].log


def nemo(tmp: Path, *overrides: str) -> Plan:
    return ranks.compose(tmp, "engine=nemo", f"engine.nemo.python={PYTHON}", *overrides)


def losses(log: Path) -> list[tuple[str, float, float]]:
    """Return training and evaluation losses: key, loss and learning rate, in order."""
    keys = (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY)
    return [(e.key, e.value, e.metadata.get("lr", 0.0)) for e in reader.read(log)[0] if e.key in keys]


@pytest.mark.parametrize("split", ["parallel.tp=1", "parallel.tp=2", "parallel.pp=2"])
def test_a_whole_model_learns_step_by_step_as_with_our_engine(prepared: Path, tmp_path: Path, split: str) -> None:
    words = (*WHOLE_MODEL, *SHORT_RUN, "task.training.max_steps=20", "recipe.lr_warmup_steps=4")
    ours = ranks.compose(prepared, "cluster.ranks_per_node=1", *words)
    ranks.run(ours, ranks.write(ours, tmp_path / "ours"), "jobs.tasks.train", "plan.json", "--trial", "0")
    expected = losses(tmp_path / "ours/result_0.txt")
    log = trained(nemo(prepared, *words, split), tmp_path / "nemo")
    actual = losses(log)
    assert len(actual) == 22 and [key for key, *_ in actual] == [key for key, *_ in expected]
    assert [loss for _, loss, _ in actual] == pytest.approx([loss for _, loss, _ in expected], abs=1e-4)
    assert [lr for *_, lr in actual] == pytest.approx([lr for *_, lr in expected])
    assert parse(log).valid


@pytest.mark.parametrize("split", ["parallel.tp=1", "parallel.tp=2", "parallel.pp=2"])
def test_adapters_learn_from_our_engine_s_base_and_load_in_it(prepared: Path, tmp_path: Path, split: str) -> None:
    words = (*SHORT_RUN, "task.training.max_steps=10", "task.training.target_eval_loss=null", "recipe.recompute=full")
    log = trained(nemo(prepared, *words, split), tmp_path / "nemo")
    [first, *_, last] = [loss for key, loss, _ in losses(log) if key == mllog.TRAIN_LOSS]
    assert last < first - 0.1
    assert parse(log).valid
    ours = ranks.compose(prepared, "cluster.ranks_per_node=1", *words)
    kept = tmp_path / "nemo" / run_files.adapters(0)
    outputs = ranks.ended(
        ours, ranks.write(ours, tmp_path / "ours"), "tests.helpers.probe", "evaluate", "plan.json", str(kept)
    )
    [actual] = [float(output.split("eval loss")[-1]) for code, output in outputs if code == 0]
    assert actual == pytest.approx(parse(log).eval_final, abs=1e-4)


def test_gpt_3_is_pre_trained_from_random_weights(prepared: Path, tmp_path: Path) -> None:
    """The rows are lora_tiny's, which the base task has made."""
    words = (*TINY_GPT, *SHORT_RUN, "task.training.max_steps=10", "recipe.lr_warmup_steps=1", "data.source=random")
    log = trained(nemo(prepared, "task=pretrain_tiny", *words), tmp_path / "nemo")
    trained_losses = [loss for key, loss, _ in losses(log) if key == mllog.TRAIN_LOSS]
    assert len(trained_losses) == 10 and trained_losses[0] == pytest.approx(4.85, abs=0.3)  # ln 128: it knows nothing
    assert parse(log).valid
