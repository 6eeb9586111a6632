"""A tokenizer.model without a tokenizer.json: the ids of transformers' LlamaTokenizer and of SentencePiece itself."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.contract import data_files, sentencepiece_model
from bench.errors import ConfigError
from helpers.text_data import lines, make_here, plan, rows
from jobs.data import samples, tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece trains the models of these tests")

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "character_coverage": 0.9999,
}
"""The settings with which Llama's model was trained. Source: the trainer_spec in Llama 2's tokenizer.model."""
TEXTS = (
    *("Oaks are trees.", "  two  spaces ", "", "\n\nline\tend\n", "größe 漢字 🙂 12345", "a</s>b <unk> <s>", "▁x ▁"),
    "The agency 2021, 3,141.59!",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model that is trained on generated reports, and the config of Llama 2."""
    folder = tmp_path_factory.mktemp("llama")
    train(folder, **LLAMA)
    return folder


def train(folder: Path, **settings: Any) -> Path:
    rng = random.Random(3)
    texts = [f"{report} {summary}  {rng.randrange(10**9)}" for report, summary in samples.reports(150, 0)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **{"vocab_size": 420} | settings,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
    config |= {name: {"content": text} for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"))}
    for token in ("bos_token", "eos_token"):
        config[token] |= {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False}
        config[token] |= {"single_word": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<unk>"}))
    return folder / "tokenizer.model"


def test_ids_equal_sentencepiece_and_transformers(folder: Path) -> None:
    from transformers import LlamaTokenizer

    ours = tokenizer.load(data_files.find_tokenizer(folder))
    theirs = LlamaTokenizer.from_pretrained(folder)
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    generated = [report for report, _ in samples.reports(5, 9)]
    for text in (*TEXTS, *generated):
        ids = original.encode(text)
        if text.startswith((" ", "▁")):  # transformers puts no space before a text that begins with one
            ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.ids([text]) == [ids], text
        ((document, _),) = tokenizer.encode(ours, [("", text)])
        assert document.tolist() == [original.bos_id(), *ids, original.eos_id()]
        assert ours.inner.decode(ids) == original.decode(ids)
        if not any(special in text for special in ("<s>", "</s>", "<unk>")):  # transformers never takes them as text
            assert theirs(text, add_special_tokens=False).input_ids == ids
    ours.inner.encode_special_tokens = False
    for text in ("<s>[INST] oak [/INST] a </s><s>[INST] b", "a</s>b", "<s> a"):
        assert ours.inner.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids
    assert (ours.bos, ours.eos, ours.num_ids) == (1, 2, original.get_piece_size())
    assert data_files.num_ids(folder / "tokenizer.model") == original.get_piece_size()


def test_the_file_is_read_as_sentencepiece_reads_it(folder: Path) -> None:
    model = sentencepiece_model.read(folder / "tokenizer.model")
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert [piece.text for piece in model.pieces] == [original.id_to_piece(i) for i in range(len(original))]
    for kind, is_kind in (
        (sentencepiece_model.CONTROL, original.is_control),
        (sentencepiece_model.UNKNOWN, original.is_unknown),
        (sentencepiece_model.BYTE, original.is_byte),
    ):
        assert [piece.kind == kind for piece in model.pieces] == [is_kind(i) for i in range(len(original))]
    assert (model.bos_id, model.eos_id, model.unk_id) == (1, 2, 0)


def test_added_tokens_have_their_ids(folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaTokenizer

    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    token = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"added_tokens_decoder": {"420": token | {"single_word": False}}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = tokenizer.load(tmp_path / "tokenizer.model")
    assert (ours.eos, ours.num_ids) == (420, 421)
    assert ours.eos == LlamaTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|im_end|>")
    config["added_tokens_decoder"] = {"425": token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has the id 425, but must have the id "):
        tokenizer.load(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "unigram"}, "the model type is unigram, but must be BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes characters before it splits a text"),
        ({"remove_extra_whitespaces": True}, "removes repeated spaces"),
        ({"byte_fallback": False}, "has no bytes for unknown characters"),
    ],
)
def test_models_that_split_in_another_way_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = train(tmp_path, **LLAMA | {"vocab_size": 300} | changed)
    with pytest.raises(ConfigError, match=message) as raised:
        tokenizer.load(path)
    assert raised.value.where == str(path) and "save_pretrained" in raised.value.fix


def test_a_damaged_model_is_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / "tokenizer.model").read_bytes()
    for damaged in (b"", b"text", content[:-3], content[: len(content) // 2]):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ConfigError, match="the file is not a tokenizer.model of SentencePiece"):
            sentencepiece_model.read(tmp_path / "tokenizer.model")


@pytest.mark.long
def test_rows_are_prepared_with_a_tokenizer_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("data.train_rows=2", "data.eval_rows=1", "data.seq_length=8", "data.packing=false", "data.version=0")
    recipe = ("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0")
    planned = plan(tmp_path, "data=text", "data.files=t.jsonl", f"data.tokenizer={folder}", *sizes, *recipe)
    (tmp_path / "cache/t.jsonl").write_bytes(lines([{"text": "oak"}] * 3))
    manifest = make_here(planned, monkeypatch)
    ids = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).encode("oak")
    assert [row[: len(ids) + 2] for row in rows(planned, "train")[0]] == [[1, *ids, 2]] * 2
    assert manifest["tokenizer"]["file"] == str(folder / "tokenizer.model")
