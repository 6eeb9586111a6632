"""Convert a SentencePiece tokenizer.model (BPE, as in Llama 2 and Mistral) to a tokenizer of Hugging Face's tokenizers.

The token ids are those of transformers' LlamaTokenizer (5.23.0): as SentencePiece's own, except that no space is put
before a text that begins with a space. SentencePiece merges the pair whose merged piece has the lowest id; a list of
merges in this order does the same.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import sentencepiece_model
from bench.contract.data_files import bad_tokenizer
from bench.contract.sentencepiece_model import BYTE, CONTROL, UNKNOWN, USER_DEFINED, SentencePieceModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
ADDED_TOKENS = "added_tokens.json"


def load(path: Path, config: dict[str, Any]) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.model, with the added tokens of its tokenizer_config.json.

    Raises:
        ConfigError: it is damaged or of another kind, or the ids of added tokens have gaps.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model = sentencepiece_model.read(path)
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = model.piece(model.unk_id)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(model, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    scheme = "always" if config.get("legacy", False) else "first"
    adds_space = config.get("add_prefix_space", model.adds_prefix_space)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if adds_space or adds_space is None else "never", split=False
    )
    strip = [decoders.Strip(content=" ", left=1)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    of_model = [piece for piece in model.pieces if piece.kind in (CONTROL, USER_DEFINED, UNKNOWN)]
    tokenizer.add_tokens([AddedToken(one.text, normalized=False, special=one.kind != USER_DEFINED) for one in of_model])
    for number, token in sorted(_added(path, config).items()):
        tokenizer.add_tokens([AddedToken(**{"normalized": False} | token)])
        if tokenizer.token_to_id(token["content"]) != number:
            actual = tokenizer.token_to_id(token["content"])
            what = f"the added token {token['content']!r} has the id {number}, but must have the id {actual}"
            raise bad_tokenizer(path, what)
    return tokenizer


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that a piece can be merged from, in the order of the merged pieces' ids."""
    merges = []
    for piece in model.pieces:
        if piece.kind in (CONTROL, UNKNOWN, BYTE):
            continue
        pairs = [(piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text))]
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        merges += sorted(known, key=lambda pair: (len(pair[0]), vocab[pair[0]], vocab[pair[1]]))
    return merges


def _added(path: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the tokens that were added to the model, by id: their text and how they are matched."""
    listed = {int(number): dict(token) for number, token in (config.get("added_tokens_decoder") or {}).items()}
    for number, token in listed.items():
        listed[number] = {name: value for name, value in token.items() if not name.startswith("__")}
    if (file := path.with_name(ADDED_TOKENS)).exists():
        try:
            more = {
                int(number): {"content": str(text), "special": True}
                for text, number in json.loads(file.read_text()).items()
            }
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise bad_tokenizer(file, error) from error
        listed = more | listed
    return listed
