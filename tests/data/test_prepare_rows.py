"""Preparing rows from files: equal bytes for any number of processes and after a kill; errors of bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.contract import data_files, mllog, plan_kinds, plan_paths
from bench.contract.plan import Plan
from bench.errors import BenchError, ConfigError
from bench.mlperf import reader
from helpers import ranks, text_data
from helpers.paths import ROOT
from helpers.text_data import lines, make_here, plan, rows, write_gzip, write_parquet, write_tokenizer
from jobs.data import prepare_rows, records, tokenization
from jobs.tasks import convert, prepare

SIZES = ("data.train_rows=40", "data.eval_rows=4", "data.seq_length=8", "data.test_split=null", "data.version=0")
RECIPE = ("recipe.eval_every_samples=16", "recipe.lr_warmup_steps=0")


def c4(tmp_path: Path, *overrides: str, num_records: int = 150) -> Plan:
    """Return a plan for a C4-like file of num_records records, of 1 to 9 words each."""
    planned = plan(tmp_path, "data=c4", "data.files=c4.jsonl", *SIZES, *RECIPE, *overrides)
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(text_data.WORDS[9:], size=rng.integers(1, 10))) for _ in range(num_records)]
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    return planned


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.starts
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = c4(tmp_path)
    monkeypatch.setattr(records, "BLOCK_BYTES", 300)
    by_processes = {}
    for processes in (1, 3):
        prepare_rows.prepare(planned, processes=processes)
        by_processes[processes] = content(Path(str(planned.data_dir)))
        Path(str(planned.data_dir)).rename(tmp_path / f"by {processes}")
    assert by_processes[1] == by_processes[3] and len(by_processes[1]) == 9
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [], "no blocks are left"
    make_here(planned, monkeypatch)
    assert content(Path(str(planned.data_dir))) == by_processes[1]


def test_no_more_is_read_than_the_rows_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows are the same, and damage after them is not read."""
    planned = c4(tmp_path)
    make_here(planned, monkeypatch)
    first = rows(planned, "train")
    Path(str(planned.data_dir)).rename(tmp_path / "before")
    monkeypatch.setattr(records, "BLOCK_BYTES", 300)
    path = tmp_path / "cache/c4.jsonl"
    path.write_bytes(path.read_bytes() + lines([{"text": "oak " * 20}] * 40) + b"{not json")
    make_here(planned, monkeypatch)
    assert rows(planned, "train") == first


@pytest.mark.starts
def test_a_killed_preparation_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = c4(tmp_path)
    whole = prepare_rows.prepare(planned, processes=1) and content(Path(str(planned.data_dir)))
    Path(str(planned.data_dir)).rename(tmp_path / "whole")
    kill_after(3, planned, tmp_path)
    (work,) = (tmp_path / "cache").glob("c4-tokens-*")
    done = sorted(work.glob("*.json"))
    times = {path: path.stat().st_mtime_ns for path in done[1:]}
    tokens = done[0].with_suffix(".tokens")
    tokens.write_bytes(b"\xff" + tokens.read_bytes()[1:])  # damaged: tokenised again
    kept: list[bool] = []

    def look_instead_of_removing(folder: Path) -> None:
        kept.extend(path.stat().st_mtime_ns == was for path, was in times.items())

    tools = SimpleNamespace(rmtree=look_instead_of_removing, disk_usage=shutil.disk_usage)
    monkeypatch.setattr(prepare_rows, "shutil", tools)
    monkeypatch.setattr(records, "BLOCK_BYTES", 300)
    prepare_rows.prepare(planned, processes=2)
    assert kept and all(kept) and done[0].stat().st_mtime_ns not in times.values()
    assert {name: held for name, held in content(Path(str(planned.data_dir))).items() if name != "manifest.json"} == {
        name: held for name, held in whole.items() if name != "manifest.json"
    }


def kill_after(num_blocks: int, planned: Plan, tmp_path: Path) -> None:
    """Kill the preparation of rows after num_blocks blocks; its workers end soon after."""
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    code = f"""
import sys, time
from pathlib import Path
from jobs.data import records, tokenization
from jobs.tasks import convert
records.BLOCK_BYTES = 300
plain = tokenization.from_plain
def slowly(plain_block):
    if plain_block["number"] == {num_blocks}:
        print("now", flush=True); time.sleep(60)
    return plain(plain_block)
tokenization.from_plain = slowly
convert.main(["rows", {str(tmp_path / "plan.json")!r}, "--processes", "2"])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"now\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    assert len(children) == 2
    for child in children:
        assert ends(child), "a worker outlived its parent"


def ends(process: str) -> bool:
    """Return whether a process ends within a minute."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{process}").exists()


@pytest.mark.starts
def test_a_worker_ends_with_its_parent_although_its_input_stays_open() -> None:
    """As in the middle of a long block, when it does not read its input."""
    code = (
        "import os, subprocess, sys; argv = [sys.executable, '-m', 'jobs.data.worker', str(os.getpid())]; "
        "worker = subprocess.Popen(argv); print(worker.pid, flush=True); worker.wait()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = parent.stdout.readline().strip()
        parent.kill()
        assert ends(worker)


@pytest.mark.starts
def test_a_killed_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = c4(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    (tmp_path / "broken/tokenizers").mkdir(parents=True)
    (tmp_path / "broken/tokenizers/__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(BenchError, match=f"a tokenizer process ended with exit code -{signal.SIGKILL}"):
        prepare_rows.prepare(planned, processes=1)


DOLLY = {"instruction": "Name a tree.", "context": "", "response": "oak"}
TEXT = {"text": "oak yes"}
BAD: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    r"line 3: a record must have a column response, but has the columns instruction, context, output": (
        *("dolly", "d.jsonl"),
        lambda path: path.write_bytes(lines([DOLLY, DOLLY, {"instruction": "", "context": "", "output": ""}])),
    ),
    r"line 2: column context must be text, but has the type NoneType": (
        *("dolly", "d.jsonl"),
        lambda path: path.write_bytes(lines([DOLLY, DOLLY | {"context": None}])),
    ),
    r"line 2: a record must be a JSON object, but this record has the type list": (
        *("c4", "c.jsonl"),
        lambda path: path.write_bytes(lines([TEXT, [1]])),
    ),
    r"line 3 is not JSON: Expecting": ("c4", "c.jsonl", lambda path: path.write_bytes(lines([TEXT]) + b"\n{x")),
    r"line 2: byte 11 is not UTF-8 \(invalid start byte\)": (
        *("c4", "c.jsonl"),
        lambda path: path.write_bytes(lines([TEXT]) + b'{"text": "\xff"}\n'),
    ),
    r"line 1: column text contains an unpaired surrogate": (
        *("c4", "c.jsonl"),
        lambda path: path.write_bytes(b'{"text": "\\ud800"}\n'),
    ),
    r"the file is empty": ("c4", "c.jsonl", lambda path: path.write_bytes(b"")),
    r"the files have no records": ("c4", "c.jsonl", lambda path: path.write_bytes(b"\n\n")),
    r"no file of c4 matches data.files=": ("c4", "*.jsonl", lambda path: None),
    r"data.source=c4 reads only files whose name ends in .jsonl or .jsonl.gz or .json or .json.gz": (
        "c4",
        "c.txt",
        lambda path: path.write_bytes(lines([TEXT])),
    ),
    r"the gzip file is truncated or damaged after line \d+: ": (
        *("c4", "c.json.gz"),
        lambda path: (write_gzip(path, lines([TEXT] * 99)), path.write_bytes(path.read_bytes()[:-9])),
    ),
    r"the gzip file is truncated or damaged after line 0: Not a gzipped file": (
        *("c4", "c.json.gz"),
        lambda path: path.write_bytes(lines([TEXT])),
    ),
    r"the parquet file is truncated or damaged: ": (
        *("fineweb_edu", "f.parquet"),
        lambda path: (write_parquet(path, [TEXT] * 9), path.write_bytes(path.read_bytes()[:-9])),
    ),
    r"the file has no column text; its columns are txt": (
        "fineweb_edu",
        "f.parquet",
        lambda path: write_parquet(path, [{"txt": ""}]),
    ),
    r"row 5: column text must be text, but has the type NoneType": (
        *("fineweb_edu", "f.parquet"),
        lambda path: write_parquet(path, [TEXT] * 5 + [{"text": None}]),
    ),
    r"record 1: a record must have a column context, but has the columns question": (
        *("pubmedqa", "p.json"),
        lambda path: path.write_text(json.dumps([{"question": "", "context": "", "answer": "oak"}, {"question": ""}])),
    ),
    r"after 1 records the file has .* instead of \]": (
        *("pubmedqa", "p.json"),
        lambda path: path.write_text('[{"question": "", "context": "", "answer": "oak"}, {"question'),
    ),
    r"data.train_rows is 40, but the files have only 2 rows for training and 4 rows for evaluation": (
        *("c4", "c.jsonl"),
        lambda path: path.write_bytes(lines([TEXT] * 12)),
    ),
    r"data.eval_rows is 4, but the files have only ": (
        *("c4", "c.jsonl"),
        lambda path: path.write_bytes(lines([TEXT] * 2)),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("message", BAD)
def test_errors_of_bad_files_name_the_place(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, name, write = BAD[message]
    planned = plan(tmp_path, f"data={source}", f"data.files='{name}'", *SIZES, *RECIPE)
    write(tmp_path / "cache" / name)
    monkeypatch.setattr(records, "BLOCK_BYTES", 1)
    with pytest.raises(ConfigError, match=message) as raised:
        make_here(planned, monkeypatch)
    assert str(tmp_path / "cache") in raised.value.where or name in raised.value.where
    assert raised.value.rule == "CFG-06" and not Path(str(planned.data_dir)).exists()


def test_the_error_of_too_few_rows_has_the_right_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that number, the tokenised blocks are used again."""
    planned = c4(tmp_path, num_records=40)
    with pytest.raises(ConfigError) as raised:
        make_here(planned, monkeypatch)
    right = re.search(r"set data.train_rows to (\d+) or less", raised.value.fix)
    assert right, raised.value
    monkeypatch.setattr(tokenization.records, "read", lambda *_: pytest.fail("tokenised again"))
    num_rows = int(right[1])
    with pytest.raises(
        ConfigError, match=f"data.train_rows is {num_rows + 1}, but the files have only {num_rows} rows for training"
    ):
        make_here(with_train_rows(planned, num_rows + 1), monkeypatch)
    assert make_here(with_train_rows(planned, num_rows), monkeypatch)["splits"]["train"]["rows"] == num_rows


def with_train_rows(planned: Plan, num_rows: int) -> Plan:
    return replace(planned, config=replace(planned.config, data=replace(planned.config.data, train_rows=num_rows)))


TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "there is no tokenizer.json and no tokenizer.model at this path": lambda folder: (
        folder / "tokenizer.json"
    ).unlink(),
    "tokenizer.json cannot be used": lambda folder: (folder / "tokenizer.json").write_text("{}"),
    "the tokenizer has no eos_token": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "is '<end>', which is not a token of tokenizer.json": lambda folder: write_tokenizer(
        folder, {"eos_token": "<end>"}
    ),
    "the tokenizer has token ids up to 599, but the model's vocabulary size is 512": lambda folder: write_tokenizer(
        folder, words=[*text_data.WORDS, *(f"w{i}" for i in range(581))]
    ),
}


@pytest.mark.parametrize("message", TOKENIZERS)
def test_a_tokenizer_that_does_not_match_is_refused(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = c4(tmp_path)
    TOKENIZERS[message](tmp_path / "cache")
    with pytest.raises(ConfigError, match=message) as raised:
        make_here(planned, monkeypatch)
    assert raised.value.rule == "CFG-06" and str(tmp_path / "cache") in raised.value.where


def test_rows_of_another_tokenizer_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = c4(tmp_path)
    manifest = make_here(planned, monkeypatch)
    prepare.prepare_rows_of(planned)
    assert prepare_rows.prepare(planned) == manifest, "they exist already"
    write_tokenizer(tmp_path / "cache", words=[*text_data.WORDS, "another"])
    with pytest.raises(ConfigError, match="but this run has another tokenizer"):
        prepare_rows.prepare(planned)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.starts
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written, and when it fills up later."""
    (tmp_path / "cache").mkdir()
    with ranks.mounted(tmp_path / "small", "size=64k"):
        planned = c4(tmp_path, f"cluster.paths.data={tmp_path}/small", num_records=9000)
        (tmp_path / "cache/c4.jsonl").rename(tmp_path / "c4.jsonl")
        planned.config.data.files = str(tmp_path / "c4.jsonl")
        planned.config.data.train_rows = 8000
        with pytest.raises(BenchError, match=r"CFG-08: the prepared rows need about 0.00 GB"):
            prepare_rows.prepare(planned, processes=1)
        monkeypatch.setattr(data_files, "check_room", lambda root, data: None)
        with pytest.raises(BenchError, match="CFG-08: the rows cannot be read or written: No space left on device"):
            prepare_rows.prepare(planned, processes=1)
        assert not Path(str(planned.data_dir)).exists()


def test_convert_prepares_the_rows_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = c4(tmp_path)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    assert convert.main(["rows", str(tmp_path / "plan.json"), "somewhere", "else"]) == 2
    assert "SOURCE and FOLDER are given, but this plan" in capsys.readouterr().err
    assert not plan_paths.is_prepared(planned)
    make_here(planned, monkeypatch)
    assert convert.main(["rows", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"train: 40 of \d+ rows in the files, 320 tokens, 100.0% real, 100.0% in the loss", shown), shown
    assert f"{planned.data_dir} is complete" in shown and plan_paths.is_prepared(planned)


@pytest.mark.trains
def test_two_ranks_prepare_rows_of_text_and_train_on_them(tmp_path: Path) -> None:
    sizes = ("data.sample=64", "data.train_rows=32", "data.eval_rows=4", "recipe.eval_every_samples=32")
    planned = ranks.compose(tmp_path, "task=finetune_tiny_dolly", *sizes, "recipe.lr_warmup_steps=0")
    folder = ranks.write(planned, tmp_path / "run")
    for _ in range(2):
        ranks.run(planned, folder, "jobs.tasks.prepare", "plan.json")
        assert plan_paths.is_prepared(planned)
    ranks.run(planned, folder, "jobs.tasks.train", "plan.json", "--trial", "0")
    events = reader.read(folder / "result_0.txt")[0]
    (loss,) = (event.value for event in events if event.key == mllog.EVAL_ACCURACY)
    assert 0 < loss < 2 * np.log(512), "two steps from random weights"
