"""Conversations: equal to transformers and to TRL's training templates; what is skipped, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from bench.contract import chat
from bench.contract.chat import Conversation
from bench.contract.data import Columns
from bench.errors import ConfigError
from jobs.data import tokenizer as tokenizers
from jobs.data.chat_template import ChatTemplate, Rendered, Skipped
from jobs.data.tokenization import TEMPLATE_TOKENS

SPECIALS = (
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<end_of_turn>", "<start_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "[INST]", "[/INST]"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|im_end|>' }}{% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None) -> Path:
    """Write a byte-level tokenizer without merges, whose special tokens are those of several chat templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    more = {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
    return folder / "tokenizer.json"


def template_of(path: Path, file: str | None = None) -> tuple[tokenizers.Tokenizer, ChatTemplate]:
    loaded = tokenizers.load(path)
    template = ChatTemplate(
        chat.templates(path, file),
        variables=chat.token_texts(tokenizers.config_of(path), TEMPLATE_TOKENS),
        specials=tokenizers.special_tokens(loaded),
        where=str(path.parent),
    )
    return loaded, template


def ours(path: Path, turns: list[dict[str, Any]], tools: list[Any] | None = None) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and which ones count."""
    loaded, template = template_of(path)
    rendered = template.render(Conversation(turns, tools))
    assert isinstance(rendered, Rendered)
    ((tokens, first, counts),) = tokenizers.encode_conversations(loaded, [rendered])
    assert first == (np.flatnonzero(counts)[0] if counts.any() else len(counts))
    return tokens.tolist(), counts.astype(int).tolist()


def theirs(
    folder: Path, turns: list[dict[str, Any]], tools: list[Any] | None = None, template: str | None = None
) -> tuple[list[int], list[int]]:
    """Return what transformers returns, and what TRL takes as its mask with assistant_only_loss."""
    from transformers import AutoTokenizer

    encoded = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        turns,
        tools=tools,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def turns_of(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=12)
CHATS = st.lists(ASCII, min_size=2, max_size=6)


@pytest.mark.long
@settings(max_examples=25)
@given(contents=CHATS, system=st.one_of(st.none(), ASCII))
def test_a_template_with_generation_equals_transformers(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], system: str | None
) -> None:
    folder = tmp_path_factory.mktemp("marked")
    path, turns = write_tokenizer(folder, MARKED), turns_of(*contents, system=system)
    assert ours(path, turns) == theirs(folder, turns)


def test_tools_and_extras_of_templates_equal_transformers(tmp_path: Path) -> None:
    """Control flow of loops, a filter with options, a macro, a namespace, and text that is not ASCII."""
    template = (
        "{% set ns = namespace(n=0) %}{% macro end() %}{{ eos_token }}{% endmacro %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% if ns.n > 3 %}{% break %}"
        "{% endif %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ m.tool_calls | tojson }}{{ end() }}"
        "{%- endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}{{ tools | tojson(indent=2) }}"
        "{% if strftime_now('%Y') | int < 2000 %}{{ raise_exception('old') }}{% endif %}{{ unk_token }}"
    )
    path, tools = write_tokenizer(tmp_path, template), [{"type": "function", "function": {"name": "größe <&>"}}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}]
    turns = turns_of("Frage?", "ja", "mehr", "nein")
    turns[1] |= {"tool_calls": calls}
    assert ours(path, turns, tools) == theirs(tmp_path, turns, tools)


TRL = ("qwen3", "llama3", "gemma", "phi3", "qwen3_instruct_2507", "phi3_5", "cohere", "deepseekv3")


@pytest.mark.long
@pytest.mark.parametrize("family", TRL)
def test_the_mask_of_a_template_without_generation_equals_trls(family: str, tmp_path: Path) -> None:
    """TRL replaces a family's template by one with {% generation %}; we take the family's own."""
    trl = pytest.importorskip("trl", reason="TRL is not installed; pip install --no-deps trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    own, training = ((folder / f"{family}{end}.jinja").read_text() for end in ("", "_training"))
    path = write_tokenizer(tmp_path, own)
    for contents in (("Name a tree.", "An oak."), ("Hi", " Yes? ", "And?", "No\n", "a", "b")):
        turns = turns_of(*contents)
        tokens, counts = ours(path, turns)
        expected_tokens, expected_counts = theirs(tmp_path, turns, template=training)
        if family == "qwen3" and len(contents) > 2:  # TRL's template adds an empty thought to each turn
            assert tokens != expected_tokens
            continue
        if family == "deepseekv3":  # TRL also counts <｜Assistant｜>, which is in the prompt
            prompt = tokenizers.load(path).inner.token_to_id("<｜Assistant｜>")
            expected_counts = [n * (token != prompt) for token, n in zip(tokens, expected_counts, strict=True)]
        assert (tokens, counts) == (expected_tokens, expected_counts)


def test_a_template_without_generation_counts_the_answers_and_their_ends(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, CHATML)
    loaded, template = template_of(path)
    rendered = template.render(Conversation(turns_of("Hi", "Yes.", "And?", "No."), None))
    assert isinstance(rendered, Rendered)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Yes.<|im_end|>\n", "No.<|im_end|>\n"]
    tokens, counts = ours(path, turns_of("Hi", "é", "And?", "No."))
    end = loaded.inner.token_to_id("<|im_end|>")
    assert [tokens[i] == end for i in np.flatnonzero(counts)] == [False, False, True, False, *[False] * 3, True, False]


def test_a_template_that_changes_earlier_turns_is_followed_or_refused(tmp_path: Path) -> None:
    """As Qwen3's: only the last answer has a thought, so the text up to an earlier answer is no beginning."""
    thought = "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    template = CHATML.replace(" + m.content", f" }}}}{thought}{{{{ m.content")
    _, compiled = template_of(write_tokenizer(tmp_path, template))
    rendered = compiled.render(Conversation(turns_of("a", "<think>b</think>c", "d", "e"), None))
    assert isinstance(rendered, Rendered)
    assert [rendered.text[a:b] for a, b in rendered.spans] == [
        "<think>b</think>c<|im_end|>\n",
        "<think></think>e<|im_end|>\n",
    ]
    numbers = CHATML.replace("+ m.content", "+ (messages | length) | string + m.content")
    _, compiled = template_of(write_tokenizer(tmp_path, numbers))
    with pytest.raises(ValueError, match="changes the text before turn 2 when more turns follow: remove"):
        compiled.render(Conversation(turns_of("a", "b"), None))


def test_conversations_that_are_skipped_or_refused(tmp_path: Path) -> None:
    _, template = template_of(write_tokenizer(tmp_path, CHATML))
    assert template.render(Conversation(turns_of("a"), None)) is Skipped.without_assistant
    assert template.render(Conversation([], None)) is Skipped.without_assistant
    assert template.render(Conversation(turns_of("<|im_end|>", "b"), None)) is Skipped.special_token
    without_end = CHATML.replace("<|im_end|>", "")
    no_tools = CHATML.replace("%}{{ '<|im_start|>' + m", "%}{% if m.role != 'tool' %}{{ '<|im_start|>' + m", 1).replace(
        "\n' }}{% endfor", "\n' }}{% endif %}{% endfor", 1
    )
    strict = "{{ raise_exception('roles must alternate') }}" + CHATML
    for broken, turns, message in (
        (without_end, turns_of("a", "b"), "ends turn 2 without a special token"),
        (no_tools, [*turns_of("a", "b"), {"role": "tool", "content": "3"}], "leaves out turns of the role tool"),
        (strict, turns_of("a", "b"), "the chat template refuses the conversation: roles must alternate"),
        ("{{ messages.append(1) }}" + CHATML, turns_of("a", "b"), "refuses the conversation: .*append"),
        ("{{ ''.__class__.mro() }}" + CHATML, turns_of("a", "b"), "refuses the conversation"),
    ):
        _, template = template_of(write_tokenizer(tmp_path, broken))
        with pytest.raises(ValueError, match=message):
            template.render(Conversation(turns, None))


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, None)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template") as raised:
        chat.templates(path, None)
    assert raised.value.where == str(tmp_path / "tokenizer_config.json") and "data.chat_template" in raised.value.fix
    named = [{"name": "tool_use", "template": "tools" + MARKED}, {"name": "default", "template": MARKED}]
    write_tokenizer(tmp_path, named)  # type: ignore[arg-type]
    turns, tools = turns_of("a", "b"), [{"type": "function", "function": {"name": "f"}}]
    for given_tools in (None, tools):
        assert ours(path, turns, given_tools) == theirs(tmp_path, turns, given_tools)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert chat.templates(path, None)["default"] == CHATML
    (tmp_path / "own.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="the chat template is not valid in line 1") as raised:
        template_of(path, str(tmp_path / "own.jinja"))
    write_tokenizer(tmp_path, named[:1])  # type: ignore[arg-type]
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template with the name default, but only tool_use"):
        chat.templates(path, None)


USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"messages": [USER, ANSWER]}, Columns()),
        ({"conversations": SHAREGPT, "id": 3}, Columns()),
        ({"messages": SHAREGPT}, Columns()),
        ({"messages": json.dumps([USER, ANSWER]), "tools": None}, Columns()),
        ({"dialog": [USER | {"name": None}, ANSWER], "messages": 3}, Columns(messages="dialog")),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]}, Columns()),
        ({"instruction": "q", "input": "", "output": "a"}, Columns()),
        ({"instruction": "q", "output": "a"}, Columns()),
        ({"frage": "q", "input": None, "antwort": "a"}, Columns(instruction="frage", output="antwort")),
    ],
)
def test_layouts_give_the_same_conversation(record: dict[str, Any], columns: Columns) -> None:
    assert chat.conversation(record, columns).turns == [USER, ANSWER]


def test_alpacas_input_follows_its_instruction() -> None:
    record = {"instruction": "q", "input": "more", "output": "a"}
    assert chat.conversation(record, Columns()).turns[0]["content"] == "q\n\nmore"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "a record must be a JSON object"),
        (
            {"text": ""},
            "messages or conversations, or columns instruction and output, but has the columns text",
        ),
        ({"messages": "hello"}, "column messages must be a list of turns, but has the type str"),
        ({"messages": ["hello"]}, "turn 1 must be an object with role and content, but has the type str"),
        (
            {"messages": [USER, {"role": "narrator", "content": ""}]},
            "turn 2 has the role 'narrator', but must have one of the roles",
        ),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "turn 1 has the role 'function_call'"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of turn 1 must be text, but has the type int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "turn 1 has a part of type 'image'"),
        ({"instruction": "", "output": 3}, "column output must be text, but has the type int"),
    ],
)
def test_other_layouts_are_refused(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat.conversation(record, Columns())
