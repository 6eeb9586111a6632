"""Rows of documents, against loops over single tokens; blocks of files, against json reading the whole file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.contract.data import Data, DataSource
from bench.errors import ConfigError
from jobs.data import micro_batches, packing, records, rows, splits
from jobs.data.packing import Documents

LENGTHS = st.lists(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), max_size=30)
SEQ = st.integers(2, 24)


def chunked(listed: list[tuple[int, int]], seq_length: int, chunk: int) -> tuple[np.ndarray, Iterator[Documents]]:
    """Return ascending tokens of documents of (length, prompt), and the documents in chunks."""
    documents = np.array(listed, dtype=np.int32).reshape(-1, 2)
    tokens = np.arange(documents[:, 0].sum(), dtype=np.int32)
    with mock.patch.object(packing, "CHUNK_TOKENS", chunk):
        return tokens, iter(list(packing.chunks(tokens, documents, seq_length=seq_length)))


@pytest.mark.long
@given(listed=LENGTHS, seq_length=SEQ, chunk=st.integers(1, 100), answer_only=st.booleans())
def test_packing_loses_and_invents_no_token(
    listed: list[tuple[int, int]], seq_length: int, chunk: int, answer_only: bool
) -> None:
    tokens, parts = chunked(listed, seq_length, chunk)
    padded_rows = list(packing.packed(parts, seq_length=seq_length, answer_only=answer_only))
    flat = [token for part in padded_rows for token in part.tokens.ravel().tolist()]
    full = len(tokens) // seq_length * seq_length
    assert flat == tokens[:full].tolist()
    is_answer = [i >= prompt for length, prompt in listed for i in range(length)]
    counted = [count for part in padded_rows for count in part.counts.ravel().tolist()]
    assert counted == (is_answer[:full] if answer_only else [True] * full)
    assert [length for part in padded_rows for length in part.lengths] == [seq_length] * (full // seq_length)
    first = [i == 0 for length, _ in listed for i in range(length)]
    starts = [start for part in padded_rows for start in part.starts.ravel().tolist()]
    assert starts == [first[i] or i % seq_length == 0 for i in range(full)]


@given(cuts=st.lists(st.sets(st.integers(1, 7)), min_size=1, max_size=4), counted=st.integers(0, 2**32))
def test_documents_have_the_positions_and_weights_that_they_have_alone(cuts: list[set[int]], counted: int) -> None:
    """Against a loop over tokens: the first token of a document is predicted by none."""
    seq_length, shape = 8, (len(cuts), 8)
    starts = np.zeros(shape, dtype=bool)
    for row, places in enumerate(cuts):
        starts[row, [0, *places]] = True
    counts = np.array([counted >> i & 1 for i in range(starts.size)], dtype=bool).reshape(shape)
    tokens = np.arange(starts.size, dtype=np.int32).reshape(shape)
    packed_rows = rows.Rows(tokens, counts, starts=starts, document_mask=True)
    _, labels, weights, positions = micro_batches.targets(packed_rows, np.arange(len(cuts)))
    lengths = []
    for row, is_start in enumerate(starts.tolist()):
        place, is_weighted = 0, []
        for token in range(seq_length):
            place = 0 if is_start[token] else place + 1
            assert positions[row, token] == place
            lengths += [1] if place == 0 else []
            lengths[-1] = place + 1
            has_next = token + 1 < seq_length and not is_start[token + 1]
            is_weighted.append(has_next and bool(counts[row, token + 1]))
            assert not has_next or labels[row, token] == tokens[row, token + 1]
        assert (weights[row] > 0).tolist() == is_weighted
        assert weights[row].sum().item() == pytest.approx(1 if any(is_weighted) else 0)
    assert micro_batches.document_lengths(positions).tolist() == lengths


@given(listed=LENGTHS, seq_length=SEQ, chunk=st.integers(1, 100), answer_only=st.booleans())
def test_padding_cuts_and_fills_and_masks_agree(
    listed: list[tuple[int, int]], seq_length: int, chunk: int, answer_only: bool
) -> None:
    tokens, parts = chunked(listed, seq_length, chunk)
    padded_rows = [packing.padded(part, seq_length=seq_length, answer_only=answer_only, pad=-7) for part in parts]
    rows_of = [row for part in padded_rows for row in zip(part.tokens, part.counts, part.lengths, strict=True)]
    assert len(rows_of) == len(listed)
    start = 0
    for (length, prompt), (row, counts, real) in zip(listed, rows_of, strict=True):
        document = tokens[start : start + length].tolist()[:seq_length]
        assert row.tolist() == document + [-7] * (seq_length - len(document)) and real == len(document)
        first = prompt if answer_only else 0
        assert counts.tolist() == [first <= i < real for i in range(seq_length)]
        start += length


@pytest.mark.long
@given(listed=LENGTHS, which=st.data(), seq_length=SEQ)
def test_chosen_documents_stay_whole(listed: list[tuple[int, int]], which: st.DataObject, seq_length: int) -> None:
    tokens, parts = chunked(listed, seq_length, 10**9)
    mask = which.draw(st.lists(st.booleans(), min_size=len(listed), max_size=len(listed)))
    starts = np.cumsum([0, *(length for length, _ in listed)])
    expected = [tokens[a:b].tolist() for a, b, is_in in zip(starts, starts[1:], mask, strict=False) if is_in]
    for part in parts:
        chosen = part.chosen(np.array(mask))
        assert chosen.tokens.tolist() == sum(expected, []) and chosen.lengths.tolist() == [
            len(document) for document in expected
        ]


def config(**values: Any) -> Data:
    fixed = {"name": "d", "summary": "", "source": DataSource.dolly, "seq_length": 8, "answer_only": True}
    return Data(**{**fixed, "train_rows": 1, "eval_rows": 2, **values})


@pytest.mark.long
@given(
    listed=LENGTHS,
    share=st.one_of(st.none(), st.floats(0.01, 0.99)),
    packing=st.booleans(),
    seed=st.integers(0, 3),
    answer_only=st.booleans(),
)
@example(listed=[(10, 0), (10, 0), (4, 0)], share=None, packing=True, seed=0, answer_only=False)
def test_no_document_is_in_both_splits(
    listed: list[tuple[int, int]], share: float | None, packing: bool, seed: int, answer_only: bool
) -> None:
    documents = np.array(listed, dtype=np.int32).reshape(-1, 2)
    data = config(test_split=share, packing=packing, seed=seed, answer_only=answer_only)
    chosen = splits.choose(documents, data)
    assert not (chosen.train & chosen.eval).any()
    left_out = [not packing and answer_only and prompt >= 8 for _, prompt in listed]
    assert (~(chosen.train | chosen.eval)).tolist() == left_out
    sizes = [length for length, _ in listed]
    counted = {"num_documents": len(sizes), "num_tokens": sum(sizes), "longest": max(sizes, default=0)}
    if splits.are_enough(data, **counted):
        assert (
            splits.num_rows(documents[chosen.train], data) >= 1 and splits.num_rows(documents[chosen.eval], data) >= 2
        )
    if share is not None:
        assert chosen.eval.sum() == round(left_out.count(False) * share)
    elif packing:
        before = [sum(length for length, _ in listed[:i]) for i in range(len(listed))]
        assert chosen.eval.tolist() == [size < 2 * 8 for size in before]
    else:
        assert np.flatnonzero(chosen.eval).tolist() == [i for i, out in enumerate(left_out) if not out][:2]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
RECORDS = st.lists(st.fixed_dictionaries({"text": TEXT}, optional={"más": TEXT, "n": st.integers()}), max_size=12)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    written=RECORDS, size=st.integers(1, 60), form=st.sampled_from(("lines", "array", "indented")), ascii=st.booleans()
)
def test_blocks_of_any_size_hold_the_records_of_the_file(
    written: list[dict[str, Any]], size: int, form: str, ascii: bool, tmp_path: Path
) -> None:
    path = tmp_path / "c4.json"
    if form == "lines":
        text = "".join(json.dumps(record, ensure_ascii=ascii) + "\n" for record in written)
        assert [json.loads(line) for line in text.split("\n") if line] == written
    else:
        text = json.dumps(written, ensure_ascii=ascii, indent=3 if form == "indented" else None)
    path.write_bytes(text.encode())
    with mock.patch.object(records, "BLOCK_BYTES", size):
        cut = list(records.cut(path))
    read = [record for block in cut for record in records.read(block, config(source=DataSource.c4), dict)]
    assert read == written
    assert sum(block.num_bytes for block in cut) <= len(text.encode())


@pytest.mark.parametrize(
    "text", ['[{"text": ""}, 3]', '[3, {"text": ""}]', '[{"text": ""} {"text": ""}]', "[]x", '[{"a"']
)
def test_an_invalid_array_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=r"after \d records the file has .* instead of "):
        list(records.cut(tmp_path / "p.json"))


pmids = st.dictionaries(
    st.integers(0, 10**8).map(str),
    st.fixed_dictionaries(
        {"QUESTION": st.text(), "CONTEXTS": st.lists(st.text(), max_size=3), "LONG_ANSWER": st.text()},
        optional={"final_decision": st.sampled_from(["yes", "no", "maybe"]), "MESHES": st.lists(st.text(), max_size=2)},
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    written=pmids, size=st.integers(1, 400), indent=st.sampled_from([None, 4]), starts=st.sampled_from(["", "\ufeff"])
)
def test_blocks_of_pubmedqas_own_file_hold_its_records(
    written: dict[str, dict[str, Any]], size: int, indent: int | None, starts: str, tmp_path: Path
) -> None:
    """The file as the authors publish it: one object, by PMID. json reads the whole file, and we read blocks of it."""
    path = tmp_path / "ori_pqal.json"
    path.write_text(starts + json.dumps(written, indent=indent), encoding="utf-8")
    with mock.patch.object(records, "BLOCK_BYTES", size):
        cut = list(records.cut(path))
    data = config(source=DataSource.pubmedqa)
    read = [record for block in cut for record in records.read(block, data, dict)]
    assert [(one["question"], one["context"], one["answer"]) for one in read] == [
        (one["QUESTION"], "\n".join(one["CONTEXTS"]), one["LONG_ANSWER"]) for one in written.values()
    ]
    assert {block.form for block in cut} == {"by_pmid"}


PMID = '"1": {"QUESTION": "", "CONTEXTS": [], "LONG_ANSWER": "oak"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{" + PMID + ', "2": 3}', r"after 1 records the file has b',\"2\":3}' instead of }"),
        ("{" + PMID, r"after 1 records the file has b'' instead of }"),
        (
            "{" + PMID + ", " + PMID + "}",
            "the text after record 0 is not JSON: the key '1' occurs twice in the same object",
        ),
        (PMID.join("{}").replace("[]", '"oak"'), None),
        (PMID.join("{}").replace("[]", "[3]"), "record of PMID 1: column context must be text, but has the type list"),
        (
            PMID.join("{}").replace("LONG_ANSWER", "x"),
            "record of PMID 1: a record must have a column answer, but has the columns q",
        ),
    ],
)
def test_an_invalid_file_by_pmid_is_refused(text: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)

    def read() -> list[dict[str, str]]:
        data, blocks = config(source=DataSource.pubmedqa), records.cut(tmp_path / "p.json")
        return [one for block in blocks for one in records.read(block, data, dict)]

    if message is None:
        assert read() == [{"question": "", "context": "oak", "answer": "oak"}]
        return
    with pytest.raises(ConfigError, match=message):
        read()


def test_real_tokens_are_those_before_the_padding() -> None:
    counts = np.array([[0, 0, 1, 0], [1, 1, 1, 1]], dtype=bool)
    padded_rows = rows.Rows(np.zeros((2, 4), dtype=np.int32), counts, np.array([3, 4], dtype=np.int32))
    assert [rows.real_tokens(padded_rows, np.array(chosen)) for chosen in ([0], [1, 0], [1, 1, -1])] == [3, 7, 8]
    full = rows.Rows(padded_rows.tokens, padded_rows.counts)
    assert rows.real_tokens(full, np.array([0, -1])) == 4


def test_saved_rows_know_their_lengths(tmp_path: Path) -> None:
    counts = np.array([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=bool)
    rows.save(tmp_path, "train", np.zeros((3, 5), dtype=np.int32), counts)
    assert np.load(tmp_path / "train_lengths.npy").tolist() == [3, 5, 0]


def test_random_rows_have_the_requested_lengths() -> None:
    tokens, counts, lengths = rows.rows(400, 6, vocab_size=9, seed=1, lengths=[2, 6, 6, 6])
    assert set(lengths) == {2, 6} and 60 < (lengths == 2).sum() < 140
    assert (counts.sum(axis=1) == lengths).all() and (tokens[~counts] == 0).all()
    starts = rows.random_starts(400, 6, seed=1, lengths=[1, 4, 9])
    assert starts[:, 0].all() and not np.array_equal(starts, rows.random_starts(400, 6, seed=2, lengths=[1, 4, 9]))
    inside = starts.sum() - 400
    assert inside == pytest.approx(400 * 6 / np.mean([1, 4, 9]) * 5 / 6, rel=0.1), "1 in 6 documents begins with a row"
    whole_documents = rows.random_starts(3, 6, seed=1, lengths=[2])
    assert whole_documents.tolist() == [[True, False] * 3] * 3
    full, all_count, whole = rows.rows(3, 6, vocab_size=9, seed=1)
    assert all_count.all() and (whole == 6).all() and full.max() < 9
