"""A trial's order of rows, micro-batches, steps and log, with scripted losses."""

import json
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.contract import checksums, mllog
from bench.contract.plan import Plan, Trial
from bench.errors import BenchError
from helpers import ranks
from jobs.engines import Fact, WarmUpTimes
from jobs.ranks.guard import Guard
from jobs.ranks.identity import Rank
from jobs.ranks.program import Begun
from jobs.tasks import train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what megatron-core imports is full of deprecated calls
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop

pytestmark = pytest.mark.skipif(ranks.DEVICE != "cpu", reason="no rank and no device: nothing here differs on a GPU")

SMALL = ("data.train_rows=10", "data.eval_rows=6", "recipe.global_batch_size=4", "recipe.eval_every_samples=8")


@cache
def composed(*overrides: str) -> Plan:
    return ranks.compose(Path("unused"), "cluster.ranks_per_node=1", "task.training.max_steps=300", *overrides)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that sets the DP and CP rank of this process; its device is the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))

    def set_rank(dp: int, cp: int) -> None:
        monkeypatch.setattr(loop.parallel_state, "get_data_parallel_rank", lambda: dp)
        monkeypatch.setattr(loop.parallel_state, "get_context_parallel_rank", lambda: cp)

    set_rank(0, 0)
    return set_rank


ROWS = rows_of.Rows(
    tokens=np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]], dtype=np.int32),
    counts=np.array([[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=bool),
)


def test_a_token_is_weighed_by_whether_its_successor_counts(place: Callable[[int, int], None]) -> None:
    """Tokens 1 and 2 of row 0 are followed by some that count, all but the last of row 1, none of row 2."""
    batch = loop.micro_batch(composed(*SMALL), ROWS, np.array([0, 1, 2, -1]))
    assert batch.tokens.tolist()[:3] == ROWS.tokens.tolist()
    assert batch.labels[:3, :3].tolist() == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    third = pytest.approx(1 / 3)
    assert batch.weights.tolist() == [[0, 0.5, 0.5, 0], [third, third, third, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 4


def test_context_parallel_ranks_take_an_early_and_a_late_part_of_the_same_rows(
    place: Callable[[int, int], None],
) -> None:
    plan, expected = composed(*SMALL), {0: [0, 3], 1: [1, 2]}
    plan = replace(plan, world=replace(plan.world, cp=2))
    for cp, places in expected.items():
        place(0, cp)
        batch = loop.micro_batch(plan, ROWS, np.array([0]))
        assert batch.position_ids.tolist() == [places]
        assert batch.tokens.tolist() == [[10 + i for i in places]]
        assert batch.labels.tolist() == [[[11, 12, 13, 10][i] for i in places]]
        assert batch.weights.tolist() == [[[0, 0.5, 0.5, 0][i] for i in places]]


def test_replicas_share_a_batch_row_by_row(place: Callable[[int, int], None]) -> None:
    """8 rows, two replicas, two rows a micro-batch."""
    plan = composed(*SMALL, "recipe.micro_batch_size=2")
    plan = replace(plan, world=replace(plan.world, dp=2))
    rows = rows_of.Rows(np.arange(32, dtype=np.int32).reshape(8, 4), np.ones((8, 4), dtype=bool))
    firsts = []
    for dp in range(2):
        place(dp, 0)
        mine = loop.micro_batches(plan, rows, np.array([7, 0, 6, 1, 5, 2, 4, 3]))
        firsts.append([batch.tokens[:, 0].tolist() for batch in mine])
    assert firsts == [[[28, 0], [24, 4]], [[20, 8], [16, 12]]]


def test_each_epoch_is_a_new_shuffle_by_the_seed_without_its_incomplete_batch() -> None:
    plan = composed(*SMALL)
    first, repeated, other = ([*islice(rows_of.train_order(plan, seed), 12)] for seed in (1, 1, 2))
    epochs = [np.concatenate(first[i : i + 2]).tolist() for i in range(0, 12, 2)]
    assert all(len(set(epoch)) == 8 and set(epoch) < set(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6, "an epoch must not repeat another"
    assert set().union(*epochs) == set(range(10)), "other rows are dropped in other epochs"
    assert np.array_equal(first, repeated)
    assert not any(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


def test_an_evaluation_sees_each_row_once() -> None:
    assert rows_of.eval_order(composed(*SMALL)).tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert rows_of.eval_order(composed(*SMALL, "data.eval_rows=8")).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


class ScriptedEngine:
    """An engine whose model is a script: step k's rows have losses that sum to 8 + k, evaluations have those given."""

    def __init__(self, eval_losses: tuple[float, ...]) -> None:
        self.batches: list[list[int]] = []
        self.eval_losses = iter(eval_losses)

    def facts(self) -> list[Fact]:
        return [("attention_backend", "scripted", {"requested": "nothing"})]

    def train_step(self, rows: str, indices: np.ndarray, step: int) -> float:
        assert rows == "rows to train" and step == len(self.batches) + 1
        self.batches.append(indices.tolist())
        return 8.0 + step

    def mean_loss(self, share: float) -> float:
        return share / 8

    def evaluate(self, rows: str) -> float:
        assert rows == "rows to eval"
        return next(self.eval_losses)


class NamedRows(str):
    """Rows that no engine reads."""

    sha256 = None


class Course:
    """A trial of a scripted engine, and its log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, eval_losses: tuple[float, ...] = ()) -> None:
        self.path, self.engine = folder / "result_0.txt", ScriptedEngine(eval_losses)
        monkeypatch.setattr(rows_of, "load", lambda plan, name, seed: NamedRows(f"rows to {name}"))
        monkeypatch.setattr(rows_of, "real_tokens", lambda rows, indices: 10 * len(indices))

    @property
    def batches(self) -> list[list[int]]:
        return self.engine.batches

    def run(self, plan: Plan, seed: int = 1, saving: Any = None) -> "Course":
        with mllog.Writer(self.path) as log:
            log.start(mllog.RUN_START)
            trial = Trial(index=0, seed=seed, log=self.path.name)
            train.train(train.Loop(plan, self.engine, trial, log, saving=saving))
        return self

    def records(self, *keys: str) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return key, value and metadata of the log's lines, read as JSON."""
        lines = (json.loads(line.removeprefix(":::MLLOG ")) for line in self.path.read_text().splitlines())
        return [(line["key"], line["value"], line["metadata"]) for line in lines if line["key"] in keys]


TARGET = "task.training.target_eval_loss=0.925"


@pytest.mark.parametrize(
    ("override", "eval_losses", "blocks", "status"),
    [
        (TARGET, (0.95, 0.926, 0.9251), [(0, 192), (192, 240), (240, 288), (288, 300)], "aborted"),
        (TARGET, (0.95, 0.925), [(0, 192), (192, 240)], "success"),
        (TARGET, (0.5,), [(0, 192)], "success"),
        (
            "task.training.target_eval_loss=null",
            (0.95, 0.5, 0.6, 0.7),
            [(0, 192), (192, 240), (240, 288), (288, 300)],
            "success",
        ),
    ],
)
def test_a_trial_ends_at_its_target_or_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    override: str,
    eval_losses: tuple[float, ...],
    blocks: list[tuple[int, int]],
    status: str,
) -> None:
    """In batches of 8, 384 samples are 48 steps, and the official rule skips FLOOR(0.125 * 8 + 2) = 3 evaluations."""
    course = Course(monkeypatch, tmp_path, eval_losses).run(composed(override))
    assert len(course.batches) == blocks[-1][1]
    expected: list[tuple[str, float | str | None, int]] = []
    for (begin, end), loss in zip_longest(blocks, eval_losses):
        expected += [("block_start", None, begin), ("block_stop", None, end)]
        if loss is not None:
            expected += [("eval_start", None, end), ("eval_accuracy", loss, end), ("eval_stop", None, end)]
    expected.append(("run_stop", status, blocks[-1][1]))
    keys = {key for key, _, _ in expected}
    records = [(key, where.get("status", value), where["step"]) for key, value, where in course.records(*keys)]
    assert records == expected
    assert all(where["samples_count"] == 8 * where["step"] for _, _, where in course.records(*keys) if where["step"])


@pytest.mark.parametrize(
    ("losses", "saved"), [((0.95, 0.93, 0.93), [100, 200, 300, 300]), ((0.95, 0.92), [100, 200, 240])]
)
def test_the_state_is_saved_at_the_interval_and_after_the_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, losses: tuple[float, ...], saved: list[int]
) -> None:
    steps: list[int] = []
    saving = SimpleNamespace(done=0, is_due=lambda step: step % 100 == 0, save=steps.append)
    Course(monkeypatch, tmp_path, losses).run(
        composed(TARGET, "task.training.checkpoint_every_steps=100", "task.benchmark=null"), saving=saving
    )
    assert steps == saved


def test_training_losses_are_means_over_the_batch_with_the_learning_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every 80 steps, and after the last of 300; each row has 10 real tokens."""
    plan = composed("task.training.target_eval_loss=null", "recipe.log_every_steps=80", "recipe.lr=0.4")
    course = Course(monkeypatch, tmp_path, (1.0, 1.0, 1.0, 1.0)).run(plan)
    losses = [
        (value, where["step"], where["samples_count"], where["lr"]) for _, value, where in course.records("train_loss")
    ]
    cosine = [0.4 * (1 + np.cos(np.pi * (step - 1) / 300)) / 2 for step in (80, 160, 240, 300)]
    expected = [
        ((8 + step) / 8, step, 8 * step, pytest.approx(lr))
        for step, lr in zip((80, 160, 240, 300), cosine, strict=True)
    ]
    assert losses == expected
    stats = [value for _, value, _ in course.records("tracked_stats")]
    assert [len(each["step_times"]) for each in stats] == [80, 80, 80, 60]
    assert [each["real_tokens"] for each in stats] == [80 * 80, 80 * 80, 80 * 80, 60 * 80]
    assert [each["throughput"] * each["train_step_time"] for each in stats] == pytest.approx([8] * 4)


def test_the_trial_seed_orders_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batches = []
    for name, seed in (("first", 1), ("repeated", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        batches.append(Course(monkeypatch, tmp_path / name, (0.5,)).run(composed(TARGET), seed).batches)
    first, repeated, other = batches
    assert first == repeated
    assert not any(one == two for one, two in zip(first, other, strict=True))
    assert len({row for batch in first for row in batch}) == 192 * 8, "no row repeats in an epoch"


def test_the_watchdog_receives_the_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading and saving are phases of their own: only steps and evaluations have limits."""
    steps = [("training", step) for step in range(1, 301)]
    first, second = ([("evaluation", step), ("training", step)] for step in (192, 240))
    begun = [("loading", 0), ("training", 0), *steps[:192], *first, *steps[192:240], *second]
    at_288 = [("evaluation", 288), ("training", 288)]
    missed = [*begun, *steps[240:288], *at_288, *steps[288:], ("saving", 300)]
    for losses, expected in (((0.95, 0.925), [*begun, ("saving", 240)]), ((0.95, 0.94, 0.93), missed)):
        (tmp_path / str(losses)).mkdir()
        course, reported = Course(monkeypatch, tmp_path / str(losses), losses), []
        with mllog.Writer(course.path) as log:
            log.start(mllog.RUN_START)
            trial = Trial(index=0, seed=1, log=course.path.name)
            loop = train.Loop(
                composed(TARGET),
                course.engine,
                trial,
                log,
                lambda *setting, reported=reported: reported.append(setting[:2]),
            )
            train.train(loop)
        assert reported == expected


def test_a_group_that_rejoins_after_the_last_step_only_logs_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    course, trial = Course(monkeypatch, tmp_path), Trial(index=0, seed=1, log="result_0.txt")
    plan = composed("task.training.target_eval_loss=null")
    local_sgd: Any = SimpleNamespace(rejoin=lambda step: plan.max_steps)
    with mllog.Writer(course.path) as log:
        log.start(mllog.RUN_START)
        train.train(train.Loop(plan, course.engine, trial, log, local_sgd=local_sgd))
    assert course.batches == []
    (end,) = course.records("run_stop")
    assert (end[2]["status"], end[2]["step"]) == ("success", plan.max_steps)


def test_the_log_has_the_settings_of_local_sgd_and_the_facts_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    course = Course(monkeypatch, tmp_path)
    plan = composed("task=pretrain_tiny_local_sgd", "cluster.ranks_per_node=2", "recipe.local_sgd.every_steps=25")
    with mllog.Writer(course.path) as log:
        train.log_facts(plan, course.engine, log)
    ((_, groups, settings), (_, backend, _)) = course.records("local_sgd", "attention_backend")
    assert (groups, settings["group"], settings["every_steps"], backend) == (2, 0, 25, "scripted")


def test_the_expected_time_of_an_evaluation() -> None:
    """6 rows in batches of 4 are two batches."""
    reported: dict[str, float] = {}
    watchdog: Any = SimpleNamespace(expect=lambda **usual: reported.update(usual) or 120)
    train.expect(watchdog, WarmUpTimes(step_s=3, eval_batch_s=2.5), composed(*SMALL))
    assert reported == {"step_s": 3, "eval_s": 5}


def test_the_expected_time_of_an_evaluation_with_local_sgd() -> None:
    """Two groups share a batch of 8; the warm-up timed a batch of 4, and 12 rows are three of these."""
    reported: dict[str, float] = {}
    watchdog: Any = SimpleNamespace(expect=lambda **usual: reported.update(usual) or 120)
    overrides = ("task=pretrain_tiny_local_sgd", "cluster.ranks_per_node=2", "recipe.micro_batch_size=4")
    plan = composed(*overrides, "recipe.global_batch_size=8", "data.eval_rows=12")
    train.expect(watchdog, WarmUpTimes(step_s=3, eval_batch_s=2.5), plan)
    assert reported == {"step_s": 3, "eval_s": 7.5}


FULL_FINE_TUNING = ("task.training.trains=all", "task.training.lora=null")


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "saved"), [((), [("save", "adapters_3", True, "timed")]), (FULL_FINE_TUNING, [])]
)
def test_building_and_loading_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: tuple[str, ...], saved: list[tuple[Any, ...]]
) -> None:
    """Full fine-tuning loads the same base, and saves no adapters.

    The engine, which holds process groups, is freed before the ranks end.
    """
    plan, calls, course = composed(TARGET, *overrides), [], Course(monkeypatch, tmp_path, (0.5,))
    assert plan.base_dir == composed(TARGET).base_dir and plan.base_dir is not None
    trial = Trial(index=3, seed=4711, log=course.path.name)

    def note(name: str, *values: Any) -> None:
        calls.append((name, *values, "timed" if course.records("run_start") else "not timed"))

    engine: Any = course.engine
    engines, held = [engine], weakref.ref(engine)
    engine.warm_up = lambda steps, seed, profile: note("warm up", steps, seed)
    engine.load = lambda folder, adapters: note("load", str(folder), adapters)

    def save(folder: Path, *, adapters: bool) -> None:
        note("save", folder.name, adapters)
        folder.mkdir()
        checksums.write(folder, [])

    engine.save = save
    del engine, course.engine
    module = SimpleNamespace(
        start_ranks=lambda plan, who: None,
        end_ranks=lambda: note("end", "without an engine" if held() is None else "with one"),
        versions=dict,
        build=lambda plan, seed: note("build", seed) or engines.pop(),
    )
    monkeypatch.setattr(train, "engine_of", lambda plan: module)
    monkeypatch.setattr(rows_of, "load", lambda plan, name, seed: note(name) or NamedRows(f"rows to {name}"))
    monkeypatch.setattr(rows_of, "real_tokens", lambda rows, indices: 1)
    with mllog.Writer(course.path) as log:
        train.run(Begun(plan, trial, Rank(0, 0, 1, "", 0), log, tmp_path, Guard(tmp_path / "error")))
    assert calls == [
        ("build", 4711, "not timed"),
        ("load", plan.base_dir, False, "not timed"),
        ("warm up", 2, 4711, "not timed"),
        ("train", "timed"),
        ("eval", "timed"),
        *saved,
        ("end", "without an engine", "timed"),
    ]
    assert [value for _, value, _ in course.records("attached_file")] == ["adapters_3/manifest.json"] * len(saved)
    assert any(name.startswith("adapters") for name in plan.files) == bool(saved)
    assert bool(course.records("lora_rank", "lora_alpha", "lora_dropout")) == bool(saved)
    assert [value for _, value, _ in course.records("seed")] == [4711]
    assert [value for _, value, _ in course.records("attention_backend")] == ["scripted"]
    intervals = ("cache_clear", "init_start", "init_stop", "run_start", "run_stop")
    assert [key for key, _, _ in course.records(*intervals)] == list(intervals)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loss: float) -> None:
    course = Course(monkeypatch, tmp_path, (loss,))
    with pytest.raises(BenchError, match="the evaluation loss is (nan|inf) at step 192"):
        course.run(composed(TARGET))
    assert course.records("eval_accuracy", "run_stop") == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, [(False, None)]),
        ("dgx01 cleared\ndgx02 kept\ndgx03 cleared\n", [(True, "dgx01"), (False, "dgx02"), (True, "dgx03")]),
        ("dgx01\n", [(False, "dgx01")]),
    ],
)
def test_cleared_caches_are_logged_from_the_jobs_record(
    tmp_path: Path, written: str | None, expected: list[tuple[bool, str | None]]
) -> None:
    """The official checker requires `true`; a node that kept its caches or has no record must not have it."""
    output, log = tmp_path / "trial_0.caches", tmp_path / "result_0.txt"
    if written is not None:
        output.write_text(written)
    with mllog.Writer(log) as writer:
        train.log_caches(output, writer)
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["cache_clear"] * len(expected)
    assert [(line["value"], line["metadata"].get("node")) for line in lines] == expected
