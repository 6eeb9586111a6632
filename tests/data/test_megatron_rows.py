"""Rows in Megatron-LM's files are those of megatron-core's GPTDataset, and damaged files are refused."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import preflight
from bench.contract import megatron_files, mllog, plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from bench.planning import compose
from helpers.megatron_tokens import write
from jobs.data import rows as rows_of
from jobs.data.megatron_rows import MegatronTokens
from jobs.tasks import inputs

VOCABULARY = 5000


def documents(number: int, *, seed: int = 0, longest: int = 60, dtype: Any = np.uint16) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCABULARY, size=rng.integers(1, longest), dtype=dtype) for _ in range(number)]


def gpt_dataset(folder: Path, name: str, *, num_samples: int, seq_length: int, seed: int) -> Any:
    """Return megatron-core's data set of the same files."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, eod=-7, pad=-1, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend_per_split=[([str(folder / name)], None), None, None],
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(folder / f"cache_{num_samples}_{seq_length}_{seed}"),
    )
    low = IndexedDataset(str(folder / name), multimodal=False, mmap=True)
    every = np.arange(low.sequence_lengths.shape[0], dtype=np.int32)
    return GPTDataset(low, str(folder / name), every, num_samples, Split.train, config)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_rows_and_their_order_are_those_of_gpt_dataset(tmp_path: Path, dtype: Any) -> None:
    """One epoch, several, and several whose last one is short enough to be shuffled separately."""
    write(tmp_path, "docs", documents(300, dtype=dtype))
    total = sum(map(len, documents(300, dtype=dtype)))
    per_epoch = (total - 1) // 32
    for seed, num_rows in (
        (1, 10),
        (1, per_epoch),
        (7, per_epoch + 5),
        (7, 2 * per_epoch - 3),
        (5, per_epoch + int(0.8 * per_epoch)),
        (3, 3 * per_epoch + 20),
    ):
        theirs = gpt_dataset(tmp_path, "docs", num_samples=num_rows, seq_length=32, seed=seed)
        ours = MegatronTokens(tmp_path, "docs", num_rows=num_rows, seq_length=32, seed=seed, vocab_size=VOCABULARY)[
            np.arange(num_rows)
        ]
        samples = [theirs[at] for at in range(num_rows)]
        np.testing.assert_array_equal(ours[:, :-1], np.stack([one["tokens"].numpy() for one in samples]))
        np.testing.assert_array_equal(ours[:, 1:], np.stack([one["labels"].numpy() for one in samples]))


def test_rows_without_a_seed_are_the_stream_of_the_file(tmp_path: Path) -> None:
    docs = documents(40)
    write(tmp_path, "docs", docs)
    stream = np.concatenate(docs).astype(np.int32)
    read = MegatronTokens(tmp_path, "docs", num_rows=9, seq_length=50, seed=None, vocab_size=VOCABULARY)
    for row in range(9):
        np.testing.assert_array_equal(read[np.array([row])][0], stream[50 * row : 50 * row + 51])


def test_the_checksum_changes_with_the_index_and_the_size_of_the_tokens(tmp_path: Path) -> None:
    docs = documents(40)

    def sha256() -> str:
        return MegatronTokens(tmp_path, "docs", num_rows=9, seq_length=50, seed=None, vocab_size=VOCABULARY).sha256

    tokens = write(tmp_path, "docs", docs)
    first = sha256()
    os.truncate(tokens, tokens.stat().st_size + 2)
    longer = sha256()
    write(tmp_path, "docs", [np.concatenate(docs[:2]), *docs[2:]])
    assert len({first, longer, sha256()}) == 3


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingPlan:
    """Return a tiny plan of data=c4_mlperf whose files are in DATADIR."""
    monkeypatch.setenv("DATADIR", str(tmp_path))
    changes = ("data=c4_mlperf", "data.seq_length=32", "data.train_rows=64", "data.eval_rows=8")
    tiny = ("task=pretrain_tiny", "cluster=local", "cluster.ranks_per_node=1", "recipe.eval_every_samples=32")
    folder = f"cluster.paths.data={tmp_path}"
    composed = compose.compose([*tiny, *changes, f"model.vocab_size={VOCABULARY}", folder, "model.max_seq_length=64"])
    composed = plan_kinds.required(composed, TrainingPlan)
    write(tmp_path, str(composed.data.files), documents(200, seed=1))
    write(tmp_path, str(composed.data.eval_files), documents(40, seed=2))
    return composed


@pytest.mark.long
def test_a_plan_reads_its_rows_in_the_order_of_the_trials_seed(plan: TrainingPlan, tmp_path: Path) -> None:
    with mllog.Writer(tmp_path / "log") as log:
        first, evaluation = inputs.open_rows(plan, log, seed=1)
        other, _ = inputs.open_rows(plan, log, seed=2)
        repeated, _ = inputs.open_rows(plan, log, seed=1)
    order = np.stack([next(rows_of.train_order(plan, seed=1))])
    np.testing.assert_array_equal(order[0], np.arange(plan.batch.global_batch_size))
    assert (first.read(order[0])[0] == repeated.read(order[0])[0]).all()
    assert (first.read(order[0])[0] != other.read(order[0])[0]).any()
    stream = np.concatenate(documents(40, seed=2))
    np.testing.assert_array_equal(evaluation.read(np.arange(8))[0][:, :-1], stream[: 8 * 32].reshape(8, 32))
    assert rows_of.real_tokens(first, np.array([0, 1, -1])) == 64
    logged = [json.loads(line[9:]) for line in (tmp_path / "log").read_text().splitlines()]
    sums = [record["value"] for record in logged if record["metadata"].get("input") == mllog.TRAIN_ROWS]
    assert len(sums) == 3 and len(set(sums)) == 1, "the checksum is that of the files"


@pytest.mark.long
def test_every_token_of_a_row_is_predicted(plan: TrainingPlan) -> None:
    from jobs.data.micro_batches import targets

    rows = rows_of.load(plan, "eval")
    stream = np.concatenate(documents(40, seed=2))
    tokens, labels, weights, positions = targets(rows, np.array([0, 3, -1]))
    assert tokens.shape == labels.shape == weights.shape == positions.shape == (3, 32)
    np.testing.assert_array_equal(labels[1].numpy(), stream[3 * 32 + 1 : 4 * 32 + 1])
    assert weights.sum(dim=1).tolist() == pytest.approx([1, 1, 0]) and (weights[0] > 0).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lost", "No such file"),
        ("no index", "not an index of Megatron-LM"),
        ("short index", "bytes, but its header requires [0-9,]+ bytes"),
        ("short tokens", "lists more tokens"),
        ("odd bytes", "but must have a multiple of [0-9]+ bytes"),
        ("floats", "token type 7"),
        ("few", "too few for 64 rows|too few for 8 rows"),
        ("vocabulary", "but the vocabulary has 5,000"),
    ],
)
def test_damaged_files_are_refused(plan: TrainingPlan, tmp_path: Path, damage: str, message: str) -> None:
    index, tokens = megatron_files.paths(tmp_path, str(plan.data.eval_files))
    match damage:
        case "lost":
            tokens.unlink()
        case "no index":
            index.write_bytes(b"x" * 100)
        case "short index":
            os.truncate(index, index.stat().st_size - 8)
        case "short tokens":
            os.truncate(tokens, tokens.stat().st_size // 4 * 2)
        case "odd bytes":
            os.truncate(tokens, tokens.stat().st_size - 1)
        case "floats":
            data = bytearray(index.read_bytes())
            data[17] = 7
            index.write_bytes(data)
        case "few":
            write(tmp_path, str(plan.data.eval_files), documents(2))
        case _:
            write(tmp_path, str(plan.data.eval_files), [np.full(400, VOCABULARY, dtype=np.int32)])
    with pytest.raises(ConfigError, match=message) as refusal:
        rows_of.load(plan, "eval").read(np.arange(8))
    assert refusal.value.rule == "CFG-06"
    if damage in ("lost", "no index", "short index", "odd bytes", "floats", "few"):
        problems = [finding for finding in preflight.before_start(plan) if finding.rule == "CFG-06"]
        assert [str(plan.data.eval_files) in finding.where for finding in problems] == [True]
        assert damage == "few" or "runstop fetch mlperf llama31_8b" in problems[0].fix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.eval_files=null", "data.eval_files is not set"),
        ("data.train_rows=null", "data.train_rows is not set"),
        ("data.document_mask=true", "document_mask is true"),
        ("data.answer_only=true", "answer_only is true"),
    ],
)
def test_settings_that_the_files_cannot_fulfil_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.compose(["task=pretrain_8b", "cluster=dgxh200", "data=c4_mlperf", change])


@pytest.mark.long
def test_the_reader_needs_no_torch() -> None:
    import subprocess

    code = "import jobs.data.megatron_rows, sys; assert not {'torch', 'megatron'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert dataclasses.is_dataclass(megatron_files.Index)
