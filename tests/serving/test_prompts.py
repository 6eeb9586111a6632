"""Prompts have exactly as many tokens as asked for, by transformers' own reading of the same tokenizer."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.errors import ConfigError
from helpers import serving
from jobs.serving import prompts

DOCUMENTS = Path(__file__).parents[2] / "docs"


def trained(*, byte_level: bool) -> Tokenizer:
    """Return a BPE of this project's pages: with bytes and no special token, or with Llama's way of blanks and BOS."""
    made = Tokenizer(models.BPE(unk_token=None if byte_level else "<unk>"))
    way = pre_tokenizers.ByteLevel() if byte_level else pre_tokenizers.Metaspace()
    made.pre_tokenizer = way
    made.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    special = [] if byte_level else ["<unk>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    made.train_from_iterator((path.read_text() for path in sorted(DOCUMENTS.glob("*.md"))), trainer)
    if not byte_level:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("byte_level", [True, False])
@pytest.mark.parametrize("num_tokens", [17, 512])
def test_every_prompt_has_exactly_so_many_tokens(byte_level: bool, num_tokens: int) -> None:
    from transformers import PreTrainedTokenizerFast

    own = trained(byte_level=byte_level)
    theirs = PreTrainedTokenizerFast(tokenizer_object=own)
    drawn = prompts.drawn(own, count=20, num_tokens=num_tokens, seed=1)
    assert [len(theirs(text)["input_ids"]) for text in drawn] == [num_tokens] * 20
    assert len(set(drawn)) == 20 and drawn == prompts.drawn(own, count=20, num_tokens=num_tokens, seed=1)
    assert drawn != prompts.drawn(own, count=20, num_tokens=num_tokens, seed=2)


def test_a_prompt_that_has_room_for_special_tokens_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt of 1 tokens can be made: .* words, 1 special tokens"):
        prompts.drawn(trained(byte_level=False), count=1, num_tokens=1, seed=1)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        prompts.tokenizer(tmp_path)
    assert prompts.tokenizer(serving.tokenizer(tmp_path / "model")).get_vocab_size() == serving.WORDS
