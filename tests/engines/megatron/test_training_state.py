"""Checkpoints of training states on one rank: contents, full disks, damaged files, and loading by megatron-core."""

import itertools
import json
import shutil
import warnings
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import groups, plan_kinds
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError
from bench.planning import compose
from helpers import ranks
from helpers.failing_disk import failing

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from test_engine_units import TINY, composed, one_rank, random_rows  # noqa: F401

    from jobs.engines import rank_state
    from jobs.engines.megatron.engine import MegatronEngine
    from jobs.tasks import checkpoints
    from jobs.tasks.checkpoints import Checkpoints
    from jobs.weights import boxes as boxes_of
    from jobs.weights import checkpoint_reader

pytestmark = [
    pytest.mark.skipif(ranks.DEVICE != "cpu", reason="one gloo rank in the tests' own process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*is deprecated", "ignore::FutureWarning"),
]

ALL = ("task.training.trains=all", "task.training.lora=null", "task.training.max_steps=9")
SAVED = ("task.benchmark=null", "task.training.target_eval_loss=null", "task.training.checkpoint_every_steps=2")
NO_LOG: Any = SimpleNamespace(event=lambda *args, **metadata: None)
"""The log of a rank that writes no log."""
BATCHES = torch.tensor([[3, 0, 7, 5], [9, 1, 2, 4], [6, 8, 0, 1], [2, 3, 5, 9], [4, 6, 7, 8], [0, 1, 2, 3]]).numpy()


def started(run: Path, *overrides: str) -> tuple[MegatronEngine, Checkpoints, Plan]:
    """Return a new engine, and the checkpoints of its trial in a run folder."""
    plan = composed(*SAVED, *(overrides or ALL))
    engine = MegatronEngine(plan, seed=plan.trials[0].seed)
    return engine, Checkpoints(plan, plan.trials[0], engine, run, NO_LOG, rank=0), plan


def trained(engine: MegatronEngine, steps: range) -> list[float]:
    rows = random_rows(10)
    return [engine.mean_loss(engine.train_step(rows, BATCHES[step - 1], step)) for step in steps]


def saved(run: Path, *overrides: str) -> MegatronEngine:
    """Train for four steps, with checkpoints after two and four."""
    engine, saving, _ = started(run, *overrides)
    assert saving.resume() == 0
    for first in (1, 3):
        trained(engine, range(first, first + 2))
        saving.save(first + 1)
    saving.finish()
    return engine


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), data=st.data())
def test_flat_range_is_split_into_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    most = data.draw(st.sampled_from([2, 7, 1000]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes_of, "MOST_ELEMENTS", most)
        boxes = list(boxes_of.flat_range(tuple(shape), begin, end))
    cut = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
    assert [number for box in cut for number in box.flatten().tolist()] == list(range(begin, end))
    assert all(list(box.shape) == list(extent) for box, (_, extent) in zip(cut, boxes, strict=True))
    assert all(box.numel() <= most for box in cut)


@pytest.mark.parametrize("shape", [(2**26 + 1,), (2**14, 2**12), (1, 2**13, 2**13)])
def test_a_box_has_at_most_128_mib_in_fp32(shape: tuple[int, ...]) -> None:
    sizes = [4 * prod(extent) for _, extent in boxes_of.flat_range(shape, 0, prod(shape))]
    assert max(sizes) == 128 * 2**20 and sum(sizes) == 4 * prod(shape)


STATES = {
    "moments in bf16": ("precision=bf16", "recipe.moments=bf16"),
    "moments on the host": ("recipe.offload_moments=true",),
    "fp8": ("precision=fp8",),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", STATES)
def test_every_kind_of_state_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    engine = saved(tmp_path, *ALL, *STATES[kind])
    expected = trained(engine, range(5, 7))
    other, saving, _ = started(tmp_path, *ALL, *STATES[kind])
    assert saving.resume() == 4
    assert trained(other, range(5, 7)) == expected


@pytest.mark.long
def test_another_layout_continues_with_dropout_masks_that_were_not_used_before(tmp_path: Path) -> None:
    """Neither those of the start, nor those after another checkpoint of the trial."""
    engine, _, plan = started(tmp_path)
    saved(tmp_path)
    seed, sampled = plan.trials[0].seed, []
    for step in (0, 2, 4):
        torch.manual_seed(seed)
        if step:
            folder = tmp_path / "checkpoints" / "trial_0" / f"step_{step}"
            engine.load_state(folder, step=step, seed=seed, same_layout=False)
        sampled.append(tuple(torch.rand(4).tolist()))
    assert len(set(sampled)) == 3


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatron_core_loads_the_trained_weights(tmp_path: Path, precision: str) -> None:
    """It is a normal checkpoint: MODEL may point at it, and megatron-core's loader reads it."""
    engine = saved(tmp_path)
    other, _, _ = started(tmp_path / "other", *ALL, f"precision={precision}")
    other.load(tmp_path / "checkpoints" / "trial_0" / "step_4", adapters=False)
    weights, loaded = (dict(e.parts.unwrapped_chunks()[0].named_parameters()) for e in (engine, other))
    assert weights.keys() == loaded.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], weight.to(loaded[name].dtype)), name


@pytest.mark.long
@pytest.mark.parametrize("trains", [ALL, ("task.training.max_steps=9",)])
def test_checkpoint_has_trained_weights_only(tmp_path: Path, trains: tuple[str, ...]) -> None:
    engine = saved(tmp_path, *trains)
    names = checkpoint_reader.Reader(tmp_path / "checkpoints" / "trial_0" / "step_4").names()
    states = {name for name in names if not name.startswith("rng_state.")}
    weights = {name for name in states if not name.startswith("optimizer.")}
    trainable = [name for name, p in engine.parts.unwrapped_chunks()[0].named_parameters() if p.requires_grad]
    assert weights == {name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") for name in trainable}
    moments = ("exp_avg", "exp_avg_sq")
    assert states - weights == {f"optimizer.state.{moment}.{name}" for moment in moments for name in weights}


@pytest.mark.long
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = saved(tmp_path)
    expected = trained(engine, range(5, 7))
    path = tmp_path / "checkpoints" / "trial_0" / "step_4" / "rank_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    engine, saving, _ = started(tmp_path)
    assert saving.resume() == 2
    assert "step_4 is damaged (rank_0.distcp has another SHA-256); trying an older one" in capfd.readouterr().err
    assert trained(engine, range(3, 7))[2:] == expected
    for step in (2, 4):
        (tmp_path / "checkpoints" / "trial_0" / f"step_{step}" / "manifest.json").write_text("{")
    assert started(tmp_path)[1].resume() == 0


@pytest.mark.long
def test_disk_failure_at_any_moment_ends_the_trial_with_complete_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path)
    for at in itertools.count():
        engine, saving, _ = started(tmp_path)
        assert saving.resume() == 4
        trained(engine, range(5, 7))
        with failing(tmp_path, at) as disk:
            try:
                saving.save(6)
                saving.finish()
            except BenchError as error:
                assert error.rule == "CFG-08" and "cannot be written: No space left on device" in error.what
                assert "the next attempt resumes from the last checkpoint" in error.fix
            except OSError:
                assert "part" in disk.failed, "the main thread creates the folder; the guard handles all other errors"
            else:
                assert not disk.failed
        whole = list(checkpoints.complete(tmp_path / "checkpoints" / "trial_0"))
        assert [checkpoints.damage(saved_state, slice(None)) for saved_state in whole] == [""] * len(whole)
        assert {saved_state.step for saved_state in whole} >= {4}
        if not disk.failed:
            break
        shutil.rmtree(tmp_path / "checkpoints" / "trial_0" / "step_6", ignore_errors=True)
    assert at > 8 and [saved_state.step for saved_state in whole] == [6, 4]


@pytest.mark.long
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="saved with other settings: max_steps was 9, but is now 8"):
        started(tmp_path, *ALL[:2], "task.training.max_steps=8")[1].resume()
    manifest = tmp_path / "checkpoints" / "trial_0" / "step_4" / "manifest.json"
    described = json.loads(manifest.read_text())
    described["model"]["num_layers"] = 3
    manifest.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="num_layers is 3 instead of 2"):
        started(tmp_path)[1].resume()


def test_too_small_a_disk_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConfigError, match=r"3 checkpoints of 0\.0 GiB do not fit: 0\.0 GiB are free"):
        started(tmp_path)[1].resume()


@pytest.mark.long
def test_training_continues_while_a_copy_is_written(tmp_path: Path) -> None:
    assert saved(tmp_path).snapshot().is_copy


@pytest.mark.long
def test_state_is_written_at_once_without_room_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.engines import rank_state

    monkeypatch.setattr(rank_state, "MAX_HOST_MEMORY_SHARE", 0)
    engine = saved(tmp_path)
    assert not engine.snapshot().is_copy
    expected = trained(engine, range(5, 7))
    other, saving, _ = started(tmp_path)
    assert saving.resume() == 4
    assert trained(other, range(5, 7)) == expected


@pytest.mark.long
def test_groups_on_the_same_node_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ("cluster=local", "cluster.ranks_per_node=4", "parallel.groups=2")
    plan = groups.of_group(
        plan_kinds.required(compose.compose(["task=pretrain_tiny_local_sgd", *where]), plan_kinds.TrainingPlan)
    )
    monkeypatch.setattr(rank_state.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert plan.world.ranks_per_node == 2
    assert rank_state.has_room(plan, 200) and not rank_state.has_room(plan, 201), "four ranks, 80 % of 1,000 bytes"
