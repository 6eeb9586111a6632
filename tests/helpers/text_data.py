"""A small tokenizer with a fixed vocabulary, records in the formats of real data sets, and rows from them."""

import gzip
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.backends.nodes import processes
from bench.contract.plan import Plan
from helpers import ranks
from jobs.data import prepare_rows, worker, workers
from jobs.tasks import prepare_here

WORDS = (
    *("<pad>", "<s>", "</s>", "<unk>", "###", "Instruction", ":", "Context", "Response"),
    *("Name", "a", "tree", ".", "oak", "Oaks", "are", "trees", "?", "yes"),
)
"""A word's index is its token id."""
PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3


def tokenizer_json(words: Sequence[str] = WORDS) -> dict[str, Any]:
    """Return a tokenizer.json that splits at spaces and punctuation, and puts <s> before a text."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}
    return {
        "version": "1.0",
        "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{"id": i, "content": words[i], **special} for i in range(4)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": bos},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(words)}, "unk_token": "<unk>"},
    }


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}


def write_tokenizer(folder: Path, config: dict[str, Any] | None = CONFIG, words: Sequence[str] = WORDS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(words)))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def lines(records: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_parquet(path: Path, records: Sequence[dict[str, Any]], row_group_size: int = 2) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(records)), path, row_group_size=row_group_size)


def write_gzip(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content))


def plan(tmp: Path, *overrides: str) -> Plan:
    """Return the plan of a task that reads files below tmp/cache, with the tokenizer in it."""
    write_tokenizer(tmp / "cache")
    return ranks.compose(tmp, "task=finetune_tiny_dolly", "cluster.ranks_per_node=1", *overrides)


def rows(plan: Plan, name: str) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return tokens, counts and lengths of a prepared split."""
    tokens, counts, lengths = (
        np.load(f"{plan.data_dir}/{name}_{part}.npy") for part in ("tokens", "counts", "lengths")
    )
    assert (tokens.dtype, counts.dtype, lengths.dtype) == (np.int32, np.bool_, np.int32)
    return tokens.tolist(), counts.astype(int).tolist(), lengths.tolist()


@contextmanager
def _here(num: int, settings: dict[str, Any]) -> Iterator[workers.Submit]:
    """Run in this process what worker processes otherwise run."""

    def submit(jobs: Any) -> Iterator[dict[str, Any]]:
        for job in jobs:
            (answer,) = worker.answers([json.dumps(settings), json.dumps(job)])
            yield workers.result_of(answer)

    yield submit


def make_here(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prepare the plan's rows without worker processes."""
    with monkeypatch.context() as patch:
        patch.setattr(workers, "started", _here)
        return prepare_rows.prepare(plan, processes=1)


def prepared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `runstop prepare` do its work in this process."""

    def run_program(words: list[str], request: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(workers, "started", _here)
            patch.setattr(sys, "stdin", io.StringIO(request))
            return prepare_here.main(words[1:])

    monkeypatch.setattr(processes, "run_program", run_program)
