"""Measures how fast text is tokenized into rows, alternating with `datasets.map` on the same file and tokenizer.

python experiments/tokenizing.py [--file FILE.parquet --tokenizer tokenizer.json] [--peer PYTHON] [--turns 5]

Without FILE it is 16 MB of made-up web pages, and a BPE of 8,192 entries that is trained on a part of them. PYTHON is
one with `datasets` and `tokenizers`; without `datasets` only ours is timed. The peer does what users do: load_dataset,
then map with the tokenizer, in as many processes as there are cores, then (second line) a map that packs rows. It keeps
no mask and no checksum; ours ends with rows, masks and checksums on disk. The peer's imports are not timed, the start
of our processes is.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench.contract.plan import Plan
from bench.planning import compose
from jobs.data import prepare_rows

SEQ_LENGTH, VOCABULARY, TEXT_BYTES = 2048, 8192, 16 * 10**6
PEER = """
import json, os, resource, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets
from itertools import chain
from tokenizers import Tokenizer
datasets.disable_progress_bars()
path, tokenizer, cache, seq_length, processes, packs = json.loads(sys.argv[1])
start = time.perf_counter()
by = Tokenizer.from_file(tokenizer)
eos = by.token_to_id("</s>")
def tokenise(batch):
    return {"input_ids": [e.ids + [eos] for e in by.encode_batch_fast(batch["text"], add_special_tokens=False)]}
def pack(batch):
    flat = list(chain.from_iterable(batch["input_ids"]))
    stop = len(flat) // seq_length * seq_length
    return {"input_ids": [flat[i : i + seq_length] for i in range(0, stop, seq_length)]}
used = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
before = used()
rows = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=cache)
rows = rows.map(tokenise, batched=True, num_proc=processes, remove_columns=rows.column_names)
if packs:
    rows = rows.map(pack, batched=True, num_proc=processes)
took = time.perf_counter() - start
print(json.dumps([took, used() - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="parquet with a column text")
    parser.add_argument(
        "--tokenizer", type=Path, help="its tokenizer.json; </s> or tokenizer_config.json ends a document"
    )
    parser.add_argument("--peer", default=sys.executable, help="a Python with datasets")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer = args.file, args.tokenizer
        if path is None:
            path, tokenizer = _made_up(Path(folder))
        _compare(Path(folder), path.absolute(), tokenizer.absolute(), args.peer, args.turns)


def _compare(folder: Path, path: Path, tokenizer: Path, peer: str, turns: int) -> None:
    plan = _plan(folder, path, tokenizer)
    seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "datasets.map": [], "datasets.map, packed": []}
    for turn in range(turns):
        seconds["ours"].append(_ours(plan, folder / f"rows-{turn}"))
        for name, packs in (("datasets.map", False), ("datasets.map, packed", True)):
            if (took := _peer(peer, path, tokenizer, folder / f"{turn}-{packs}", packs)) is not None:
                seconds[name].append(took)
    size_mb = sum(len(text.encode()) for text in parquet.read_table(path, columns=["text"])["text"].to_pylist()) / 1e6
    load = os.getloadavg()[0]
    print(f"{size_mb:.0f} MB of text, {os.cpu_count()} cores (load {load:.1f} at the end), {turns} turns, medians")
    ours = [statistics.median(part) for part in zip(*seconds["ours"], strict=True)]
    for name, turns_of in seconds.items():
        if not turns_of:
            print(f"{name}: not measured, {peer} has no datasets")
            continue
        took, cpu = zip(*turns_of, strict=True)
        median, cpu_median = statistics.median(took), statistics.median(cpu)
        print(
            f"{name}: {median:.2f} s ({min(took):.2f} to {max(took):.2f}), {size_mb / median:.2f} MB/s, "
            f"{median / ours[0]:.2f} x the time of ours; {cpu_median:.2f} s of CPU time ({min(cpu):.2f} to "
            f"{max(cpu):.2f}), {cpu_median / ours[1]:.2f} x ours"
        )


def _plan(folder: Path, path: Path, tokenizer: Path) -> Plan:
    """Return a plan whose rows take the whole file; their number is known when they have been made once."""
    words = (
        *("task=pretrain_tiny", "data=fineweb_edu", f"data.files='{path}'", f"data.tokenizer='{tokenizer}'"),
        *("model.vocab_size=1000000", f"data.seq_length={SEQ_LENGTH}", "data.test_split=0.01", "data.eval_rows=1"),
        *("data.train_rows=16", "recipe.eval_every_samples=16", f"cluster.paths.data='{folder}'"),
    )
    plan = compose.compose(list(words))
    there = prepare_rows.prepare(plan)["splits"]["train"]["rows_there"]
    data = dataclasses.replace(plan.config.training_data, train_rows=there)
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, data=data))


def _ours(plan: Plan, rows: Path) -> tuple[float, float]:
    """Return seconds, and those of all cores together."""
    start, before = time.perf_counter(), _cpu_s()
    prepare_rows.prepare(dataclasses.replace(plan, data_dir=str(rows)))
    return time.perf_counter() - start, _cpu_s() - before


def _cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _peer(python: str, path: Path, tokenizer: Path, cache: Path, packs: bool) -> tuple[float, float] | None:
    words = json.dumps([str(path), str(tokenizer), str(cache), SEQ_LENGTH, os.cpu_count(), packs])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run([python, "-c", PEER, words], env=environment, capture_output=True, text=True)
    if "No module named 'datasets'" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    took, cpu = json.loads(done.stdout.splitlines()[-1])
    return took, cpu


def _made_up(folder: Path) -> tuple[Path, Path]:
    """Write pages of made-up words, whose frequencies fall as 1 / rank, and a tokenizer of them."""
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, size=rng.integers(1, 12))) for _ in range(400_000)])
    share = 1 / np.arange(1, len(words) + 1)
    pages: list[str] = []
    while sum(map(len, pages)) < TEXT_BYTES:
        sizes = rng.lognormal(6, 1, size=1000).astype(int) + 1
        sampled = rng.choice(words, size=sizes.sum(), p=share / share.sum())
        pages += [" ".join(part) for part in np.split(sampled, np.cumsum(sizes)[:-1])]
    path, tokenizer = folder / "pages.parquet", folder / "tokenizer.json"
    parquet.write_table(pyarrow.table({"text": pages}), path, row_group_size=1000)
    by = Tokenizer(models.BPE())
    by.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    by.train_from_iterator(pages[: len(pages) // 10], trainer)
    by.save(str(tokenizer))
    tokenizer.with_name("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path, tokenizer


if __name__ == "__main__":
    main()
