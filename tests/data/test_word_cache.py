"""Tokenising word by word gives the same tokens as for the whole text."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs.data import tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers  # noqa: E402

SOME = [
    "The cat's mat, isn't it? \n\n  I'LL go (now) to 12345 places...  \t and 7 more!\n - a\n\n\n b ",
    "  two  spaces   three\u00a0no-break \u3000wide \u2003em\x1cfile\x85next\n "
    "ünïcödé 你好 世界 🙂 👍🏽 é x\u0301 ▁ under ▁▁score",
] * 3


@cache
def gpt2() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(bpe)


@cache
def llama3() -> Tokenizer:
    bpe = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(tokenizer.LLAMA_3), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return trained(bpe)


def trained(bpe: Tokenizer) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SOME, trainer)
    bpe.encode_special_tokens = True
    return bpe


@cache
def llama2() -> Tokenizer:
    """A vocabulary of SentencePiece's kind: bytes, letters, and merges with a space only at their start."""
    merges = [("▁", "▁"), ("▁", "t"), ("▁t", "w"), ("▁tw", "o"), ("c", "e"), ("a", "c"), ("▁▁", "▁"), ("a", "t")]
    letters = sorted(set("▁abcdeghilmnopqrstuwxyzTI'.,")) + ["".join(pair) for pair in merges]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    vocab = {name: i for i, name in enumerate(names)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.add_special_tokens(["<unk>", "<s>", "</s>"])
    bpe.encode_special_tokens = True
    return bpe


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"gpt2": gpt2, "llama3": llama3, "llama2": llama2}
LETTERS = st.sampled_from(list(" \n\t\r.,'!()abcetowIT079éü好🙂▁\u0301\u00a0\u3000\x1c\x85\u200b")) | st.characters(
    exclude_categories=["Cs"]
)
TEXTS = st.lists(st.text(LETTERS, max_size=40), min_size=1, max_size=4)


@pytest.mark.long
@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=TEXTS)
@example(texts=SOME)
@example(
    texts=["", " ", "a ", "  a", "a  ", " </s> a</s>b", "'s 's", "!\n a", "! \n a", "two two two", "a\u0301 \u0301"]
)
def test_words_give_the_tokens_of_the_text(name: str, texts: list[str]) -> None:
    bpe = TOKENIZERS[name]()
    ids = tokenizer.encoder_of(bpe)
    assert getattr(ids, "__self__", None).__class__ is tokenizer.WordCache, "this tokenizer allows it"
    expected = [bpe.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids(texts) == expected
    assert ids(texts) == expected, "from the cache"


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a prefix space": lambda definition: definition["pre_tokenizer"].update(add_prefix_space=True),
    "no pattern": lambda definition: definition["pre_tokenizer"].update(use_regex=False),
    "a normalizer": lambda definition: definition.update(normalizer={"type": "Lowercase"}),
    "dropout": lambda definition: definition["model"].update(dropout=0.1),
    "an added word": lambda definition: definition["added_tokens"].append(
        {
            "id": 500,
            "content": "a b",
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False),
        }
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tokenizers_get_whole_texts(change: str) -> None:
    definition = json.loads(gpt2().to_str())
    CHANGES[change](definition)
    assert not hasattr(tokenizer.encoder_of(Tokenizer.from_str(json.dumps(definition))), "__self__")


def test_a_vocabulary_that_merges_over_spaces_gets_whole_texts() -> None:
    definition = json.loads(llama2().to_str())
    definition["model"]["vocab"]["t▁"] = len(definition["model"]["vocab"])
    assert not hasattr(tokenizer.encoder_of(Tokenizer.from_str(json.dumps(definition))), "__self__")


def test_a_full_cache_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MOST_WORDS", 2)
    ids = tokenizer.encoder_of(gpt2())
    texts = ["a b c d", "e f g", "a b"]
    expected = [gpt2().encode(text).ids for text in texts]
    assert [ids([text])[0] for text in texts] == expected
    assert len(ids.__self__._known) <= 5  # type: ignore[attr-defined]
