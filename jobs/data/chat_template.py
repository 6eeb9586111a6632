"""Render conversations with a tokenizer's own chat template, and find the text that the assistant wrote.

Templates run in Jinja's immutable sandbox, with the filters, functions and statements that transformers offers
(transformers 5.23.0, utils/chat_template_utils.py): tojson, raise_exception, strftime_now, break and continue, and
{% generation %}.

The assistant's text is what {% generation %} encloses. In a template without this statement, a turn begins where the
template's prompt for the next answer ends, and it ends behind its special token (such as <|im_end|>) and the white
space that follows. A conversation is refused if the template does not render it from left to right.
"""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bench.contract.chat import DEFAULT, TOOL_USE, Conversation
from bench.contract.data_files import broken_text
from bench.errors import ConfigError

BEGIN, END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode around the assistant's text while a template runs."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SPACE = re.compile(r"\s*")
THOUGHT = "</think>"
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")
"""Some prompts for the next answer begin a thought, as DeepSeek-R1's, which stored answers do not have."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with an assistant's reasoning; transformers gives its value to templates by the first two."""
WITH_GENERATION = (
    "or set data.chat_template to a copy of the template with {% generation %} around the assistant's text"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text of a conversation, and where the assistant's text begins and ends in it, in characters."""

    text: str
    spans: list[tuple[int, int]]


class Skipped(Enum):
    """Why a conversation is skipped."""

    without_assistant = "without_assistant"
    special_token = "special_token"  # noqa: S105 - not a password
    """A special token, such as </s>, is spelled out in a turn, where it would end the turn."""


class _Generation(Extension):
    """The statement {% generation %}: encloses what it renders in BEGIN and END."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """The chat templates of a tokenizer.

    `variables` are the special tokens by name, such as bos_token; `specials` are the texts of all special tokens.

    Raises:
        ConfigError: a template is not valid; `where` names it.
    """

    def __init__(
        self, templates: dict[str, str], *, variables: dict[str, str], specials: list[str], where: str
    ) -> None:
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid in line {error.lineno}: {error.message}",
                where=where,
                fix="copy the template of the model again, or set data.chat_template to a Jinja file",
                rule="CFG-06",
            ) from error
        self._marks_answers = {name: bool(_GENERATION.search(text)) for name, text in templates.items()}
        self._variables = variables
        longest_first = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def render(self, conversation: Conversation) -> Rendered | Skipped:
        """Return the text of a conversation, with the spans of the assistant's text.

        Raises:
            ValueError: the template refuses or leaves out turns, or the assistant's text cannot be found.
        """
        turns = [_with_reasoning(turn) for turn in conversation.turns]
        if not any(turn["role"] == "assistant" for turn in turns):
            return Skipped.without_assistant
        contents = [str(turn[name]) for turn in turns for name in ("content", *REASONING) if name in turn]
        if any(self._special.search(text) for text in contents):
            return Skipped.special_token
        if any(BEGIN in text or END in text for text in contents):
            raise ValueError("a turn contains U+FDD0 or U+FDD1, which are not characters")
        name = TOOL_USE if conversation.tools and TOOL_USE in self._templates else DEFAULT
        marked = self._text(name, turns, conversation.tools)
        if wrong := broken_text(marked):
            raise ValueError(f"the conversation {wrong}")
        self._check_roles(name, turns, conversation.tools, marked)
        if self._marks_answers[name]:
            return _unmarked(marked)
        return Rendered(marked, self._spans(name, turns, conversation.tools, marked))

    def _text(
        self, name: str, turns: list[dict[str, Any]], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self._templates[name].render(
                messages=turns,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _check_roles(self, name: str, turns: list[dict[str, Any]], tools: list[Any] | None, text: str) -> None:
        """Raise ValueError if the template leaves out the turns of a role without an error."""
        for role in sorted({turn["role"] for turn in turns} - {"user", "assistant"}):
            try:
                without = self._text(name, [turn for turn in turns if turn["role"] != role], tools)
            except ValueError:
                continue
            if without == text:
                raise ValueError(f"the chat template leaves out turns of the role {role}")

    def _spans(
        self, name: str, turns: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for i in (i for i, turn in enumerate(turns) if turn["role"] == "assistant"):
            before = self._text(name, turns[:i], tools, add_generation_prompt=True)
            if not text.startswith(before):
                before = _OPEN_THOUGHT.sub("", before)
            if not text.startswith(before) or (spans and len(before) < spans[-1][1]):
                raise ValueError(
                    f"the chat template changes the text before turn {i + 1} when more turns follow: "
                    f"remove this conversation, {WITH_GENERATION}"
                )
            start = len(before)
            end = len(text) if i + 1 == len(turns) else self._end(name, turns[: i + 1], tools, text, start)
            if not self._special.search(text, start, end):
                raise ValueError(
                    f"the chat template ends turn {i + 1} without a special token, so a model would not learn to stop: "
                    f"use a template that ends the assistant's turns with eos_token, {WITH_GENERATION}"
                )
            spans.append((start, end))
        return spans

    def _end(self, name: str, turns: list[dict[str, Any]], tools: list[Any] | None, text: str, start: int) -> int:
        """Return where the last of these turns, which begins at `start`, ends in the text of the conversation."""
        if text.startswith(until := self._text(name, turns, tools)):
            return len(until)
        answer = str(turns[-1]["content"]).rpartition(THOUGHT)[2].strip()
        begin = text.find(answer, start) if answer else -1
        special = self._special.search(text, begin + len(answer)) if begin >= 0 else None
        if special is None:
            raise ValueError(
                f"the end of turn {len(turns)} cannot be found in the text that the chat template writes: remove this "
                f"conversation, {WITH_GENERATION}"
            )
        space = _SPACE.match(text, special.end())
        return space.end() if space else special.end()


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((turn[name] for name in REASONING if turn.get(name) is not None), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _unmarked(marked: str) -> Rendered:
    """Return the text without BEGIN and END, and the spans between them."""
    parts, spans, start, length = [], list[tuple[int, int]](), 0, 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            start = length
        elif part == END:
            spans += [(start, length)] if length > start else []
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), spans)
