"""What preflight says of files that rows are to be plan_ from, before a job waits for its turn."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import preflight
from bench.backends.slurm import script
from bench.contract import data_files
from bench.contract.plan import Plan
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning.commands import needs_preparing
from bench.preflight import data
from helpers import text_data
from helpers.text_data import lines, make_here, plan, write_gzip, write_parquet, write_tokenizer

SIZES = ("data.train_rows=3", "data.eval_rows=1", "data.seq_length=4", "data.test_split=null")
RECIPE = ("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0")
TEXT = {"text": "oak"}


def planned(tmp_path: Path, source: str, name: str) -> Plan:
    return plan(tmp_path, f"data={source}", f"data.files={name}", *SIZES, *RECIPE)


def findings(plan_: Plan) -> list[preflight.Finding]:
    return [one for one in preflight.inspect(plan_) if one.severity == "error"]


FINE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "c4.json.gz": ("c4", lambda path: write_gzip(path, lines([TEXT]))),
    "f.parquet": ("fineweb_edu", lambda path: write_parquet(path, [TEXT])),
    "p.json": (
        *("pubmedqa",),
        lambda path: path.write_text(json.dumps([{"question": "", "context": "x" * 2**21, "answer": ""}])),
    ),
    "d.jsonl": (
        *("dolly",),
        lambda path: path.write_bytes(lines([dict.fromkeys(("instruction", "context", "response"), "")])),
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_files_that_can_be_read_are_fine(name: str, tmp_path: Path) -> None:
    source, write = FINE[name]
    plan_ = planned(tmp_path, source, name)
    write(tmp_path / "cache" / name)
    assert findings(plan_) == []
    (checked,) = (c for c in preflight.tier(plan_, "laptop") if c.what == "text files")
    assert checked.seen == "1 files, 0.00 GB"


def add_token(tokenizer: Path, number: int) -> None:
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": "<more>"})
    tokenizer.write_text(json.dumps(content))


WRONG: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no file of c4 matches data.files=": ("CFG-06", lambda cache: (cache / "c4.jsonl").unlink()),
    "the file is empty": ("CFG-06", lambda cache: (cache / "c4.jsonl").write_bytes(b"")),
    "the first record is not valid: a record must have a column text, but has the columns txt": (
        *("CFG-06",),
        lambda cache: (cache / "c4.jsonl").write_bytes(lines([{"txt": ""}])),
    ),
    "the first record is not JSON": ("CFG-06", lambda cache: (cache / "c4.jsonl").write_bytes(b"text\n")),
    "there is no tokenizer.json and no tokenizer.model at this path": (
        "CFG-06",
        lambda cache: (cache / "tokenizer.json").unlink(),
    ),
    "the tokenizer has no eos_token": (
        *("CFG-06",),
        lambda cache: (cache / "tokenizer_config.json").write_text('{"bos_token": "<s>"}'),
    ),
    "tokenizer.json cannot be used": ("CFG-06", lambda cache: (cache / "tokenizer.json").write_text('{"model": {}}')),
    "token ids up to 600, but the model's vocabulary size is 512": (
        "CFG-06",
        lambda cache: add_token(cache / "tokenizer.json", 600),
    ),
    "token ids up to 512, but the model's vocabulary size is 512": (
        *("CFG-06",),
        lambda cache: write_tokenizer(cache, words=[*text_data.WORDS, *(f"w{i}" for i in range(494))]),
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_problems_with_text_files_are_found(text: str, tmp_path: Path) -> None:
    rule, spoil = WRONG[text]
    plan_ = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT]))
    spoil(tmp_path / "cache")
    (problem,) = findings(plan_)
    assert problem.rule == rule and re.search(text, problem.what) and str(tmp_path / "cache") in problem.where


def test_a_parquet_without_the_column_or_its_end_is_found(tmp_path: Path) -> None:
    plan_ = planned(tmp_path, "fineweb_edu", "f.parquet")
    path = tmp_path / "cache/f.parquet"
    write_parquet(path, [{"txt": ""}])
    (problem,) = findings(plan_)
    assert "the file has no column text; its columns are txt" in problem.what
    path.write_bytes(path.read_bytes()[:-9])
    (problem,) = findings(plan_)
    assert "the parquet file is truncated or damaged" in problem.what


def test_too_little_disk_space_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows of 4 tokens of 9 bytes."""
    plan_ = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT]))
    for free, rules in ((143, ["CFG-08"]), (144, [])):
        monkeypatch.setattr(data_files.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        outcomes = data.text_files(plan_, root=tmp_path / "cache", rows=tmp_path / "none")
        assert [one.rule for one in outcomes if not isinstance(one, str)] == rules


def test_a_new_file_is_found_if_the_rows_would_have_been_prepared_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_ = planned(tmp_path, "c4", "*.jsonl")
    (tmp_path / "cache/m.jsonl").write_bytes(lines([TEXT] * 9))
    make_here(plan_, monkeypatch)
    (tmp_path / "cache/n.jsonl").write_bytes(lines([TEXT]))  # the rows were full before it
    assert findings(plan_) == []
    (tmp_path / "cache/a.jsonl").write_bytes(lines([TEXT]))
    (problem,) = findings(plan_)
    assert problem.what == "the prepared rows do not contain the records of a.jsonl, because this file was added later"


def test_existing_rows_are_checked_instead_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_ = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT] * 9))
    make_here(plan_, monkeypatch)
    for changed, why in (({"text": "elm"}, "has a different SHA-256"), ({"text": "oak oak"}, "bytes instead of")):
        (tmp_path / "cache/c4.jsonl").write_bytes(lines([changed] * 9))
        (problem,) = findings(plan_)
        assert "rows were prepared from a file that has changed since then: c4.jsonl" in problem.what
        assert why in problem.what
    (tmp_path / "cache/c4.jsonl").unlink()
    assert findings(plan_) == []
    write_tokenizer(tmp_path / "cache", words=[*text_data.WORDS, "another"])
    (problem,) = findings(plan_)
    assert "but this run has another tokenizer" in problem.what
    write_tokenizer(tmp_path / "cache")
    path = Path(str(plan_.data_dir)) / "train_tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    by_size, by_manifest = (one.what for one in findings(plan_))
    assert "train_tokens.npy has" in by_size and "1 of 8 files differ from manifest.json" in by_manifest


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=null", "data.source=dolly reads files, but data.files is not set"),
        (
            "data.prompt_type=null",
            "records of data.source=dolly have prompts and answers, but data.prompt_type is null",
        ),
        ("data.test_split=1.5", "test_split is 1.5, but must be a share of the records"),
        ("data=c4 data.prompt_type=plain", "data.prompt_type is plain, but records of data.source=c4 have no prompts"),
        ("data=c4 data.answer_only=true", "records of data.source=c4 have no answers"),
        ("data=rows_350 data.lengths=[351]", "but must list lengths from 2 to data.seq_length=350"),
    ],
)
def test_settings_that_contradict_their_source_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(tmp_path, "data=dolly", *override.split(" "))


MOUNTS: dict[str, tuple[str, list[str]]] = {
    "data.files=c4": ("", ["$DATADIR:$DATADIR", "$MODEL:$MODEL:ro"]),
    "data.files=/d/c4/*/en.?.json": ("", ["$DATADIR:$DATADIR", "$MODEL:$MODEL:ro", "/d/c4:/d/c4:ro"]),
    "data.files=/d/c4.jsonl": ("data.tokenizer=/t/tokenizer.json", ["/d/c4.jsonl:/d/c4.jsonl:ro", "/t:/t:ro"]),
}


@pytest.mark.parametrize("files", MOUNTS)
def test_a_container_sees_the_files_and_the_tokenizer(files: str) -> None:
    other, mounts = MOUNTS[files]
    words = ("task=pretrain_tiny", "data=c4", "cluster=dgx1", "container=pyxis", files, other)
    plan_ = compose.compose([*filter(None, words), "recipe.global_batch_size=16", "parallel={tp: 1, pp: 1, cp: 1}"])
    there = list(script._mounts(plan_))
    assert [mount for mount in mounts if mount not in there] == []
    assert ("$MODEL:$MODEL:ro" in there) is not bool(other)
    assert needs_preparing(plan_.config) and plan_.data_dir in script._to_prepare(plan_)
