"""Prompts have exactly the requested number of tokens, also with transformers' tokenizer."""

from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.errors import ConfigError
from helpers import serving
from jobs.serving import prompts

DOCUMENTS = Path(__file__).parents[2] / "docs"


@cache
def trained(*, byte_level: bool) -> Tokenizer:
    """Return a BPE tokenizer trained on docs/: byte-level without special tokens, or with Llama's spaces and BOS."""
    built = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    way = pre_tokenizers.ByteLevel() if byte_level else pre_tokenizers.Metaspace()
    built.pre_tokenizer = way
    built.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    special = [] if byte_level else ["<unk>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    built.train_from_iterator((path.read_text() for path in sorted(DOCUMENTS.glob("*.md"))), trainer)
    if not byte_level:
        built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


@pytest.mark.long
@pytest.mark.parametrize("byte_level", [True, False])
@pytest.mark.parametrize("num_tokens", [17, 512])
def test_every_prompt_has_the_exact_number_of_tokens(byte_level: bool, num_tokens: int) -> None:
    from transformers import PreTrainedTokenizerFast

    own = trained(byte_level=byte_level)
    theirs = PreTrainedTokenizerFast(tokenizer_object=own)
    sampled = prompts.random_prompts(own, lengths=[num_tokens] * 20, seed=1)
    assert [len(theirs(text)["input_ids"]) for text in sampled] == [num_tokens] * 20
    assert len(set(sampled)) == 20 and sampled == prompts.random_prompts(own, lengths=[num_tokens] * 20, seed=1)
    assert sampled != prompts.random_prompts(own, lengths=[num_tokens] * 20, seed=2)


def test_a_prompt_of_special_tokens_only_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="no prompt can have 1 tokens: .* words of one token, and adds 1 special tokens",
    ):
        prompts.random_prompts(trained(byte_level=False), lengths=[1], seed=1)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        prompts.tokenizer(tmp_path)
    assert prompts.tokenizer(serving.tokenizer(tmp_path / "model")).get_vocab_size() == serving.WORDS
