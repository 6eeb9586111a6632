"""GovReport's rows, from files made like the published ones, through the command line to what preflight asks for."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.preflight import data as preflight
from helpers import ranks
from jobs.data import rows as rows_of
from jobs.tasks import convert

parquet = pytest.importorskip("pyarrow.parquet")

SEQ_LENGTH, NUM_TRAIN, NUM_EVAL = 32, 70, 6
"""70 rows are more than one batch of the reader."""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    sizes = (
        "recipe.eval_every_samples=8",
        f"data.train_rows={NUM_TRAIN}",
        f"data.eval_rows={NUM_EVAL}",
        f"data.seq_length={SEQ_LENGTH}",
    )
    splits = ranks.compose(tmp_path, "cluster.ranks_per_node=1", *sizes)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(splits))
    return splits


def rows(num_rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random tokens and labels; the first 20 labels of a row do not count."""
    tokens = np.random.default_rng(num_rows).integers(0, 128, (num_rows, SEQ_LENGTH))
    labels = tokens.copy()
    labels[:, :20] = -100
    return list(zip(tokens, labels, strict=True))


def write_parquet(folder: Path, splits: dict[str, list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Write both splits in the layout of the Hugging Face data set: data/SPLIT-00000-of-0000N.parquet."""
    import pyarrow as arrow

    (folder / "data").mkdir(parents=True)
    for split, held in splits.items():
        for i, part in enumerate((held[:4], held[4:])):
            columns = {"input_ids": [t.tolist() for t, _ in part], "labels": [x.tolist() for _, x in part]}
            columns["attention_mask"] = [[1] * SEQ_LENGTH for _ in part]
            schema = arrow.schema([(name, arrow.list_(arrow.int32())) for name in columns])
            parquet.write_table(arrow.table(columns, schema=schema), folder / f"data/{split}-0000{i}-of-00002.parquet")


def write_npy(folder: Path, splits: dict[str, list[tuple[np.ndarray, np.ndarray]]], **changes: Any) -> None:
    """Write both splits as NVIDIA's convert_dataset.py does."""
    folder.mkdir(parents=True)
    for split, held in splits.items():
        dicts = [
            {"input_ids": t.astype(np.int32), "loss_mask": [int(x != -100) for x in labels], "seq_start_id": [0]}
            | changes
            for t, labels in held
        ]
        np.save(folder / split, np.array(dicts, dtype=object), allow_pickle=True)


def write_npy_by_protocol_5(folder: Path, splits: dict[str, list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Write the same rows with pickle protocol 5, which stores arrays as buffers."""
    write_npy(folder, splits)
    for path in [*folder.iterdir()]:
        held = np.load(path, allow_pickle=True)
        with path.open("wb") as file:
            header = {"shape": held.shape, "fortran_order": False, "descr": "|O"}
            np.lib.format.write_array_header_1_0(file, header)
            pickle.dump(held, file, protocol=5)


WRITERS = {"parquet": write_parquet, "npy": write_npy, "npy, protocol 5": write_npy_by_protocol_5}
BOTH = {"train": rows(NUM_TRAIN), "validation": rows(NUM_EVAL)}


def converted(tmp_path: Path) -> int:
    return convert.main(["rows", str(tmp_path / "plan.json"), str(tmp_path / "published"), str(tmp_path / "rows")])


@pytest.mark.parametrize("form", WRITERS)
def test_published_rows_are_converted(plan: Plan, tmp_path: Path, form: str, capsys: pytest.CaptureFixture) -> None:
    WRITERS[form](tmp_path / "published", BOTH)
    assert converted(tmp_path) == 0
    assert "train: 70 rows of 32 tokens, 37.5% count" in capsys.readouterr().out
    for name, split in (("train", "train"), ("eval", "validation")):
        tokens, counts = (np.load(tmp_path / "rows" / f"{name}_{part}.npy") for part in ("tokens", "counts"))
        np.testing.assert_array_equal(tokens, [tokens for tokens, _ in BOTH[split]])
        np.testing.assert_array_equal(counts, [labels != -100 for _, labels in BOTH[split]])
    findings = [*preflight.prepared_rows(tmp_path / "rows", plan.config.data), *preflight.manifest(tmp_path / "rows")]
    assert not findings, findings
    assert len(json.loads((tmp_path / "rows" / "manifest.json").read_text())["files"]) == 6


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "5 rows, but the plan needs 6 eval rows": ("parquet", {"validation": rows(NUM_EVAL)[:5]}),
    "7 rows, but the plan needs 6 eval rows": ("npy", {"validation": rows(NUM_EVAL) + rows(1)}),
    "row 0 has tokens of shape (31,)": ("parquet", {"train": [(t[1:], x[1:]) for t, x in rows(NUM_TRAIN)]}),
    "row 0 has token 1000": ("npy", {"train": [(np.full_like(t, 1000), x) for t, x in rows(NUM_TRAIN)]}),
    "the labels of row 0 do not match its tokens": (
        "parquet",
        {"train": [(t, np.roll(t, -1)) for t, _ in rows(NUM_TRAIN)]},
    ),
    "the folder has no file with the train rows": ("parquet", {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_other_rows_are_refused(plan: Plan, tmp_path: Path, message: str, capsys: pytest.CaptureFixture) -> None:
    form, changes = REFUSED[message]
    WRITERS[form](tmp_path / "published", BOTH | changes)
    if not changes:
        (tmp_path / "published" / "data").rename(tmp_path / "published" / "elsewhere")
    assert converted(tmp_path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_start_id": [0, 9]}, "row 0 has an unsupported document mask"),
        ({"loss_mask": [1] * 31}, "tokens of shape (32,) and labels of shape (31,)"),
        ({"loss_mask": Path("x")}, "the pickle refers to pathlib"),
    ],
)
def test_an_invalid_npy_is_refused_and_runs_no_code(
    plan: Plan, tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture
) -> None:
    write_npy(tmp_path / "published", BOTH, **changes)
    assert converted(tmp_path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_damaged_files_and_an_existing_folder_are_refused(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_npy(tmp_path / "published", BOTH)
    whole = (tmp_path / "published" / "train.npy").read_bytes()
    for damaged in (whole[:-100], b"", b"\x93NUMPY", whole[:200]):
        (tmp_path / "published" / "train.npy").write_bytes(damaged)
        assert converted(tmp_path) == 2
        assert "does not have rows of input_ids and loss_mask" in capsys.readouterr().err
    (tmp_path / "published" / "train.npy").unlink()
    (tmp_path / "published" / "train.parquet").write_bytes(os.urandom(100))
    assert converted(tmp_path) == 2
    assert "does not have rows of input_ids and labels" in capsys.readouterr().err
    (tmp_path / "rows").mkdir()
    assert converted(tmp_path) == 2
    assert "this folder already exists" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_reported(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_npy(tmp_path / "published", BOTH)
    with ranks.mounted(tmp_path / "small", "size=8k"):
        argv = ["rows", str(tmp_path / "plan.json"), str(tmp_path / "published"), str(tmp_path / "small" / "rows")]
        assert convert.main(argv) == 1
        assert not (tmp_path / "small" / "rows").exists()
    assert "a file cannot be read or written: No space left on device" in capsys.readouterr().err


def test_an_epoch_trains_each_row_at_most_once_in_an_order_of_its_seed_and_number(plan: Plan) -> None:
    """Of 70 rows in batches of 8, six are left out of each epoch, other ones in each."""
    order = rows_of.train_order(plan, 3)
    first, second = (np.stack([next(order) for _ in range(8)]) for _ in range(2))
    for epoch in (first, second):
        assert epoch.shape == (8, 8) and len(set(epoch.flat)) == 64 and set(epoch.flat) <= set(range(70))
    assert set(first.flat) != set(second.flat) and list(first.flat) != sorted(first.flat)
    repeated, other = (next(rows_of.train_order(plan, seed)).tolist() for seed in (3, 4))
    assert repeated == first[0].tolist() != other
