"""Read a SentencePiece tokenizer.model: its pieces and the settings that decide how text is split.

The file is a protobuf message (ModelProto). Only the fields below are read, by the rules of protobuf's wire format, so
that neither protobuf nor sentencepiece is needed. Standard library only: ranks import it.

Source: sentencepiece_model.proto of SentencePiece 0.2, and protobuf's page "Encoding".
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces (ModelProto.SentencePiece.Type)."""
BPE = 2
"""TrainerSpec.ModelType; 1 is unigram, 3 words, 4 characters."""
MODEL_TYPES = {1: "unigram", BPE: "BPE", 3: "word", 4: "character"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Piece:
    """A token: its text, with U+2581 for a space, and its type."""

    text: str
    kind: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The pieces by token id, and the settings."""

    pieces: list[Piece]
    model_type: int
    has_bytes: bool
    """Characters without a piece become bytes."""
    unk_id: int
    bos_id: int
    eos_id: int
    """-1: there is none."""
    normalizer: bytes
    """Rules that change characters before the text is split, compiled; empty: none."""
    adds_prefix_space: bool
    removes_spaces: bool
    """Whether repeated spaces become one."""

    def piece(self, number: int) -> str | None:
        """Return the text of a token; None for -1."""
        return self.pieces[number].text if 0 <= number < len(self.pieces) else None


def read(path: Path) -> SentencePieceModel:
    """Read a tokenizer.model that splits text as Llama's does.

    Raises:
        ConfigError: it is damaged, or it splits text in another way.
    """
    try:
        model = _parsed(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise ConfigError(
            f"the file is not a tokenizer.model of SentencePiece: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="copy tokenizer.model from the model's folder again",
            rule="CFG-06",
        ) from error
    if difference := _difference_from_llama(model):
        raise ConfigError(
            f"this SentencePiece model is not supported: {difference}",
            where=str(path),
            fix="write a tokenizer.json next to this file with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            rule="CFG-06",
        )
    return model


def _difference_from_llama(model: SentencePieceModel) -> str:
    if model.model_type != BPE:
        return f"the model type is {MODEL_TYPES.get(model.model_type, model.model_type)}, but must be BPE"
    if model.normalizer:
        return "the model changes characters before it splits a text (normalization_rule_name is not identity)"
    if model.removes_spaces:
        return "the model removes repeated spaces (remove_extra_whitespaces is true)"
    return "" if model.has_bytes else "the model has no bytes for unknown characters (byte_fallback is false)"


def _parsed(content: bytes) -> SentencePieceModel:
    pieces, trainer, normalizer = list[Piece](), dict[int, int | bytes](), dict[int, int | bytes]()
    for number, value in _fields(content):
        if number == 1:
            of_piece = dict(_fields(_bytes(value)))
            pieces.append(Piece(_bytes(of_piece.get(1, b"")).decode("utf-8"), _int(of_piece.get(3, NORMAL))))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(_bytes(value)))
    if not pieces or not trainer:
        raise ValueError("the file has no pieces or no trainer_spec")
    return SentencePieceModel(
        pieces=pieces,
        model_type=_int(trainer.get(3, 1)),
        has_bytes=bool(trainer.get(35, 0)),
        unk_id=_int(trainer.get(40, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        normalizer=_bytes(normalizer.get(2, b"")),
        adds_prefix_space=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
    )


def _int(value: int | bytes) -> int:
    """Return a number, of 32 bits with a sign."""
    if isinstance(value, bytes):
        raise ValueError("a field contains bytes, but sentencepiece_model.proto requires a number")
    return value - 2**64 if value >= 2**63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field contains a number, but sentencepiece_model.proto requires bytes")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: number and value."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if wire == _BYTES:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError(f"damaged at byte {at:,}")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits per byte, lowest first, and the position behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError(f"damaged at byte {at:,}")
