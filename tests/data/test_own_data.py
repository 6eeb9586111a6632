"""The user's own files: rows of text and conversations, their count before a plan, and a run on them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cli, preflight
from bench.contract import codec
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan, required
from bench.errors import ConfigError
from bench.planning import compose
from helpers.text_data import (
    CONFIG,
    lines,
    make_here,
    plan,
    prepared_here,
    rows,
    write_gzip,
    write_parquet,
    write_tokenizer,
)

TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m.role + ' : ' + m.content + ' </s>' }} {% endfor %}"
    "{% if add_generation_prompt %}### assistant : {% endif %}"
)
"""With the tokenizer of `text_data`: 4 for ###, 3 for the role, 6 for the colon, 2 for </s>."""
RECIPE = (
    *("recipe.eval_every_samples=1", "recipe.global_batch_size=1", "recipe.lr_warmup_steps=0"),
    *("data.seq_length=20", "data.eval_rows=1"),
)
TURNS = [
    {"role": "user", "content": "Name a tree."},
    {"role": "assistant", "content": "oak"},
    {"role": "user", "content": "a tree?"},
    {"role": "assistant", "content": "yes ."},
]
TOKENS = [4, 3, 6, 9, 10, 11, 12, 2, 4, 3, 6, 13, 2, 4, 3, 6, 10, 11, 17, 2, 4, 3, 6, 18, 12, 2]
COUNTS = [0] * 11 + [1, 1] + [0] * 10 + [1, 1, 1]


def write_chat_tokenizer(folder: Path) -> None:
    write_tokenizer(folder, CONFIG | {"chat_template": TEMPLATE})


def overrides(tmp_path: Path, *words: str) -> list[str]:
    paths = [f"cluster.paths.{name}={tmp_path}/cache" for name in ("data", "model", "logs")]
    return ["task=finetune_tiny_dolly", "cluster.ranks_per_node=1", *paths, *RECIPE, *words]


def chat_plan(tmp_path: Path, *words: str) -> Plan:
    write_chat_tokenizer(tmp_path / "cache")
    return compose.compose(overrides(tmp_path, "data=chat", "data.files=c.jsonl", "data.train_rows=2", *words))


@pytest.mark.long
def test_conversations_fill_rows_and_the_assistants_turns_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = chat_plan(tmp_path, "data.seq_length=28")
    skipped = [{"messages": TURNS[:1]}, {"messages": [TURNS[0] | {"content": "</s>"}, TURNS[1]]}]
    records = [{"messages": TURNS}, *skipped, {"messages": TURNS[:2]}, {"messages": TURNS}]
    (tmp_path / "cache/c.jsonl").write_bytes(lines(records))
    manifest = make_here(planned, monkeypatch)
    padding = [0, 0]
    assert rows(planned, "eval") == ([TOKENS + padding], [COUNTS + padding], [26])
    short = [TOKENS[:13] + [0] * 15, COUNTS[:13] + [0] * 15]
    assert rows(planned, "train") == ([short[0], TOKENS + padding], [short[1], COUNTS + padding], [13, 26])
    listed = manifest["records"]
    assert (listed["left_out_empty"], listed["left_out_special_tokens"], listed["documents"]) == (1, 1, 3)


def test_packed_conversations_keep_their_masks_over_the_ends_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = chat_plan(tmp_path, "data.seq_length=10", "data.packing=true", "data.train_rows=4")
    (tmp_path / "cache/c.jsonl").write_bytes(lines([{"messages": TURNS}] * 3))
    make_here(planned, monkeypatch)
    tokens, counts = np.array(TOKENS * 2)[:40].reshape(4, 10), np.array(COUNTS * 2)[:40].reshape(4, 10)
    assert rows(planned, "train") == (tokens.tolist(), counts.tolist(), [10] * 4)


FORMS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "t.jsonl": lambda path, records: path.write_bytes(lines(records)),
    "t.json": lambda path, records: path.write_text(json.dumps(records)),
    "t.json.gz": lambda path, records: write_gzip(path, lines(records)),
    "t.parquet": write_parquet,
}


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_named_columns_are_read_from_every_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of other names, a folder, and turns to which parquet adds null fields."""
    write_chat_tokenizer(tmp_path / "cache")
    (tmp_path / "cache/mine").mkdir()
    shared = ("data.files=mine", "data.train_rows=2", "data.seq_length=28")
    turns = [TURNS[0] | {"name": "me"}, *TURNS[1:]]
    records = [{"dialog": turns, "content": "a tree . oak", "messages": "none"}] * 3
    FORMS[name](tmp_path / "cache/mine" / name, records)
    chat = compose.compose(overrides(tmp_path, "data=chat", *shared, "data.columns.messages=dialog"))
    text = compose.compose(overrides(tmp_path, "data=text", *shared, "data.columns.text=content", "data.packing=false"))
    for planned, expected in ((chat, TOKENS), (text, [1, 10, 11, 12, 13, 2])):
        assert [one for one in preflight.inspect(planned) if one.severity == "error"] == []
        make_here(planned, monkeypatch)
        assert [row[: len(expected)] for row in rows(planned, "train")[0]] == [expected] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (lines([{"text": "a"}]), "line 1: a record must have a column messages or conversations"),
        (
            lines([{"messages": TURNS}, {"messages": 3}]),
            "line 2: column messages must be a list of turns, but has the type int",
        ),
        (
            lines([{"messages": TURNS}] * 2) + b'{"messages": [{"role": "user", "content": 3}]}',
            "line 3: the content of",
        ),
        (lines([{"messages": TURNS[:1]}]), "the files have no records to train on: 1 were skipped"),
        (
            lines([{"messages": TURNS}, {"messages": [{"role": "user", "content": "\ud800"}, *TURNS]}]),
            "line 2: .* surr",
        ),
    ],
)
def test_invalid_conversations_are_refused_by_line(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = chat_plan(tmp_path)
    (tmp_path / "cache/c.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        make_here(planned, monkeypatch)
    assert raised.value.where == str(tmp_path / "cache/c.jsonl") and raised.value.rule == "CFG-06"


def test_a_refusal_of_the_chat_template_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = chat_plan(tmp_path)
    strict = TEMPLATE.replace("{{ '###", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ '###")
    write_tokenizer(tmp_path / "cache", CONFIG | {"chat_template": strict})
    tool = {"role": "tool", "content": "oak"}
    (tmp_path / "cache/c.jsonl").write_bytes(lines([{"messages": TURNS}, {"messages": [*TURNS, tool]}]))
    with pytest.raises(ConfigError, match="line 2: the chat template refuses the conversation: no tools"):
        make_here(planned, monkeypatch)


def test_rows_of_another_chat_template_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = chat_plan(tmp_path)
    (tmp_path / "cache/c.jsonl").write_bytes(lines([{"messages": TURNS}] * 3))
    make_here(planned, monkeypatch)
    assert [one for one in preflight.inspect(planned) if one.severity == "error"] == []
    (tmp_path / "cache/chat_template.jinja").write_text(TEMPLATE + " ")
    (problem,) = [one for one in preflight.inspect(planned) if one.severity == "error"]
    assert "the rows were prepared with a chat template that differs" in problem.what
    with pytest.raises(ConfigError, match="the rows were prepared with a chat template that differs"):
        make_here(planned, monkeypatch)


WRONG: dict[str, Callable[[Path], Any]] = {
    "the tokenizer has no chat template": lambda cache: write_tokenizer(cache),
    "the first record is not valid: a record must have a column messages": lambda cache: (
        cache / "c.jsonl"
    ).write_bytes(lines([{}])),
    "the file is not a tokenizer.model of SentencePiece": lambda cache: (cache / "tokenizer.json").rename(
        cache / "tokenizer.model"
    ),
    "line 1 of the chat template is not valid": lambda cache: (cache / "chat_template.jinja").write_text("{% if %}"),
}


@pytest.mark.parametrize("text", WRONG)
def test_plan_and_doctor_refuse_wrong_tokenizers(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = chat_plan(tmp_path)
    (tmp_path / "cache/c.jsonl").write_bytes(lines([{"messages": TURNS}]))
    WRONG[text](tmp_path / "cache")
    (problem,) = [one for one in preflight.inspect(planned) if one.severity == "error"]
    assert problem.what.startswith(text) and str(tmp_path / "cache") in problem.where and problem.fix
    words = overrides(tmp_path, "data=chat", "data.files=c.jsonl", "data.train_rows=2")
    if "tokenizer" in text:
        with pytest.raises(ConfigError, match=text):  # also before the rows are counted
            compose.compose([*words, "data.train_rows=null"])
    for verb, code in (("plan", 2), ("doctor", 1)):
        with pytest.raises(SystemExit) as ended:
            cli.main([verb, *words])
        assert ended.value.code == code
        assert text.split(":")[0] in " ".join("".join(capsys.readouterr()).split())


def prepare(words: list[str], *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", *words, *options])
    return int(str(ended.value.code))


@pytest.mark.long
def test_prepare_counts_the_rows_that_a_plan_then_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_here(monkeypatch)
    write_chat_tokenizer(tmp_path / "cache")
    path = tmp_path / "cache/c.jsonl"
    words = overrides(tmp_path, "data=chat", "data.files=c.jsonl")
    with pytest.raises(
        ConfigError, match="the files cannot be read: no file of chat matches data.files=c.jsonl"
    ) as raised:
        compose.compose(words)
    assert "set data.train_rows to the number of training rows" in raised.value.fix
    path.write_bytes(lines([{"messages": TURNS}] * 5))
    with pytest.raises(ConfigError, match="this machine has no prepared rows of chat to count") as raised:
        compose.compose(words)
    assert f"run this command first: runstop prepare {' '.join(words)}" in raised.value.fix
    before = sorted((tmp_path / "cache").iterdir())
    assert prepare(words, "--dry-run") == 0 and sorted((tmp_path / "cache").iterdir()) == before
    assert prepare(words) == 0
    shown = capsys.readouterr().out
    assert "data.train_rows is 4" in shown and f"runstop launch {' '.join(words)}" in shown
    counted = required(compose.compose(words), TrainingPlan)
    assert counted.config.training_data.train_rows == 4 and Path(str(counted.data_dir)).is_dir()
    assert codec.plain(compose.compose([*words, "data.train_rows=4"])) == codec.plain(counted)
    assert [one for one in preflight.inspect(counted) if one.severity == "error"] == []
    assert prepare(words) == 0, "the rows are used again"
    path.write_bytes(lines([{"messages": TURNS}] * 9))
    assert prepare(words) == 2
    assert "the input files have changed since these rows were prepared" in capsys.readouterr().err
    shutil.rmtree(str(counted.data_dir))
    assert prepare(words) == 0
    assert required(compose.compose(words), TrainingPlan).config.training_data.train_rows == 8


@pytest.mark.long
def test_a_job_on_another_machine_makes_the_counted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_here(monkeypatch)
    write_chat_tokenizer(tmp_path / "cache")
    (tmp_path / "cache/c.jsonl").write_bytes(lines([{"messages": TURNS}] * 5))
    words = overrides(tmp_path, "data=chat", "data.files=c.jsonl")
    assert prepare(words) == 0
    planned = required(compose.compose(words), TrainingPlan)
    here = {path.name: path.read_bytes() for path in Path(str(planned.data_dir)).glob("*.npy")}
    assert len(here) == 8
    elsewhere = replace(planned, data_dir=f"{tmp_path}/cache/there-{Path(str(planned.data_dir)).name}")
    make_here(elsewhere, monkeypatch)
    assert here == {path.name: path.read_bytes() for path in Path(str(elsewhere.data_dir)).glob("*.npy")}


@pytest.mark.long
def test_counts_of_other_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = overrides(tmp_path, "data=gov_report", "data.train_rows=null", "data.seq_length=4")
    with pytest.raises(ConfigError, match="this machine has no prepared rows of gov_report to count"):
        compose.compose(words)
    (tmp_path / "cache").mkdir()
    np.save(tmp_path / "cache/train_tokens.npy", np.zeros((7, 4), dtype=np.int32))
    assert compose.compose(words).config.training_data.train_rows == 7
    for data in ("rows_350", "tiny_report"):
        with pytest.raises(ConfigError, match="generates rows, but the number of rows .data.train_rows. is null"):
            compose.compose(overrides(tmp_path, f"data={data}", "data.train_rows=null"))
    with pytest.raises(ConfigError, match="data.sample needs a number of training rows, but data.train_rows is null"):
        compose.compose(overrides(tmp_path, "data.train_rows=null"))
    with pytest.raises(
        ConfigError, match="data.sample is set, but runstop cannot generate records for data.source=chat"
    ):
        compose.compose(overrides(tmp_path, "data=chat", "data.sample=9", "data.train_rows=3"))
    with pytest.raises(ConfigError, match="data.chat_template is set, but data.source=c4 does not use this key"):
        plan(tmp_path, "data=c4", "data.chat_template=a")
    assert prepare(overrides(tmp_path, "data=rows_350")) == 2
    assert "there is nothing to prepare for the rows of rows_350: they are random tokens" in capsys.readouterr().err
