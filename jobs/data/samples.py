"""Small samples in the formats of real data sets: generated reports and summaries (jobs/data/tiny_reports.py).

A sample is a folder with the records and a byte-level BPE tokenizer that is trained on them. Both depend only on the
seed and the number of records. They contain nothing of the real data sets.
"""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

from bench.contract.atomic_files import atomic_folder
from bench.contract.data import Data, DataSource
from bench.contract.data_files import TOKENIZER, TOKENIZER_CONFIG
from bench.errors import ConfigError
from jobs.data import tiny_reports

RECORDS = "records"
"""The subfolder with the file of records."""
FILES = {
    DataSource.fineweb_edu: "sample.parquet",
    DataSource.c4: "sample.json.gz",
    DataSource.dolly: "sample.jsonl",
    DataSource.pubmedqa: "sample.json",
}
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCABULARY = range(320, 513)
"""Vocabulary sizes of the tokenizer: 256 bytes, 3 special tokens and some merges."""
QUESTION = "Summarise the report in five values."
MORE_REMARKS = 12
"""Exclusive maximum of remarks at the end of a report, so that records differ in length."""
ROW_GROUP = 64


def provide(folder: Path, data: Data, vocab_size: int) -> None:
    """Write the sample of a data config, unless it exists.

    Raises:
        ConfigError: the model's vocabulary is too small for the tokenizer.
    """
    if folder.exists():
        return
    if vocab_size < VOCABULARY.start:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}, but data.sample needs {VOCABULARY.start} tokens or more",
            where="model.vocab_size",
            fix=f"set model.vocab_size to {VOCABULARY.start} or more",
        )
    pairs = list(reports(int(data.sample or 0), data.seed))
    with atomic_folder(folder) as part:
        (part / RECORDS).mkdir()
        write(part / RECORDS / FILES[data.source], data.source, pairs)
        train_tokenizer(part, pairs, min(vocab_size, VOCABULARY.stop - 1))


def reports(num_records: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield reports with a random number of remarks, and their summaries."""
    rng = random.Random(seed)
    for _ in range(num_records):
        report, summary = tiny_reports.document(rng, with_summary=True)
        more = [f" {remark} ." for remark in rng.choices(tiny_reports.REMARKS, k=rng.randrange(MORE_REMARKS))]
        yield " ".join(report[1:]) + "".join(more), " ".join(summary[:-1])


def write(path: Path, source: DataSource, pairs: list[tuple[str, str]]) -> None:
    """Write reports as records of a source, in a file of its format."""
    records = [_record(source, report, summary) for report, summary in pairs]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    match source:
        case DataSource.fineweb_edu:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=ROW_GROUP)
        case DataSource.c4:
            path.write_bytes(gzip.compress(lines.encode(), mtime=0))
        case DataSource.pubmedqa:
            path.write_text(json.dumps(records, indent=1))
        case _:
            path.write_text(lines)


def _record(source: DataSource, report: str, summary: str) -> dict[str, str]:
    match source:
        case DataSource.dolly:
            return {"instruction": QUESTION, "context": report, "response": summary, "category": "summarization"}
        case DataSource.pubmedqa:
            return {"question": QUESTION, "context": report, "answer": summary}
        case DataSource.c4:
            return {"text": f"{report} {summary}", "timestamp": "2026-01-01T00:00:00Z", "url": "file:sample"}
        case _:
            return {"text": f"{report} {summary}", "id": "sample", "language": "en"}


def train_tokenizer(folder: Path, pairs: list[tuple[str, str]], vocab_size: int) -> None:
    """Write a tokenizer.json, trained on the reports, and a tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = [PAD, BOS, EOS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((f"{QUESTION}\n{report}\n{summary}" for report, summary in pairs), trainer)
    tokenizer.save(str(folder / TOKENIZER))
    config = {"add_bos_token": True, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
