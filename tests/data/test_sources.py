"""What each source's records become: tokens and masks written by hand, for a tokenizer that is written by hand too.

Tokens of the words: ### 4, Instruction 5, : 6, Context 7, Response 8, Name 9, a 10, tree 11, . 12, oak 13, Oaks 14,
are 15, trees 16, ? 17, yes 18; <pad> 0, <s> 1, </s> 2, <unk> 3.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import preflight
from bench.errors import ConfigError
from bench.planning.estimates import documents
from helpers import text_data
from helpers.text_data import lines, make_here, plan, rows, write_gzip, write_parquet, write_tokenizer
from jobs.data import rows as rows_of
from jobs.data import tokenizer
from jobs.data.micro_batches import targets

SMALL = (
    *("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0"),
    *("data.version=0", "data.test_split=null"),
)
NAME = {"instruction": "Name a tree.", "context": "", "response": "oak", "category": "open_qa"}
WITH_CONTEXT = {"instruction": "Name a tree.", "context": "Oaks are trees.", "response": "oak.", "category": "qa"}
TOO_LONG = {"instruction": "Name a tree. " * 4, "context": "", "response": "oak", "category": "qa"}
NO_ANSWER = {"instruction": "Name a tree.", "context": "", "response": " \n", "category": "qa"}
NAME_20 = [1, 4, 5, 6, 9, 10, 11, 12, 4, 8, 6, 13, 2, 0, 0, 0, 0, 0, 0, 0]
NAME_COUNTS = [0] * 11 + [1, 1] + [0] * 7
CONTEXT_20 = [1, 4, 5, 6, 9, 10, 11, 12, 4, 7, 6, 14, 15, 16, 12, 4, 8, 6, 13, 12]
CONTEXT_COUNTS = [0] * 18 + [1, 1]


def of_files(tmp_path: Path, data: str, files: str, *overrides: str, **sizes: int) -> Any:
    named = [f"data.{name}={value}" for name, value in sizes.items()]
    return plan(tmp_path, f"data={data}", f"data.files={files}", *SMALL, *named, *overrides)


@pytest.mark.long
def test_dolly_one_record_a_row_and_answers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(tmp_path, "dolly", "d.jsonl", seq_length=20, train_rows=2, eval_rows=1)
    content = lines([NAME, TOO_LONG, WITH_CONTEXT, NO_ANSWER]) + b"\n" + lines([NAME])
    (tmp_path / "cache/d.jsonl").write_bytes(content)
    manifest = make_here(planned, monkeypatch)
    assert rows(planned, "eval") == ([NAME_20], [NAME_COUNTS], [13])
    assert rows(planned, "train") == ([CONTEXT_20, NAME_20], [CONTEXT_COUNTS, NAME_COUNTS], [20, 13])
    assert manifest["splits"]["train"] == {
        "rows": 2,
        "tokens": 40,
        "real_tokens": 33,
        "counted_tokens": 4,
        "rows_there": 2,
        "documents": 2,
    }
    records = manifest["records"]
    assert (records["documents"], records["cut"]) == (4, 1), "the record with a context"
    assert (records["left_out_empty"], records["left_out_long_prompts"]) == (1, 1)
    assert records["lengths_by_decile"][0] == 13 and records["lengths_by_decile"][-1] == 25
    assert manifest["source"]["files"] == [
        {
            "path": str(tmp_path / "cache/d.jsonl"),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    ]


def test_dolly_with_all_tokens_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(tmp_path, "dolly", "d.jsonl", "data.answer_only=false", seq_length=20, train_rows=2, eval_rows=1)
    (tmp_path / "cache/d.jsonl").write_bytes(lines([NAME, TOO_LONG, NAME]))
    make_here(planned, monkeypatch)
    long = [1, 4, 5, 6, *[9, 10, 11, 12] * 4]
    assert rows(planned, "train") == ([long, NAME_20], [[1] * 20, [1] * 13 + [0] * 7], [20, 13])


def test_dolly_packed_answers_count_over_the_ends_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(tmp_path, "dolly", "d.jsonl", "data.packing=true", seq_length=12, train_rows=2, eval_rows=1)
    (tmp_path / "cache/d.jsonl").write_bytes(lines([NAME, NAME, NAME]))
    make_here(planned, monkeypatch)
    assert rows(planned, "eval") == ([NAME_20[:12]], [NAME_COUNTS[:12]], [12])
    first, second = NAME_20[:12], [2, *NAME_20[:11]]
    assert rows(planned, "train") == ([first, second], [NAME_COUNTS[:12], [1] + [0] * 11], [12, 12])


MASK = ("data.packing=true", "data.document_mask=true")


@pytest.mark.long
def test_packed_rows_have_the_boundaries_of_their_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document of 13 tokens in rows of 12: its last token is a document of its own in the next row."""
    sizes = {"seq_length": 12, "train_rows": 2, "eval_rows": 1}
    planned = of_files(tmp_path, "dolly", "d.jsonl", *MASK, **sizes)
    across = of_files(tmp_path, "dolly", "d.jsonl", MASK[0], **sizes)
    assert planned.data_dir != across.data_dir and planned.attention_share is None
    (tmp_path / "cache/d.jsonl").write_bytes(lines([NAME, NAME, NAME]))
    manifest = make_here(planned, monkeypatch)
    assert "starts_version" not in make_here(across, monkeypatch)
    assert rows(planned, "train") == rows(across, "train")
    train, without = rows_of.load(planned, "train"), rows_of.load(across, "train")
    assert train.starts is not None and train.starts.astype(int).tolist() == [[1] + [0] * 11, [1, 1] + [0] * 10]
    assert without.starts is None and not without.document_mask and train.sha256 != without.sha256
    assert targets(train, np.array([1]))[3].tolist() == [[0, *range(11)]]
    share = of_files(tmp_path, "dolly", "d.jsonl", *MASK, **sizes).attention_share
    assert share == pytest.approx(documents.share([13.0], seq_length=12)), (
        "all documents that the manifest counts have 13 tokens"
    )

    folder = Path(str(planned.data_dir))
    assert manifest["starts_version"] == 1 and "train_starts.npy" in (folder / "manifest.json").read_text()
    with (folder / "train_starts.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(ConfigError, match="document boundaries of row 1 were changed"):
        targets(rows_of.load(planned, "train"), np.array([1]))
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"starts_version": 1', '"starts_version": 2'))
    with pytest.raises(ConfigError, match="have the version 2, .* but the plan needs version 1"):
        rows_of.load(planned, "train")
    (folder / "train_starts.npy").unlink()
    with pytest.raises(ConfigError, match="is true, but these rows have no document boundaries"):
        rows_of.load(planned, "train")


PUBMEDQA = [
    {"question": "are oaks trees?", "context": "Oaks are trees.", "answer": "yes."},
    {"question": "yes?", "context": "", "answer": "oak"},
]
PLAIN_14 = [[1, 15, 3, 16, 17, 14, 15, 16, 12, 18, 12, 2, 0, 0], [1, 18, 17, 13, 2, *[0] * 9]]
PLAIN_COUNTS = [[0] * 9 + [1, 1, 1, 0, 0], [0, 0, 0, 1, 1, *[0] * 9]]


@pytest.mark.long
@pytest.mark.parametrize("form", ["array", "indented array", "lines"])
def test_pubmedqa_as_an_array_and_as_lines(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(
        tmp_path, "pubmedqa", "p.json", "data.prompt_type=plain", seq_length=14, train_rows=1, eval_rows=1
    )
    text = lines(PUBMEDQA) if form == "lines" else json.dumps(PUBMEDQA, indent=2 if "in" in form else None).encode()
    (tmp_path / "cache/p.json").write_bytes(text)
    make_here(planned, monkeypatch)
    assert rows(planned, "eval") == (PLAIN_14[:1], PLAIN_COUNTS[:1], [12])
    assert rows(planned, "train") == (PLAIN_14[1:], PLAIN_COUNTS[1:], [5])


OWN = {
    str(10_000_000 + number): {
        "QUESTION": one["question"],
        "CONTEXTS": [one["context"]],
        "LABELS": ["BACKGROUND"],
        "LONG_ANSWER": one["answer"],
        "MESHES": [],
        "final_decision": "yes",
    }
    for number, one in enumerate(PUBMEDQA)
}


@pytest.mark.parametrize("packing", [False, True])
def test_pubmedqas_own_file_gives_the_rows_of_its_converted_records(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded or packed as the task says; the plan is checked before the start, and a run reads the same rows."""
    of_file = {}
    for name, content in (("ori_pqaa.json", OWN), ("dataset.json", PUBMEDQA)):
        sizes = {"seq_length": 5 if packing else 14, "train_rows": 1, "eval_rows": 1}
        words = ("data.prompt_type=plain", f"data.packing={str(packing).lower()}")
        planned = of_files(tmp_path, "pubmedqa", name, *words, **sizes)
        (tmp_path / "cache" / name).write_text(json.dumps(content, indent=4))
        assert [one for one in preflight.inspect(planned) if one.severity == "error"] == []
        make_here(planned, monkeypatch)
        of_file[name] = [rows(planned, split) for split in ("eval", "train")]
    assert of_file["ori_pqaa.json"] == of_file["dataset.json"]
    if not packing:
        assert of_file["ori_pqaa.json"][0] == (PLAIN_14[:1], PLAIN_COUNTS[:1], [12])


TEXTS = [{"text": text, "url": "u"} for text in ("oak", "a tree", "Oaks are", "", "trees", "yes </s>")]
EVAL_4 = [[1, 13, 2, 1]]
"""The first text and the beginning of the second, whose rest is left out."""
TRAIN_4 = [[1, 14, 15, 2], [1, 16, 2, 1], [18, 3, 3, 3]]
"""</s> in a text is three unknown words. The last EOS, which fills no row, is dropped."""


@pytest.mark.long
@pytest.mark.parametrize("form", ["fineweb_edu, parquet", "c4, gzip", "c4, lines", "c4, two files"])
def test_texts_are_packed_and_every_token_counts(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(tmp_path, form.partition(",")[0], "text", seq_length=4, train_rows=3, eval_rows=1)
    folder = tmp_path / "cache/text"
    folder.mkdir()
    match form:
        case "fineweb_edu, parquet":
            write_parquet(folder / "000.parquet", TEXTS)
        case "c4, gzip":
            write_gzip(folder / "c4-train.00000-of-00001.json.gz", lines(TEXTS))
        case "c4, two files":
            (folder / "b.jsonl").write_bytes(lines(TEXTS[2:]))
            (folder / "a.jsonl").write_bytes(lines(TEXTS[:2]))
            (folder / "README.md").write_text("nothing")
        case _:
            (folder / "c4.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(TEXTS).replace(b"\n", b"\r\n"))
    make_here(planned, monkeypatch)
    assert rows(planned, "eval") == (EVAL_4, [[1] * 4], [4])
    assert rows(planned, "train") == (TRAIN_4, [[1] * 4] * 3, [4] * 3)


def test_a_test_split_is_that_share_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = of_files(tmp_path, "dolly", "d.jsonl", "data.test_split=0.2", seq_length=20, train_rows=8, eval_rows=2)
    numbered = [NAME | {"response": setting} for setting in text_data.WORDS[9:19]]
    (tmp_path / "cache/d.jsonl").write_bytes(lines(numbered))
    manifest = make_here(planned, monkeypatch)
    answers = {name: [row[11] for row in rows(planned, name)[0]] for name in ("train", "eval")}
    assert sorted(answers["train"] + answers["eval"]) == list(range(9, 19)) and len(answers["eval"]) == 2
    assert answers["train"] == sorted(answers["train"]), "in the order of the file"
    assert {name: split["rows_there"] for name, split in manifest["splits"].items()} == {"train": 8, "eval": 2}


DOCUMENTS: dict[str, tuple[dict[str, Any] | None, list[int]]] = {
    "as Llama's": (text_data.CONFIG, [1, 13, 2]),
    "the config forbids BOS": (text_data.CONFIG | {"add_bos_token": False}, [13, 2]),
    "another end": ({"eos_token": "<unk>"}, [1, 13, 3]),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_document_begins_and_ends_as_the_config_says(case: str, tmp_path: Path) -> None:
    config, expected = DOCUMENTS[case]
    by = tokenizer.load(write_tokenizer(tmp_path, config))
    ((tokens, prompt),) = tokenizer.encode(by, [("", "oak")])
    assert tokens.tolist() == expected and prompt == 0


def test_a_token_that_reaches_into_the_answer_is_the_answers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    vocab = {setting: i for i, setting in enumerate(("<pad>", "<s>", "</s>", "<unk>", "a", "\n", "b", "\nb", "é"))}
    model = {"type": "BPE", "vocab": vocab, "merges": [["\n", "b"]], "unk_token": "<unk>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model, "pre_tokenizer": None}))
    by = tokenizer.load(path)
    documents = tokenizer.encode(by, [("aé\n", "ba"), ("aé\n", "ab")])
    assert [(tokens.tolist(), prompt) for tokens, prompt in documents] == [
        ([1, 4, 8, 7, 4, 2], 3),
        ([1, 4, 8, 5, 4, 6, 2], 4),
    ]


@pytest.mark.long
def test_the_sample_is_tokenised_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = ("data.sample=60", "data.train_rows=40", "data.eval_rows=5", "recipe.eval_every_samples=16")
    planned = plan(tmp_path, *sizes, "recipe.lr_warmup_steps=0")
    make_here(planned, monkeypatch)
    folder = Path(f"{planned.data_dir}.sample")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    records = [json.loads(line) for line in (folder / "records/sample.jsonl").read_text().splitlines()]
    texts = {
        f"### Instruction:\n{r['instruction']}\n\n### Context:\n{r['context']}\n\n### Response:\n{r['response']}": r
        for r in records
    }
    tokens, counts, lengths = rows(planned, "train")
    for row, counted, length in zip(tokens, counts, lengths, strict=True):
        text = peer.decode(row[1 : length - 1])
        assert row[1 : length - 1] == peer(text, add_special_tokens=False)["input_ids"]
        answer = [token for token, is_counted in zip(row, counted, strict=True) if is_counted]
        assert peer.decode(answer) == texts[text]["response"] + "</s>"
        assert (row[0], row[length - 1], set(row[length:])) == (1, 2, {0} if length < 256 else set())
