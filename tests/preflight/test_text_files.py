"""What preflight says of files that rows are to be made from, before a job waits for its turn."""

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


def findings(made: Plan) -> list[preflight.Finding]:
    return [found for found in preflight.inspect(made) if found.severity == "error"]


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
    made = planned(tmp_path, source, name)
    write(tmp_path / "cache" / name)
    assert findings(made) == []
    (checked,) = (c for c in preflight.tier(made, "laptop") if c.what == "files of text")
    assert checked.seen == "1 files, 0.00 GB"


def add_token(tokenizer: Path, number: int) -> None:
    content = json.loads(tokenizer.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": "<more>"})
    tokenizer.write_text(json.dumps(content))


WRONG: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no files of c4": ("CFG-06", lambda cache: (cache / "c4.jsonl").unlink()),
    "this file is empty": ("CFG-06", lambda cache: (cache / "c4.jsonl").write_bytes(b"")),
    "the first record: no column text; there are txt": (
        *("CFG-06",),
        lambda cache: (cache / "c4.jsonl").write_bytes(lines([{"txt": ""}])),
    ),
    "the first record is not JSON": ("CFG-06", lambda cache: (cache / "c4.jsonl").write_bytes(b"text\n")),
    "no tokenizer.json": ("CFG-06", lambda cache: (cache / "tokenizer.json").unlink()),
    "does not say which token is its eos_token": (
        *("CFG-06",),
        lambda cache: (cache / "tokenizer_config.json").write_text('{"bos_token": "<s>"}'),
    ),
    "not a tokenizer of": ("CFG-06", lambda cache: (cache / "tokenizer.json").write_text('{"model": {}}')),
    "tokens go up to 600, and the model has 512": ("CFG-06", lambda cache: add_token(cache / "tokenizer.json", 600)),
    "tokens go up to 512, and the model has 512": (
        *("CFG-06",),
        lambda cache: write_tokenizer(cache, words=[*text_data.WORDS, *(f"w{i}" for i in range(494))]),
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_stands_in_the_way_of_rows_is_found(text: str, tmp_path: Path) -> None:
    rule, spoil = WRONG[text]
    made = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT]))
    spoil(tmp_path / "cache")
    (found,) = findings(made)
    assert found.rule == rule and re.search(text, found.what) and str(tmp_path / "cache") in found.where


def test_a_parquet_without_the_column_or_its_end_is_found(tmp_path: Path) -> None:
    made = planned(tmp_path, "fineweb_edu", "f.parquet")
    path = tmp_path / "cache/f.parquet"
    write_parquet(path, [{"txt": ""}])
    (found,) = findings(made)
    assert "no column text; there are txt" in found.what
    path.write_bytes(path.read_bytes()[:-9])
    (found,) = findings(made)
    assert "the parquet is cut short or damaged" in found.what


def test_too_little_room_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows of 4 tokens of 9 bytes."""
    made = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT]))
    for free, rules in ((143, ["CFG-08"]), (144, [])):
        monkeypatch.setattr(data_files.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        told = data.found(made, root=tmp_path / "cache", rows=tmp_path / "none")
        assert [found.rule for found in told if not isinstance(found, str)] == rules


def test_a_file_that_comes_after_the_rows_were_made_is_found_if_it_would_have_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(tmp_path, "c4", "*.jsonl")
    (tmp_path / "cache/m.jsonl").write_bytes(lines([TEXT] * 9))
    make_here(made, monkeypatch)
    (tmp_path / "cache/n.jsonl").write_bytes(lines([TEXT]))  # the rows were full before it
    assert findings(made) == []
    (tmp_path / "cache/a.jsonl").write_bytes(lines([TEXT]))
    (found,) = findings(made)
    assert found.what == "these rows were made without a.jsonl"


def test_rows_that_were_made_are_looked_at_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(tmp_path, "c4", "c4.jsonl")
    (tmp_path / "cache/c4.jsonl").write_bytes(lines([TEXT] * 9))
    make_here(made, monkeypatch)
    for changed, why in (({"text": "elm"}, "has another sha256"), ({"text": "oak oak"}, "bytes instead of")):
        (tmp_path / "cache/c4.jsonl").write_bytes(lines([changed] * 9))
        (found,) = findings(made)
        assert "these rows were made from another file: c4.jsonl" in found.what and why in found.what
    (tmp_path / "cache/c4.jsonl").unlink()
    assert findings(made) == []
    write_tokenizer(tmp_path / "cache", words=[*text_data.WORDS, "another"])
    (found,) = findings(made)
    assert "these rows were made with another tokenizer" in found.what
    write_tokenizer(tmp_path / "cache")
    path = Path(str(made.data_dir)) / "train_tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    by_size, by_manifest = (found.what for found in findings(made))
    assert "train_tokens.npy has" in by_size and "1 of 6 files are not as manifest.json has them" in by_manifest


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=null", "dolly is read from files, and none are named"),
        ("data.prompt_type=null", "records of dolly hold answers, and prompt_type is None"),
        ("data.test_split=1.5", "1.5 is no share of the records"),
        ("data=c4 data.prompt_type=plain", "records of c4 hold text alone, and prompt_type is plain"),
        ("data=c4 data.answer_only=true", "there is no answer to count alone"),
        ("data=rows_350 data.lengths=[351]", "random rows of 350 tokens cannot have lengths"),
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
    made = compose.compose([*filter(None, words), "recipe.global_batch_size=16", "parallel={tp: 1, pp: 1, cp: 1}"])
    there = list(script._mounts(made))
    assert [mount for mount in mounts if mount not in there] == []
    assert ("$MODEL:$MODEL:ro" in there) is not bool(other)
    assert needs_preparing(made.config) and made.data_dir in script._to_prepare(made)
