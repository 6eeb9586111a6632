"""Conversations in the layouts of common data sets, and the chat templates of a tokenizer.

Standard library only: ranks import it.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.atomic_files import read_object
from bench.contract.data import Columns
from bench.errors import ConfigError

TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates. Source: transformers 5.23.0, PreTrainedTokenizerBase.get_chat_template."""
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response"), "tool"),
    "system": "system",
}
"""The senders in `from`, and their roles."""
MESSAGE_COLUMNS = ("messages", "conversations")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a record, each with role and content, and the functions that the assistant may call."""

    turns: list[dict[str, Any]]
    tools: list[Any] | None


def columns_of(names: Collection[str], columns: Columns) -> tuple[str, ...]:
    """Return the columns to read: those of OpenAI's messages, of ShareGPT's conversations or of Alpaca's instructions.

    Raises:
        ValueError: there is none of them.
    """
    wanted = MESSAGE_COLUMNS if columns.messages is None else (columns.messages,)
    if turns := next((name for name in wanted if name in names), None):
        return (turns, columns.tools) if columns.tools in names else (turns,)
    alpaca = (columns.instruction, columns.output)
    if columns.messages is None and all(name in names for name in alpaca):
        return (*alpaca, columns.input) if columns.input in names else alpaca
    expected_columns = columns.messages or f"{' or '.join(MESSAGE_COLUMNS)}, or columns {' and '.join(alpaca)}"
    raise ValueError(
        f"a record must have a column {expected_columns}, but has the columns {', '.join(map(str, names)) or 'none'}"
    )


def conversation(record: Any, columns: Columns) -> Conversation:
    """Return the conversation of a record.

    Raises:
        ValueError: the record has another layout; the text says what is wrong.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a record must be a JSON object, but this record has the type {type(record).__name__}")
    turns_column, *others = columns_of(record, columns)
    if turns_column == columns.instruction and columns.output in others:
        return Conversation(_of_instruction(record, columns), None)
    turns = _decoded(record[turns_column])
    if not isinstance(turns, list):
        raise ValueError(f"column {turns_column} must be a list of turns, but has the type {type(turns).__name__}")
    tools = _decoded(record.get(columns.tools))
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"column {columns.tools} must be a list of functions, but has the type {type(tools).__name__}")
    return Conversation([_turn(turn, number) for number, turn in enumerate(turns, 1)], _without_null(tools) or None)


def _decoded(value: Any) -> Any:
    """Return a list that is stored as JSON text, as in many parquet files; other values unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _of_instruction(record: dict[str, Any], columns: Columns) -> list[dict[str, Any]]:
    """Return the two turns of an Alpaca record: instruction and input are one question, with a blank line between."""
    texts = {name: record.get(name) for name in (columns.instruction, columns.input, columns.output)}
    for column, text in texts.items():
        if not isinstance(text, str) and not (text is None and column == columns.input):
            raise ValueError(f"column {column} must be text, but has the type {type(text).__name__}")
    instruction, more, output = texts.values()
    question = f"{instruction}\n\n{more}" if more and more.strip() else instruction
    return [{"role": "user", "content": question}, {"role": "assistant", "content": output}]


def _turn(raw: Any, number: int) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(
            f"turn {number} must be an object with role and content, but has the type {type(raw).__name__}"
        )
    turn: dict[str, Any] = _without_null(raw)
    if "role" not in turn and "from" in turn:
        turn = {"role": SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise ValueError(f"turn {number} has the role {role!r:.40}, but must have one of the roles {', '.join(ROLES)}")
    if isinstance(content, list):
        content = _joined(content, number)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"the content of turn {number} must be text, but has the type {type(content).__name__}")
    return turn | {"content": content}


def _joined(parts: list[Any], number: int) -> str:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            part_type = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"turn {number} has a part of type {part_type!r:.40}, but only text is supported")
    return "".join(part["text"] for part in parts)


def _without_null(value: Any) -> Any:
    """Return a value without null fields, with which parquet fills the fields that a turn does not have."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def columns_fix(columns: Columns) -> str:
    """Return the fix for records in another layout."""
    return (
        "write records with messages: [{role, content}, …], conversations: [{from, value}, …], or instruction, input "
        f"and output; or, for other column names, set data.columns.messages (now {columns.messages or 'null'}), "
        "data.columns.instruction, data.columns.input and data.columns.output"
    )


def templates(tokenizer: Path, file: str | None) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name, or the one in a file.

    chat_template.jinja comes before `chat_template` in tokenizer_config.json, which is a text or a list of
    {name, template}.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    folder = tokenizer.parent
    try:
        if file is not None:
            return {DEFAULT: Path(file).read_text(encoding="utf-8")}
        by_name = {path.stem: path.read_text(encoding="utf-8") for path in (folder / MORE_TEMPLATES).glob("*.jinja")}
        if (folder / TEMPLATE_FILE).exists():
            return by_name | {DEFAULT: (folder / TEMPLATE_FILE).read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {getattr(error, 'strerror', None) or error}",
            where=file or str(folder / TEMPLATE_FILE),
            fix="copy the file again, or set data.chat_template to a Jinja file",
            rule="CFG-06",
        ) from error
    listed = read_object(folder / TOKENIZER_CONFIG, follows_links=True).get("chat_template")
    if isinstance(listed, str) and listed.strip():
        return by_name | {DEFAULT: listed}
    if isinstance(listed, list):
        by_name |= {str(one["name"]): str(one["template"]) for one in listed if _is_named(one)}
    if DEFAULT not in by_name:
        only_these = f" with the name {DEFAULT}, but only {', '.join(sorted(by_name))}" if by_name else ""
        raise ConfigError(
            f"the tokenizer has no chat template{only_these}",
            where=str(folder / TOKENIZER_CONFIG),
            fix=f"set data.chat_template to a Jinja file, or copy {TEMPLATE_FILE} into this folder from the chat model "
            "with the same tokenizer",
            rule="CFG-06",
        )
    return by_name


def _is_named(one: Any) -> bool:
    return isinstance(one, dict) and {"name", "template"} <= one.keys()


def token_texts(config: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json sets; each is a text or {"content": text}."""
    values = {name: config.get(name) for name in names}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
