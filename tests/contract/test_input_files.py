"""The user's files, and each refusal of them, whole: weights, tokenizers, chat templates, records and their columns."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import chat, data_files, hugging_face
from bench.contract.data import Columns, Data, DataSource
from bench.contract.described_model import Described
from bench.contract.hugging_face import Stored
from bench.errors import ConfigError
from bench.planning import compose

DOWNLOAD = "download the model's *.safetensors again, because pickled *.bin weights are not supported"


def safetensors(path: Path, shapes: dict[str, tuple[int, ...]], *, more: int = 0, dtype: str = "BF16") -> None:
    """Write a file with tensors of two bytes per element, which are all zero."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end + more))


def text_of(error: pytest.ExceptionInfo[ConfigError]) -> str:
    """Return a refusal by the rule about the user's files, without the number of the rule."""
    rule, text = str(error.value).split(": ", 1)
    assert rule == "CFG-06"
    return text


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        hugging_face.tensors(folder)
    return text_of(error).replace(str(folder), "FOLDER")


def test_the_tensors_of_all_shards_are_listed(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {"a": (2, 3), "b": ()}, dtype="F16")
    a, b = Stored("model.safetensors", (2, 3), "F16"), Stored("model.safetensors", (), "F16")
    assert hugging_face.tensors(tmp_path) == {"a": a, "b": b}
    assert (a.num_elements, a.num_bytes, b.num_elements, b.num_bytes) == (6, 12, 1, 2)
    assert replace(a, dtype="F32").num_bytes == 24
    safetensors(tmp_path / "one.safetensors", {"a": (5,)})
    safetensors(tmp_path / "two.safetensors", {"b": (7,)})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: (one.file, one.shape) for name, one in hugging_face.tensors(tmp_path).items()} == {
        "a": ("one.safetensors", (5,)),
        "b": ("two.safetensors", (7,)),
    }


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (
            None,
            "the folder contains no *.safetensors\n  where: FOLDER/model.safetensors.index.json\n  fix:   download the "
            "model's *.safetensors and their index, because pickled *.bin weights are not supported; or, to measure "
            "only speed, set model.weights=random",
        ),
        (
            {"a": "../one.safetensors"},
            "model.safetensors.index.json: weight_map must name a file of this folder for each tensor\n  where: "
            "FOLDER/model.safetensors.index.json\n  fix:   download the model again to an empty folder",
        ),
        (
            ["one.safetensors"],
            "model.safetensors.index.json: weight_map must name a file of this folder for each tensor\n  where: "
            "FOLDER/model.safetensors.index.json\n  fix:   download the model again to an empty folder",
        ),
        (
            {"a": "one.safetensors", "b": "five.safetensors", "c": "four.safetensors"},
            "2 of 3 files of the model are missing, for example five.safetensors\n  where: FOLDER\n  fix:   "
            + DOWNLOAD,
        ),
        (
            {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"},
            "two.safetensors: the tensor a is also in the file three.safetensors\n  where: FOLDER/two.safetensors\n"
            "  fix:   download the model again to an empty folder",
        ),
        (
            {"a": "one.safetensors", "d": "one.safetensors"},
            "one.safetensors: model.safetensors.index.json lists the tensor d in this file, but the file does not "
            "contain this tensor\n  where: FOLDER/one.safetensors\n  fix:   download the model again to an empty "
            "folder",
        ),
    ],
)
def test_an_index_that_does_not_match_its_files_is_refused(weight_map: Any, expected: str, tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", {"a": (5,)})
    safetensors(tmp_path / "two.safetensors", {"b": (5,), "a": (5,)})
    safetensors(tmp_path / "three.safetensors", {"c": (5,), "a": (5,)})
    if weight_map is not None:
        if "c" in weight_map:
            safetensors(tmp_path / "one.safetensors", {"e": (5,)})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the file has no header"),
        (struct.pack("<Q", 100_000_001) + b"{}", "the file has no header"),
        (struct.pack("<Q", 2) + b"{}" + b"more", "the file has 14 bytes instead of 10"),
        (struct.pack("<Q", 5) + b"[1,2]", "the header is not an object that describes each tensor"),
        (struct.pack("<Q", 8) + b'{"a": 3}', "the header is not an object that describes each tensor"),
    ],
)
def test_a_damaged_file_of_weights_is_refused(content: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    first, *rest = refusal(tmp_path).splitlines()
    assert first.startswith(f"a file of the weights is incomplete or damaged: {what}")
    assert rest == ["  where: FOLDER/model.safetensors", "  fix:   download this file again"]


def test_a_file_of_weights_of_another_size_is_refused(tmp_path: Path) -> None:
    for more in (-1, 1):
        safetensors(tmp_path / "model.safetensors", {"a": (5,)}, more=more)
        size = (tmp_path / "model.safetensors").stat().st_size
        assert f"the file has {size:,} bytes instead of {size - more:,}\n" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("total", "described", "is_refused"),
    [
        (99, {}, True),
        (100, {}, False),
        (100 + 2 * 1024, {}, False),
        (101 + 2 * 1024, {}, True),
        (101 + 2 * 1024, {"ignores_tensors": True}, False),
        (99, {"ignores_tensors": True}, True),
        (101 + 2 * 1024, {"tied_embeddings": True}, False),
        (100 + 2 * 1024 + 3 * 5, {"tied_embeddings": True}, False),
        (101 + 2 * 1024 + 3 * 5, {"tied_embeddings": True}, True),
    ],
)
def test_a_described_model_has_as_many_numbers_as_its_files(
    total: int, described: dict[str, bool], is_refused: bool, tmp_path: Path
) -> None:
    """Two layers may have 1,024 more numbers each, and tied embeddings may be stored twice."""
    safetensors(tmp_path / "model.safetensors", {"a": (total - 10,), "b": (2, 5)})
    (tmp_path / "config.json").write_text(json.dumps({"vocab": 7, "torch_dtype": "float32"}))
    model = described_model(tied=described.pop("tied_embeddings", False), **described)
    if not is_refused:
        hugging_face.check(tmp_path, model)
        return
    with pytest.raises(ConfigError) as error:
        hugging_face.check(tmp_path, model)
    assert text_of(error) == (
        f"the weight files contain {total:,} numbers, but the model in config.json has 100 parameters\n  where: "
        f"{tmp_path}\n  fix:   download the weights again, or correct config.json"
    )


def described_model(*, tied: bool = False, **changes: Any) -> Any:
    described = Described(
        config_json='{"vocab": 7}',
        transformers="5",
        architecture="A",
        layer="L",
        parameters=100,
        active_parameters=100,
        largest_parameter=100,
        layer_weights=100,
        active_layer_weights=100,
        kv_width=0,
        num_uncounted_layers=0,
        attention=[],
        projections=[],
        attention_implementations=[],
        can_recompute=False,
        **changes,
    )
    tiny = compose.compose(["task=pretrain_tiny", "cluster=local"]).config.model
    sizes = {"num_layers": 2, "vocab_size": 3, "hidden_size": 5, "tied_embeddings": tied}
    return replace(tiny, described=described, **sizes)


def test_experts_in_mxfp4_have_two_numbers_in_each_byte(tmp_path: Path) -> None:
    """30 bytes of blocks are 60 numbers, and their scales are none."""
    safetensors(tmp_path / "model.safetensors", {"e_blocks": (30,), "e_scales": (3000,), "other": (40,)})
    (tmp_path / "config.json").write_text('{"vocab": 7}')
    hugging_face.check(tmp_path, described_model(is_mxfp4=True))
    with pytest.raises(ConfigError, match=r"contain 3,070 numbers"):
        hugging_face.check(tmp_path, described_model())


def test_a_config_that_differs_from_the_plan_is_refused(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {"a": (100,)})
    (tmp_path / "config.json").write_text('{"vocab": 8, "a": 1, "b": 2, "c": 3}')
    with pytest.raises(ConfigError) as error:
        hugging_face.check(tmp_path, described_model())
    assert error.value.what == (
        "config.json differs from the plan: a is 1, but None in the plan; b is 2, but None in the plan; c is 3, but "
        "None in the plan"
    )


@pytest.mark.parametrize(
    ("text", "why"), [("[]", "the file is not a JSON object"), ("{", "Expecting"), (None, "No su")]
)
def test_a_config_that_cannot_be_read_is_refused(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        hugging_face.config(tmp_path)
    assert error.value.what.startswith(f"config.json cannot be read: {why}")
    assert error.value.fix == "give a Hugging Face folder with config.json and *.safetensors"


def test_tensors_of_one_supported_dtype_are_accepted() -> None:
    for dtypes, shown in ((("F32", "BF16"), "BF16, F32"), (("I8",), "I8"), ((), "")):
        stored = {str(number): Stored("f", (1,), dtype) for number, dtype in enumerate(dtypes)}
        with pytest.raises(ConfigError, match=f"the tensors have the dtypes {shown}, but all tensors must have"):
            hugging_face.check_dtypes(stored, where="here")
    hugging_face.check_dtypes({"a": Stored("f", (1,), "F16"), "b": Stored("f", (1,), "F16")}, where="here")


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "columns", "tools"),
    [
        ({"instruction": [USER, ANSWER], "output": "x"}, Columns(messages="instruction"), None),
        ({"turns": [USER, ANSWER], "output": [{"f": 1}]}, Columns(messages="turns", tools="output"), [{"f": 1}]),
        ({"messages": [USER, ANSWER], "conversations": 3, "tools": '[{"f": null}]'}, Columns(), [{}]),
        ({"messages": '  [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]'}, Columns(), None),
        ({"messages": [USER | {"name": None}, ANSWER], "tools": []}, Columns(), None),
        ({"instruction": "q", "input": " \n", "output": "a", "tools": [1]}, Columns(), None),
    ],
)
def test_the_columns_of_a_conversation_are_those_of_the_config(
    record: dict[str, Any], columns: Columns, tools: list[Any] | None
) -> None:
    conversation = chat.conversation(record, columns)
    assert (conversation.turns, conversation.tools) == ([USER, ANSWER], tools)


def test_a_turn_without_text_calls_a_tool_and_parts_are_joined() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": None}]}
    parts = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}
    senders = [{"from": name, "value": "v"} for name in ("chatgpt", "model", "observation", "tool_response", "system")]
    turns = chat.conversation({"messages": [calls, parts, *senders]}, Columns()).turns
    assert turns[:2] == [
        {"role": "assistant", "tool_calls": [{"name": "f"}], "content": ""},
        {"role": "tool", "content": "ab"},
    ]
    assert [turn["role"] for turn in turns[2:]] == ["assistant", "assistant", "tool", "tool", "system"]


@pytest.mark.parametrize(
    ("record", "columns", "message"),
    [
        ("text", Columns(), "a record must be a JSON object, but this record has the type str"),
        (
            {},
            Columns(),
            "a record must have a column messages or conversations, or columns instruction and output, but has the "
            "columns none",
        ),
        (
            {"messages": 1, "b": 2},
            Columns(messages="m"),
            "a record must have a column m, but has the columns messages, b",
        ),
        (
            {"instruction": "", "output": ""},
            Columns(messages="m"),
            "a record must have a column m, but has the columns instruction, output",
        ),
        ({"messages": "[1"}, Columns(), "column messages must be a list of turns, but has the type str"),
        ({"messages": [], "tools": "f"}, Columns(), "column tools must be a list of functions, but has the type str"),
        ({"messages": [USER, 3]}, Columns(), "turn 2 must be an object with role and content, but has the type int"),
        (
            {"messages": [{"role": "r" * 50, "content": ""}]},
            Columns(),
            f"turn 1 has the role '{'r' * 39}, but must have one of the roles system, developer, user, assistant, tool",
        ),
        ({"messages": [{"role": "user"}]}, Columns(), "the content of turn 1 must be text, but has the type NoneType"),
        (
            {"messages": [{"role": "user", "content": None, "tool_calls": []}]},
            Columns(),
            "the content of turn 1 must be text, but has the type NoneType",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"text": "a"}, "b"]}]},
            Columns(),
            "turn 2 has a part of type 'str', but only text is supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            Columns(),
            "turn 1 has a part of type 'text', but only text is supported",
        ),
        (
            {"instruction": None, "output": ""},
            Columns(),
            "column instruction must be text, but has the type NoneType",
        ),
        ({"instruction": "", "input": 3, "output": ""}, Columns(), "column input must be text, but has the type int"),
    ],
)
def test_a_record_in_another_layout_is_refused(record: Any, columns: Columns, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole text is compared
        chat.conversation(record, columns)
    assert str(error.value) == message


def test_templates_have_an_order_and_their_own_refusals(tmp_path: Path) -> None:
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("of rag")
    for chat_template in (None, "  ", [], [{"name": "tool_use"}, 3], {"default": "x"}):
        config.write_text(json.dumps({"chat_template": chat_template}))
        with pytest.raises(ConfigError) as error:
            chat.templates(tokenizer, None)
        assert text_of(error) == (
            f"the tokenizer has no chat template with the name default, but only rag\n  where: {config}\n  fix:   set "
            "data.chat_template to a Jinja file, or copy chat_template.jinja into this folder from the chat model with "
            "the same tokenizer"
        )
    config.write_text(json.dumps({"chat_template": "of config"}))
    assert chat.templates(tokenizer, None) == {"rag": "of rag", "default": "of config"}
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "listed"}, {"name": "x"}]}))
    assert chat.templates(tokenizer, None) == {"rag": "of rag", "default": "listed"}
    (tmp_path / "chat_template.jinja").write_text("of file")
    assert chat.templates(tokenizer, None) == {"rag": "of rag", "default": "of file"}
    assert chat.templates(tokenizer, str(tmp_path / "chat_template.jinja")) == {"default": "of file"}
    with pytest.raises(ConfigError) as error:
        chat.templates(tokenizer, "/no/such.jinja")
    assert text_of(error) == (
        "the chat template cannot be read: No such file or directory\n  where: /no/such.jinja\n  fix:   copy the file "
        "again, or set data.chat_template to a Jinja file"
    )


def test_special_tokens_are_texts_or_objects_with_a_text() -> None:
    config = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None, "unk_token": {"content": 3}}
    names = (*config, "sep_token")
    assert chat.token_texts(config, names) == {"eos_token": "</s>", "bos_token": "<s>"}


DATA = Data(
    name="mine",
    summary="",
    source=DataSource.text,
    seq_length=100,
    train_rows=1000,
    eval_rows=24,
    answer_only=False,
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("all", ["all/a.jsonl", "all/sub/b.parquet"]),
        ("all/a.jsonl", ["all/a.jsonl"]),
        ("all/*/*.parquet", ["all/sub/b.parquet"]),
    ],
)
def test_the_files_of_a_folder_or_a_glob_are_found_in_order(pattern: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "all/sub").mkdir(parents=True)
    for name in ("sub/b.parquet", "a.jsonl", "notes.txt"):
        (tmp_path / "all" / name).write_text("x")
    found_files = data_files.find(tmp_path, replace(DATA, files=pattern))
    assert [str(path.relative_to(tmp_path)) for path in found_files] == expected


SUFFIXES = ".jsonl or .jsonl.gz or .json or .json.gz or .parquet"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (
            "none/*",
            "no file of mine matches data.files=none/*\n  where: FOLDER/none/*\n  fix:   set data.files to a file, a "
            f"folder or a glob of {SUFFIXES} files; write the path relative to DATADIR, or absolute",
        ),
        ("empty.jsonl", "the file is empty\n  where: FOLDER/empty.jsonl\n  fix:   copy the file again"),
        (
            "*.txt",
            f"data.source=text reads only files whose name ends in {SUFFIXES}\n  where: FOLDER/notes.txt\n  fix:   set "
            f"data.files to files that end in {SUFFIXES}",
        ),
    ],
)
def test_files_that_cannot_be_read_are_refused(pattern: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError) as error:
        data_files.find(tmp_path, replace(DATA, files=pattern))
    assert text_of(error).replace(str(tmp_path), "FOLDER") == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"files": "relative/*.json"}, []),
        ({"files": "/data/all"}, ["/data/all"]),
        ({"files": "/data/all/a*.json"}, ["/data/all"]),
        ({"files": "/data/a?/b[1].json"}, ["/data"]),
        ({"files": "/data/b[1]/c.json"}, ["/data"]),
        ({"tokenizer": "/t/tokenizer.json", "chat_template": "/c.jinja"}, ["/t", "/c.jinja"]),
        ({"tokenizer": "/t/tokenizer.model"}, ["/t"]),
        ({"tokenizer": "/t"}, ["/t"]),
        ({"files": "/data/all", "sample": 3}, []),
        ({"files": "/data/all", "source": DataSource.random}, []),
    ],
)
def test_paths_outside_of_the_folders_of_the_cluster_are_mounted(changes: dict[str, Any], expected: list[str]) -> None:
    assert data_files.outside(replace(DATA, **changes)) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"model": {"vocab": {"a": 0, "b": 9}}}, 10),
        ({"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 12}, {"id": 11}]}, 13),
        ({"model": {"vocab": [["a", 0.1], ["b", 0.2]]}, "added_tokens": None}, 2),
        ({"model": {"vocab": {}}}, 0),
    ],
)
def test_the_number_of_token_ids_counts_added_tokens(content: object, expected: int, tmp_path: Path) -> None:
    (path := tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert data_files.num_ids(path) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "the file has no valid vocabulary (model.vocab, added_tokens)"),
        ('{"model": {"vocab": 3}}', "the file has no valid vocabulary (model.vocab, added_tokens)"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (path := tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        data_files.num_ids(path)
    assert text_of(error) == (
        f"tokenizer.json cannot be used: {why}\n  where: {path}\n  fix:   set MODEL or data.tokenizer to the folder of "
        "the model's tokenizer, or download tokenizer.json again"
    )


def test_a_tokenizer_is_found_in_its_folder_and_around_a_converted_checkpoint(tmp_path: Path) -> None:
    converted = tmp_path / "megatron_core"
    converted.mkdir()
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json and no tokenizer\.model at this path"):
        data_files.find_tokenizer(converted)
    (tmp_path / "tokenizer.model").touch()
    assert data_files.find_tokenizer(converted) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").touch()
    assert data_files.find_tokenizer(converted) == tmp_path / "tokenizer.json"
    (converted / "tokenizer.model").touch()
    assert data_files.find_tokenizer(converted) == converted / "tokenizer.model"
    assert data_files.find_tokenizer(tmp_path / "tokenizer.json") == tmp_path / "tokenizer.json"
    (other := tmp_path / "tokenizer.txt").touch()
    with pytest.raises(ConfigError):
        data_files.find_tokenizer(other / "none")


def test_ids_up_to_the_vocabulary_size_are_accepted() -> None:
    data_files.check_vocabulary(Path("t.json"), 32_000, 32_000)
    with pytest.raises(ConfigError) as error:
        data_files.check_vocabulary(Path("t.json"), 32_001, 32_000)
    assert error.value.what == "the tokenizer has token ids up to 32,000, but the model's vocabulary size is 32,000"


@pytest.mark.parametrize(
    ("record", "columns", "problem"),
    [
        ({"a": "x", "b": ""}, ("a", "b"), None),
        ([], ("a",), "a record must be a JSON object, but this record has the type list"),
        ({}, ("a",), "a record must have a column a, but has the columns none"),
        ({"b": "", "c": ""}, ("b", "a"), "a record must have a column a, but has the columns b, c"),
        ({"a": None}, ("a",), "column a must be text, but has the type NoneType"),
        ({"a": "\ud800"}, ("a",), "column a contains an unpaired surrogate, which is not a valid character"),
    ],
)
def test_every_column_of_a_record_is_a_text(record: Any, columns: tuple[str, ...], problem: str | None) -> None:
    assert data_files.check_record(record, columns) == problem


def test_records_of_each_source_have_its_columns(tmp_path: Path) -> None:
    own = {"QUESTION": "q", "CONTEXTS": ["a", "b"], "LONG_ANSWER": "c", "YEAR": "1"}
    pubmed, named = replace(DATA, source=DataSource.pubmedqa), replace(DATA, columns=Columns(text="body"))
    assert data_files.read_record(own, pubmed) == {"question": "q", "context": "a\nb", "answer": "c", "YEAR": "1"}
    ours = {"question": "q", "context": "c", "answer": "a"}
    assert data_files.read_record(ours, pubmed) == ours
    assert data_files.read_record(own | {"CONTEXTS": "text"}, pubmed)["context"] == "text"
    with pytest.raises(ValueError, match="column context must be text, but has the type list"):
        data_files.read_record(own | {"CONTEXTS": ["a", 3]}, pubmed)
    assert data_files.read_record({"body": "t", "more": 3}, named) == {"text": "t"}
    assert data_files.columns_in_file(["id", "body"], named) == ("body",)
    with pytest.raises(ValueError, match="the file has no column text; its columns are id, body"):
        data_files.columns_in_file(["id", "body"], DATA)
    talks = replace(DATA, source=DataSource.chat)
    assert data_files.columns_in_file(["tools", "messages"], talks) == ("messages", "tools")
    assert data_files.columns_in_file(["input", "instruction", "output"], talks) == ("instruction", "output", "input")
    assert [data_files.columns_fix(one) for one in (named, pubmed, replace(DATA, source=DataSource.dolly))] == [
        "set data.columns.text to the name of a column that has text in every record",
        "write text into these columns of each record: question, context, answer (or QUESTION, CONTEXTS, LONG_ANSWER, "
        "as in PubMedQA's own files); or set data.source to the format of the file",
        "write text into these columns of each record: instruction, context, response; or set data.source to the "
        "format of the file",
    ]


def test_rows_need_nine_bytes_for_each_token_and_one_more_for_boundaries() -> None:
    assert data_files.room_needed(DATA) == 1024 * 100 * 9
    assert data_files.room_needed(replace(DATA, document_mask=True)) == 1024 * 100 * 10


def test_rows_that_were_counted_last_for_the_same_config_are_found(tmp_path: Path) -> None:
    wanted = data_files.config_of_count(DATA, 100)
    assert wanted == data_files.config_of_count(replace(DATA, train_rows=None), 100)
    assert wanted not in (data_files.config_of_count(DATA, 101), data_files.config_of_count(replace(DATA, seed=1), 100))
    manifests = {
        "mine-1": {"counted_for": wanted, "splits": {"train": {"rows": 11}}},
        "mine-2": {"counted_for": wanted, "splits": {"train": {"rows": 22}}},
        "mine-3": {"counted_for": wanted, "splits": {}},
        "mine-4": {"counted_for": "other", "splits": {"train": {"rows": 44}}},
        "yours-1": {"counted_for": wanted, "splits": {"train": {"rows": 55}}},
    }
    for age, (name, content) in enumerate(manifests.items()):
        (tmp_path / name).mkdir()
        (path := tmp_path / name / "manifest.json").write_text(json.dumps(content))
        os.utime(path, (1000 - age, 1000 - age))
    assert data_files.counted_rows(tmp_path, DATA, 100) == (tmp_path / "mine-1", 11)
    os.utime(tmp_path / "mine-2/manifest.json", (2000, 2000))
    assert data_files.counted_rows(tmp_path, DATA, 100) == (tmp_path / "mine-2", 22)
    assert data_files.counted_rows(tmp_path, DATA, 99) is None
